"""Which device each trainer rank and each engine replica is on. Pure: counts and node names in, numbers out.

Ranks and replicas take neighbouring devices, and those that share a model share a node wherever they can (`by_node`).
In the trainer, tensor parallelism is the innermost axis: ranks 0 and 1 share a model under `train.tensor_parallel=2`.
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
    train_tensor_parallel: int = 1
    """Ranks of the trainer that share a copy of the model."""

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Devices that share a model; those of replicas, which can't straddle nodes, first."""
        return *self.replicas, *self.teacher, *_groups(self.trainer, self.train_tensor_parallel)


def plan_layout(
    train_gpus: int,
    rollout_gpus: int,
    rollout_tensor_parallel: int,
    *,
    train_tensor_parallel: int = 1,
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
        train_tensor_parallel=train_tensor_parallel,
    )


def _groups(devices: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Neighbours, so many a group."""
    assert len(devices) % size == 0, "checked while composing"
    return tuple(tuple(devices[start : start + size]) for start in range(0, len(devices), size))


def by_node(nodes: Sequence[str], groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Which bundle is which device: device i is bundle `by_node(...)[i]`.

    The largest groups choose first, each the first node with enough bundles left. A group that finds none straddles
    nodes, but the smaller ones within it may still each lie on one.

    Args:
        nodes: the node of each bundle.
        groups: devices that should share a node; of equally large ones the first choose first.

    Example: bundles on nodes `A B A B A B`, groups `(0, 1) (2, 3) (4, 5)`: `(0, 2, 1, 3, 4, 5)`; only the last group
    straddles.
    """
    left = {node: [bundle for bundle, where in enumerate(nodes) if where == node] for node in dict.fromkeys(nodes)}
    bundle_of: dict[int, int] = {}
    alone = [(device,) for device in range(len(nodes))]
    for group in sorted([*groups, *alone], key=len, reverse=True):
        devices = [device for device in group if device not in bundle_of]
        bundles = next((bundles for bundles in left.values() if len(bundles) >= len(devices)), None)
        if bundles is not None:
            bundle_of.update(zip(devices, bundles, strict=False))
            del bundles[: len(devices)]
    return tuple(bundle_of[device] for device in range(len(nodes)))
