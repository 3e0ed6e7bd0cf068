"""Group `algo`: the objective."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.base import not_yet, require_between


@dataclass(kw_only=True)
class GKD:
    """Generalised knowledge distillation (Agarwal et al., arXiv 2306.13649): the student learns on its own samples
    from the teacher's distribution at every response token."""

    beta: float = 0.5
    """Divergence between teacher and student: 0 = forward KL(T||S), 1 = reverse KL(S||T), between: generalised
    Jensen-Shannon. The scale of the loss changes a lot with beta: compare runs by eval/forward_kl, not by loss."""
    lmbda: float = 1.0
    """Share of batches the student samples itself; the rest are dataset responses. Only 1 works today."""

    def __post_init__(self) -> None:
        require_between("algo.beta", self.beta, 0.0, 1.0)
        require_between("algo.lmbda", self.lmbda, 0.0, 1.0)
        if self.lmbda != 1.0:
            raise not_yet(f"algo.lmbda={self.lmbda:g} (dataset responses)", "algo.lmbda=1")


@dataclass(kw_only=True)
class GRPO:
    """Group-relative policy optimisation (arXiv 2402.03300). Not available yet."""

    def __post_init__(self) -> None:
        raise not_yet("algo=grpo", "algo=gkd")


@dataclass(kw_only=True)
class OPSD:
    """On-policy self-distillation (arXiv 2601.18734): the teacher sees a privileged prompt. Not available yet."""

    def __post_init__(self) -> None:
        raise not_yet("algo=opsd", "algo=gkd")
