"""Composed configuration -> `Run`."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from rlhf.config.checks import refuse_left_by_lmbda
from rlhf.config.registry import GROUPS, PROJECT_ROOT, SECTIONS, register, target_of
from rlhf.config.run import Run
from rlhf.config.suggest import unknown_key
from rlhf.errors import ConfigError
from rlhf.plugins import load_plugins

HINTS = {
    "model.path": "model.path=FOLDER (the student's Hugging Face checkpoint)",
    "data.path": "data.path=rows.jsonl",
    "data.name": "data.name=openai/gsm8k",
    "data.function": "data.function=rows.py:easy (a function that yields rows, or a name that a plugin registers)",
    "environment.name": "environment.name=FILE.py:CLASS (with reset and step, or a name that a plugin registers)",
    "teacher.model": "teacher.model=FOLDER (a Hugging Face checkpoint with the student's tokenizer)",
}


def to_run(config: DictConfig, sweep: bool = False) -> Run:
    """Check a composed configuration and make the dataclasses out of it.

    Args:
        sweep: it is a job of a sweep, of whose keys others may make use.

    Raises:
        ConfigError: (possibly inside Hydra's InstantiationException) for keys that no spec has, missing values, values
            out of range and combinations that aren't legal.
    """
    names = [field.name for field in dataclasses.fields(Run)]
    for key in map(str, config):
        if key not in names:
            raise ConfigError(unknown_key(key, config))
    load_plugins(plugins_of(config))
    missing = sorted(OmegaConf.missing_keys(config))
    incomplete = {key.partition(".")[0] for key in missing}
    if "model.path" in missing:
        incomplete.add("teacher")  # whose default depends on it
    sections = {name: _section(name, config) for name in names if name not in incomplete}
    if missing:
        hints = ", ".join(HINTS.get(key, f"{key}=...") for key in missing)
        raise ConfigError(f"missing value{'s' if len(missing) > 1 else ''}: write {hints}")
    run = Run(**sections)
    if not sweep and run.resume == "never":  # a job of a sweep may be continued alone
        refuse_left_by_lmbda(run)
    return run


def sections_of(overrides: list[str], names: tuple[str, ...], values: dict[str, Any]) -> dict[str, Any]:
    """Some sections of the configuration that `rlhf.launch` would compose, without the checks across them.

    Args:
        overrides: As on the command line.
        names: Groups and sections.
        values: More keys, whose values are taken as they are.

    Raises:
        What `rlhf.config.messages.explain` says in one line.
    """
    register()
    with initialize_config_dir(str(PROJECT_ROOT / "conf"), version_base="1.3"):
        config = compose("config", overrides)
    for key, value in values.items():
        OmegaConf.update(config, key, value)
    load_plugins(plugins_of(config))
    missing = sorted(key for key in OmegaConf.missing_keys(config) if key.partition(".")[0] in names)
    if missing:
        raise ConfigError(f"missing value: write {HINTS.get(missing[0], f'{missing[0]}=...')}")
    return {name: _section(name, config) for name in names}


def plugins_of(config: DictConfig) -> list[str]:
    """Key `plugins`, which is neither a group nor a section."""
    value = config.get("plugins")
    entries = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_list(value) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) and entry.strip() for entry in entries):
        raise ConfigError(f"plugins={entries} must be a list of files and modules; write plugins=[mine.py]")
    for entry in entries:
        if entries.count(entry) > 1:
            raise ConfigError(f"plugins={entries} names {entry} twice; keep one")
    return entries


def _section(name: str, config: DictConfig) -> Any:
    """One section as its dataclass. `+KEY`, `~KEY` and `SECTION=VALUE` get past Hydra's own checks; not past this."""
    section = config.get(name)
    if name == "plugins":
        return plugins_of(config)
    if name not in GROUPS and name not in SECTIONS:
        return section
    specs = {target_of(spec): spec for spec in (GROUPS.get(name) or {name: SECTIONS[name]}).values()}
    spec = specs.get(str(section.get("_target_"))) if isinstance(section, DictConfig) else None
    if spec is None:
        if name in GROUPS:
            options = ", ".join(f"{name}={option}" for option in GROUPS[name])
            raise ConfigError(f"{name} must be an option of its group; choose one of {options}")
        raise ConfigError(f"{name} must be a section; set its keys one by one, {name}.KEY=VALUE")
    _refuse_unknown_keys(name, section, spec, config)
    return instantiate(section, _convert_="object")


def _refuse_unknown_keys(name: str, section: DictConfig, spec: type, config: DictConfig) -> None:
    """Also those of a section inside this one."""
    types = typing.get_type_hints(spec)
    for key in map(str, section):
        if key != "_target_" and key not in types:
            raise ConfigError(unknown_key(f"{name}.{key}", config))
        if dataclasses.is_dataclass(types.get(key)):
            _refuse_unknown_keys(f"{name}.{key}", section[key], types[key], config)
