"""One row: a conversation to continue, and perhaps its reference response. What a row may look like is decided here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rlhf.config.algo import GKD, OPSD
from rlhf.config.environment import MultiTurn
from rlhf.config.reward import FunctionReward
from rlhf.config.run import on_policy_share
from rlhf.errors import one_line
from rlhf.types import ROW

ROLES = ("system", "developer", "user", "assistant", "tool")
UNSUPPORTED = {
    "completion": "'completion' is not read; call it 'response'",
    "images": "'images' are not supported",
    "videos": "'videos' are not supported",
    "audios": "'audios' are not supported",
    "tools": "'tools' are not supported",
    "chosen": "'chosen' (preference pairs) is not supported",
}
"""Columns that other trainers give a meaning; to pass over them would train on something else than was meant."""
NAMED = 8
"""Columns named in a reason."""
TAKEN = ("messages", "prompt", "response", "teacher_prompt")
"""Columns with a meaning of their own; all others are kept as they are."""


@dataclass(frozen=True)
class Row:
    """A conversation that ends where the model has to answer.

    Example: `{"prompt": "2 + 3?", "response": "5", "level": 1}` on line 12 becomes
    `Row(11, "sums.jsonl:12", [{"role": "user", "content": "2 + 3?"}], "5", {"level": 1})`.
    """

    index: int
    """Position among all rows of the source, bad ones included."""
    where: str
    """`file.jsonl:12` (line) or `gsm_symbolic[3]` (row)."""
    messages: list[dict[str, Any]]
    response: str | None
    columns: dict[str, Any]
    teacher_messages: list[dict[str, Any]] | None = None
    """What the teacher reads instead of `messages` (`teacher_prompt`); None where it reads the same."""


@dataclass(frozen=True)
class Needs:
    """What a run needs of every row besides a prompt."""

    response: bool = False
    teacher_prompt: bool = False
    for_rewards: bool = False
    """Its columns carry what reward functions and environments may be told besides: the reference response, and the
    row's name."""

    @classmethod
    def of(cls, algo: Any, rollout: Any, reward: Any = None, environment: Any = None) -> Needs:
        """What these groups need."""
        off_policy = on_policy_share(algo, rollout) < 1
        writes = isinstance(algo, GKD) and algo.seq_kd
        return cls(
            response=off_policy and not writes,
            teacher_prompt=isinstance(algo, OPSD),
            for_rewards=isinstance(reward, FunctionReward) or isinstance(environment, MultiTurn),
        )

    def complete(self, row: Row) -> Row:
        """With all columns that are needed."""
        if not self.for_rewards:
            return row
        response = {} if row.response is None else {"response": row.response}
        return replace(row, columns={**row.columns, **response, ROW: row.where})

    def lacking(self, row: Row) -> str | None:
        """Why the row can't be used."""
        if self.response and row.response is None:
            return "no reference response, which rollout=none and algo.lmbda below 1 train on"
        if self.teacher_prompt and row.teacher_messages is None:
            return "no teacher_prompt, which algo=opsd needs; data.preprocessor=opsd_reference_solution makes one"
        return None


NOTHING_MORE = Needs()


@dataclass(frozen=True)
class BadRow:
    """A row that can't be used, and why."""

    where: str
    reason: str

    def __str__(self) -> str:
        return printable(f"{self.where}: {self.reason}")


def printable(text: str) -> str:
    """One line that can be written anywhere: rows and file names may hold what UTF-8 can't spell."""
    return one_line(text).encode("utf-8", "backslashreplace").decode()


class _Bad(Exception):
    """Carries the reason out of the checks below."""


