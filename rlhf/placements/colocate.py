"""placement=colocate: trainer and engine on one shared set of devices, taking turns."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.algos.objective import Objective
from rlhf.backends.actors import RayEngine, RayTrainer
from rlhf.backends.cluster import RayCluster
from rlhf.backends.megatron.setup import TrainerSetup
from rlhf.backends.vllm.setup import EngineSetup
from rlhf.config.run import Run
from rlhf.config.teacher import ColocatedTeacher, SelfTeacher
from rlhf.config.train import Train
from rlhf.placements.layout import by_node, plan_layout
from rlhf.preflight import Inputs

SHARE = 0.5
"""Of a device, for each of the two roles on it."""


@dataclass
class Roles:
    """The started roles, and the cluster that holds them."""

    trainer: RayTrainer
    scorer: RayTrainer
    """A colocated teacher lives in the trainer."""
    engine: RayEngine | None
    """None where the responses come from the rows."""
    cluster: RayCluster
    described: list[str]

    def close(self) -> None:
        self.cluster.close()


def start(run: Run, inputs: Inputs, objective: Objective) -> Roles:
    """Start Ray, reserve the devices, start every role and wait until all are ready.

    Raises:
        ClusterError: too few devices, or no answer in time.
        RoleDied: a process ended while starting.
    """
    engine_spec = run.engine
    engine_ranks = 1 if engine_spec is None else engine_spec.tensor_parallel
    layout = plan_layout(run.train.gpus, run.train.gpus, engine_ranks)
    cluster = RayCluster(run.cluster, bundles=layout.devices)
    try:
        bundle_of = by_node(cluster.nodes, (run.train.tensor_parallel, engine_ranks))
        trainer = RayTrainer(
            cluster,
            trainer_setup(run, inputs, objective),
            bundles=[bundle_of[device] for device in layout.trainer],
            share=SHARE,
        )
        engine = None
        if engine_spec is not None:
            engine = RayEngine(
                cluster,
                EngineSetup(
                    model=inputs.student,
                    rollout=engine_spec,
                    max_model_len=run.data.max_length + engine_spec.max_new_tokens,
                    stop_token_ids=inputs.stop_token_ids,
                    seed=run.run.seed,
                ),
                bundles=[bundle_of[devices[0]] for devices in layout.replicas],
                share=SHARE,
            )
        trainer.ready(run.cluster.start_timeout_s)
        if engine is not None:
            engine.ready(run.cluster.start_timeout_s)
    except BaseException:
        cluster.close()
        raise
    devices = f"{run.train.gpus} x {run.cluster.device.value}"
    described = [
        f"trainer: {devices}{shared_by(run.train)}, Megatron-core, {run.train.dtype.value}, student {run.model.path}"
        + (f" without {len(run.model.drop_layers)} layers" if run.model.drop_layers else ""),
        f"teacher: {described_teacher(run.teacher)}, in the trainer's processes",
        "engine: none, responses are the data's; so there is no sample to show"
        if engine_spec is None
        else f"engine: the same {devices}, vLLM, {engine_spec.dtype.value}",
    ]
    return Roles(trainer, trainer, engine, cluster, described)


def trainer_setup(run: Run, inputs: Inputs, objective: Objective) -> TrainerSetup:
    """What a trainer rank is started with."""
    return TrainerSetup(
        student=inputs.student,
        teacher=inputs.teacher,
        train=run.train,
        objective=objective,
        steps=inputs.steps,
        seed=run.run.seed,
        offload_teacher=isinstance(run.teacher, ColocatedTeacher) and run.teacher.offload,
        self_teacher=run.teacher if isinstance(run.teacher, SelfTeacher) else None,
    )


def described_teacher(teacher: ColocatedTeacher | SelfTeacher) -> str:
    """Whose weights score."""
    if isinstance(teacher, ColocatedTeacher):
        return f"{teacher.model}{', in host memory between uses' if teacher.offload else ''}"
    if teacher.ema_decay is None:
        return "the student itself"
    return f"a moving average of the student (decay {teacher.ema_decay:g})"


def shared_by(train: Train) -> str:
    """How several devices share the training; empty for one."""
    if train.gpus == 1:
        return ""
    parts = [f"tensor parallel {train.tensor_parallel}"] if train.tensor_parallel > 1 else []
    parts += ["sequence parallel"] if train.uses_sequence_parallel else []
    parts += [f"data parallel {train.data_parallel}"] if train.data_parallel > 1 else []
    parts += ["distributed optimizer"] if train.distributed_optimizer else []
    return f" ({', '.join(parts)})"
