"""What an unknown key may have been meant to be."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlhf.config.names import OURS, ours
from rlhf.config.registry import GROUPS, target_of


def unknown_key(key: str, config: DictConfig) -> str:
    """The line for `key` that no spec of `config` has: the nearest full key, or the option that has it, or all keys."""
    parent, _, name = key.rpartition(".")
    section = OmegaConf.select(config, parent, throw_on_missing=False) if parent else config
    siblings = sorted(set(_names(section)) - {name})
    keys = [other for other in _all_keys(config, hydra=key.startswith("hydra.")) if other != key]
    message = f"unknown key {key}"
    same_name = [other for other in keys if other.rpartition(".")[2] == name]
    here = ours(key)
    if others := _options_with(parent, name):
        option = _option_of(parent, section)
        instead = f"; with {parent}={option} it is {here}" if here in keys else ""
        return f"{message} with {parent}={option}; {' or '.join(others)} has it{instead}"
    if same_name and (key not in OURS or here not in keys):
        return f"{message}; did you mean {' or '.join(same_name)}?"
    if here is not None and here != key:
        having = [] if here in keys else _options_with(here.partition(".")[0], here.rpartition(".")[2])
        return f"{message}; here it is {here}" + (f" ({' or '.join(having)})" if having else "")
    if close := difflib.get_close_matches(name.lower(), siblings, n=1):
        return f"{message}; did you mean {parent + '.' if parent else ''}{close[0]}?"
    if not parent and (close := _close_names(name, keys)):
        return f"{message}; did you mean {close[0]}?"
    where = parent or "the configuration"
    return f"{message}; {where} has {', '.join(siblings) if siblings else 'no keys'}"


def _names(section: Any) -> list[str]:
    names = [str(name) for name in section] if OmegaConf.is_dict(section) else []
    return [name for name in names if name not in ("_target_", "hydra")]


def _all_keys(config: DictConfig, hydra: bool) -> list[str]:
    """Full keys of sections and values, the outermost first."""
    content = OmegaConf.to_container(config, resolve=False, throw_on_missing=False)
    assert isinstance(content, dict)
    found: list[str] = []
    level: list[tuple[str, Any]] = [(str(key), value) for key, value in content.items() if hydra or key != "hydra"]
    while level:
        found += [key for key, _ in level]
        level = [(f"{key}.{name}", v) for key, value in level if isinstance(value, dict) for name, v in value.items()]
    return [key for key in found if not key.endswith("_target_")]


def _close_names(name: str, keys: list[str]) -> list[str]:
    by_name = {key.rpartition(".")[2]: key for key in reversed(keys)}
    return [by_name[match] for match in difflib.get_close_matches(name, by_name, n=1)]


def _option_of(group: str, section: Any) -> str:
    """Name of the chosen option."""
    target = str(section.get("_target_")) if OmegaConf.is_dict(section) else ""
    names = [option for option, spec in GROUPS[group].items() if target == target_of(spec)]
    return names[0] if names else "..."


def _options_with(group: str, name: str) -> list[str]:
    """The options of a group that do have the key."""
    options = GROUPS.get(group, {})
    return [f"{group}={o}" for o, spec in options.items() if name in {f.name for f in dataclasses.fields(spec)}]
