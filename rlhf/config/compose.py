"""Composed configuration -> `Run`."""

from __future__ import annotations

from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from rlhf.config.run import Run
from rlhf.errors import ConfigError

HINTS = {
    "model.path": "model.path=FOLDER, the student's Hugging Face checkpoint",
    "data.path": "data.path=rows.jsonl",
    "data.name": "data.name=openai/gsm8k",
}


def to_run(config: DictConfig) -> Run:
    """Check a composed configuration and make the dataclasses out of it.

    Raises:
        ConfigError: (possibly inside Hydra's InstantiationException) for missing values, values out of range and
            combinations that aren't legal.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        hints = ", ".join(HINTS.get(key, f"{key}=...") for key in missing)
        raise ConfigError(f"missing value{'s' if len(missing) > 1 else ''}: write {hints}")
    sections: dict[str, Any] = {}
    for key in map(str, config):
        value = config[key]
        sections[key] = instantiate(value, _convert_="object") if isinstance(value, DictConfig) else value
    return Run(**sections)
