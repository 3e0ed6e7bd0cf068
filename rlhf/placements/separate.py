"""placement=separate: trainer and engine on devices of their own; weights are pushed over a collective."""

from __future__ import annotations

from rlhf.algos.objective import Objective
from rlhf.config.run import Run
from rlhf.placements.layout import plan_layout
from rlhf.placements.roles import Roles, start_roles, teacher_devices
from rlhf.preflight import Inputs


def start(run: Run, inputs: Inputs, objective: Objective) -> Roles:
    """See `start_roles`."""
    engine = run.engine
    assert engine is not None, "checked when the run was composed"
    gpus, ranks = teacher_devices(run)
    layout = plan_layout(
        run.train.gpus,
        engine.gpus,
        engine.tensor_parallel,
        train_tensor_parallel=run.train.tensor_parallel,
        separate=True,
        teacher_gpus=gpus,
        teacher_tensor_parallel=ranks,
    )
    return start_roles(run, inputs, objective, layout, shared=False)
