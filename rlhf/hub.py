"""Names on the hubs of models and data: `hf://owner/name` (Hugging Face), `ms://owner/name` (ModelScope)."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import NamedTuple

from rlhf.errors import ConfigError

TITLES = {"hf": "the Hugging Face hub", "ms": "ModelScope"}
LOGGERS = ("huggingface_hub", "datasets", "modelscope")


class HubId(NamedTuple):
    """`hf://openai/gsm8k` is `HubId("hf", "openai/gsm8k")`."""

    scheme: str
    name: str


def hub_id(text: str, key: str) -> HubId | None:
    """The hub id that `text` spells with its scheme; None if it has none (a path, or a bare `owner/name`).

    Raises:
        ConfigError: what follows the scheme isn't `owner/name`.
    """
    scheme, separator, name = text.partition("://")
    if not separator or scheme not in TITLES:
        return None
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is None:
        raise ConfigError(f"{key}={text} is no id of {TITLES[scheme]}; write {key}={scheme}://OWNER/NAME")
    return HubId(scheme, name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the hubs' clients from reporting every retry: what went wrong is raised in the end."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
