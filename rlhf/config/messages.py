"""Hydra's and OmegaConf's errors, said in one line with the key and the remedy."""

from __future__ import annotations

import difflib
import re

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from rlhf.errors import RlhfError, one_line


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what caused it, outermost first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _closest(word: str, known: list[str]) -> str:
    matches = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def _unknown_key(error: OmegaConfBaseException) -> str:
    key = error.full_key or str(error.key)
    parent = key.rpartition(".")[0]
    try:
        known = [str(k) for k in error.parent_node if not str(k).startswith("_")]
    except TypeError:
        known = []
    message = f"unknown key {key}{_closest(key.rpartition('.')[2], known)}"
    if known:
        message += f" ({parent or 'top level'} has: {', '.join(sorted(known))})"
    return message


def explain(error: BaseException) -> str | None:
    """One line for the user, or None when the error isn't the user's (a bug: let the traceback show)."""
    chain = _chain(error)
    for cause in chain:
        if isinstance(cause, RlhfError):
            return str(cause)
    for cause in chain:
        if isinstance(cause, MissingConfigException):
            lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
            options = [line for line in cause.options or [] if line != "schema"]
            known = f"; options: {', '.join(sorted(options))}" if options else ""
            return one_line(lines[0]) + known
        if isinstance(cause, ConfigAttributeError | ConfigKeyError):
            return _unknown_key(cause)
        if isinstance(cause, ValidationError):
            first = str(cause).splitlines()[0]
            return f"{cause.full_key}: {one_line(first)}"
        if isinstance(cause, InstantiationException) and (
            key := re.search(r"unexpected keyword argument '(\w+)'", str(cause))
        ):
            return f"unknown key {str(cause).rpartition('full_key: ')[2]}.{key[1]}"
    for cause in chain:
        if isinstance(cause, OverrideParseException):
            return one_line(f"can't read the override {cause.override!r}: {str(cause).splitlines()[-1]}")
        if isinstance(cause, ConfigCompositionException | OmegaConfBaseException):
            text = re.sub(r"\(?To append.*|Use '?\+.*", "", one_line(cause))
            return text.strip()
        if isinstance(cause, HydraException):
            return one_line(cause)
    return None
