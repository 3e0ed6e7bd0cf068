"""Group `algo`: the objective."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlhf.config.base import (
    refuse_unused,
    require,
    require_at_least,
    require_below,
    require_between,
    require_positive,
)


@dataclass(kw_only=True)
class GKD:
    """Generalised knowledge distillation (Agarwal et al., arXiv 2306.13649): the student learns on its own samples
    from the teacher's distribution at every response token."""

    beta: float = 0.5
    """Divergence between teacher and student: 0 = forward KL(T||S), 1 = reverse KL(S||T), between: generalised
    Jensen-Shannon. The scale of the loss changes a lot with beta: compare runs by eval/forward_kl, not by loss."""
    lmbda: float | None = None
    """Probability that a step trains on the student's own samples; else it takes the rows' reference responses, or what
    the teacher writes (`algo.seq_kd`). Drawn from `run.seed` and the step's number alone. 0 starts no engine; a
    warning names the `rollout.*` that it leaves without effect. 1 refuses keys of off-policy steps, or in a sweep (-m)
    warns of them. null: 1, or 0 with `rollout=none`."""
    sft_alpha: float = 0.0
    """Adds this times the cross entropy of the response tokens to the divergence, in off-policy steps."""
    seq_kd: bool = False
    """Let the teacher write the responses of off-policy steps as they come (sequence-level distillation, Kim & Rush,
    arXiv 1606.07947), with `teacher.generation.*`; those of the rows aren't used. Needs teacher=standalone, whose
    devices then hold its weights twice: one copy writes, one scores."""

    def __post_init__(self) -> None:
        require_between("algo.beta", self.beta, 0.0, 1.0)
        if self.lmbda is not None:
            require_between("algo.lmbda", self.lmbda, 0.0, 1.0)
        require_at_least("algo.sft_alpha", self.sft_alpha, 0)


class Advantage(Enum):
    """What a response's reward is compared with."""

    grpo = "grpo"
    """The mean of its group (arXiv 2402.03300)."""
    rloo = "rloo"
    """The mean of the others of its group (arXiv 2402.14740): K/(K-1) (r - mean)."""


class ScaleRewards(Enum):
    """What advantages are divided by (and 1e-4 more)."""

    group = "group"
    """The standard deviation of the group's rewards."""
    batch = "batch"
    """The standard deviation of all rewards of the generation."""
    none = "none"
    """Nothing (Dr. GRPO, arXiv 2503.20783)."""


class Ratio(Enum):
    """Whose probability the importance ratio compares."""

    token = "token"
    """Each token's."""
    sequence = "sequence"
    """The response's, to the power of 1/length (GSPO, arXiv 2507.18071). Ratios are then much closer to 1: clip at
    e.g. algo.clip_low=3e-4 algo.clip_high=4e-4."""


class OldLogprobs(Enum):
    """Where the log-probabilities of the policy before the update come from."""

    sampler = "sampler"
    """The engine's own, of the distribution it sampled from: the ratio corrects for stale weights and other arithmetic,
    too."""
    trainer = "trainer"
    """The trainer's, of the whole distribution, before the first optimizer step of a generation, in which the ratio is
    1: clips need `algo.steps_per_generation` above 1, which costs a forward pass. What the sampler did
    differently, also with the older weights of `placement.max_staleness=1`, is corrected by `algo.importance_cap`
    alone."""


class KLEstimator(Enum):
    """How KL(student || teacher) is estimated from the sampled token, with d = log teacher - log student (J. Schulman,
    "Approximating KL divergence", 2020)."""

    k1 = "k1"
    """-d: unbiased; may be negative. Only for algo.kl_in=reward: in the loss its gradient is zero on average."""
    k2 = "k2"
    """d^2 / 2: biased, and its gradient is the KL's."""
    k3 = "k3"
    """exp(d) - 1 - d: unbiased, never negative."""


class KLIn(Enum):
    """Where the penalty goes."""

    loss = "loss"
    """Added to each token's loss."""
    reward = "reward"
    """Subtracted from the response's reward, summed over its tokens, before advantages are made."""


class LossMean(Enum):
    """What the losses of the tokens of an optimizer step are divided by."""

    token = "token"
    """Their number: every token counts the same (DAPO, arXiv 2503.14476)."""
    sequence = "sequence"
    """The length of their response, and the number of responses: every response counts the same (GRPO)."""
    constant = "constant"
    """`rollout.max_new_tokens`, with `environment=multi_turn` times `environment.max_turns`, and the number of
    responses (Dr. GRPO, arXiv 2503.20783)."""


