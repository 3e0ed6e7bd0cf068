"""Checks of the command line itself: what Hydra would take without a word."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf

from rlhf.config.base import require
from rlhf.config.names import OTHER_VALUES, ours
from rlhf.config.run import RunSection
from rlhf.errors import ConfigError


def check_arguments(arguments: list[str]) -> None:
    """Refuse options Hydra doesn't have, keys that are given two values, of which one would be ignored, those of a
    sweep without one, and parts of recipes instead of recipes.

    Raises:
        ConfigError: in one line.
    """

    def refuse(message: str) -> NoReturn:
        here = "".join(f"; {line}" for line in _written_with_dashes(arguments))
        raise ConfigError(
            f"{message}{here} (see --help; options such as -m come first, and keys have no dashes: KEY=VALUE)"
        )

    parser = get_args_parser()
    parser.error = refuse
    values: dict[str, str] = {}
    given = parser.parse_args(arguments)
    sweep = given.multirun or any(override.lstrip("+") == "hydra.mode=MULTIRUN" for override in given.overrides)
    for override in given.overrides:
        key, _, value = override.partition("=")
        key = key.lstrip("+~")
        if key == "recipes" and (part := re.search(r"\bparts/\w*", value)):
            raise ConfigError(
                f"+recipes={value}: {part[0]} is what recipes are made of, not a recipe; use e.g. "
                "+recipes=cpu/gkd_colocate_qwen3"
            )
        if values.setdefault(key, value) != value:
            raise ConfigError(f"{key} is given twice, {key}={values[key]} and {key}={value}; keep one")
        if key.startswith(("hydra.sweep.", "hydra.sweeper.")) and not sweep:
            raise ConfigError(f"{key}={value} is for a sweep, and has no effect without -m; add -m, or leave it out")


def _written_with_dashes(arguments: list[str]) -> list[str]:
    """What other trainers' options (`--learning_rate 1e-5`) are here."""
    lines = []
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        option, _, value = argument.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        here = ours(name)
        if not option.startswith("--") or here is None:
            continue
        if name == "beta" and "algo=grpo" not in arguments:
            here = "algo.beta"
        if not value and not following.startswith("-") and "=" not in following:
            value = following
        lines.append(f"{option}: here it is {here}{f'={value}' if value and name not in OTHER_VALUES else ''}")
    return lines


def check_folders(config: DictConfig, hydra_run_dir: str, sweep: bool) -> None:
    """Refuse folders that would not be used.

    Raises:
        ConfigError: in one line.
    """
    require(hydra_run_dir == ".", f"hydra.run.dir={hydra_run_dir} has no effect; use run.dir={hydra_run_dir}")
    if sweep and OmegaConf.is_dict(config.get("run")):
        folder = _as_written(config.get("run")).get("dir")
        require(
            folder == RunSection.dir,
            f"run.dir={folder} has no effect in a sweep, whose jobs have folders of their own; "
            f"use hydra.sweep.dir={folder}",
        )


def check_resume(config: DictConfig, hydra_sweep: Any, sweep: bool) -> None:
    """Refuse resume=auto where the folder is another one each time: it would never find anything.

    Args:
        hydra_sweep: section `hydra.sweep`.

    Raises:
        ConfigError: in one line.
    """
    if config.get("resume") != "auto":
        return
    if sweep:
        require(
            "${now:" not in str(_as_written(hydra_sweep).get("dir")),
            "resume=auto looks for checkpoints in the jobs' folders, and those have the time in their names; write "
            "hydra.sweep.dir=multirun/NAME",
        )
        return
    section = _as_written(config.get("run"))
    folder = str(section.get("dir")).replace("${run.name}", str(section.get("name")))
    require(
        "${now:" not in folder,
        "resume=auto looks for checkpoints in the run's folder, and that has the time in its name; write run.name=NAME",
    )


def _as_written(section: Any) -> dict[Any, Any]:
    """The values of a section before anything is put into them; empty if it is no section."""
    values = OmegaConf.to_container(section, resolve=False) if OmegaConf.is_dict(section) else {}
    assert isinstance(values, dict)
    return values
