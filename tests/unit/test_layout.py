"""Who is on which device: worked examples, and the properties that make them right."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import pytest

from rlhf.errors import ClusterError
from rlhf.placements.layout import Layout, by_node, plan_layout
from rlhf.placements.roles import check_one_node


def test_ranks_and_replicas_share_the_devices():
    assert plan_layout(1, 1, 1) == Layout(1, (0,), ((0,),))
    assert plan_layout(2, 2, 1) == Layout(2, (0, 1), ((0,), (1,)))
    assert plan_layout(4, 4, 2) == Layout(4, (0, 1, 2, 3), ((0, 1), (2, 3)))


def test_roles_on_devices_of_their_own_take_the_sum():
    assert plan_layout(1, 1, 1, separate=True) == Layout(2, (0,), ((1,),))
    assert plan_layout(2, 4, 2, separate=True) == Layout(6, (0, 1), ((2, 3), (4, 5)))
    assert plan_layout(2, 2, 1, teacher_gpus=2) == Layout(4, (0, 1), ((0,), (1,)), ((2,), (3,)))
    assert plan_layout(2, 1, 1, separate=True, teacher_gpus=4, teacher_tensor_parallel=2) == (
        Layout(7, (0, 1), ((2,),), ((3, 4), (5, 6)))
    )


def straddling(nodes: str, order: tuple[int, ...], groups: Collection[Sequence[int]]) -> int:
    """Groups whose devices lie on more than one node."""
    return sum(len({nodes[order[device]] for device in group}) > 1 for group in groups)


def pairs(devices: int) -> list[tuple[int, ...]]:
    return [(first, first + 1) for first in range(0, devices, 2)]


@pytest.mark.parametrize(
    ("nodes", "groups", "order"),
    [
        ("A", [(0,)], (0,)),
        ("AA", [(0, 1)], (0, 1)),
        ("ABAB", [], (0, 2, 1, 3)),
        ("ABAB", pairs(4), (0, 2, 1, 3)),
        ("ABABAB", pairs(6), (0, 2, 1, 3, 4, 5)),
        ("ABBBBCCC", [*pairs(8), (0, 1, 2, 3), (4, 5, 6, 7)], (1, 2, 3, 4, 5, 6, 0, 7)),
    ],
)
def test_devices_are_numbered_by_node(nodes: str, groups: list[tuple[int, ...]], order: tuple[int, ...]):
    assert by_node(nodes, groups) == order


def test_a_replica_behind_a_trainer_of_another_size_lies_on_one_node():
    """`train.gpus=1 rollout.gpus=2 rollout.tensor_parallel=2` on nodes with two devices and one."""
    layout = plan_layout(1, 2, 2, separate=True)
    order = by_node("AAB", layout.groups)
    assert layout.groups == ((1, 2), (0,)) and order == (2, 0, 1)
    layout = plan_layout(2, 2, 2, train_tensor_parallel=2, separate=True)
    assert by_node("ABAC", layout.groups)[2:] == (0, 2), "the trainer's ranks are the ones that can straddle"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("other", [1, 2, 4])
def test_no_group_straddles_nodes_that_need_not(size: int, other: int):
    most = max(size, other)
    for counts in itertools.product(range(5), repeat=3):
        if sum(counts) == 0 or sum(counts) % most:
            continue
        turns = itertools.zip_longest(*(name * count for name, count in zip("ABC", counts, strict=True)), fillvalue="")
        nodes = "".join(itertools.chain(*turns))
        layout = plan_layout(len(nodes), len(nodes), other, train_tensor_parallel=size)
        order = by_node(nodes, layout.groups)
        assert sorted(order) == list(range(len(nodes)))
        largest = {group for group in layout.groups if len(group) == most}
        needed = sum(counts) // most - sum(count // most for count in counts)
        assert straddling(nodes, order, largest) == needed


def test_a_replica_that_straddles_nodes_is_refused():
    check_one_node("rollout.tensor_parallel", [(0, 1), (2,)], "AAB")
    with pytest.raises(
        ClusterError, match=r"^teacher\.tensor_parallel=2 needs .* nodes have 1, 2; lower teacher\.tens"
    ):
        check_one_node("teacher.tensor_parallel", [(0, 1), (2,)], "ABB")
