"""Hydra's and OmegaConf's errors, said in one line with the key and the remedy."""

from __future__ import annotations

import errno
import re

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from rlhf.config.registry import PROJECT_ROOT
from rlhf.config.suggest import unknown_key
from rlhf.errors import RlhfError, nearest, one_line

REWRITES = [
    (r"Could not append to config\. An item is already at '([^']*)'.*", r"+\1: the key exists already; write \1=VALUE"),
    (r"Multiple values for (\S+)\. To override .* '.*: (.*)'.*", r"+\1=\2: \1 is chosen already; write \1=\2"),
    (r"Could not override '([^']*)'\. No match in the defaults list\..*use \+(\S+)", r"\1 has no default; write +\2"),
    (r"Could not override '([^']*)'\. Did you mean to override (\S+)\?.*", r"unknown group \1; did you mean \2?"),
    (r"Could not delete from config\. (.*)", r"can't remove: \1"),
    (r"Error merging override ~(\S+).*", r"~\1: keys can't be removed; write \1=VALUE"),
    (r"Ambiguous value for argument '([^']*)'.*", r"\1 has several values: add -m to run each, or quote the value"),
    (r"Config group override must be .* Got (.*)", r"a group takes the name of one option (see --help), got \1"),
    (r"Value '(.*)' of type '\w+' could not be converted to Float", r"'\1' is not a number"),
    (r"Value '(.*)' of type '\w+' could not be converted to Integer", r"'\1' is not a whole number"),
    (r"Value '(.*)' is not a valid bool.*", r"'\1' is neither true nor false"),
    (r"Invalid value assigned: \w+ is not a ListConfig, list or tuple\.", r"not a list; write [A,B,...]"),
    (r"Cannot convert '(list|ListConfig)' to string.*", "takes one value, not a list"),
    (r"Cannot convert '(dict|DictConfig)' to string.*", "takes one value, not a mapping"),
    (r"field '.*' is not Optional", "null is not allowed"),
    (r"Invalid type assigned: \w+ is not a subclass of .*", "a section; set its keys one by one"),
    (r".*Merge error: .* is not a subclass of .*", r"a group takes the name of one option (see --help), got several"),
]
"""Hydra's words -> ours, for what it doesn't say well enough."""

ENVIRONMENT = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
    *(errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG),
}
"""What the file system may refuse: no bug of ours."""


def explain(error: BaseException) -> str | None:
    """One line for the user, or None when the error isn't the user's (a bug: let the traceback show)."""
    chain = _chain(error)
    for cause in chain:
        if isinstance(cause, RlhfError):
            return str(cause)
    for cause in chain:
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
            return _no_such_option(cause)
        if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.parent_node is not None:
            return unknown_key(cause.full_key or str(cause.key), cause.parent_node._get_root())
        if isinstance(cause, ValidationError) and cause.full_key:
            return f"{cause.full_key}: {_rewritten(str(cause).splitlines()[0])}"
    for cause in chain:
        if isinstance(cause, OverrideParseException):
            return _unreadable(cause)
        if isinstance(cause, ConfigCompositionException):
            return _rewritten(str(cause))
        if isinstance(cause, OmegaConfBaseException):
            first = str(cause).splitlines()[0]
            return f"{cause.full_key}: {first}" if cause.full_key else first
        if isinstance(cause, HydraException | ValueError) and _raised_by_hydra(cause):
            return _rewritten(str(cause))
        if isinstance(cause, RuntimeError) and str(cause) == "Could not determine home directory.":
            return "a path begins with ~ and a user who has no home folder; write the whole path"
        if isinstance(cause, OSError) and cause.errno in ENVIRONMENT:
            return one_line(f"{cause.strerror}: {cause.filename}" if cause.filename else cause.strerror)
    return None


def interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C is behind an error: libraries turn it into one of theirs while they import."""
    return any(isinstance(cause, KeyboardInterrupt) for cause in _chain(error))


def words_of_stop(stop: KeyboardInterrupt) -> str:
    """What became of the run, as an interruption that says so; a second one may come while the first is on
    its way, and says nothing."""
    return next((str(cause) for cause in _chain(stop) if isinstance(cause, KeyboardInterrupt) and str(cause)), "")


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what caused it, outermost first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _no_such_option(error: MissingConfigException) -> str:
    """`algo=foo`, `+recipes=foo`, `+recipes=cpu/foo`, --config-name=foo."""
    missing = str(error.missing_cfg_file)
    group, _, option = missing.rpartition("/")
    if missing.startswith("recipes/"):
        group, _, option = missing.partition("/")
    options = sorted(name for name in error.options or [] if name != "schema")
    if not group or not options:
        return one_line(str(error).splitlines()[0])
    folder, _, _ = option.rpartition("/")
    if folder and group == "recipes":  # Hydra lists those of the folder above
        options = sorted(f"{folder}/{path.stem}" for path in (PROJECT_ROOT / group / folder).glob("*.yaml")) or options
    return f"{group}={option} doesn't exist{nearest(option, options)}; options: {', '.join(options)}"


def _unreadable(error: OverrideParseException) -> str:
    """An override that isn't KEY=VALUE in Hydra's grammar."""
    reason = f": {one_line(error.__cause__)}" if error.__cause__ is not None else ""
    reason = re.sub(r" expecting \{.*", "", reason)
    if "=~" in str(error.override):
        return f"can't read {error.override!r}: write $HOME instead of ~"
    return f"can't read {error.override!r}{reason}; write KEY=VALUE, and quote special characters: 'KEY=\"VALUE\"'"


def _rewritten(text: str) -> str:
    text = one_line(text)
    for pattern, words in REWRITES:
        if re.match(pattern, text):
            return re.sub(pattern, words, text)
    return text


def _raised_by_hydra(error: BaseException) -> bool:
    """Hydra refuses some arguments with a bare ValueError. Elsewhere that is a bug."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("hydra.")
