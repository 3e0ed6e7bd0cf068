"""Who is on which device: worked examples, and the properties that make them right."""

from __future__ import annotations

import itertools

import pytest

from rlhf.placements.layout import Layout, by_node, plan_layout


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


def straddling(nodes: str, order: tuple[int, ...], size: int) -> int:
    """Groups of neighbours that lie on more than one node."""
    where = [nodes[bundle] for bundle in order]
    return sum(len(set(where[start : start + size])) > 1 for start in range(0, len(where), size))


@pytest.mark.parametrize(
    ("nodes", "groups", "order"),
    [
        ("A", (1, 1), (0,)),
        ("AA", (2, 1), (0, 1)),
        ("ABAB", (1, 1), (0, 2, 1, 3)),
        ("ABAB", (2, 1), (0, 2, 1, 3)),
        ("ABABAB", (2, 1), (0, 2, 1, 3, 4, 5)),
        ("ABBBBCCC", (4, 2), (1, 2, 3, 4, 5, 6, 0, 7)),
    ],
)
def test_devices_are_numbered_by_node(nodes: str, groups: tuple[int, ...], order: tuple[int, ...]):
    assert by_node(nodes, groups) == order


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("other", [1, 2, 4])
def test_no_group_straddles_nodes_that_need_not(size: int, other: int):
    for counts in itertools.product(range(5), repeat=3):
        if sum(counts) == 0 or sum(counts) % max(size, other):
            continue
        turns = itertools.zip_longest(*(name * count for name, count in zip("ABC", counts, strict=True)), fillvalue="")
        nodes = "".join(itertools.chain(*turns))
        order = by_node(nodes, (size, other))
        assert sorted(order) == list(range(len(nodes)))
        if size >= other:
            assert straddling(nodes, order, size) == sum(counts) // size - sum(count // size for count in counts)
