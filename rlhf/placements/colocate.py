"""placement=colocate: trainer and engine on one shared set of devices, taking turns."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.algos.objective import Objective
from rlhf.backends.actors import RayEngine, RayTrainer
from rlhf.backends.cluster import RayCluster
from rlhf.backends.megatron.setup import TrainerSetup
from rlhf.backends.vllm.setup import EngineSetup
from rlhf.config.run import Run
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
    cluster = RayCluster(run.cluster, bundles=run.train.gpus)
    try:
        trainer = RayTrainer(
            cluster,
            TrainerSetup(inputs.student, inputs.teacher, run.train, objective, inputs.steps, run.run.seed),
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
            share=SHARE,
        )
        trainer.ready(run.cluster.start_timeout_s)
        engine.ready(run.cluster.start_timeout_s)
    except BaseException:
        cluster.close()
        raise
    devices = f"{run.train.gpus} x {run.cluster.device.value}"
    described = [
        f"trainer: {devices}, Megatron-core, {run.train.dtype.value}, student {run.model.path}"
        + (f" without {len(run.model.drop_layers)} layers" if run.model.drop_layers else ""),
        f"teacher: {run.teacher.model}, in the trainer's processes",
        f"engine: the same {devices}, vLLM, {run.rollout.dtype.value}",
    ]
    return Roles(trainer, trainer, engine, cluster, described)
