"""Which device each trainer rank and each engine replica is on. Pure: counts and node names in, numbers out.

Devices are numbered so that neighbours share a node wherever they can (`by_node`); ranks and replicas then take
neighbours. In the trainer, tensor parallelism is the innermost axis: ranks 0 and 1 share a model under
`train.tensor_parallel=2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Who is where.

    Example: `train.gpus=4 rollout.gpus=4 rollout.tensor_parallel=2` on shared devices: trainer `(0, 1, 2, 3)`, replicas
    `((0, 1), (2, 3))`.
    """

    devices: int
    trainer: tuple[int, ...]
    """The device of each rank."""
    replicas: tuple[tuple[int, ...], ...]
    """The devices of each engine replica."""


def plan_layout(train_gpus: int, rollout_gpus: int, rollout_tensor_parallel: int) -> Layout:
    """placement=colocate: trainer and engine on the same devices."""
    assert train_gpus == rollout_gpus and rollout_gpus % rollout_tensor_parallel == 0, "checked while composing"
    devices = tuple(range(train_gpus))
    starts = range(0, rollout_gpus, rollout_tensor_parallel)
    return Layout(
        devices=train_gpus,
        trainer=devices,
        replicas=tuple(devices[start : start + rollout_tensor_parallel] for start in starts),
    )


def by_node(nodes: Sequence[str], groups: Sequence[int]) -> tuple[int, ...]:
    """Number the devices: device i is bundle `by_node(...)[i]`.

    As many groups of neighbours as possible lie on one node, the largest first: a group straddles nodes only when what
    is left of each node is too small for it.

    Args:
        nodes: the node of each bundle.
        groups: sizes that matter, e.g. both roles' tensor_parallel; each of them divides the next larger one.

    Example: bundles on nodes `A B A B A B` and groups of 2: `(0, 2, 1, 3, 4, 5)`, only the last pair straddles.
    """
    left = {node: [bundle for bundle, where in enumerate(nodes) if where == node] for node in dict.fromkeys(nodes)}
    order: list[int] = []
    for size in sorted({*groups, 1}, reverse=True):
        for bundles in left.values():
            whole = len(bundles) // size * size
            order += bundles[:whole]
            del bundles[:whole]
    return tuple(order)
