"""Functions of a user's own modules and files: imported, with one line that says what is wrong with them."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.errors import ConfigError, nearest, one_line


def imported(name: str, key: str, built_in: list[str], kind: str = "function") -> Callable[..., Any]:
    """The function, or class, that `key` names.

    Args:
        name: `package.module.function` or `file.py:function`.
        key: for messages, e.g. `data.preprocessor`.
        built_in: names that would have been understood, too.
        kind: for messages: function or class.

    Raises:
        ConfigError: there is no such function, or its module can't be imported.
    """
    if name.endswith(".py") or name.startswith(":") or name.endswith((":", ".")):
        raise ConfigError(f"{key}={name} names no {kind}; write file.py:{kind} or package.{kind}")
    if ":" in name:
        file, _, function = name.rpartition(":")
        module = load(f"{key}={name}", lambda: module_of(Path(file).expanduser()))
    elif "." in name:
        dotted, _, function = name.rpartition(".")
        module = load(f"{key}={name}", lambda: importlib.import_module(dotted))
    else:
        known = f"{', '.join(built_in)}, " if built_in else ""
        raise ConfigError(
            f"{key}={name} doesn't exist{nearest(name, built_in)}; write {known}package.module.{kind} or file.py:{kind}"
        )
    found = getattr(module, function, None)
    if not callable(found):
        there = [word for word, value in vars(module).items() if callable(value) and not word.startswith("_")]
        raise ConfigError(
            f"{key}={name}: there is no {kind} {function} in {module.__file__ or module.__name__}"
            f"{nearest(function, there)}"
        )
    return found


def module_of(path: Path) -> ModuleType:
    """A file as a module of its own, run once a process."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    path = path.resolve()
    name = f"rlhf_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load(what: str, importing: Callable[[], ModuleType]) -> ModuleType:
    """The module, or one line that says which line of which file fails.

    Args:
        what: `KEY=VALUE` for the message.

    Raises:
        ConfigError: it can't be imported, or what a plugin registers is refused.
    """
    try:
        return importing()
    except KeyboardInterrupt:
        raise
    except ConfigError as error:  # of a decorator of ours
        raise ConfigError(f"{what}: {error}{line_of(error)}") from error
    except BaseException as error:  # a user's file may even call sys.exit
        raise ConfigError(f"{what} can't be imported: {named(error)}{line_of(error)}") from error


def raised(error: BaseException) -> str:
    """`raised KeyError: 'level', line N of FILE`: how a call of a user's function failed."""
    return f"raised {named(error)[:300]}{line_of(error)}"


def named(error: BaseException) -> str:
    """`KeyError: 'level'`, or the type alone of an error that says nothing."""
    words = said(error)
    return f"{type(error).__name__}{f': {words}' if words else ''}"


def said(error: BaseException) -> str:
    """What an error of a user's code says, on a single line."""
    try:
        return one_line(error)
    except Exception:  # its own __str__
        return ""


def shown(value: Any) -> str:
    """The type of what a user's function gave, and the beginning of what it says it is."""
    try:
        words = one_line(repr(value))[:60]
    except Exception:  # a user's own __repr__
        words = ""
    return f"{type(value).__name__} {words}".strip()


def line_of(error: BaseException) -> str:
    """`, line N of FILE`: the innermost line of a user's own file; empty where there is none."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno} of {error.filename}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f", line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""


def defined_at(function: Callable[..., Any]) -> str:
    """`, line N of FILE`: where a function written in Python begins; empty for another callable."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f", line {code.co_firstlineno} of {code.co_filename}" if code is not None else ""


def unusual_kind(function: Callable[..., Any]) -> str | None:
    """`an async function`, `a generator` or `a class`, whose call gives something else than what it returns; None: a
    function as it should be."""
    for kind, is_kind in (
        ("an async function", inspect.iscoroutinefunction),
        ("an async generator", inspect.isasyncgenfunction),
        ("a generator", inspect.isgeneratorfunction),
        ("a class", inspect.isclass),
    ):
        if is_kind(function):
            return kind
    return None


def _is_users(filename: str) -> bool:
    """Neither Python's own file, nor an installed package's, nor one of ours."""
    path = Path(filename)
    return not (
        filename.startswith("<")
        or Path(__file__).parent in path.parents
        or Path(functools.__file__).parent in path.parents
        or "site-packages" in path.parts
    )
