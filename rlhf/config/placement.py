"""Group `placement`: which roles share devices."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.base import require, require_between


@dataclass(kw_only=True)
class Colocate:
    """Trainer and engine share one set of devices and take turns."""

    max_staleness: int = 0
    """Steps that rollouts may run ahead of training. Roles that share devices can't overlap: 0."""

    def __post_init__(self) -> None:
        require(
            self.max_staleness == 0,
            f"placement.max_staleness={self.max_staleness} needs roles on devices of their own; "
            "placement=colocate allows 0; use placement=separate",
        )


@dataclass(kw_only=True)
class Separate:
    """Trainer and engine on devices of their own; weights are pushed from one to the other over a collective."""

    max_staleness: int = 0
    """Steps that rollouts may run ahead of training. 0: each step generates with the weights it trains, as under
    placement=colocate. 1: the next responses are generated while this step trains, with the weights before it."""

    def __post_init__(self) -> None:
        require_between("placement.max_staleness", self.max_staleness, 0, 1)
