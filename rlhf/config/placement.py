"""Group `placement`: which roles share devices."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.base import not_yet, require


@dataclass(kw_only=True)
class Colocate:
    """Trainer and engine share one set of devices and take turns."""

    max_staleness: int = 0
    """Steps that rollouts may run ahead of training. Roles that share devices can't overlap: 0."""

    def __post_init__(self) -> None:
        require(
            self.max_staleness == 0,
            f"placement.max_staleness={self.max_staleness} needs roles on devices of their own; "
            "placement=colocate allows 0",
        )


@dataclass(kw_only=True)
class Separate:
    """Trainer and engine on disjoint devices; weights are pushed over a collective. Not available yet."""

    def __post_init__(self) -> None:
        raise not_yet("placement=separate", "placement=colocate")
