"""One run from its checked configuration to its summary.

check inputs ► start Ray and the roles ► loop ► save ► summary ► shut down
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.algos.build import build_objective, minibatches_of
from rlhf.checkpoint import BEST, Better, Checkpoints
from rlhf.config.environment import MultiTurn
from rlhf.config.placement import Separate
from rlhf.config.reward import NoReward
from rlhf.config.run import Run
from rlhf.config.teacher import NoTeacher, OwnTeacher
from rlhf.config.train import DType
from rlhf.errors import RlhfError
from rlhf.loggers.base import Continued, MetricLog
from rlhf.loggers.base import build as build_log
from rlhf.loggers.rollouts import recorded
from rlhf.loop import run_steps
from rlhf.outcome import decoded_sample, describe_data, publish, report_data, saved_text
from rlhf.preflight import Inputs, can_be_verified, check_inputs
from rlhf.progress import BadRowList, Progress, versions
from rlhf.report import summary as report
from rlhf.resume import (
    BAD_ROWS,
    Resume,
    check_data,
    content_of,
    described,
    described_as_done,
    find,
    finished,
    mark_of,
    prepare,
    still_as_found,
)
from rlhf.rewards.verify import solves
from rlhf.roles.protocols import Environments, Rewarder
from rlhf.run_folder import RunFolder, check, keep_traceback
from rlhf.sources.build import source_of
from rlhf.sources.conversations import Conversations
from rlhf.sources.evaluation import Evaluator
from rlhf.sources.steps import StepSource
from rlhf.stopping import Stopped, unstoppable
from rlhf.training_state import CHECKPOINTS, plain
from rlhf.types import Metrics

if TYPE_CHECKING:
    from rlhf.placements.roles import Roles


def execute(run: Run, config: Any, sweep: bool = False) -> float | None:
    """Run it.

    Args:
        run: the checked configuration.
        config: the same as plain containers, to be written down.
        sweep: it is a job of a sweep.

    Returns:
        The run's objective, see `objective_of`.

    Raises:
        RlhfError: anything the user can do something about, in one line.
    """
    resume = find(run, config, sweep)
    content = content_of(run, resume)
    run_dir = check(run.run, content)
    if run.logger.console and not sweep:
        print("checking models, tokenizers and data ...", flush=True)
    inputs = check_inputs(run)
    if resume is not None:
        check_data(resume, inputs.dataset)
        if finished(resume, run, run_dir, inputs.steps):
            print(described_as_done(resume, run_dir), flush=True)
            summary = report.read(run_dir)
            return objective_of(run, summary.rewards | summary.eval_after)
    if run.logger.console and not sweep and run.resume != "never":
        print(described(resume), flush=True)
    folder = RunFolder.claim(run.run, config, content)
    try:
        still_as_found(resume, run, config, sweep)
        continued = None
        if resume is not None and resume.in_place:
            prepare(resume, folder.path)
            continued = Continued(resume.state.step, resume.state.wandb_id)
        log = build_log(run.logger, folder.path, run.run.name, config, inputs.steps, continued, brief=sweep)
        try:
            if continued is None:
                report_data(inputs, folder.path, log)
            return train(run, inputs, folder, log, config, resume, sweep)
        finally:
            log.close()
    finally:
        folder.release()


def train(
    run: Run,
    inputs: Inputs,
    claimed: RunFolder,
    log: MetricLog,
    config: Any,
    resume: Resume | None = None,
    sweep: bool = False,
) -> float | None:
    """Start the roles, run the loop, save, report; whatever happens, give the devices back."""
    folder = claimed.path
    bad_rows = BadRowList(folder / BAD_ROWS, log, len(inputs.dataset.bad_rows))
    rewarder = build_rewarder(run, inputs)
    conversations = build_conversations(run, inputs)
    starting = time.perf_counter()
    users: list[Rewarder | Environments] = [] if rewarder is None else [rewarder]
    users += [] if conversations is None else [conversations.environments]
    try:
        roles = start_roles(run, inputs, folder, log, sweep)
    except BaseException:
        end_users_code(users)
        raise
    checkpoints = Checkpoints(
        roles.trainer,
        folder / CHECKPOINTS,
        run.run.save_every,
        keep_last=run.run.keep_last,
        keep_best=run.eval.every > 0 and run.eval.keep_best,
        better=judged_by(run),
    )
    started = time.perf_counter()
    try:
        claimed.begun()

        def report_evaluation(step: int, metrics: Metrics) -> None:
            log.log(step, metrics)
            checkpoints.after_evaluation(step, metrics)

        source = build_source(run, inputs, roles, log, bad_rows, report_evaluation, rewarder, conversations)
        progress = Progress(mark_of(inputs.dataset), plain(config), source, bad_rows, log, started)
        if resume is not None:
            progress.restore(resume.state, resume.checkpoint)
            if resume.in_place:
                checkpoints.go_on()
        if run.run.save_every:
            checkpoints.describe = progress.state
        experiences = recorded(source, folder, inputs.tokenizer, log.warn) if run.logger.rollouts else source
        run_steps(experiences, roles.trainer, checkpoints, log, largest_gap(run))
        log.phase("save")
        final = checkpoints.finish(inputs.steps)
    except KeyboardInterrupt:
        shut_down(roles, checkpoints, users)
        raise Stopped(f"interrupted; {saved_text(checkpoints)}") from None
    except RlhfError as error:
        shut_down(roles, checkpoints, users)
        raise type(error)(f"{error}; {saved_text(checkpoints)}; {keep_traceback(error, folder)}") from error
    finally:
        shut_down(roles, checkpoints, users)
    evaluator = source.evaluator
    best = checkpoints.best()
    summary = report.RunSummary(
        name=run.run.name,
        directory=folder,
        steps=inputs.steps,
        seconds=progress.seconds,
        start_seconds=started - starting,
        phases=log.seconds,
        eval_before=evaluator.results.get(0, {}),
        eval_after=evaluator.results.get(inputs.steps, {}),
        rewards={name: value for name, value in log.latest.items() if name.startswith("reward/")},
        sample=decoded_sample(inputs, evaluator),
        checkpoint=final,
        saved=checkpoints.saved[:-1],
        best=None if best is None else {"path": str(folder / CHECKPOINTS / BEST), **best},
        held_out_rows=len(inputs.dataset.held_out),
        resumed_from=None if resume is None else resume.state.step,
        bad_rows=bad_rows.count,
        roles=roles.described,
        versions=versions(),
    )
    try:
        publish(summary, run, inputs, folder, log, sweep)
    except KeyboardInterrupt:
        raise Stopped(f"interrupted when all steps were done; {saved_text(checkpoints)}") from None
    return objective_of(run, summary.rewards | summary.eval_after)


def objective_of(run: Run, measured: Metrics) -> float | None:
    """What a sweep compares runs by, and its sweeper optimises; None where it wasn't measured.

    The held-out forward KL (lower is better). With rewards the held-out reward, or without evaluation the last step's
    mean reward (higher is better).
    """
    names = (judged_by(run).key, "reward/mean") if run.rewarded else (judged_by(run).key,)
    return next((measured[name] for name in names if name in measured), None)


def judged_by(run: Run) -> Better:
    """The held-out metric that says how good a run is."""
    return Better("eval/reward", highest=True) if run.rewarded else Better()


def build_rewarder(run: Run, inputs: Inputs) -> Rewarder | None:
    """What rewards responses; None without rewards."""
    if isinstance(run.reward, NoReward):
        return None
    from rlhf.rewards.build import rewarder_of

    return rewarder_of(run, inputs)


def build_conversations(run: Run, inputs: Inputs) -> Conversations | None:
    """What the student talks with; None where a sample is one response."""
    if not isinstance(run.environment, MultiTurn):
        return None
    from rlhf.environments.pool import EnvironmentPool

    return Conversations(
        EnvironmentPool(run.environment, run.plugins),
        inputs.markup,
        decode=partial(inputs.tokenizer.decode, skip_special_tokens=True),
        max_turns=run.environment.max_turns,
        reward_weight=run.environment.reward_weight,
    )


def end_users_code(users: Sequence[Rewarder | Environments]) -> None:
    """End the processes of reward functions and environments."""
    for one in users:
        with unstoppable():
            one.close()


def shut_down(roles: Roles, checkpoints: Checkpoints, users: Sequence[Rewarder | Environments]) -> None:
    """Give the devices back, and remove what a process that is gone now was still writing."""
    end_users_code(users)  # first: work ahead may be waiting for it
    with unstoppable():
        roles.close()
        checkpoints.remove_unfinished()


def start_roles(run: Run, inputs: Inputs, folder: Path, log: MetricLog, sweep: bool = False) -> Roles:
    """Ray and every role, ready."""
    if isinstance(run.placement, Separate):
        from rlhf.placements.separate import start
    else:
        from rlhf.placements.colocate import start

    log.phase("start")
    if run.logger.console and not sweep:
        length = f"\nrun.epochs={run.run.epochs}: {inputs.steps} steps" if run.run.epochs else ""
        teacher = teacher_named(run)
        roles = "Ray and the trainer" if run.engine is None else "Ray, trainer and engine"
        without = f" without {len(run.model.drop_layers)} layers" if run.model.drop_layers else ""
        print(f"student {run.model.path}{without}, teacher {teacher}\n{describe_data(inputs)}{length}", flush=True)
        print(f"starting {roles}, then evaluating: about a minute ...", flush=True)
    try:
        return start(run, inputs, build_objective(run))
    except KeyboardInterrupt:
        raise Stopped("interrupted while starting; nothing was saved") from None
    except RlhfError as error:
        raise type(error)(f"{error}; {keep_traceback(error, folder)}") from error


def teacher_named(run: Run) -> str:
    """For the person watching."""
    if isinstance(run.teacher, NoTeacher):
        return "none"
    if isinstance(run.teacher, OwnTeacher):
        return "itself" if run.teacher.changes else "itself, as it was at the start"
    return str(run.teacher.model)


def build_source(
    run: Run,
    inputs: Inputs,
    roles: Roles,
    log: MetricLog,
    bad_rows: BadRowList,
    report_evaluation: Callable[[int, Metrics], None],
    rewarder: Rewarder | None = None,
    conversations: Conversations | None = None,
) -> StepSource:
    """Where experiences come from, with the evaluation between them."""
    scorer = None if isinstance(run.teacher, NoTeacher) else roles.scorer
    evaluator = Evaluator(
        spec=run.eval,
        train=run.train,
        held_out=inputs.dataset.held_out,
        trainer=roles.trainer,
        scorer=scorer,
        engine=roles.engine,
        seed=run.run.seed,
        total_steps=inputs.steps,
        report=report_evaluation,
        solves=verifier_of(run, inputs),
        rewarder=rewarder,
        conversations=conversations,
    )
    return source_of(
        run,
        roles.engine,
        roles.background,
        roles.writer,
        rewarder,
        conversations,
        trainer=roles.trainer,
        scorer=scorer,
        evaluator=evaluator,
        cursor=inputs.dataset.cursor(run.run.seed, run.data.shuffle, bad_rows.add),
        make_minibatches=minibatches_of(run, roles.trainer.data_parallel),
        micro_batch_tokens=run.train.micro_batch_tokens,
        batch_samples=run.prompts_per_step,
        steps=inputs.steps,
        seed=run.run.seed,
        phase=log.phase,
    )


def verifier_of(run: Run, inputs: Inputs) -> Callable[[np.ndarray, int], bool] | None:
    """Tells whether a completion solves a held-out row; None where that isn't asked, or can't be told."""
    if run.engine is None or run.eval.accuracy is False or not can_be_verified(inputs.dataset):
        return None
    columns, decode = inputs.dataset.held_out.columns, inputs.tokenizer.decode
    return lambda tokens, row: solves(decode(tokens, skip_special_tokens=True), columns[row])


def largest_gap(run: Run) -> float:
    """Mean log-probability gap that deserves a warning; without an engine there is none."""
    if run.engine is None:
        return math.inf
    if run.engine.logprob_gap_warning is not None:
        return run.engine.logprob_gap_warning
    if run.placement.max_staleness or run.updates_per_step > 1:
        return math.inf  # the trainer's weights are newer than the sampler's: a gap is expected
    exact = run.engine.dtype is DType.float32 and run.train.dtype is DType.float32
    return 1e-3 if exact else 0.1
