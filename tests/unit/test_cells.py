"""Which combinations of groups the configuration allows, and what it says of the others."""

from __future__ import annotations

from tests.cells import every_cell, legal_cells, pairwise, reason_of, refusal


def test_the_rules_allow_the_legal_cells_and_name_what_is_wrong_with_the_others() -> None:
    """The rules of the configuration make the list; this literal one is what it should be."""
    refused = {cell: refusal(cell) for cell in every_cell()}
    assert [cell for cell, reason in refused.items() if reason is None] == sorted(legal_cells(), key=every_cell().index)
    for cell, reason in refused.items():
        if reason is not None:
            assert reason.startswith(reason_of(cell)), cell


def test_a_few_cells_hold_every_pair() -> None:
    cells = legal_cells()
    chosen = pairwise(cells)
    assert len(chosen) < len(cells) / 3
    for one in cells:
        for i in range(6):
            for j in range(i):
                assert any((one[i], one[j]) == (other[i], other[j]) for other in chosen)
