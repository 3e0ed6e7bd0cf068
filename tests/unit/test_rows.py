"""Which rows are taken, and what is said about the others."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.data.bad_rows import BadRows
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
        ({}, "no 'messages' or 'prompt'; the row has no columns"),
        (
            {"question": "x", "prompt": None},
            "no 'messages' or 'prompt'; the row has the columns question (map one with data.prompt_column)",
        ),
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
        ({"prompt": "x", "teacher_prompt": 7}, "teacher_prompt is an int, expected a string or a list of messages"),
        ({"prompt": "x", "teacher_prompt": " "}, "empty teacher_prompt"),
        (
            {"prompt": "x", "teacher_prompt": [USER, 5]},
            "teacher_prompt's message 2 is an int, expected an object with 'role' and 'content'",
        ),
        (
            {"prompt": "x", "teacher_prompt": [USER, ASSISTANT]},
            "teacher_prompt ends with role assistant, expected user or tool",
        ),
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


def test_chosen_columns_stand_in_and_displace() -> None:
    raw = {"question": "2 + 3?", "answer": "5", "messages": "other", "response": "other", "level": 1}
    row = parse_row(raw, "x:1", 0, "question", "answer")
    assert row == Row(0, "x:1", [USER], "5", {"level": 1})
    conversation = parse_row({"chat": [USER, ASSISTANT]}, "x:1", 0, "chat")
    assert conversation == Row(0, "x:1", [USER], "5", {})
    absent = parse_row({"question": "2 + 3?", "answer": None}, "x:1", 0, "question", "answer")
    assert absent == Row(0, "x:1", [USER], None, {})
    for prompt, response, column, key in [("q", None, "q", "prompt"), ("question", "a", "a", "response")]:
        reason = f"no column '{column}' (data.{key}_column); the row has the columns question, level"
        assert parse_row({"question": "x", "level": 1}, "x:1", 0, prompt, response) == BadRow("x:1", reason)


def test_what_is_said_of_a_row_can_be_written() -> None:
    bad = parse_row({"messages": [{"role": "a\nb\ud800", "content": "x"}]}, "x:1", 0)
    assert str(bad).encode().startswith(b"x:1: message 1 has role 'a b\\ud800', expected")


def test_bad_rows_are_grouped_by_reason() -> None:
    long = [BadRow(f"a.jsonl:{i}", f"prompt has {i * 100} tokens, data.max_length is 64") for i in range(1, 9)]
    bad = BadRows(shown=3).add([BadRow("b.parquet[7]", "empty prompt"), *long, BadRow("b.parquet[9]", "empty prompt")])
    assert (bad.count, bad.first) == (10, BadRow("b.parquet[7]", "empty prompt"))
    assert bad.lines() == [
        "8 x prompt has 100 tokens, data.max_length is 64: a.jsonl:1,2,3 ...",
        "2 x empty prompt: b.parquet[7,9]",
    ]
    bad.add([BadRow("a[1].jsonl:5", "empty prompt")])
    assert bad.lines()[1] == "3 x empty prompt: b.parquet[7,9] a[1].jsonl:5"
    many = BadRows().add(BadRow(f"a:{i}", f"message has role {chr(97 + i)}") for i in range(25))
    assert len(many.lines()) == 21 and many.lines()[-1] == "5 x 5 other reasons"
