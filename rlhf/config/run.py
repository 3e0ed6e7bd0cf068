"""The root of the configuration: sections that are no group, and the whole."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rlhf.config.algo import GKD, GRPO
from rlhf.config.base import refuse_unused, require, require_at_least, require_between, written
from rlhf.config.cluster import Cluster
from rlhf.config.data import DataCommon
from rlhf.config.environment import MultiTurn, NoEnvironment
from rlhf.config.logger import Logger
from rlhf.config.model import Model
from rlhf.config.reward import NoReward
from rlhf.config.rollout import NoRollout, VllmRollout
from rlhf.config.teacher import NoTeacher, StandaloneTeacher, TeacherGeneration
from rlhf.config.train import Train

MOST_STEPS = 10_000_000
"""A century at five minutes a step: more is a slip of the keyboard."""


class EvalResponses(Enum):
    """Which responses the held-out divergence is measured on."""

    dataset = "dataset"
    """The reference responses of the held-out rows: the same text before and after."""
    student = "student"
    """The student's own samples at that moment."""


@dataclass(kw_only=True)
class RunSection:
    """Section `run`: its name, folder, length and seed."""

    name: str = "run"
    """Names the run and its folder. The command's default is the time it started."""
    dir: str = "outputs/${run.name}"
    """Folder of the run: configuration, metrics, checkpoints, summary; from where the command is started.
    Jobs of a sweep (-m) get folders of their own under multirun/ instead."""
    overwrite: bool = False
    """Delete what an earlier run of the same name left in the folder; false refuses to start there."""
    steps: int | None = 16
    """Steps; null where `run.epochs` says how long the run is. A step makes responses, scores them and trains on them:
    one optimizer step; under algo=grpo one generation, which is `algo.steps_per_generation` optimizer steps. So it is
    for `run.save_every`, `eval.every` and the step that is logged; `train.warmup_steps` and the schedule of the
    learning rate count optimizer steps."""
    epochs: int | None = None
    """Passes over the training rows, instead of `run.steps`: `run.steps=null run.epochs=2`. Batches cross the borders
    of epochs, and the last one is filled up with the first rows of one more: every row is seen so many times."""
    seed: int = 0
    """Seeds data order, sampling and initialisation."""
    save_every: int = 0
    """Write a checkpoint every so many steps: a Hugging Face folder with the training state in it, from which `resume`
    goes on. 0: only the final one, without training state."""
    keep_last: int = 0
    """Keep the newest so many of them and delete older ones; 0 keeps all. The final and the best one always stay."""

    def __post_init__(self) -> None:
        require(
            re.fullmatch(r"[A-Za-z0-9_.=,+-]+", self.name) is not None and not set(self.name) <= {"."},
            f"run.name may hold letters, digits and _ . - + = , only (and not be . or ..), got {self.name!r}",
        )
        require(self.dir.strip() != "", "run.dir is empty; use run.dir=outputs/NAME, or leave it out")
        require(
            self.steps is None or self.epochs is None,
            f"run.steps={self.steps} and run.epochs={self.epochs} both say how long the run is; keep one: "
            f"run.steps=null run.epochs={self.epochs}, or run.epochs=null",
        )
        require(
            self.steps is not None or self.epochs is not None,
            "run.steps=null and run.epochs=null: how long is the run? use run.steps=16, or run.epochs=1",
        )
        if self.steps is not None:
            require_between("run.steps", self.steps, 1, MOST_STEPS)
        if self.epochs is not None:
            require_between("run.epochs", self.epochs, 1, MOST_STEPS)
        require_between("run.seed", self.seed, 0, 2**31 - 1)
        require_at_least("run.save_every", self.save_every, 0)
        require_at_least("run.keep_last", self.keep_last, 0)
        if self.save_every == 0:
            refuse_unused(self, "run", ("keep_last",), "with run.save_every=0", "use run.save_every=50")


@dataclass(kw_only=True)
class Eval:
    """Section `eval`: held-out full-vocabulary divergences from the teacher at temperature 1, and under algo=grpo
    rewards of greedy responses, before the first step and after the last."""

    samples: int = 16
    """Held-out rows; 0 turns evaluation off."""
    every: int = 0
    """Also every so many steps; 0: only before the first and after the last."""
    keep_best: bool = True
    """With eval.every > 0: keep the weights with the lowest held-out forward KL, with rewards those with the highest
    held-out reward, as checkpoints/best."""
    responses: EvalResponses = EvalResponses.dataset
    """dataset | student: whose responses to the held-out prompts are scored."""
    accuracy: bool | None = None
    """Also complete every held-out prompt greedily, and let the rows' verifier say how many answers are right. null:
    where the rows have one (`data=reasoning_gym`) and an engine runs."""
    max_response_tokens: int = 128
    """Reference responses are cut to this many tokens; with responses=student, `rollout.max_new_tokens` counts."""

    def __post_init__(self) -> None:
        require_at_least("eval.samples", self.samples, 0)
        require_at_least("eval.every", self.every, 0)
        require_at_least("eval.max_response_tokens", self.max_response_tokens, 1)
        if self.samples == 0:
            unused = ("every", "keep_best", "responses", "accuracy", "max_response_tokens")
            refuse_unused(self, "eval", unused, "with eval.samples=0 (no evaluation)", "use eval.samples=16")
        if self.every == 0:
            refuse_unused(self, "eval", ("keep_best",), "with eval.every=0", "use eval.every=10")
        if self.responses is EvalResponses.student:
            why = "with eval.responses=student"
            refuse_unused(self, "eval", ("max_response_tokens",), why, "use rollout.max_new_tokens")


