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
    `((0, 1), (2, 3))`; with `placement=separate`: replicas `((4, 5), (6, 7))`.
    """

    devices: int
    trainer: tuple[int, ...]
    """The device of each rank."""
    replicas: tuple[tuple[int, ...], ...]
    """The devices of each engine replica."""
    teacher: tuple[tuple[int, ...], ...] = ()
    """The devices of each replica of a standalone teacher."""


def plan_layout(
    train_gpus: int,
    rollout_gpus: int,
    rollout_tensor_parallel: int,
    *,
    separate: bool = False,
    teacher_gpus: int = 0,
    teacher_tensor_parallel: int = 1,
) -> Layout:
    """Trainer and engine on the same devices, or the engine on the next ones; behind them a standalone teacher."""
    assert separate or train_gpus == rollout_gpus, "checked while composing"
    engine = range(train_gpus, train_gpus + rollout_gpus) if separate else range(train_gpus)
    teacher = range(engine.stop, engine.stop + teacher_gpus)
    return Layout(
        devices=teacher.stop,
        trainer=tuple(range(train_gpus)),
        replicas=_groups(engine, rollout_tensor_parallel),
        teacher=_groups(teacher, teacher_tensor_parallel),
    )


def _groups(devices: range, size: int) -> tuple[tuple[int, ...], ...]:
    """Neighbours, so many a replica."""
    assert len(devices) % size == 0, "checked while composing"
    return tuple(tuple(devices[start : start + size]) for start in range(0, len(devices), size))


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
