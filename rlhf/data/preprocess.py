"""`data.preprocessor`: a function from a row to a row, applied before the row is checked: built in, or your own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from rlhf import plugins
from rlhf.user_code import imported, raised

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


def load_preprocessor(name: str) -> Preprocessor:
    """The function `data.preprocessor` names, made safe: what goes wrong with a row is a ValueError that says so.

    Args:
        name: a built-in one, a plugin's, `package.module.function`, or `file.py:function`.

    Raises:
        ConfigError: there is no such function, or its module can't be imported.
    """
    function = BUILT_IN.get(name) or plugins.find("preprocessor", name)
    if function is None:
        function = imported(name, "data.preprocessor", plugins.names("preprocessor"))

    def preprocess(row: dict[str, Any]) -> dict[str, Any]:
        try:
            made = function(copy.deepcopy(row))  # a reader may hand out the same row in the next epoch
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's function may even call sys.exit
            raise ValueError(f"data.preprocessor={name} {raised(error)}") from error
        if not isinstance(made, dict) or not all(isinstance(key, str) for key in made):
            raise ValueError(f"data.preprocessor={name} gave {type(made).__name__} {made!r:.60}, expected a row (dict)")
        return made

    return preprocess
