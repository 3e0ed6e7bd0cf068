"""A process that reward functions run in, started by `rlhf.rewards.pool`.

driver                                    worker
Setup (paths, functions, options)   ──►   imports them
                                    ◄──   list of Signatures, or Failed
Call (function, its columns)        ──►   calls it
                                    ◄──   list of numbers, or Failed; twice, if it still has to find the row
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from rlhf.errors import ConfigError
from rlhf.plugins import load_plugins
from rlhf.processes import next_message
from rlhf.rewards.functions import Loaded, Wrong, checked, load_function
from rlhf.user_code import raised, said


@dataclass(frozen=True)
class Setup:
    """The first message."""

    path: list[str]
    """`sys.path` of the driver: names mean the same in both."""
    plugins: list[str]
    functions: list[tuple[str, dict[str, Any]]]
    """Name and options."""


@dataclass(frozen=True)
class Call:
    """Score `count` completions."""

    function: int
    count: int
    columns: dict[str, list[Any]]


@dataclass(frozen=True)
class Failed:
    """A function that can't be loaded, raised, or gave something else than numbers."""

    reason: str
    index: int | None = None
    """Of the completion among those of the call, if it is known."""
    killed: bool = False
    """The process is gone with it."""
    searched: bool = False
    """Another answer follows, which may say of which completion it is."""


def serve(connection: Connection) -> None:
    setup: Setup = connection.recv()
    sys.path[:] = setup.path
    try:
        functions = load_all(setup)
    except ConfigError as error:
        connection.send(Failed(str(error)))
        return
    connection.send([function.signature for function in functions])
    while True:
        call = next_message(connection)
        given = answers(functions[call.function], call) if isinstance(call, Call) else [Failed(call)]
        for answer in given:
            connection.send(answer)


def load_all(setup: Setup) -> list[Loaded]:
    load_plugins(setup.plugins)
    return [load_function(name, options) for name, options in setup.functions]


def answers(function: Loaded, call: Call) -> Iterator[list[float | None] | Failed]:
    """What the function gives. After a failure of several completions together each alone tells which one it is; the
    failure is told at once, since that may take too long or end the process."""
    result = _called(function, call)
    if not isinstance(result, Failed) or result.index is not None or call.count == 1:
        yield result
        return
    yield replace(result, searched=True)
    yield _found(function, call, result)


def _found(function: Loaded, call: Call, failure: Failed) -> Failed:
    for index in range(call.count):
        alone = {name: values[index : index + 1] for name, values in call.columns.items()}
        found = _called(function, Call(call.function, 1, alone))
        if isinstance(found, Failed) and found.reason == failure.reason:
            return Failed(failure.reason, index)
    return failure


def _called(function: Loaded, call: Call) -> list[float | None] | Failed:
    try:
        values = checked(function.call(**call.columns), call.count)
    except BaseException as error:  # a user's function may even call sys.exit
        as_message = isinstance(error, TypeError) and "string indices" in said(error)  # c[0]["content"]
        return Failed(raised(error) + (" (completions are strings, not messages)" if as_message else ""))
    return Failed(values.reason, values.index) if isinstance(values, Wrong) else values