def parse_row(
    raw: Any,
    where: str,
    index: int,
    prompt_column: str | None = None,
    response_column: str | None = None,
    preprocess: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Row | BadRow:
    """Check one raw row (a JSON object) and bring it into one shape.

    A row has `messages` (a list of {"role", "content"}) or `prompt` (a string, or such a list). If the last message is
    the assistant's it is the reference response; a column `response` gives it too. null is the same as absent.
    `teacher_prompt`, a string or a list of messages, is what the teacher reads in the prompt's place; empty is absent.
    `prompt_column` and `response_column` stand in for `messages`/`prompt` and `response`. `preprocess` changes the row
    after that; it raises ValueError for a row it can't use.
    """
    try:
        if not isinstance(raw, dict):
            raise _Bad(f"row is {_kind(raw)}, expected an object")
        raw = _renamed(raw, prompt_column, response_column)
        if preprocess is not None:
            try:
                raw = preprocess(raw)
            except ValueError as error:
                raise _Bad(str(error)) from None
        row = {key: value for key, value in raw.items() if value is not None}
        for column, reason in UNSUPPORTED.items():
            if row.get(column):
                raise _Bad(reason)
        messages = _messages(row)
        response = _response(row, messages)
        if not messages:
            raise _Bad("no message before the final assistant message")
        _check_last(messages, "the conversation", "prompt")
        teacher_messages = None
        if row.get("teacher_prompt"):
            teacher_messages = _conversation(row["teacher_prompt"], "teacher_prompt")
            _check_last(teacher_messages, "teacher_prompt", "teacher_prompt")
    except _Bad as bad:
        return BadRow(where, str(bad))
    columns = {key: value for key, value in raw.items() if key not in TAKEN}
    return Row(index, where, messages, response, columns, teacher_messages)


def _check_last(messages: list[dict[str, Any]], whole: str, name: str) -> None:
    """The last message asks for an answer."""
    last = messages[-1]
    if last["role"] not in ("user", "tool"):
        raise _Bad(f"{whole} ends with role {last['role']}, expected user or tool")
    if not last["content"].strip():
        raise _Bad(f"empty {name}")


def _renamed(raw: dict[str, Any], prompt_column: str | None, response_column: str | None) -> dict[str, Any]:
    """The chosen columns under the names rows know; they displace columns that had these names before."""
    chosen = {"prompt": prompt_column, "response": response_column}
    row = {key: value for key, value in raw.items() if key not in chosen.values()}
    for name, column in chosen.items():
        if column is not None:
            if column not in raw:
                raise _Bad(f"no column '{column}' (data.{name}_column); {_columns(raw)}")
            if name == "prompt":
                row.pop("messages", None)
            row[name] = raw[column]
    return row


def _columns(row: dict[str, Any]) -> str:
    names = ", ".join(list(row)[:NAMED]) + (", ..." if len(row) > NAMED else "")
    return f"the row has the columns {names}" if row else "the row has no columns"


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    if "messages" in row and "prompt" in row:
        raise _Bad("both 'messages' and 'prompt'; keep one")
    if "messages" in row:
        if not isinstance(row["messages"], list):
            raise _Bad(f"messages is {_kind(row['messages'])}, expected a list of messages")
        return _conversation(row["messages"], "messages")
    if "prompt" in row:
        return _conversation(row["prompt"], "prompt")
    there = _columns(row)
    raise _Bad(f"no 'messages' or 'prompt'; {there}" + (" (map one with data.prompt_column)" if row else ""))


def _conversation(value: Any, name: str) -> list[dict[str, Any]]:
    """A string or a list of messages, as messages."""
    if isinstance(value, str):
        return [{"role": "user", "content": _text(value, name)}]
    if not isinstance(value, list):
        raise _Bad(f"{name} is {_kind(value)}, expected a string or a list of messages")
    if not value:
        raise _Bad(f"{name} is an empty list")
    of = "teacher_prompt's " if name == "teacher_prompt" else ""
    return [_message(message, f"{of}message {number}") for number, message in enumerate(value, start=1)]


def _message(message: Any, name: str) -> dict[str, Any]:
    """`message` without nulls (Parquet fills every field of a struct). Further keys are the chat template's."""
    if not isinstance(message, dict):
        raise _Bad(f"{name} is {_kind(message)}, expected an object with 'role' and 'content'")
    message = {key: value for key, value in message.items() if value is not None}
    for key in ("role", "content"):
        if key not in message:
            raise _Bad(f"{name} has no '{key}'")
        if not isinstance(message[key], str):
            raise _Bad(f"{name} has {_kind(message[key])} as '{key}', expected a string")
    if message["role"] not in ROLES:
        raise _Bad(f"{name} has role '{message['role']}', expected {', '.join(ROLES[:-1])} or {ROLES[-1]}")
    _text(message["content"], name)
    return message


def _response(row: dict[str, Any], messages: list[dict[str, Any]]) -> str | None:
    """The reference response; takes a final assistant message off `messages`."""
    given = row.get("response")
    if given is not None and not isinstance(given, str):
        raise _Bad(f"response is {_kind(given)}, expected a string")
    final = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    if given is not None and final is not None and given != final:
        raise _Bad("'response' differs from the final assistant message; keep one")
    response = given if given is not None else final
    if response is not None and not response.strip():
        raise _Bad("empty response")
    return None if response is None else _text(response, "response")


def _text(text: str, what: str) -> str:
    """JSON can spell half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Bad(f"{what} holds half a surrogate pair at character {error.start + 1}") from None
    return text


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", int: "an int", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")
