"""RoPE in `config.json`: fields at the top level and in `rope_scaling` (transformers 4) or `rope_parameters`
(transformers 5), read as one. What isn't implemented, and two fields that contradict each other, are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf.backends.megatron.fields import Fields, shown
from rlhf.errors import ModelError

TOP_LEVEL = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
OBJECTS = ("rope_scaling", "rope_parameters")
EVERY_TYPE = {"rope_type", "rope_theta", "partial_rotary_factor"}
STRETCH = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
KNOWN = {"default": EVERY_TYPE, "llama3": EVERY_TYPE | STRETCH}
"""The fields of each implemented type."""
DEFAULT_THETA = 10_000.0
"""Of transformers, where a file names none."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretched RoPE (arXiv 2407.21783, section 3.4.2; the numbers are in the checkpoint's config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the whole head."""

    theta: float
    scaling: Llama3Scaling | None


def read_rope(config: Fields) -> Rope:
    """The rotary embedding of a checkpoint.

    Raises:
        ModelError: a type or a field that isn't implemented, a missing or impossible number, or a contradiction.
    """
    values, origin = _merged(config)
    kind = values.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in KNOWN:
        raise ModelError(
            f"{config.where}: config.json has {origin['rope_type']}={shown(kind)}, implemented: "
            f"{', '.join(map(shown, KNOWN))}"
        )
    # The length of the original context says nothing of an embedding that isn't stretched.
    ignored = {"original_max_position_embeddings"} if kind == "default" else set()
    for name in values.keys() - KNOWN[kind] - ignored:
        raise ModelError(
            f"{config.where}: config.json has {origin[name]}={shown(values[name])}, which isn't implemented for "
            f"rope_type={kind}"
        )
    rope = Fields({origin.get(name, name): value for name, value in values.items()}, config.where)
    if values.get("partial_rotary_factor", 1) != 1:
        raise rope.wrong(origin["partial_rotary_factor"], "1, the only value implemented")
    theta = rope.positive(origin.get("rope_theta", "rope_theta"), DEFAULT_THETA)
    return Rope(theta, _llama3(rope, origin) if kind == "llama3" else None)


def _merged(config: Fields) -> tuple[dict[str, Any], dict[str, str]]:
    """The value of each RoPE field, and where in the file it stands, e.g. `rope_scaling.factor`."""
    found = [(name, name, config.values[name]) for name in TOP_LEVEL if name in config.values]
    for table in OBJECTS:
        for name, value in config.table(table).items():
            found.append(("rope_type" if name == "type" else name, f"{table}.{name}", value))
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, place, value in found:
        if value is None:
            continue
        if name in values and values[name] != value:
            raise ModelError(
                f"{config.where}: config.json contradicts itself: {origin[name]}={shown(values[name])}, but "
                f"{place}={shown(value)}; remove one of them"
            )
        values[name], origin[name] = value, place
    return values, origin


def _llama3(rope: Fields, origin: dict[str, str]) -> Llama3Scaling:
    table = origin["rope_type"].partition(".")[0]

    def name(field: str) -> str:
        return origin.get(field, f"{table}.{field}")

    low, high = rope.positive(name("low_freq_factor")), rope.positive(name("high_freq_factor"))
    if high <= low:
        raise rope.wrong(name("high_freq_factor"), f"more than {name('low_freq_factor')}={low:g}")
    factor = rope.positive(name("factor"))
    if factor < 1:
        raise rope.wrong(name("factor"), "at least 1")
    return Llama3Scaling(factor, low, high, rope.count(name("original_max_position_embeddings")))
