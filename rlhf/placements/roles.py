"""Starts the roles of a run on the devices of a layout; both placements end here."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf.algos.objective import Objective
from rlhf.backends.actors import RayEngine, RayTrainer
from rlhf.backends.cluster import RayCluster
from rlhf.backends.megatron.setup import TrainerSetup
from rlhf.backends.vllm.setup import EngineSetup
from rlhf.config.run import Run
from rlhf.config.train import Train
from rlhf.placements.layout import Layout, by_node
from rlhf.preflight import Inputs
from rlhf.sources.ahead import Background


@dataclass
class Roles:
    """The started roles, and the cluster that holds them."""

    trainer: RayTrainer
    scorer: RayTrainer
    """A colocated teacher lives in the trainer."""
    engine: RayEngine
    cluster: RayCluster
    described: list[str]
    background: Background = field(default_factory=Background)
    """Where a source works ahead of training."""

    def close(self) -> None:
        self.cluster.release()
        self.background.join()  # before Ray, which it may be waiting for, is gone
        self.cluster.close()


def start_roles(run: Run, inputs: Inputs, objective: Objective, layout: Layout, *, shared: bool) -> Roles:
    """Start Ray, reserve the devices, start every role and wait until all are ready.

    Args:
        layout: who is where.
        shared: trainer and engine are on the same devices, half of one each; otherwise weights are pushed.

    Raises:
        ClusterError: too few devices, or no answer in time.
        RoleDied: a process ended while starting.
    """
    share = 0.5 if shared else 1.0
    cluster = RayCluster(run.cluster, bundles=layout.devices)
    try:
        bundle_of = by_node(cluster.nodes, (run.train.tensor_parallel, run.rollout.tensor_parallel))
        trainer = RayTrainer(
            cluster,
            TrainerSetup(inputs.student, inputs.teacher, run.train, objective, inputs.steps, run.run.seed),
            bundles=[bundle_of[device] for device in layout.trainer],
            share=share,
        )
        engine = RayEngine(
            cluster,
            EngineSetup(
                model=inputs.student,
                rollout=run.rollout,
                max_model_len=run.data.max_length + run.rollout.max_new_tokens,
                stop_token_ids=inputs.stop_token_ids,
                seed=run.run.seed,
                shares_device=shared,
            ),
            bundles=[bundle_of[devices[0]] for devices in layout.replicas],
            share=share,
        )
        trainer.ready(run.cluster.start_timeout_s)
        engine.ready(run.cluster.start_timeout_s)
        if not shared:
            engine.connect(trainer, run.cluster.start_timeout_s)
    except BaseException:
        cluster.close()
        raise
    return Roles(trainer, trainer, engine, cluster, describe(run, shared))


def describe(run: Run, shared: bool) -> list[str]:
    """One line a role, for the summary."""
    kind = run.cluster.device.value
    without = f" without {len(run.model.drop_layers)} layers" if run.model.drop_layers else ""
    ahead = ", one step ahead" if run.placement.max_staleness else ""
    engine_on = f"the same {run.rollout.gpus} x {kind}" if shared else f"{run.rollout.gpus} x {kind} of its own{ahead}"
    return [
        f"trainer: {run.train.gpus} x {kind}{shared_by(run.train)}, Megatron-core, {run.train.dtype.value}, student "
        f"{run.model.path}{without}",
        f"teacher: {run.teacher.model}, in the trainer's processes",
        f"engine: {engine_on}, vLLM, {run.rollout.dtype.value}",
    ]


def shared_by(train: Train) -> str:
    """How several devices share the training; empty for one."""
    if train.gpus == 1:
        return ""
    parts = [f"tensor parallel {train.tensor_parallel}"] if train.tensor_parallel > 1 else []
    parts += ["sequence parallel"] if train.uses_sequence_parallel else []
    parts += [f"data parallel {train.data_parallel}"] if train.data_parallel > 1 else []
    parts += ["distributed optimizer"] if train.distributed_optimizer else []
    return f" ({', '.join(parts)})"
