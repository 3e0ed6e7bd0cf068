"""`data.preprocessor`: a function from a row to a row, applied before the row is checked: built in, or your own."""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import importlib.util
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.errors import ConfigError, one_line

Preprocessor = Callable[[dict[str, Any]], dict[str, Any]]


def opsd_reference_solution(row: dict[str, Any]) -> dict[str, Any]:
    """The row with a `teacher_prompt`: its conversation, where the last message also tells the reference response.

    The idea is that of OPSD (arXiv 2601.18734): a model that knows the solution judges better how to get there. A row
    that has a `teacher_prompt` already keeps it.

    Raises:
        ValueError: the row has no prompt or no reference response.
    """
    if row.get("teacher_prompt"):
        return row
    conversation = row.get("messages") or row.get("prompt")
    if isinstance(conversation, str):
        conversation = [{"role": "user", "content": conversation}]
    if not conversation:
        raise ValueError("no prompt to make a teacher_prompt of")
    *before, last = conversation
    solution = row.get("response")
    if last["role"] == "assistant":
        solution = last["content"]
        if not before:
            raise ValueError("no prompt to make a teacher_prompt of")
        *before, last = before
    if not solution:
        raise ValueError("no reference response to make a teacher_prompt of")
    told = (
        f"{last['content']}\n\nA correct solution, for you alone:\n{solution}\n\n"
        "Make sure you understand why it is correct. Then solve the task yourself, step by step and in your own words, "
        "without mentioning that you have seen a solution."
    )
    return {**row, "teacher_prompt": [*before, {**last, "content": told}]}


BUILT_IN: dict[str, Preprocessor] = {"opsd_reference_solution": opsd_reference_solution}


@functools.cache
def load_preprocessor(name: str) -> Preprocessor:
    """The function `data.preprocessor` names, made safe: what goes wrong with a row is a ValueError that says so.

    Args:
        name: a built-in one, `package.module.function`, or `file.py:function`.

    Raises:
        ConfigError: there is no such function, or its module can't be imported.
    """
    function = BUILT_IN[name] if name in BUILT_IN else _imported(name)

    def preprocess(row: dict[str, Any]) -> dict[str, Any]:
        try:
            made = function(copy.deepcopy(row))  # a reader may hand out the same row in the next epoch
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's function may even call sys.exit
            said = f": {one_line(error)}" if str(error) else ""
            raise ValueError(f"data.preprocessor={name} raised {type(error).__name__}{said}") from error
        if not isinstance(made, dict) or not all(isinstance(key, str) for key in made):
            raise ValueError(f"data.preprocessor={name} gave {type(made).__name__} {made!r:.60}, expected a row (dict)")
        return made

    return preprocess


def _imported(name: str) -> Preprocessor:
    """The function of a user's module."""
    if name.endswith(".py") or name.startswith(":") or name.endswith((":", ".")):
        raise ConfigError(f"data.preprocessor={name} names no function; write file.py:function or package.function")
    if ":" in name:
        file, _, function = name.rpartition(":")
        module = _import(name, lambda: _module_of(Path(file).expanduser()))
    elif "." in name:
        dotted, _, function = name.rpartition(".")
        module = _import(name, lambda: importlib.import_module(dotted))
    else:
        raise ConfigError(
            f"data.preprocessor={name} doesn't exist; write {', '.join(BUILT_IN)}, "
            "package.module.function or file.py:function"
        )
    found = getattr(module, function, None)
    if not callable(found):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"data.preprocessor={name}: there is no function {function} in {module.__file__ or module.__name__}"
            f"{_nearest(function, there)}"
        )
    return found


def _module_of(path: Path) -> ModuleType:
    """Run a file as a module of its own."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"rlhf_plugin_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import(name: str, load: Callable[[], ModuleType]) -> ModuleType:
    """The module, or one line that says which line of which file fails."""
    try:
        return load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's file may even call sys.exit
        at = ""
        if isinstance(error, SyntaxError):
            at = f", line {error.lineno} of {error.filename}"
        else:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
            if frames:
                at = f", line {frames[-1].lineno} of {frames[-1].filename}"
        raise ConfigError(
            f"data.preprocessor={name} can't be imported: {type(error).__name__}: {one_line(error)}{at}"
        ) from error


def _is_users(filename: str) -> bool:
    """Neither Python's own file, nor an installed package's, nor this one."""
    path = Path(filename)
    return not (
        filename.startswith("<")
        or filename == __file__
        or Path(functools.__file__).parent in path.parents
        or "site-packages" in path.parts
    )


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