@dataclass(kw_only=True)
class GRPO:
    """Group-relative policy optimisation (arXiv 2402.03300): several responses to a prompt, and those with the better
    rewards become likelier. One step of the run (`run.steps`) is one generation, which gives
    `train.global_batch_samples` x `algo.steps_per_generation` responses to 1/`algo.num_generations` as many prompts."""

    num_generations: int = 8
    """Responses to a prompt, which are compared with each other."""
    steps_per_generation: int = 1
    """Optimizer steps from one generation. Each takes the next `train.global_batch_samples` responses in the order of
    the prompts, so a group is in one of them where `algo.num_generations` divides that number, and split otherwise."""
    advantage: Advantage = Advantage.grpo
    """grpo | rloo: what a reward is compared with."""
    scale_rewards: ScaleRewards | None = None
    """group | batch | none: what advantages are divided by. null: group, with `algo.advantage=rloo` none."""
    clip_low: float = 0.2
    """Ratios below 1 minus this are cut for tokens that should become less likely."""
    clip_high: float | None = None
    """Ratios above 1 plus this are cut for tokens that should become likelier. null: `algo.clip_low`."""
    clip_dual: float | None = None
    """Largest ratio for tokens that should become less likely (dual clip, arXiv 1912.09729), e.g. 3. null: none."""
    ratio: Ratio = Ratio.token
    """token | sequence: whose probabilities are compared."""
    old_logprobs: OldLogprobs | None = None
    """sampler | trainer: what the student's log-probabilities are compared with, at `rollout.temperature`. null:
    sampler; trainer where the sampler's distribution is cut (`rollout.top_p`, `top_k`, `min_p`), since the cut one
    isn't what the trainer computes."""
    importance_cap: float | None = None
    """With old_logprobs=trainer: each token's loss is multiplied by trainer's / sampler's probability before the
    update, at most this (truncated importance sampling, e.g. 2); by the response's with ratio=sequence. null: it
    isn't."""
    kl_coef: float = 0.0
    """Penalty on the distance to a reference, `teacher=reference` or another teacher. 0 needs no teacher."""
    kl_estimator: KLEstimator = KLEstimator.k3
    """k1 | k2 | k3: of the distance at the sampled tokens."""
    kl_in: KLIn = KLIn.loss
    """loss | reward: where the penalty goes."""
    teacher_kl_coef: float = 0.0
    """On-policy distillation: adds this times (teacher's - student's log-probability before the update) to each token's
    advantage. May be all there is to learn: `reward=none`."""
    loss_mean: LossMean = LossMean.token
    """token | sequence | constant: what the losses of an optimizer step are divided by."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all the same, which teach nothing, by groups of further prompts (DAPO)."""
    max_resamples: int = 3
    """How often further prompts are asked in one step; then such groups fill up what is missing."""
    mask_truncated: bool = False
    """Take responses that the length limit cut out of the loss and its denominators. They still count in their group's
    mean."""
    overlong_buffer: int = 0
    """Soft punishment (DAPO, equation 13): over the last so many tokens before `rollout.max_new_tokens` the reward
    falls by up to 1. 0: none."""

    def __post_init__(self) -> None:
        require_at_least("algo.num_generations", self.num_generations, 1)
        require_at_least("algo.steps_per_generation", self.steps_per_generation, 1)
        require_below("algo.clip_low", self.clip_low, 0, 1)
        require_positive("algo.clip_low", self.clip_low)
        if self.clip_high is not None:
            require_positive("algo.clip_high", self.clip_high)
        if self.clip_dual is not None:
            require(
                self.clip_dual > 1 + self.upper_clip,
                f"algo.clip_dual={self.clip_dual:g} must be above 1 + algo.clip_high = {1 + self.upper_clip:g}",
            )
        if self.importance_cap is not None:
            require_positive("algo.importance_cap", self.importance_cap)
        require_at_least("algo.kl_coef", self.kl_coef, 0)
        require_at_least("algo.teacher_kl_coef", self.teacher_kl_coef, 0)
        if self.kl_coef == 0:
            refuse_unused(self, "algo", ("kl_estimator", "kl_in"), "with algo.kl_coef=0", "use e.g. algo.kl_coef=0.01")
        require(
            self.kl_coef == 0 or self.kl_in is KLIn.reward or self.kl_estimator is not KLEstimator.k1,
            "algo.kl_estimator=k1 has a gradient that is zero on average with algo.kl_in=loss, so nothing would pull "
            "towards the teacher; use algo.kl_in=reward or algo.kl_estimator=k3",
        )
        require(
            self.kl_coef == 0 or self.teacher_kl_coef == 0,
            f"algo.kl_coef={self.kl_coef:g} and algo.teacher_kl_coef={self.teacher_kl_coef:g} both pull towards the "
            "same teacher; keep one",
        )
        require_between("algo.max_resamples", self.max_resamples, 1, 1000)
        if not self.dynamic_sampling:
            why = "with algo.dynamic_sampling=false"
            refuse_unused(self, "algo", ("max_resamples",), why, "use algo.dynamic_sampling=true")
        require_at_least("algo.overlong_buffer", self.overlong_buffer, 0)

    @property
    def upper_clip(self) -> float:
        """What `clip_high` means."""
        return self.clip_low if self.clip_high is None else self.clip_high

    @property
    def scale(self) -> ScaleRewards:
        """What `scale_rewards` means."""
        if self.scale_rewards is not None:
            return self.scale_rewards
        return ScaleRewards.group if self.advantage is Advantage.grpo else ScaleRewards.none

    @property
    def asks_teacher(self) -> bool:
        """Whether anything is learned from a teacher or a reference."""
        return self.kl_coef > 0 or self.teacher_kl_coef > 0


@dataclass(kw_only=True)
class OPSD(GKD):
    """On-policy self-distillation (arXiv 2601.18734): GKD whose teacher reads a privileged prompt (`teacher_prompt`),
    e.g. the task with its solution, before the student's response. Every row must have one. Under `algo=gkd`, rows that
    have one get the same, and the others plain GKD."""
