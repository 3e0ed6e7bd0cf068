"""Group `cluster`: the machines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from rlhf.config.base import refuse_unused, require, require_at_least, require_seconds, require_text


class Device(Enum):
    """Kind of device one trainer or engine process owns."""

    cpu = "cpu"
    """One process; placed through the custom Ray resource `slot`."""
    cuda = "cuda"
    """One NVIDIA GPU, as the Ray resource `GPU`; roles that share it take turns."""


@dataclass(kw_only=True)
class Cluster:
    """Where Ray runs."""

    device: Device = Device.cpu
    """cpu | cuda."""
    address: str | None = None
    """HOST:PORT of a running Ray cluster, or `auto` on one of its nodes; null starts one on this machine."""
    threads: int | None = None
    """CPU threads of each process; null: the machine's, shared by the devices on it."""
    object_store_gb: float = 2.0
    """Shared memory of a Ray started here, in GiB; weights pass through it."""
    start_timeout_s: float = 300.0
    """How long to wait for devices and for the processes to come up, in seconds."""

    def __post_init__(self) -> None:
        if self.threads is not None:
            require_at_least("cluster.threads", self.threads, 1)
        require_at_least("cluster.object_store_gb", self.object_store_gb, 0.1)
        require_seconds("cluster.start_timeout_s", self.start_timeout_s)
        if self.address is not None:
            require_text("cluster.address", self.address, "auto")
            require(
                self.address == "auto" or re.fullmatch(r"[^\s/:]+:\d{1,5}", self.address) is not None,
                f"cluster.address={self.address} must be HOST:PORT, or auto on a node of the cluster",
            )
            refuse_unused(
                self,
                "cluster",
                ("object_store_gb",),
                f"with cluster.address={self.address} (a Ray that runs already)",
                "set the size where that Ray is started",
            )
