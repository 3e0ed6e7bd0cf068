"""The built-in reward functions. A factory's parameters are what `reward.options.NAME` may hold.

The functions have the signature of a user's own ones, and never raise for what a model wrote.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

from rlhf.rewards.functions import BuiltIn
from rlhf.rewards.verify import SOLVED, final_answer, has_verifier, load_library, score_of


def math_verify(column: str = "response") -> BuiltIn:
    """1 where the completion's answer equals the one of the row, as mathematics (package math-verify): `1/2` = `0.5`.

    A completion with `<answer>` tags answers with what is in the last ones. Where the row's answer isn't mathematics,
    1 where both final answers are the same text.

    Args:
        column: holds the right answer, bare or at the end of a worked solution; `response` is the reference response.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import math_verify as library
    except ImportError as error:
        raise ValueError("needs the package math-verify: pip install 'math-verify[antlr4-9-3]'") from error

    def parsed(text: str) -> list[Any]:
        tagged = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
        text = (tagged[-1] if tagged else text.rpartition("####")[2]).strip()
        bare = not re.search(r"[$\n]|\\[\[(]|\\boxed", text) and not _has_words(text)
        return (library.parse(f"${text}$") if bare else []) or library.parse(text)

    def equal(completion: str, right: object) -> float:
        gold = parsed(str(right))
        if not gold:
            return float(final_answer(completion).casefold() == final_answer(str(right)).casefold())
        return float(library.verify(gold, parsed(completion)))

    def rewards(completions: list[str], **columns: list[Any]) -> list[float | None]:
        return [
            None if right is None else equal(completion, right)
            for completion, right in zip(completions, columns[column], strict=True)
        ]

    return BuiltIn(rewards, (column,))


def _has_words(text: str) -> bool:
    """Rather than variables and LaTeX commands."""
    return re.search(r"[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+(\{[A-Za-z ]*\})?", "", text)) is not None


def reasoning_gym(partial: bool = False) -> BuiltIn:
    """1 where the row's own verifier (columns `task` and `entry` of `data=reasoning_gym`) accepts the final answer.

    Args:
        partial: give the verifier's own number instead, which for some tasks is between 0 and 1 for half an answer.
    """

    load_library()

    def reward(completion: str, row: dict[str, Any]) -> float | None:
        if not has_verifier(row):
            return None
        score = score_of(completion, row)
        return score if partial else float(score >= SOLVED)

    def rewards(completions: list[str], task: list[Any], entry: list[Any], **columns: list[Any]) -> list[float | None]:
        rows = zip(completions, task, entry, strict=True)
        return [reward(completion, {"task": name, "entry": made}) for completion, name, made in rows]

    return BuiltIn(rewards, ("task", "entry"))


def format(pattern: str = r"(?s).*<answer>\s*\S.*</answer>\s*") -> BuiltIn:
    """1 where the whole completion matches a regular expression.

    Args:
        pattern: Python's syntax. The default: it ends with a non-empty answer in `<answer>` tags.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern={pattern} is no regular expression: {error}") from error
    return BuiltIn(lambda completions, **columns: [float(compiled.fullmatch(text) is not None) for text in completions])


def length(target: int, slack: int = 64) -> BuiltIn:
    """A soft penalty on long completions (DAPO, arXiv 2503.14476, equation 13): 0 up to `target` tokens, from there
    falling evenly to -1 at `target + slack` tokens, and -1 beyond.

    Args:
        target: tokens, EOS included.
        slack: tokens; 0 makes it a step.
    """
    if target < 1 or slack < 0:
        raise ValueError(f"target={target} must be at least 1, slack={slack} at least 0")

    def reward(tokens: int) -> float:
        over = max(0, tokens - target)
        return -min(1.0, over / slack) if slack else -float(over > 0)

    return BuiltIn(lambda completion_ids, **columns: [reward(len(ids)) for ids in completion_ids])


def code(
    column: str = "tests",
    partial: bool = False,
    timeout_s: float = 10.0,
    cpu_s: int = 10,
    memory_mb: int = 1024,
) -> BuiltIn:
    """1 where the completion's program passes the row's tests, in a process of its own with limits.

    The program is the last fenced block, or the whole completion. THE LIMITS ARE NO SECURITY BOUNDARY: see
    `rlhf.rewards.sandbox`.

    Args:
        column: holds Python source of assertions, or a list of such; they see the program's names.
        partial: the share of the tests that passed, instead of 1 for all.
        timeout_s: for program and tests together; below `reward.timeout_s`.
        cpu_s: processor seconds.
        memory_mb: address space.
    """
    from rlhf.rewards.sandbox import Limits, passed, program_of

    limits = Limits(timeout_s=timeout_s, cpu_s=cpu_s, memory_mb=memory_mb)

    def reward(completion: str, tests: Any) -> float | None:
        tests = [tests] if isinstance(tests, str) else tests
        if not tests:
            return None
        share = passed(program_of(completion), list(map(str, tests)), limits) / len(tests)
        return share if partial else float(share == 1)

    def rewards(completions: list[str], **columns: list[Any]) -> list[float | None]:
        return [reward(text, tests) for text, tests in zip(completions, columns[column], strict=True)]

    return BuiltIn(rewards, (column,), timeout_s)


FACTORIES: dict[str, Callable[..., BuiltIn]] = {
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "format": format,
    "length": length,
    "code": code,
}
