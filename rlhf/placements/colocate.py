"""placement=colocate: trainer and engine on one shared set of devices, taking turns."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.algos.objective import Objective
from rlhf.backends.actors import RayEngine, RayTrainer
from rlhf.backends.cluster import RayCluster
from rlhf.backends.megatron.setup import TrainerSetup
from rlhf.backends.vllm.setup import EngineSetup
from rlhf.config.run import Run
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
    engine: RayEngine
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
    layout = plan_layout(run.train.gpus, run.rollout.gpus, run.rollout.tensor_parallel)
    cluster = RayCluster(run.cluster, bundles=layout.devices)
    try:
        bundle_of = by_node(cluster.nodes, (run.train.tensor_parallel, run.rollout.tensor_parallel))
        trainer = RayTrainer(
            cluster,
            TrainerSetup(inputs.student, inputs.teacher, run.train, objective, inputs.steps, run.run.seed),
            bundles=[bundle_of[device] for device in layout.trainer],
            share=SHARE,
        )
        engine = RayEngine(
            cluster,
            EngineSetup(
                model=inputs.student,
                rollout=run.rollout,
                max_model_len=run.data.max_length + run.rollout.max_new_tokens,
                stop_token_ids=inputs.stop_token_ids,
                seed=run.run.seed,
            ),
            bundles=[bundle_of[devices[0]] for devices in layout.replicas],
            share=SHARE,
        )
        trainer.ready(run.cluster.start_timeout_s)
        engine.ready(run.cluster.start_timeout_s)
    except BaseException:
        cluster.close()
        raise
    devices = f"{run.train.gpus} x {run.cluster.device.value}"
    described = [
        f"trainer: {devices}{shared_by(run.train)}, Megatron-core, {run.train.dtype.value}, student {run.model.path}"
        + (f" without {len(run.model.drop_layers)} layers" if run.model.drop_layers else ""),
        f"teacher: {run.teacher.model}, in the trainer's processes",
        f"engine: the same {devices}, vLLM, {run.rollout.dtype.value}",
    ]
    return Roles(trainer, trainer, engine, cluster, described)


def shared_by(train: Train) -> str:
    """How several devices share the training; empty for one."""
    if train.gpus == 1:
        return ""
    parts = [f"tensor parallel {train.tensor_parallel}"] if train.tensor_parallel > 1 else []
    parts += ["sequence parallel"] if train.uses_sequence_parallel else []
    parts += [f"data parallel {train.data_parallel}"] if train.data_parallel > 1 else []
    parts += ["distributed optimizer"] if train.distributed_optimizer else []
    return f" ({', '.join(parts)})"
