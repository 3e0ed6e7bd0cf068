"""Checks across groups. Each refuses in one line that names the keys and the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.config.algo import GKD
from rlhf.config.base import not_yet, refuse_unused, require
from rlhf.config.cluster import Device
from rlhf.config.data import FileData, HubData, OnBadRow, RowsData
from rlhf.config.distill import NoDistill
from rlhf.config.placement import Separate
from rlhf.config.reward import NoReward
from rlhf.config.run import EvalResponses
from rlhf.config.teacher import NoTeacher

if TYPE_CHECKING:
    from rlhf.config.run import Run
    from rlhf.config.train import Train


def check(run: Run) -> None:
    """Refuse every combination of groups that isn't a legal cell.

    Raises:
        ConfigError: naming the keys and what to write instead.
    """
    if isinstance(run.algo, GKD):
        require(
            not isinstance(run.teacher, NoTeacher),
            "algo=gkd needs a teacher, got teacher=none; use teacher=colocated or teacher=standalone",
        )
        require(
            not isinstance(run.distill, NoDistill),
            "algo=gkd needs teacher scores, got distill=none; use distill=topk or distill=fullvocab",
        )
        require(
            isinstance(run.reward, NoReward),
            "algo=gkd learns from a teacher and would ignore reward.*; use reward=none",
        )
    require(
        isinstance(run.placement, Separate) or run.train.gpus == run.rollout.gpus,
        f"placement=colocate shares one set of devices: train.gpus={run.train.gpus} and "
        f"rollout.gpus={run.rollout.gpus} must be equal; make them so, or use placement=separate",
    )
    require(
        run.eval.samples == 0 or run.eval.samples >= run.train.data_parallel,
        f"eval.samples={run.eval.samples} can't feed the {run.train.data_parallel} copies of the model that "
        f"train.gpus={run.train.gpus} train.tensor_parallel={run.train.tensor_parallel} make; use "
        f"eval.samples={run.train.data_parallel} or more, or eval.samples=0",
    )
    if run.cluster.device is Device.cuda and run.train.gpus > 1:
        raise not_yet(f"cluster.device=cuda with train.gpus={run.train.gpus}", "one GPU, or cluster.device=cpu")
    if run.eval.samples == 0 and isinstance(run.data, FileData | HubData):
        why = "with eval.samples=0 (no evaluation)"
        refuse_unused(run.data, "data", ("eval_path", "eval_split"), why, "use eval.samples=16")
    if run.run.steps is not None:
        check_schedule(run.train, run.run.steps, f"run.steps={run.run.steps}")
    uncounted = isinstance(run.data, RowsData) and run.data.streaming and run.data.on_bad_row is OnBadRow.skip
    require(
        run.run.epochs is None or not uncounted,
        f"run.epochs={run.run.epochs} needs to know how many rows there are, and data.streaming=true "
        "data.on_bad_row=skip doesn't count them first; use run.steps, or data.streaming=false",
    )
    longest = run.train.padded(run.data.max_length + run.rollout.max_new_tokens)
    require(
        run.train.micro_batch_tokens >= longest,
        f"train.micro_batch_tokens={run.train.micro_batch_tokens} can't hold one sample of data.max_length="
        f"{run.data.max_length} + rollout.max_new_tokens={run.rollout.max_new_tokens} tokens; use at least {longest}",
    )
    if run.eval.samples > 0 and run.eval.responses is EvalResponses.dataset:
        longest = run.train.padded(run.data.max_length + run.eval.max_response_tokens)
        require(
            run.train.micro_batch_tokens >= longest,
            f"train.micro_batch_tokens={run.train.micro_batch_tokens} can't hold one held-out sample of "
            f"data.max_length={run.data.max_length} + eval.max_response_tokens={run.eval.max_response_tokens} tokens; "
            f"use at least {longest}",
        )


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
