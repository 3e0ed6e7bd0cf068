"""Preprocessors: the built-in one, a user's own, and what is said when one fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.data import FileData, OnBadRow, Truncation
from rlhf.config.registry import PROJECT_ROOT
from rlhf.data.dataset import load
from rlhf.data.preprocess import load_preprocessor, opsd_reference_solution
from rlhf.data.rows import Needs
from rlhf.errors import ConfigError, DataError
from tests.unit.tiny import tiny_tokenizer

USER, ANSWER = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "it is 5"}


def load_rows(folder: Path, rows: list[Any], needs: Needs | None = None, **options: Any) -> Any:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = FileData(path=str(folder / "rows.jsonl"), **options)
    extra = {} if needs is None else {"needs": needs}
    return load(spec, tiny_tokenizer(), seed=0, eval_samples=0, eval_needs_response=False, **extra)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 3?", "response": "it is 5"},
        {"prompt": [USER], "response": "it is 5"},
        {"messages": [USER, ANSWER]},
    ],
)
def test_the_teacher_is_told_the_solution_after_the_task(row: dict[str, Any]) -> None:
    made = opsd_reference_solution(row)
    (message,) = made.pop("teacher_prompt")
    assert made == row and message["role"] == "user"
    assert message["content"].startswith("2 + 3?\n\n") and "\nit is 5\n" in message["content"]


def test_what_else_the_conversation_holds_is_kept() -> None:
    system = {"role": "system", "content": "be brief"}
    made = opsd_reference_solution({"messages": [system, USER, ANSWER, USER], "response": "still 5"})
    assert made["teacher_prompt"][:3] == [system, USER, ANSWER] and "still 5" in made["teacher_prompt"][3]["content"]
    own = {"prompt": "x", "teacher_prompt": "mine"}
    assert opsd_reference_solution(own) is own


def test_it_sees_the_columns_by_their_usual_names(tmp_path: Path) -> None:
    rows = [{"question": "2 + 3?", "answer": "5"}, {"question": "no answer"}]
    options = dict(prompt_column="question", response_column="answer", max_teacher_length=400)
    dataset = load_rows(tmp_path, rows, on_bad_row=OnBadRow.skip, preprocessor="opsd_reference_solution", **options)
    assert [str(bad).partition(": ")[2] for bad in dataset.bad_rows] == [
        "no column 'answer' (data.response_column); the row has the columns question"
    ]
    tokenizer = tiny_tokenizer()
    prompt = tokenizer.decode(dataset.train.teacher_prompt(0))
    assert prompt.startswith("<|im_start|>user\n2 + 3?\n\nA correct solution") and prompt.endswith("assistant\n")


def test_long_teacher_prompts_follow_the_rule_of_long_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "teacher_prompt": "how many apples " * 20}, {"prompt": "x"}]
    with pytest.raises(DataError, match=r"teacher_prompt has \d+ tokens, data.max_teacher_length is 30"):
        load_rows(tmp_path, rows, max_teacher_length=30)
    with pytest.raises(DataError, match=r"teacher_prompt has \d+ tokens, data.max_teacher_length is 40"):
        load_rows(tmp_path, rows, max_length=40)
    dataset = load_rows(tmp_path, rows, max_teacher_length=30, truncation=Truncation.left)
    assert dataset.train.teacher_lengths.tolist() == [30, 0] and dataset.train.truncated.tolist() == [True, False]
    assert dataset.statistics["data/teacher_prompt_rows"] == 1


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (Needs(response=True), "no reference response, which rollout=none and algo.lmbda below 1 train on"),
        (
            Needs(teacher_prompt=True),
            "no teacher_prompt, which algo=opsd needs; data.preprocessor=opsd_reference_solution makes one",
        ),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_that_lacks_what_the_run_needs_is_a_bad_one(
    needs: Needs, reason: str, streaming: bool, tmp_path: Path
) -> None:
    rows = [
        {"prompt": "x", "response": "y", "teacher_prompt": "z"},
        {"prompt": "x"},
        {"prompt": "x", "teacher_prompt": ""},
    ]
    assert len(load_rows(tmp_path, rows, streaming=streaming).bad_rows) == 0
    with pytest.raises(DataError, match=rf"2 of 3 rows can't be used, the first is .*rows.jsonl:2: {reason}"):
        load_rows(tmp_path, rows, needs, streaming=streaming)
    dataset = load_rows(tmp_path, rows, needs, streaming=streaming, on_bad_row=OnBadRow.skip, shuffle=False)
    bad = [] if streaming else dataset.bad_rows
    cursor = dataset.cursor(0, False, bad.append)
    assert cursor.take(2).numbers.tolist() == ([0, 0])
    assert [str(row).rpartition("rows.jsonl:")[2] for row in bad] == [f"2: {reason}", f"3: {reason}"]


# ---- your own -------------------------------------------------------------------------------------------------------


def test_the_example_plugin(tmp_path: Path) -> None:
    """The file the documentation points to."""
    plugin = PROJECT_ROOT / "docs" / "examples" / "privileged_hint.py"
    rows = [{"prompt": "2 + 3?", "hint": "count on from 2"}, {"prompt": "2 + 4?"}]
    dataset = load_rows(tmp_path, rows, preprocessor=f"{plugin}:add_hint", max_teacher_length=200)
    assert dataset.train.teacher_prompt(1) is None
    assert "count on from 2" in tiny_tokenizer().decode(dataset.train.teacher_prompt(0))


def test_a_function_of_an_installed_module() -> None:
    row = {"prompt": "x"}
    with pytest.raises(ValueError, match="expected a row"):
        load_preprocessor("json.dumps")(row)
    assert load_preprocessor("copy.copy")(row) == row


def test_rows_it_fails_on_are_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def f(row):\n"
        "    row['messages'] = [{'role': 'user', 'content': row.pop('prompt')}]\n"
        "    if row['level'] == 2:\n"
        "        return ['no', 'row']\n"
        "    return row\n"
    )
    rows = [{"prompt": "a", "level": 1}, {"prompt": "b"}, {"prompt": "c", "level": 2}, {"level": 1}]
    name = f"{tmp_path / 'mine.py'}:f"
    dataset = load_rows(tmp_path, rows, preprocessor=name, on_bad_row=OnBadRow.skip)
    assert len(dataset.train) == 1
    assert [str(bad).partition(": ")[2] for bad in dataset.bad_rows] == [
        f"data.preprocessor={name} raised KeyError: 'level', line 3 of {tmp_path / 'mine.py'}",
        f"data.preprocessor={name} gave list ['no', 'row'], expected a row (dict)",
        f"data.preprocessor={name} raised KeyError: 'prompt', line 2 of {tmp_path / 'mine.py'}",
    ]
    where = (
        r"the first is \S*rows\.jsonl:2: data\.preprocessor=\S* raised KeyError: 'level', line 3 of \S*mine\.py; use"
    )
    with pytest.raises(DataError, match=where):
        load_rows(tmp_path, rows[:2], preprocessor=name)


def test_it_cannot_spoil_the_rows_of_the_next_epoch() -> None:
    row = {"prompt": [dict(USER)]}
    load_preprocessor("tests.unit.test_preprocess.spoils")(row)
    assert row == {"prompt": [USER]}


def spoils(row: dict[str, Any]) -> dict[str, Any]:
    row["prompt"][0]["content"] = "spoilt"
    return row


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "opsd_reference_solutions",
            r"doesn't exist; did you mean opsd_reference_solution\?; write opsd_reference_solution, package",
        ),
        ("gone.py:f", "can't be imported: FileNotFoundError: no file gone.py"),
        ("no_such_package.f", "can't be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        ("json.dump_s", r"there is no function dump_s in .*; did you mean dumps\?"),
        ("{}/fine.py:g", r"there is no function g in .*/fine\.py"),
        ("{}/breaks.py:f", r"can't be imported: JSONDecodeError: .*, line 3 of .*/breaks\.py"),
        ("{}/syntax.py:f", r"can't be imported: SyntaxError: .*, line 2 of .*/syntax\.py"),
        ("{}/text.txt:f", r"can't be imported: ImportError: .*/text.txt is no Python file"),
    ],
)
def test_what_is_wrong_with_a_plugin_is_one_line(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "fine.py").write_text("def f(row):\n    return row\n")
    (tmp_path / "breaks.py").write_text("import json\n\nTABLE = json.loads('{')\n")
    (tmp_path / "syntax.py").write_text("import json\ndef f(row:\n")
    (tmp_path / "text.txt").write_text("def f(row):\n    return row\n")
    with pytest.raises(ConfigError, match=message) as caught:
        load_preprocessor(name.format(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", ["import sys\n\ndef f(row):\n    sys.exit(0)\n", "raise SystemExit(0)\n"])
def test_a_function_that_ends_the_process_is_an_error_like_others(body: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(body)
    with pytest.raises((ValueError, ConfigError), match="SystemExit"):
        load_preprocessor(f"{tmp_path}/ends.py:f")({"prompt": "a"})


@pytest.mark.parametrize("name", ["mine.py", "mine.py:", "package.", ":f"])
def test_a_preprocessor_without_a_function(name: str) -> None:
    with pytest.raises(ConfigError, match=r"names no function; write file\.py:function or package\.function"):
        load_preprocessor(name)