def on_policy_share(algo: Any, rollout: Any) -> float:
    """What `algo.lmbda` means."""
    if isinstance(algo, GKD) and algo.lmbda is not None:
        return algo.lmbda
    return 0.0 if isinstance(rollout, NoRollout) else 1.0


@dataclass(kw_only=True)
class Run:
    """One run: every group and section, checked together on construction."""

    run: RunSection
    """Name, folder, length and seed of the run."""
    eval: Eval
    """Held-out evaluation."""
    resume: str
    """never | auto | FOLDER. auto: go on from the newest checkpoint in run.dir, or start at the beginning where there
    is none. FOLDER: go on from a checkpoint, or from the newest one of a run; in place if it is in run.dir, else in a
    new run. auto needs a run.name of yours; in a sweep (-m), hydra.sweep.dir=multirun/NAME."""
    plugins: list[str] = field(default_factory=list)
    """Your own preprocessors, reward functions, data sets, losses and environments: `path/to/file.py` or
    `package.module` each, imported before anything else is checked. See docs/plugins.md."""
    model: Model
    """The student."""
    train: Train
    """The trainer."""
    rollout: Any
    """The engine that samples."""
    data: DataCommon
    """Where prompts come from."""
    reward: Any
    """What scores responses."""
    environment: Any = field(default_factory=NoEnvironment)
    """What the model talks with, over several turns."""
    distill: Any
    """What is asked of the teacher."""
    teacher: Any
    """Where the teacher lives."""
    placement: Any
    """Which roles share devices."""
    logger: Logger
    """Where metrics go."""
    cluster: Cluster
    """Where Ray runs."""
    algo: Any
    """The objective."""

    def __post_init__(self) -> None:
        from rlhf.config.checks import check

        require(
            isinstance(self.resume, str) and bool(self.resume.strip()),
            f"resume={written(self.resume)} must be never, auto, or the folder of a run or a checkpoint",
        )
        if self.resume == "auto":
            require(
                not self.run.overwrite,
                "resume=auto continues what run.overwrite=true deletes; keep one",
            )
            require(
                self.run.save_every > 0,
                "resume=auto continues from what run.save_every writes, and run.save_every=0 writes nothing; "
                "use e.g. run.save_every=50",
            )
        check(self)

    @property
    def lmbda(self) -> float:
        """Probability that a step trains on the student's own samples."""
        return on_policy_share(self.algo, self.rollout)

    @property
    def engine(self) -> VllmRollout | None:
        """The engine's options; None where none is started."""
        return self.rollout if isinstance(self.rollout, VllmRollout) and self.lmbda > 0 else None

    @property
    def writer(self) -> TeacherGeneration | None:
        """How the teacher writes responses; None where it writes none."""
        writes = isinstance(self.algo, GKD) and self.algo.seq_kd and self.lmbda < 1
        return self.teacher.generation if writes and isinstance(self.teacher, StandaloneTeacher) else None

    @property
    def response_limits(self) -> dict[str, int]:
        """Key -> longest responses that are trained on, by where they come from."""
        limits = {} if self.engine is None else self._sample_limit(self.engine)
        if self.writer is not None:
            return limits | {"teacher.generation.max_new_tokens": self.writer.max_new_tokens}
        return limits if self.lmbda == 1 else limits | {"data.max_response_length": self.data.max_response_length}

    def _sample_limit(self, engine: VllmRollout) -> dict[str, int]:
        if isinstance(self.environment, MultiTurn):
            turns = f"a conversation ({self.environment.described(engine.max_new_tokens)})"
            return {turns: self.environment.most_tokens(engine.max_new_tokens)}
        return {"rollout.max_new_tokens": engine.max_new_tokens}

    @property
    def longest_continuation(self) -> int:
        """Most tokens that follow a prompt in what the engine makes: a response, or all turns of a conversation."""
        return 0 if self.engine is None else max(self._sample_limit(self.engine).values())

    @property
    def most_response_tokens(self) -> int:
        """Most tokens that the engine samples for a prompt, in all turns."""
        assert self.engine is not None
        turns = self.environment.max_turns if isinstance(self.environment, MultiTurn) else 1
        return int(turns * self.engine.max_new_tokens)

    @property
    def rewarded(self) -> bool:
        """Whether rewards are learned from: those of functions, or of an environment."""
        pays = isinstance(self.environment, MultiTurn) and self.environment.reward_weight != 0
        return not isinstance(self.reward, NoReward) or (isinstance(self.algo, GRPO) and pays)

    @property
    def reads_reference_responses(self) -> bool:
        """Whether held-out rows need a reference response to be evaluated on."""
        return self.measures_divergence and self.eval.responses is EvalResponses.dataset

    @property
    def measures_divergence(self) -> bool:
        """Whether held-out divergences from a teacher are measured."""
        return self.eval.samples > 0 and not isinstance(self.teacher, NoTeacher)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a step of the run."""
        return self.algo.steps_per_generation if isinstance(self.algo, GRPO) else 1

    @property
    def prompts_per_step(self) -> int:
        """Rows of the data that a step takes; with `algo.dynamic_sampling` at least."""
        responses = self.train.global_batch_samples * self.updates_per_step
        return responses // self.algo.num_generations if isinstance(self.algo, GRPO) else responses
