"""Starts the roles of a run on the devices of a layout; both placements end here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf.algos.objective import Objective
from rlhf.assets import read_config
from rlhf.backends.actors import RayEngine, RayTrainer
from rlhf.backends.cluster import RayCluster
from rlhf.backends.megatron.adapters import parameters
from rlhf.backends.megatron.architecture import Architecture
from rlhf.backends.megatron.setup import TrainerSetup
from rlhf.backends.megatron.tensors import head_name
from rlhf.backends.scorer_actors import RayScorer
from rlhf.backends.vllm.setup import EngineSetup, ScorerSetup
from rlhf.config.cluster import Device
from rlhf.config.distill import FullVocab
from rlhf.config.rollout import VllmRollout
from rlhf.config.run import Run
from rlhf.config.teacher import ColocatedTeacher, NoTeacher, OwnTeacher, StandaloneTeacher, TeacherGeneration
from rlhf.config.train import Train
from rlhf.errors import ClusterError
from rlhf.memory import GIB, longest_sample, training_bytes
from rlhf.placements.layout import Layout, by_node
from rlhf.preflight import Inputs
from rlhf.sources.ahead import Background


@dataclass
class Roles:
    """The started roles, and the cluster that holds them."""

    trainer: RayTrainer
    scorer: RayTrainer | RayScorer
    """A colocated teacher lives in the trainer."""
    engine: RayEngine | None
    """None where no response is the student's own."""
    writer: RayEngine | None
    """The teacher that writes responses, on the scorer's devices; None where it writes none."""
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
        bundle_of = by_node(cluster.nodes, layout.groups)
        nodes = [cluster.nodes[bundle] for bundle in bundle_of]
        check_one_node("rollout.tensor_parallel", layout.replicas, nodes)
        check_one_node("teacher.tensor_parallel", layout.teacher, nodes)
        trainer = RayTrainer(
            cluster,
            trainer_setup(run, inputs, objective),
            bundles=[bundle_of[device] for device in layout.trainer],
            share=share,
            lends=shared and run.cluster.device is Device.cuda,
        )
        engine = None
        if run.engine is not None:
            engine = RayEngine(
                cluster,
                engine_setup(run, inputs, run.engine, shared),
                bundles=[[bundle_of[device] for device in devices] for devices in layout.replicas],
                share=share,
            )
        scorer: RayTrainer | RayScorer = trainer
        writer = None
        if isinstance(run.teacher, StandaloneTeacher):
            bundles = [[bundle_of[device] for device in devices] for devices in layout.teacher]
            part = 1.0 if run.writer is None else 0.5
            scorer = RayScorer(cluster, scorer_setup(run, inputs, run.teacher, objective), bundles, part)
            if run.writer is not None:
                setup = writer_setup(run, inputs, run.teacher, run.writer)
                writer = RayEngine(cluster, setup, bundles, part, role="writing teacher")
                writer.ready(run.cluster.start_timeout_s)
            scorer.ready(run.cluster.start_timeout_s)
        trainer.ready(run.cluster.start_timeout_s)
        if engine is not None:
            engine.ready(run.cluster.start_timeout_s)
            if not shared:
                engine.connect(trainer, run.cluster.start_timeout_s)
    except BaseException:
        cluster.close()
        raise
    return Roles(trainer, scorer, engine, writer, cluster, describe(run, inputs, shared))


def check_one_node(key: str, replicas: Sequence[Sequence[int]], nodes: Sequence[str]) -> None:
    """vLLM's processes of a replica share a node.

    Args:
        key: what says how many they are.
        nodes: the node of each device.

    Raises:
        ClusterError: they would be on several.
    """
    for devices in replicas:
        if len({nodes[device] for device in devices}) > 1:
            per_node = Counter(nodes).values()
            raise ClusterError(
                f"{key}={len(devices)} needs so many devices of one node, and the run's nodes have "
                f"{', '.join(map(str, per_node))}; lower {key}, or use nodes with more devices each"
            )


def teacher_devices(run: Run) -> tuple[int, int]:
    """Devices of a standalone teacher, and how many of them share a replica."""
    return (run.teacher.gpus, run.teacher.tensor_parallel) if isinstance(run.teacher, StandaloneTeacher) else (0, 1)


def trainer_setup(run: Run, inputs: Inputs, objective: Objective) -> TrainerSetup:
    """With the whole teacher, or only its head, or neither."""
    standalone = isinstance(run.teacher, StandaloneTeacher)
    hidden_rows_come = standalone and (isinstance(run.distill, FullVocab) or run.eval.samples > 0)
    return TrainerSetup(
        student=inputs.student,
        teacher=None if standalone or inputs.base_teaches else inputs.teacher,
        train=run.train,
        objective=objective,
        steps=inputs.steps * run.updates_per_step,
        seed=run.run.seed,
        offload_teacher=isinstance(run.teacher, ColocatedTeacher) and run.teacher.offload,
        self_teacher=run.teacher if isinstance(run.teacher, OwnTeacher) else None,
        teacher_head=inputs.teacher if hidden_rows_come else None,
        adapter=inputs.adapter,
        base_teacher=inputs.base_teaches and not standalone,
    )


def engine_setup(run: Run, inputs: Inputs, rollout: VllmRollout, shared: bool) -> EngineSetup:
    """Of each replica of the student's engine."""
    return EngineSetup(
        model=inputs.student,
        rollout=rollout,
        max_model_len=run.data.max_length + run.longest_continuation,
        stop_token_ids=inputs.stop_token_ids,
        seed=run.run.seed,
        shares_device=shared,
    )


