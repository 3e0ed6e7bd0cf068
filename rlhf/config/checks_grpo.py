"""Checks across groups that concern algo=grpo."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.config.algo import GRPO, KLIn, OldLogprobs
from rlhf.config.base import not_yet, refuse_unused, require
from rlhf.config.distill import NoDistill, Sampled
from rlhf.config.environment import MultiTurn
from rlhf.config.reward import FunctionReward
from rlhf.config.rollout import VllmRollout
from rlhf.config.teacher import NoTeacher, SelfTeacher

if TYPE_CHECKING:
    from rlhf.config.run import Run


def check_grpo(run: Run, algo: GRPO) -> None:
    """Refuse what doesn't go with GRPO.

    Raises:
        ConfigError: naming the keys and what to write instead.
    """
    engine = run.engine
    if not isinstance(engine, VllmRollout):
        require(False, "algo=grpo learns from the student's own samples, and rollout=none takes none; use rollout=vllm")
        return
    require(
        engine.temperature > 0,
        "algo=grpo compares different samples of a prompt, and rollout.temperature=0 (greedy) gives one; use "
        "rollout.temperature=1",
    )
    for key, value, one in (("top_k", engine.top_k, 1), ("min_p", engine.min_p, 1.0)):
        require(
            value != one,
            f"algo=grpo compares different samples of a prompt, and rollout.{key}={value:g} leaves only the likeliest "
            f"token; use rollout.{key}={2 if key == 'top_k' else 0.1:g}, or 0",
        )
    _check_teacher(run, algo)
    _check_rewards(run, algo, engine)
    _check_old_logprobs(algo, engine)
    _check_batches(run, algo)
    if isinstance(run.environment, MultiTurn):
        why = "with environment=multi_turn, where no one response has a length to punish"
        refuse_unused(algo, "algo", ("overlong_buffer",), why, "use algo.mask_truncated=true")
    require(
        algo.overlong_buffer <= engine.max_new_tokens,
        f"algo.overlong_buffer={algo.overlong_buffer} is more than rollout.max_new_tokens={engine.max_new_tokens}; "
        "lower it",
    )
    why, remedy = "with algo=grpo, where every response is the student's own", "use rollout.max_new_tokens"
    refuse_unused(run.data, "data", ("max_response_length",), why, remedy)


def _check_teacher(run: Run, algo: GRPO) -> None:
    """A teacher where it is asked, and only there."""
    coefficient = "algo.kl_coef" if algo.kl_coef else "algo.teacher_kl_coef"
    if algo.asks_teacher:
        value = algo.kl_coef or algo.teacher_kl_coef
        option = "teacher=reference" if algo.kl_coef else "teacher=colocated"
        require(
            not isinstance(run.teacher, NoTeacher),
            f"{coefficient}={value:g} pulls towards a teacher, got teacher=none; use {option} distill=sampled, or "
            f"{coefficient}=0",
        )
        require(
            isinstance(run.distill, Sampled),
            f"{coefficient}={value:g} needs the teacher's log-probabilities of the sampled tokens; use distill=sampled",
        )
    else:
        require(
            isinstance(run.teacher, NoTeacher) and isinstance(run.distill, NoDistill),
            "algo=grpo asks a teacher only with algo.kl_coef or algo.teacher_kl_coef; use e.g. algo.kl_coef=0.01 with "
            "teacher=reference distill=sampled, or teacher=none distill=none",
        )
    if not isinstance(run.teacher, SelfTeacher) or not run.teacher.changes:
        return
    require(
        algo.kl_coef == 0 or run.teacher.ema_decay is not None,
        f"algo.kl_coef={algo.kl_coef:g} with teacher=self measures the student's distance from itself; use "
        "teacher=reference",
    )
    if run.placement.max_staleness:
        raise not_yet(
            f"placement.max_staleness={run.placement.max_staleness} with teacher=self, whose weights are trained while "
            "it is asked",
            "placement.max_staleness=0, or another teacher",
        )


def _check_rewards(run: Run, algo: GRPO, engine: VllmRollout) -> None:
    """Something to learn from, and no key that needs rewards without them."""
    if isinstance(run.reward, FunctionReward) and isinstance(run.environment, MultiTurn):
        called = [name.rpartition(":")[2].rpartition(".")[2] for name in run.reward.functions]
        require(
            "environment" not in called,
            "a function of reward.functions is called environment, as the part of environment=multi_turn is; rename it",
        )
    if isinstance(run.reward, FunctionReward):
        _check_length_target(run.reward, engine)
    if run.rewarded:
        require(
            algo.num_generations > 1,
            "algo.num_generations=1 leaves nothing to compare a reward with; use algo.num_generations=8",
        )
        return
    weightless = "" if not isinstance(run.environment, MultiTurn) else " environment.reward_weight=0"
    require(
        algo.teacher_kl_coef > 0,
        f"algo=grpo with reward=none{weightless} has nothing to learn from; use reward=functions, or "
        "algo.teacher_kl_coef=1 with teacher=colocated distill=sampled",
    )
    unused = ("advantage", "scale_rewards", "dynamic_sampling", "overlong_buffer")
    refuse_unused(algo, "algo", unused, "with reward=none", "use reward=functions")


def _check_length_target(reward: FunctionReward, engine: VllmRollout) -> None:
    """The built-in `length` can tell responses apart; its options are checked with those of the other functions."""
    target = reward.options.get("length", {}).get("target") if "length" in reward.functions else None
    require(
        not isinstance(target, int) or target < engine.max_new_tokens,
        f"reward.options.length.target={target} punishes no response, since none is longer than rollout.max_new_tokens="
        f"{engine.max_new_tokens}; use a smaller target",
    )


def _check_old_logprobs(algo: GRPO, engine: VllmRollout) -> None:
    """The sampler's log-probabilities are used only where the trainer can compute the same; ratios only where they
    aren't 1."""
    cut = " ".join(
        text
        for text, given in (
            (f"rollout.top_p={engine.top_p:g}", engine.top_p < 1),
            (f"rollout.top_k={engine.top_k}", engine.top_k > 0),
            (f"rollout.min_p={engine.min_p:g}", engine.min_p > 0),
        )
        if given
    )
    require(
        not cut or algo.old_logprobs is not OldLogprobs.sampler,
        f"algo.old_logprobs=sampler with {cut}: the sampler's log-probabilities are those of a cut distribution, which "
        "the trainer doesn't compute; use algo.old_logprobs=trainer (or null)",
    )
    require(
        not (cut and algo.kl_coef > 0 and algo.kl_in is KLIn.reward),
        f"algo.kl_in=reward with {cut}: the penalty takes the sampler's log-probabilities, which are those of a cut "
        "distribution; use algo.kl_in=loss",
    )
    if not recomputes(algo, engine):
        why = "with algo.old_logprobs=sampler (null means that here), whose ratio corrects for the sampler already"
        refuse_unused(algo, "algo", ("importance_cap",), why, "use algo.old_logprobs=trainer")
    elif algo.steps_per_generation == 1:
        trainer = "algo.old_logprobs=trainer"
        said = trainer if algo.old_logprobs is not None else f"{cut} (which means {trainer})"
        why = f"with {said} algo.steps_per_generation=1, where every ratio is 1"
        remedy = "use algo.steps_per_generation=2" + ("" if cut else " or algo.old_logprobs=sampler")
        of_ratios = ("clip_low", "clip_high", "clip_dual")
        # The importance, too, is the response's under ratio=sequence.
        unused = of_ratios if algo.importance_cap is not None else (*of_ratios, "ratio")
        refuse_unused(algo, "algo", unused, why, remedy)


def recomputes(algo: GRPO, engine: VllmRollout) -> bool:
    """What `algo.old_logprobs` means: whether the trainer computes the log-probabilities before the update."""
    if algo.old_logprobs is None:
        return not engine.whole_distribution
    return algo.old_logprobs is OldLogprobs.trainer


def _check_batches(run: Run, algo: GRPO) -> None:
    """Whole groups, and a length that can be told."""
    responses = run.train.global_batch_samples * algo.steps_per_generation
    taken = f"train.global_batch_samples={run.train.global_batch_samples}"
    if algo.steps_per_generation > 1:
        taken += f" x algo.steps_per_generation={algo.steps_per_generation}"
    require(
        responses % algo.num_generations == 0,
        f"{taken} must be divisible by algo.num_generations={algo.num_generations}: a generation makes whole groups",
    )
    require(
        run.run.epochs is None or not algo.dynamic_sampling,
        f"run.epochs={run.run.epochs} needs to know how many rows a step takes, and algo.dynamic_sampling=true takes "
        "more where it must; use run.steps",
    )
