"""A process that conversations' environments live in, started by `rlhf.environments.pool`.

driver                                      worker
Setup (paths, plugins, class, options)  ──► imports the class
                                        ◄── its Signature, or Failed
Begin (episode, columns)                ──► makes an object, calls reset
                                        ◄── None, or Failed
Respond (episode, text)                 ──► calls step
                                        ◄── Turn, or Failed
End (episode)                           ──► calls close, forgets it
                                        ◄── None, or Failed
"""

from __future__ import annotations

import inspect
import numbers
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rlhf import plugins
from rlhf.environments.base import Turn
from rlhf.errors import ConfigError, one_line
from rlhf.processes import next_message
from rlhf.user_code import defined_at, imported, raised, shown, unusual_kind

RESERVED = ("seed",)
"""What `reset` may ask for besides the data's columns."""


@dataclass(frozen=True)
class Setup:
    """The first message."""

    path: list[str]
    """`sys.path` of the driver: names mean the same in both."""
    plugins: list[str]
    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Signature:
    """What `reset` has to be given."""

    parameters: tuple[str, ...]
    """By name; `everything` adds all columns there are."""
    required: tuple[str, ...]
    """Those without a default."""
    everything: bool


@dataclass(frozen=True)
class Begin:
    """A conversation begins."""

    episode: int
    columns: dict[str, Any]


@dataclass(frozen=True)
class Respond:
    """The model has said something."""

    episode: int
    text: str


@dataclass(frozen=True)
class End:
    """A conversation is over."""

    episode: int


@dataclass(frozen=True)
class Failed:
    """A class that can't be loaded, a method that raised, or a step that gave something else than a Turn."""

    reason: str


def serve(connection: Connection) -> None:
    setup: Setup = connection.recv()
    sys.path[:] = setup.path
    try:
        plugins.load_plugins(setup.plugins)
        environment, signature = load_environment(setup.name, setup.options)
    except ConfigError as error:
        connection.send(Failed(str(error)))
        return
    connection.send(signature)
    episodes: dict[int, Any] = {}
    while True:
        message = next_message(connection)
        failed = Failed(message) if isinstance(message, str) else None
        connection.send(failed or answer(episodes, lambda: environment(**setup.options), message))


METHODS = {"reset": "reset(self, **columns)", "step": "step(self, response)", "close": "close(self)"}
"""How a person writes them."""


def load_environment(name: str, options: dict[str, Any]) -> tuple[Callable[..., Any], Signature]:
    """Find the class, and what its `reset` takes. One object is made, as for each conversation, so that options it
    refuses are found now; none of its methods is called.

    Raises:
        ConfigError: it doesn't exist, can't be imported, lacks a method, has one that can't be called, or doesn't take
            the options.
    """
    found: Any = plugins.find("environment", name) or imported(
        name, "environment.name", plugins.names("environment"), "class"
    )
    key = f"environment.name={name}"
    if not inspect.isclass(found):
        raise ConfigError(f"{key} is no class; write class {name.rpartition(':')[2]}(Environment)")
    if missing := [method for method in ("reset", "step") if not callable(getattr(found, method, None))]:
        raise ConfigError(f"{key} has no method {missing[0]}; it needs {METHODS['reset']} and {METHODS['step']}")
    if abstract := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"{key} has no method {abstract[0]} of its own; define it")
    made = _made(found, key, options)
    _signature_of(made, "step", key, ("text",))
    if hasattr(made, "close"):
        _signature_of(made, "close", key, ())
    parameters = list(_signature_of(made, "reset", key, None).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if unnamed := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]:
        raise ConfigError(f"{key}: reset takes {unnamed[0]} by position; all arguments are given by their names")
    return found, Signature(
        parameters=tuple(p.name for p in named),
        required=tuple(p.name for p in named if p.default is p.empty and p.name not in RESERVED),
        everything=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _made(found: Any, key: str, options: dict[str, Any]) -> Any:
    """An object of the class."""
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise ConfigError(f"environment.options={options} don't fit {key}: {one_line(error)}") from error
    if inspect.iscoroutinefunction(found.__init__):
        raise ConfigError(
            f"{key}: {found.__name__}.__init__ is an async function; write def{defined_at(found.__init__)}"
        )
    try:
        return found(**options)
    except BaseException as error:  # a user's method may even call sys.exit
        raise ConfigError(
            f"{key} can't be made with environment.options={options}: {found.__name__}(...) {raised(error)}"
        ) from error


def _signature_of(made: Any, name: str, key: str, given: tuple[str, ...] | None) -> inspect.Signature:
    """What a method takes besides `self`: positional arguments `given`, or whatever it names where that is None."""
    method = getattr(made, name)
    what, where = f"{key}: {type(made).__name__}.{name}", defined_at(method)
    if kind := unusual_kind(method):
        raise ConfigError(f"{what} is {kind}; write def {METHODS[name]}{where}")
    try:
        signature = inspect.signature(method)
        if given is not None:
            signature.bind(*given)
    except (TypeError, ValueError) as error:  # ValueError: not even self
        raise ConfigError(f"{what} can't be called: {one_line(error)}; write def {METHODS[name]}{where}") from error
    return signature


def answer(episodes: dict[int, Any], make: Callable[[], Any], message: Begin | Respond | End) -> Turn | Failed | None:
    """Do what is asked."""
    try:
        if isinstance(message, Begin):
            episodes[message.episode] = make()
            given = episodes[message.episode].reset(**message.columns)
            return None if given is None else Failed(f"reset gave {shown(given)}, expected None")
        if isinstance(message, Respond):
            return checked(episodes[message.episode].step(message.text))
        close = getattr(episodes.pop(message.episode), "close", None)
        if close is not None:
            close()
        return None
    except BaseException as error:  # a user's method may even call sys.exit
        return Failed(raised(error))


def checked(given: Any) -> Turn | Failed:
    """A step's result in plain types."""
    if not isinstance(given, Turn):
        return Failed(f"step gave {shown(given)}, expected Turn(observation, reward, done)")
    if not isinstance(given.observation, str):
        return Failed(f"step gave {shown(given.observation)} as observation, expected a string")
    if not isinstance(given.done, bool | np.bool_):
        return Failed(f"step gave {shown(given.done)} as done, expected True or False")
    if not isinstance(given.reward, numbers.Real) or not np.isfinite(np.float32(given.reward)):
        return Failed(f"step gave {shown(given.reward)} as reward, expected a finite number")
    if not given.done and not given.observation.strip():
        return Failed("step gave no observation, though the conversation isn't done")
    try:
        given.observation.encode()
    except UnicodeEncodeError as error:
        return Failed(f"step gave an observation with half a surrogate pair at character {error.start + 1}")
    # Plain: the driver, which unpickles it, may not know a user's own kind of string.
    return Turn(str.__str__(given.observation), float(given.reward), bool(given.done))