def writer_setup(run: Run, inputs: Inputs, spec: StandaloneTeacher, writer: TeacherGeneration) -> EngineSetup:
    """Of each replica of a standalone teacher that writes responses."""
    assert inputs.teacher is not None
    engine = spec.engine
    return EngineSetup(
        model=inputs.teacher,
        rollout=VllmRollout(
            gpus=spec.gpus,
            tensor_parallel=spec.tensor_parallel,
            dtype=engine.dtype,
            max_new_tokens=writer.max_new_tokens,
            temperature=writer.temperature,
            top_p=writer.top_p,
            top_k=writer.top_k,
            min_p=writer.min_p,
            max_num_seqs=engine.max_num_seqs,
            kv_cache_gb=writer.kv_cache_gb,
            enforce_eager=engine.enforce_eager,
        ),
        max_model_len=max(run.data.max_length, run.data.teacher_length) + writer.max_new_tokens,
        stop_token_ids=inputs.teacher_stop_token_ids,
        seed=run.run.seed,
        shares_device=False,
        fixed=True,
        vocab=inputs.architecture.vocab,
    )


def scorer_setup(run: Run, inputs: Inputs, spec: StandaloneTeacher, objective: Objective) -> ScorerSetup:
    """Of each replica of a standalone teacher."""
    assert inputs.teacher is not None
    teacher = Architecture.from_config(read_config(inputs.teacher), str(inputs.teacher))
    return ScorerSetup(
        model=inputs.teacher,
        engine=spec.engine,
        max_model_len=longest_sample(run),
        distill=objective.distill,
        head=None if isinstance(run.distill, FullVocab) else head_name(teacher),
        vocab=teacher.vocab,
        seed=run.run.seed,
        tensor_parallel=spec.tensor_parallel,
        evaluates=run.measures_divergence,
    )


def describe(run: Run, inputs: Inputs, shared: bool) -> list[str]:
    """One line a role, for the summary."""
    kind = run.cluster.device.value
    without = f" without {len(run.model.drop_layers)} layers" if run.model.drop_layers else ""
    ahead = ", one step ahead" if run.placement.max_staleness else ""
    whose = "data" if run.writer is None else "teacher"
    engine = f"engine: none, responses are the {whose}'s; so there is no sample to show"
    if run.engine is not None:
        its = f"the same {run.engine.gpus} x {kind}" if shared else f"{run.engine.gpus} x {kind} of its own{ahead}"
        engine = f"engine: {its}{of_replicas(run.engine)}, vLLM, {run.engine.dtype.value}"
    return [
        f"trainer: {run.train.gpus} x {kind}{shared_by(run.train)}, Megatron-core, {run.train.dtype.value}, student "
        f"{run.model.path}{without}{describe_adapter(inputs)}; weights, gradients and optimizer states: "
        f"{training_bytes(inputs.architecture, inputs.adapter, run.train) / GIB:.2g} GiB a device",
        f"teacher: {describe_teacher(run.teacher, kind, inputs.base_teaches)}"
        f"{'' if run.writer is None else ', writes responses'}",
        engine,
    ]


def describe_adapter(inputs: Inputs) -> str:
    """What is trained, if it isn't everything."""
    adapter = inputs.adapter
    if adapter is None:
        return ""
    trained, every = parameters(inputs.architecture, adapter)
    return (
        f", LoRA of rank {adapter.rank} on {', '.join(adapter.modules)}: {trained:,} of {every:,} parameters are "
        f"trained ({trained / every:.2%})"
    )


def describe_teacher(
    teacher: ColocatedTeacher | StandaloneTeacher | OwnTeacher | NoTeacher, kind: str, is_base: bool = False
) -> str:
    """Whose weights score, and where.

    Args:
        is_base: it is the checkpoint that the student has an adapter on.
    """
    if isinstance(teacher, NoTeacher):
        return "none"
    if isinstance(teacher, StandaloneTeacher):
        its = f"{teacher.gpus} x {kind} of its own{of_replicas(teacher)}"
        return f"{teacher.model}, {its}, vLLM, {teacher.engine.dtype.value}"
    if isinstance(teacher, ColocatedTeacher) and is_base:
        whose = f"{teacher.model}, the student without its adapter"
    elif isinstance(teacher, ColocatedTeacher):
        whose = f"{teacher.model}{', in host memory between uses' if teacher.offload else ''}"
    elif teacher.ema_decay is None:
        whose = "the student itself"
    elif not teacher.changes:
        whose = "the student as it was at the start"
    else:
        whose = f"a moving average of the student (decay {teacher.ema_decay:g})"
    return f"{whose}, in the trainer's processes"


def of_replicas(spec: VllmRollout | StandaloneTeacher) -> str:
    """How several devices make replicas of vLLM; empty for one each."""
    return f" (tensor parallel {spec.tensor_parallel})" if spec.tensor_parallel > 1 else ""


def shared_by(train: Train) -> str:
    """How several devices share the training; empty for one."""
    if train.gpus == 1:
        return ""
    parts = [f"tensor parallel {train.tensor_parallel}"] if train.tensor_parallel > 1 else []
    parts += ["sequence parallel"] if train.uses_sequence_parallel else []
    parts += [f"data parallel {train.data_parallel}"] if train.data_parallel > 1 else []
    parts += ["distributed optimizer"] if train.distributed_optimizer else []
    return f" ({', '.join(parts)})"
