"""What keys are where nobody sets them, by the class that a section becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rlhf.config.registry import GROUPS, SECTIONS, target_of


def defaults_of(target: str) -> dict[str, Any]:
    """Key inside the section -> its dataclass default, for every key that has one; those of sections inside it, too.

    Args:
        target: the section's `_target_`; of a class that isn't ours there are none.

    Example: of `rlhf.config.model.Model` `{"drop_layers": [], "lora.rank": 0, ...}`.
    """
    specs = [*SECTIONS.values(), *(spec for options in GROUPS.values() for spec in options.values())]
    return next((dict(_flat(spec)) for spec in specs if target_of(spec) == target), {})


def _flat(spec: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(spec):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(default):
            yield from _flat(type(default), f"{prefix}{field.name}.")
        elif default is not dataclasses.MISSING:
            yield f"{prefix}{field.name}", default
