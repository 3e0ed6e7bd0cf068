"""Plugins: your own preprocessors, rewards, data sets, losses and environments under names of their own.
`plugins=[FILE, ...]`.

    from rlhf.plugins import register_dataset, register_preprocessor, register_reward

    @register_reward("brief")
    def brief(completions: list[str], **columns: list) -> list[float]:
        return [1.0 / (1 + len(text)) for text in completions]

A plugin is imported once in each process that needs it. See docs/plugins.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rlhf.config.base import written
from rlhf.errors import ConfigError
from rlhf.user_code import load, module_of

Function = TypeVar("Function", bound=Callable[..., Any])

BUILT_IN: dict[str, tuple[str, ...]] = {
    "preprocessor": ("opsd_reference_solution",),
    "reward": ("math_verify", "reasoning_gym", "format", "length", "code"),
    "dataset": (),
    "loss": (),
    "environment": (),
}
"""Kind -> names that are taken."""


@dataclass(frozen=True)
class Registered:
    """What a decorator was told."""

    kind: str
    name: str
    function: Callable[..., Any]


_registered: list[Registered] = []
"""By all plugins this process has imported, in order."""
_of_entry: dict[str, list[Registered]] = {}
"""Those of each entry of `plugins`."""
_active: dict[str, dict[str, Callable[..., Any]]] = {kind: {} for kind in BUILT_IN}
"""Kind -> name -> function, of the plugins of the run: jobs of a sweep may have different ones."""


def register_preprocessor(name: str) -> Callable[[Function], Function]:
    """`data.preprocessor=NAME`: a function from a row (dict) to a row."""
    return _registering("preprocessor", name)


def register_reward(name: str) -> Callable[[Function], Function]:
    """`reward.functions=[NAME]`: `f(completions, **columns) -> list` of a number or None a completion."""
    return _registering("reward", name)


def register_dataset(name: str) -> Callable[[Function], Function]:
    """`data=plugin data.function=NAME`: `f(**options)` that returns or yields rows (dicts), the same ones each time."""
    return _registering("dataset", name)


def register_loss(name: str) -> Callable[[Function], Function]:
    """`distill.loss=NAME`: `f(student_logprobs, teacher_logprobs)`, tensors [rows, outcomes], that gives each outcome's
    share of the row's loss, [rows, outcomes] as well."""
    return _registering("loss", name)


def register_environment(name: str) -> Callable[[Function], Function]:
    """`environment.name=NAME`: a class with `reset` and `step`, see `rlhf.environments.base`."""
    return _registering("environment", name)


def load_plugins(entries: Sequence[str]) -> None:
    """Import the plugins of a run; those of an earlier one are forgotten.

    Args:
        entries: `path/to/file.py` or `package.module` each.

    Raises:
        ConfigError: one can't be imported, registers nothing, or takes a name that something else has.
    """
    table: dict[str, dict[str, Callable[..., Any]]] = {kind: {} for kind in BUILT_IN}
    owner: dict[tuple[str, str], str] = {}
    files = [str(Path(entry).resolve()) if entry.endswith(".py") else entry for entry in entries]
    for entry, file in zip(entries, files, strict=True):
        if files.count(file) > 1:
            raise ConfigError(f"plugins={written(list(entries))} names {entry} twice; keep one")
        if entry not in _of_entry:
            _of_entry[entry] = _imported(entry)
        for found in _of_entry[entry]:
            other = owner.setdefault((found.kind, found.name), entry)
            if found.name in table[found.kind] and table[found.kind][found.name] is not found.function:
                where = f"{other} and {entry}" if other != entry else entry
                raise ConfigError(f"plugins: two {found.kind}s are called {found.name}, in {where}; rename one")
            table[found.kind][found.name] = found.function
    _active.update(table)


def find(kind: str, name: str) -> Callable[..., Any] | None:
    """What the run's plugins have registered under a name."""
    return _active[kind].get(name)


def names(kind: str) -> list[str]:
    """Built-in ones, and those of the run's plugins."""
    return [*BUILT_IN[kind], *_active[kind]]


def _registering(kind: str, name: str) -> Callable[[Function], Function]:
    if callable(name):
        example = getattr(name, "__name__", "NAME")
        raise ConfigError(f"@register_{kind} needs a name; write @register_{kind}({example!r})")
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"@register_{kind}({name!r}): a name has letters, digits and _ only")
    if name in BUILT_IN[kind]:
        raise ConfigError(f"@register_{kind}({name!r}): a built-in {kind} is called so; choose another name")

    def register(function: Function) -> Function:
        if not callable(function):
            raise ConfigError(
                f"@register_{kind}({name!r}) decorates {type(function).__name__} {function!r:.60}, expected a "
                f"{'class' if kind == 'environment' else 'function'}"
            )
        _registered.append(Registered(kind, name, function))
        return function

    return register


def _imported(entry: str) -> list[Registered]:
    """What one plugin registers: while it is imported, or before, when something else has imported it."""
    before = len(_registered)

    def importing() -> ModuleType:
        if entry.endswith(".py") or "/" in entry:
            return module_of(Path(entry).expanduser())
        return importlib.import_module(entry)

    module = load(f"plugins=[{entry}]", importing)
    inside = (module.__name__, f"{module.__name__}.")
    earlier = [
        found
        for found in _registered[:before]
        if found.function.__module__ == inside[0] or found.function.__module__.startswith(inside[1])
    ]
    found = [*earlier, *_registered[before:]]
    if not found:
        decorators = ", ".join(f"@register_{kind}" for kind in BUILT_IN)
        raise ConfigError(f"plugins=[{entry}] registers nothing; decorate a function with one of {decorators}")
    return found
