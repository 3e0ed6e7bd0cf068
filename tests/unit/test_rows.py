"""Which rows are taken, and what is said about the others."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.data.rows import BadRow, Row, parse_row

USER = {"role": "user", "content": "2 + 3?"}
ASSISTANT = {"role": "assistant", "content": "5"}


def test_prompt_string() -> None:
    row = parse_row({"prompt": "2 + 3?", "response": "5", "level": 1}, "sums.jsonl:12", 11)
    assert row == Row(11, "sums.jsonl:12", [USER], "5", {"level": 1})


@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_final_assistant_message_is_the_response(name: str) -> None:
    system = {"role": "system", "content": "Be brief."}
    row = parse_row({name: [system, USER, ASSISTANT]}, "x:1", 0)
    assert row == Row(0, "x:1", [system, USER], "5", {})


def test_earlier_assistant_messages_stay() -> None:
    row = parse_row({"messages": [USER, ASSISTANT, USER]}, "x:1", 0)
    assert row == Row(0, "x:1", [USER, ASSISTANT, USER], None, {})


def test_null_is_absent_and_further_message_keys_stay() -> None:
    raw = {
        "messages": [USER, {"role": "tool", "content": "5", "name": "sum", "tool_calls": None}],
        "prompt": None,
        "response": None,
        "teacher_prompt": "",
        "note": None,
    }
    row = parse_row(raw, "x:1", 0)
    assert row == Row(0, "x:1", [USER, {"role": "tool", "content": "5", "name": "sum"}], None, {"note": None})


def test_the_same_response_twice_is_no_contradiction() -> None:
    row = parse_row({"messages": [USER, ASSISTANT], "response": "5"}, "x:1", 0)
    assert isinstance(row, Row) and row.response == "5"


def test_the_raw_row_is_left_alone() -> None:
    raw = {"messages": [USER, ASSISTANT]}
    parse_row(raw, "x:1", 0)
    assert raw == {"messages": [USER, ASSISTANT]}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([1], "row is a list, expected an object"),
        (None, "row is null, expected an object"),
        ({}, "no 'messages' or 'prompt'"),
        ({"question": "x", "prompt": None}, "no 'messages' or 'prompt'"),
        ({"prompt": 3}, "prompt is an int, expected a string or a list of messages"),
        ({"prompt": True}, "prompt is a bool, expected a string or a list of messages"),
        ({"prompt": {"role": "user"}}, "prompt is an object, expected a string or a list of messages"),
        ({"prompt": " \n"}, "empty prompt"),
        ({"prompt": []}, "prompt is an empty list"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": "hi"}, "messages is a string, expected a list of messages"),
        ({"messages": [USER], "prompt": "hi"}, "both 'messages' and 'prompt'; keep one"),
        ({"messages": [USER, "hi"]}, "message 2 is a string, expected an object with 'role' and 'content'"),
        ({"messages": [USER, {"content": "x"}]}, "message 2 has no 'role'"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 has no 'content'"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "message 1 has a list as 'content', expected a string"),
        ({"messages": [{"role": 1, "content": "x"}]}, "message 1 has an int as 'role', expected a string"),
        (
            {"messages": [{"role": "human", "content": "x"}]},
            "message 1 has role 'human', expected system, developer, user, assistant or tool",
        ),
        ({"messages": [{"role": "user", "content": ""}]}, "empty prompt"),
        ({"messages": [ASSISTANT]}, "no message before the final assistant message"),
        (
            {"messages": [USER, {"role": "system", "content": "x"}]},
            "the conversation ends with role system, expected user or tool",
        ),
        (
            {"messages": [USER, ASSISTANT, ASSISTANT]},
            "the conversation ends with role assistant, expected user or tool",
        ),
        ({"prompt": "x", "response": 5}, "response is an int, expected a string"),
        ({"prompt": "x", "response": ""}, "empty response"),
        (
            {"messages": [USER, ASSISTANT], "response": "6"},
            "'response' differs from the final assistant message; keep one",
        ),
        ({"prompt": "x", "teacher_prompt": "y"}, "teacher_prompt (OPSD) is not available yet"),
        ({"prompt": "x", "completion": "y"}, "'completion' is not read; call it 'response'"),
        ({"prompt": "x", "images": ["y.png"]}, "'images' are not supported"),
        ({"prompt": "x", "tools": [{"name": "y"}]}, "'tools' are not supported"),
        ({"prompt": "ab\ud800"}, "prompt holds half a surrogate pair at character 3"),
        ({"prompt": "x", "response": "\udfff"}, "response holds half a surrogate pair at character 1"),
    ],
)
def test_reasons(raw: Any, reason: str) -> None:
    assert parse_row(raw, "x:1", 0) == BadRow("x:1", reason)
    assert str(BadRow("x:1", reason)) == f"x:1: {reason}"
