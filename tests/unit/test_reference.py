"""docs/configuration.md says what the program does."""

from __future__ import annotations

import dataclasses

import pytest

from rlhf.config.reference import enums_of, field_docs, render, unavailable
from rlhf.config.registry import GROUPS, PROJECT_ROOT, SECTIONS
from rlhf.config.run import Run

SPECS = list(dict.fromkeys([*SECTIONS.values(), *(s for options in GROUPS.values() for s in options.values()), Run]))


def test_the_page_is_up_to_date() -> None:
    page = (PROJECT_ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == render(), "run: python -m rlhf.config.reference > docs/configuration.md"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.__name__)
def test_every_key_and_every_choice_is_described(spec: type) -> None:
    assert spec.__doc__ and not spec.__doc__.startswith(f"{spec.__name__}(")
    assert {field.name for field in dataclasses.fields(spec)} <= set(field_docs(spec))
    for kind in enums_of(spec).values():
        assert set(field_docs(kind)) == set(kind.__members__)


def test_choices_are_written_as_they_are_named() -> None:
    """OmegaConf takes the names of an enum's members; the code writes their values."""
    for spec in SPECS:
        for kind in enums_of(spec).values():
            assert [member.name for member in kind] == [member.value for member in kind]


def test_the_page_says_what_is_not_available_yet() -> None:
    page = render()
    assert ("Struck out" in page) == ("~~" in page)
    for group, options in GROUPS.items():
        for option, spec in options.items():
            section = page.split(f"### {group}={option}")[1].split("\n#")[0]
            assert ("**Not available yet.**" in section) == bool(unavailable(spec)), f"{group}={option}"
