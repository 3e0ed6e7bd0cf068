"""What `reward.functions` names: found, given its options, and ready to be called. Runs in the functions' processes."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import numpy as np

from rlhf import plugins
from rlhf.config.base import written
from rlhf.errors import ConfigError, nearest, one_line
from rlhf.user_code import imported, shown, unusual_kind

RESERVED = ("prompts", "completions", "completion_ids")
"""What a function may ask for besides the data's columns: texts of prompt and completion (special tokens left out), and
the completion's token ids."""
LARGEST = float(np.finfo(np.float32).max)

RewardFunction = Callable[..., Sequence[float | None]]


@dataclass(frozen=True)
class BuiltIn:
    """A function of ours, which judges each completion on its own."""

    function: RewardFunction
    columns: tuple[str, ...] = ()
    """Columns of the data that it reads."""
    timeout_s: float | None = None
    """Its own limit for a completion."""


@dataclass(frozen=True)
class Signature:
    """What a function has to be given."""

    parameters: tuple[str, ...]
    """By name; `everything` adds all columns there are."""
    required: tuple[str, ...]
    """Those without a default."""
    everything: bool
    rowwise: bool
    """A built-in one: each completion alone, and 0 for one that takes too long."""
    timeout_s: float | None = None
    """Of a built-in one: what its option `timeout_s` says."""


@dataclass(frozen=True)
class Loaded:
    """A function that can be called."""

    call: RewardFunction
    signature: Signature


def load_function(name: str, options: dict[str, Any]) -> Loaded:
    """Find a function and give it its options.

    Args:
        name: one entry of `reward.functions`.
        options: its part of `reward.options`.

    Raises:
        ConfigError: it doesn't exist, can't be imported, or doesn't take the options.
    """
    from rlhf.rewards.built_in import FACTORIES

    if name in FACTORIES:
        factory = FACTORIES[name]
        known = list(inspect.signature(factory).parameters)
        _refuse_unknown(name, options, known)
        needed = [one.name for one in inspect.signature(factory).parameters.values() if one.default is one.empty]
        if lacking := [one for one in needed if one not in options]:
            raise ConfigError(f"reward.functions={name} needs reward.options.{name}.{lacking[0]}=VALUE")
        _check_types(name, options, get_type_hints(factory))
        try:
            made = factory(**options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"reward.options.{name}: {one_line(error)}") from error
        return Loaded(made.function, Signature(RESERVED, made.columns, True, True, made.timeout_s))
    function = plugins.find("reward", name) or imported(name, "reward.functions", plugins.names("reward"))
    return _with_options(name, function, options)


def _with_options(name: str, function: RewardFunction, options: dict[str, Any]) -> Loaded:
    """A user's function; its options are keyword arguments that are always the same."""
    if kind := unusual_kind(function):
        raise ConfigError(f"reward.functions={name} is {kind}; write a function that returns a list of numbers")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward.functions={name} has no signature to read; wrap it in a function") from error
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [parameter.name for parameter in named]
    if "completions" not in names and "completion_ids" not in names and not everything:
        raise ConfigError(
            f"reward.functions={name} takes no completions; write def {function_name(name)}(completions, **columns)"
        )
    if unnamed := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]:
        raise ConfigError(
            f"reward.functions={name} takes {unnamed[0]} by position; all arguments are given by their names"
        )
    if taken := sorted(set(options) & set(RESERVED)):
        raise ConfigError(f"reward.options.{function_name(name)}.{taken[0]} is what every function is given; rename it")
    _refuse_unknown(name, options, [n for n in names if n not in RESERVED])  # `**columns` takes none of them
    free = [parameter for parameter in named if parameter.name not in options]
    signature = Signature(
        parameters=tuple(parameter.name for parameter in free),
        required=tuple(p.name for p in free if p.default is p.empty and p.name not in RESERVED),
        everything=everything,
        rowwise=False,
    )
    return Loaded(functools.partial(function, **options), signature)


def _refuse_unknown(name: str, options: dict[str, Any], known: list[str]) -> None:
    for option in options:
        if option not in known:
            has = ", ".join(known) or "no options"
            raise ConfigError(
                f"reward.options.{function_name(name)}.{option} is no option of {name}{nearest(option, known)}; "
                f"it has {has}"
            )


KINDS: dict[type, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("text", (str,)),
}
"""An option's type -> what it is called, and what a value may be."""


def _check_types(name: str, options: dict[str, Any], types: dict[str, type]) -> None:
    """Values of a built-in function's options are of the types that its factory says."""
    for option, value in options.items():
        wanted = types[option]
        words, accepted = KINDS[wanted]
        if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
            raise ConfigError(f"reward.options.{name}.{option}={written(value)} must be {words}")


def function_name(name: str) -> str:
    """`mean` of `package.module.mean` and of `file.py:mean`."""
    return name.rpartition(":")[2].rpartition(".")[2]


@dataclass(frozen=True)
class Wrong:
    """A result that can't be used."""

    reason: str
    index: int | None = None
    """Of the completion, if the reason is about one."""


def checked(result: Any, count: int) -> list[float | None] | Wrong:
    """A function's result as plain numbers; None where the function doesn't apply to a completion."""
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__") or not hasattr(result, "__getitem__"):
        return Wrong(f"gave {shown(result)}, expected a list of {count} numbers")
    if len(result) != count:
        return Wrong(f"gave {len(result)} rewards for {count} completions")
    values: list[float | None] = []
    for index in range(count):
        number = result[index]
        if hasattr(number, "item") and not isinstance(number, numbers.Number):  # numpy's and torch's scalars
            try:
                number = number.item()
            except (TypeError, ValueError, RuntimeError):  # of several elements
                return Wrong(f"gave {shown(number)}, expected a number", index)
        if number is None:
            values.append(None)
        elif not isinstance(number, numbers.Real):
            return Wrong(f"gave {shown(number)}, expected a number", index)
        elif not abs(float(number)) <= LARGEST:
            return Wrong(f"gave {number}, expected a finite number", index)
        else:
            values.append(float(number))
    return values
