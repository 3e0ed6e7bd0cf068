"""Checks across groups. Each refuses in one line that names the keys and the remedy."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rlhf.config.algo import GKD, GRPO, OPSD
from rlhf.config.base import changed_keys, not_yet, refuse_unused, require
from rlhf.config.checks_grpo import check_grpo
from rlhf.config.cluster import Device
from rlhf.config.data import OnBadRow, RowsData
from rlhf.config.distill import NoDistill, Sampled, TopK
from rlhf.config.environment import MultiTurn
from rlhf.config.placement import Colocate, Separate
from rlhf.config.reward import NoReward
from rlhf.config.rollout import NoRollout
from rlhf.config.run import EvalResponses
from rlhf.config.teacher import ColocatedTeacher, NoTeacher, SelfTeacher, StandaloneTeacher

if TYPE_CHECKING:
    from rlhf.config.run import Run
    from rlhf.config.train import Train


def check(run: Run) -> None:
    """Refuse every combination of groups that isn't a legal cell.

    Raises:
        ConfigError: naming the keys and what to write instead.
    """
    if isinstance(run.algo, GKD):
        algo = "algo=opsd" if isinstance(run.algo, OPSD) else "algo=gkd"
        require(
            not isinstance(run.teacher, NoTeacher),
            f"{algo} needs a teacher, got teacher=none; use teacher=colocated or teacher=standalone",
        )
        require(
            not isinstance(run.distill, NoDistill),
            f"{algo} needs teacher scores, got distill=none; use distill=topk or distill=fullvocab",
        )
        require(
            not isinstance(run.distill, Sampled),
            f"{algo} compares distributions, and distill=sampled asks about one token of each; use distill=topk or "
            "distill=fullvocab",
        )
        require(
            isinstance(run.reward, NoReward),
            f"{algo} learns from a teacher and would ignore reward.*; use reward=none",
        )
        if run.distill.loss is not None:
            why = f"with distill.loss={run.distill.loss}, which is another loss"
            refuse_unused(run.algo, "algo", ("beta",), why, "use distill.loss=null")
        _check_responses(run, run.algo)
    if isinstance(run.environment, MultiTurn):
        _check_environment(run, run.environment)
    if isinstance(run.algo, GRPO):
        check_grpo(run, run.algo)
    _check_written(run)
    if isinstance(run.teacher, NoTeacher):
        why = "with teacher=none, from which no divergence is measured"
        refuse_unused(run.eval, "eval", ("responses", "max_response_tokens"), why, "name a teacher")
        refuse_unused(run.data, "data", ("max_teacher_length",), "with teacher=none", "name a teacher")
    if isinstance(run.teacher, StandaloneTeacher) and not isinstance(run.distill, TopK):
        why = "without distill=topk, for which the teacher's logits are made"
        refuse_unused(run.teacher.engine, "teacher.engine", ("logits_mb",), why, "use distill=topk")
    if isinstance(run.teacher, ColocatedTeacher) and run.cluster.device is Device.cpu:
        why = "with cluster.device=cpu, where device and host memory are one"
        refuse_unused(run.teacher, "teacher", ("offload",), why, "use cluster.device=cuda")
    require(
        isinstance(run.placement, Separate) or run.engine is None or run.train.gpus == run.engine.gpus,
        f"placement=colocate shares one set of devices: train.gpus={run.train.gpus} and "
        f"rollout.gpus={getattr(run.rollout, 'gpus', None)} must be equal; make them so, or use placement=separate",
    )
    require(
        run.eval.samples == 0 or run.eval.samples >= run.train.data_parallel,
        f"eval.samples={run.eval.samples} can't feed the {run.train.data_parallel} copies of the model that "
        f"train.gpus={run.train.gpus} train.tensor_parallel={run.train.tensor_parallel} make; use "
        f"eval.samples={run.train.data_parallel} or more, or eval.samples=0",
    )
    if run.eval.samples == 0 and isinstance(run.data, RowsData):
        why = "with eval.samples=0 (no evaluation)"
        refuse_unused(run.data, "data", ("eval_path", "eval_split", "eval_function"), why, "use eval.samples=16")
    if run.run.steps is not None:
        check_schedule(run.train, run.run.steps * run.updates_per_step, said_of(run, f"run.steps={run.run.steps}"))
    uncounted = isinstance(run.data, RowsData) and run.data.streaming and run.data.on_bad_row is OnBadRow.skip
    require(
        run.run.epochs is None or not uncounted,
        f"run.epochs={run.run.epochs} needs to know how many rows there are, and data.streaming=true "
        "data.on_bad_row=skip doesn't count them first; use run.steps, or data.streaming=false",
    )
    _check_micro_batch(run)


def _check_environment(run: Run, environment: MultiTurn) -> None:
    """Somebody talks with it, and its rewards are used as far as they have keys."""
    none = "rollout=none" if isinstance(run.rollout, NoRollout) else f"algo.lmbda={run.lmbda:g}"
    require(
        run.engine is not None,
        f"environment=multi_turn talks with the student's engine, and {none} starts none; use environment=none",
    )
    if isinstance(run.algo, GKD):
        why = "with a teacher's divergence to learn from, where rewards are only logged"
        refuse_unused(environment, "environment", ("reward_weight",), why, "use algo=grpo")


def _check_responses(run: Run, algo: GKD) -> None:
    """Where the responses come from: the engine, the rows, or both."""
    if isinstance(run.rollout, NoRollout):
        require(
            run.lmbda == 0,
            f"algo.lmbda={run.lmbda:g} trains on the student's own samples, and rollout=none starts no engine to take "
            "them; use algo.lmbda=0, or rollout=vllm",
        )
    if run.engine is None:
        no_engine = "rollout=none" if isinstance(run.rollout, NoRollout) else "algo.lmbda=0"
        require(
            isinstance(run.placement, Colocate),
            f"placement=separate gives the engine devices of its own, and {no_engine} starts none; use "
            "placement=colocate",
        )
        require(
            run.eval.samples == 0 or run.eval.responses is EvalResponses.dataset,
            f"eval.responses=student needs an engine, and {no_engine} starts none; use eval.responses=dataset",
        )
        require(
            not run.eval.accuracy,
            f"eval.accuracy=true needs an engine, and {no_engine} starts none; use eval.accuracy=null",
        )
    elif run.placement.max_staleness and isinstance(run.teacher, SelfTeacher) and run.teacher.changes:
        raise not_yet(
            f"placement.max_staleness={run.placement.max_staleness} with teacher=self, whose weights are trained while "
            "it is asked",
            "placement.max_staleness=0, or another teacher",
        )
    elif run.placement.max_staleness and run.lmbda < 1:
        raise not_yet(
            f"placement.max_staleness={run.placement.max_staleness} with algo.lmbda={run.lmbda:g}",
            "algo.lmbda=1, or placement.max_staleness=0",
        )
    elif algo.lmbda is None:  # given: see `left_by_lmbda`
        why = "where every response is the student's own (algo.lmbda=null)"
        remedy = "use algo.lmbda=0.5 or rollout=none"
        refuse_unused(algo, "algo", ("sft_alpha",), why, remedy)
        refuse_unused(run.data, "data", ("max_response_length",), why, remedy)


def _check_written(run: Run) -> None:
    """What the teacher writes is asked for, used, and written by a teacher that can."""
    algo = run.algo
    if not isinstance(algo, GKD) or not algo.seq_kd:
        if isinstance(run.teacher, StandaloneTeacher):
            unused = names_of(run.teacher.generation)
            without, remedy = ("algo.seq_kd=false", "") if isinstance(algo, GKD) else ("algo=grpo", "algo=gkd ")
            why, remedy = f"with {without} (the teacher writes nothing)", f"use {remedy}algo.seq_kd=true"
            refuse_unused(run.teacher.generation, "teacher.generation", unused, why, remedy)
        return
    require(
        isinstance(run.teacher, StandaloneTeacher),
        "algo.seq_kd=true needs a teacher that writes; use teacher=standalone, or responses the teacher wrote before: "
        "algo.seq_kd=false rollout=none data=file data.path=FILE",
    )
    if run.lmbda == 1 and algo.lmbda is None:  # given: see `left_by_lmbda`
        why = "where every response is the student's own (algo.lmbda=null)"
        refuse_unused(algo, "algo", ("seq_kd",), why, "use algo.lmbda=0.5 or rollout=none")
    why = "with algo.seq_kd=true, where the teacher writes the responses"
    refuse_unused(run.data, "data", ("max_response_length",), why, "use teacher.generation.max_new_tokens")


def left_by_lmbda(run: Run) -> str | None:
    """The keys that `algo.lmbda=0` or `algo.lmbda=1`, written down, leaves without effect, in one line; None: none.

    No check refuses them: other jobs of a sweep over it need them, and a recipe's `rollout.*` can't be taken back.
    """
    algo = run.algo
    if not isinstance(algo, GKD) or algo.lmbda not in (0, 1):
        return None
    if algo.lmbda == 0:
        why, specs = "no engine is started", {"rollout": run.rollout}
        names = names_of(run.rollout)
    else:
        why, specs = "every response is the student's own", {"algo": algo, "data": run.data}
        names = ("sft_alpha", "seq_kd", "max_response_length")
        if isinstance(run.teacher, StandaloneTeacher):
            specs["teacher.generation"] = run.teacher.generation
            names += names_of(run.teacher.generation)
    unused = [given for group, spec in specs.items() for given in changed_keys(spec, group, names)]
    if not unused:
        return None
    return (
        f"algo.lmbda={algo.lmbda:g} leaves {', '.join(unused)} without effect, since {why}; use algo.lmbda=0.5, or "
        "leave them at their defaults"
    )


def refuse_left_by_lmbda(run: Run) -> None:
    """Of a run alone, `algo.lmbda=1` refuses what `algo.lmbda=null` does.

    Raises:
        ConfigError: naming the keys and what to write instead.
    """
    line = left_by_lmbda(run)
    require(run.lmbda != 1 or line is None, str(line))


def names_of(spec: Any) -> tuple[str, ...]:
    """All keys of a spec."""
    return tuple(field.name for field in dataclasses.fields(spec))


def _check_micro_batch(run: Run) -> None:
    """A micro-batch holds the longest sample there may be."""
    prompts = {"data.max_length": run.data.max_length, "data.max_teacher_length": run.data.teacher_length}
    responses = dict(run.response_limits)
    if run.reads_reference_responses:
        responses["eval.max_response_tokens"] = run.eval.max_response_tokens
    for prompt, prompt_tokens in prompts.items():
        for response, response_tokens in responses.items():
            longest = run.train.padded(prompt_tokens + response_tokens)
            held_out = "held-out " if response.startswith("eval.") else ""
            require(
                run.train.micro_batch_tokens >= longest,
                f"train.micro_batch_tokens={run.train.micro_batch_tokens} can't hold one {held_out}sample of {prompt}="
                f"{prompt_tokens} + {response}={response_tokens} tokens; use at least {longest}",
            )


def said_of(run: Run, length: str) -> str:
    """How the person wrote the length of the run in optimizer steps."""
    return length if run.updates_per_step == 1 else f"{length} x algo.steps_per_generation={run.updates_per_step}"


def check_schedule(train: Train, steps: int, said: str) -> None:
    """The learning rate's schedule fits the run. `said` is how the person wrote its length.

    Raises:
        ConfigError: it doesn't.
    """
    require(
        train.warmup_steps + train.decay_steps <= steps,
        f"train.warmup_steps={train.warmup_steps} and train.decay_steps={train.decay_steps} don't fit {said}; "
        "lower them",
    )
