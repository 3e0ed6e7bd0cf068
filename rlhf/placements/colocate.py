"""placement=colocate: trainer and engine on one shared set of devices, taking turns."""

from __future__ import annotations

from rlhf.algos.objective import Objective
from rlhf.config.run import Run
from rlhf.placements.layout import plan_layout
from rlhf.placements.roles import Roles, start_roles, teacher_devices
from rlhf.preflight import Inputs


def start(run: Run, inputs: Inputs, objective: Objective) -> Roles:
    """See `start_roles`."""
    engine_ranks = 1 if run.engine is None else run.engine.tensor_parallel
    gpus, ranks = teacher_devices(run)
    layout = plan_layout(
        run.train.gpus,
        run.train.gpus,
        engine_ranks,
        train_tensor_parallel=run.train.tensor_parallel,
        teacher_gpus=gpus,
        teacher_tensor_parallel=ranks,
    )
    return start_roles(run, inputs, objective, layout, shared=True)
