"""Whether Ray outlives a run: in a sweep it does, since a second start in one process takes seconds and may fail.

Without Ray itself, so that the launcher can say so before it knows whether any job will need one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rlhf.config.cluster import Cluster, Device


@dataclass(frozen=True)
class Kept:
    """What a Ray that outlives its run was started, or attached to, for."""

    spec: Cluster
    devices: int
    """Of the custom resource, on CPU."""

    def fits(self, spec: Cluster, devices: int) -> bool:
        """Whether another run can use it as it is."""
        same = (self.spec.address, self.spec.device) == (spec.address, spec.device)
        if spec.address is not None:
            return same
        room = devices <= self.devices or spec.device is Device.cuda
        return same and self.spec.object_store_gb == spec.object_store_gb and room


@dataclass
class Keeper:
    """Of this process."""

    keeping: bool = False
    kept: Kept | None = None


KEEPER = Keeper()


def keep_ray() -> None:
    """From now on a Ray that a run starts, or attaches to, stays for the next one."""
    KEEPER.keeping = True


def end_kept_ray() -> None:
    """End the one that was started, detach from one that wasn't, and keep none any more. Safe to call again."""
    KEEPER.keeping = False
    if KEEPER.kept is not None:
        sys.modules["rlhf.backends.cluster"].end_ray()
        KEEPER.kept = None
