"""Group `algo`: the objective."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.base import not_yet, require_at_least, require_between


@dataclass(kw_only=True)
class GKD:
    """Generalised knowledge distillation (Agarwal et al., arXiv 2306.13649): the student learns on its own samples
    from the teacher's distribution at every response token."""

    beta: float = 0.5
    """Divergence between teacher and student: 0 = forward KL(T||S), 1 = reverse KL(S||T), between: generalised
    Jensen-Shannon. The scale of the loss changes a lot with beta: compare runs by eval/forward_kl, not by loss."""
    lmbda: float | None = None
    """Probability that a step trains on the student's own samples; else it takes the rows' reference responses, or what
    the teacher writes (`algo.seq_kd`). Drawn from `run.seed` and the step's number alone. 0 starts no engine, and
    `rollout.*` is not used. null: 1, or 0 with `rollout=none`."""
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


@dataclass(kw_only=True)
class GRPO:
    """Group-relative policy optimisation (arXiv 2402.03300). Not available yet."""

    def __post_init__(self) -> None:
        raise not_yet("algo=grpo", "algo=gkd or algo=opsd")


@dataclass(kw_only=True)
class OPSD(GKD):
    """On-policy self-distillation (arXiv 2601.18734): GKD whose teacher reads a privileged prompt (`teacher_prompt`),
    e.g. the task with its solution, before the student's response. Every row must have one. Under `algo=gkd`, rows that
    have one get the same, and the others plain GKD."""
