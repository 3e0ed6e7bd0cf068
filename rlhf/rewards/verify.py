"""Whether a response solves its exercise: a row's own verifier, asked about the response's final answer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

SOLVED = 0.99
"""reasoning-gym gives 1 for a right answer, and sometimes a little for one in the right form."""


def has_verifier(columns: Mapping[str, Any]) -> bool:
    """Whether `solves` can tell, from a row's columns: exercises of reasoning-gym carry their `task` and `entry`."""
    return "task" in columns and isinstance(columns.get("entry"), dict)


def solves(response: str, columns: Mapping[str, Any]) -> bool:
    """Whether the final answer of `response` is right. The row must have a verifier."""
    return score_of(response, columns) >= SOLVED


def score_of(response: str, columns: Mapping[str, Any]) -> float:
    """What the row's verifier gives the final answer of `response`, in [0, 1]. The row must have one.

    Zero for what a task's own scorer can't read: a model may write anything.
    """
    score = load_library().get_score_answer_fn(columns["task"])
    whole = any(sign in str(columns["entry"]["answer"]) for sign in ("\n", "="))  # a grid, an equation
    answer = response.strip() if whole else final_answer(response)
    try:
        return float(score(answer, columns["entry"]))
    except Exception:
        return 0.0


def load_library() -> Any:
    """reasoning-gym, which takes seconds to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        import reasoning_gym

    return reasoning_gym


def final_answer(response: str) -> str:
    """The answer in a worked solution, by the forms that models and data sets use, the most explicit first.

    `<answer>7</answer>`; `\\boxed{7}`; `#### 7` (GSM8K, arXiv 2110.14168); `the answer is 7.`; the right-hand side
    of the last line's last equation; the last line. Commas within numbers are taken out.
    """
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", _found(response)).strip()


def _found(response: str) -> str:
    if tagged := re.findall(r"<answer>(.*?)</answer>", response, flags=re.DOTALL):
        return str(tagged[-1])
    if (boxed := _last_boxed(response)) is not None:
        return boxed
    lines = [line for line in response.splitlines() if line.strip()]
    last_line = lines[-1] if lines else ""
    if "####" in response:
        after = response.rpartition("####")[2].strip().splitlines()
        return after[0] if after else ""
    if said := re.findall(r"answer is:?\s*([^\n]+)", response, flags=re.IGNORECASE):
        return re.split(r"\.(?:\s|$)", str(said[-1]))[0]
    return last_line.rpartition("=")[2].rstrip(". ")


def _last_boxed(response: str) -> str | None:
    """What the last `\\boxed{...}` holds; braces may be nested."""
    start = response.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for index in range(start, len(response)):
        depth += {"{": 1, "}": -1}.get(response[index], 0)
        if depth == 0:
            return response[start:index]
    return None
