"""Runs a function in several processes that form a gloo group, and brings back what each of them returned."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def _rank(rank: int, function: Callable[..., Any], world_size: int, folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(function(rank, world_size, store, *args)))


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`function(rank, world_size, store, *args)` in each of `world_size` new processes -> what they returned."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (function, world_size, Path(folder), args), nprocs=world_size)
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(world_size)]
