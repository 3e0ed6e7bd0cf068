"""Split into training and held-out rows, bad rows, and everything that can be wrong with either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.data import FileData, HubData, OnBadRow, ReasoningGymData, Truncation
from rlhf.data.dataset import Dataset, load
from rlhf.data.raw import RowSource
from rlhf.errors import DataError
from tests.unit.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def write(file: Path, rows: list[Any]) -> str:
    """Rows as JSONL; a string is written as it is."""
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


def sums(count: int, start: int = 0) -> list[Any]:
    return [{"prompt": f"{i} + 1?", "response": str(i + 1), "n": i} for i in range(start, start + count)]


def numbers(dataset: Dataset) -> tuple[list[int], list[int]]:
    return [c["n"] for c in dataset.train.columns], [c["n"] for c in dataset.held_out.columns]


def test_the_last_rows_are_held_out(tmp_path: Path, tokenizer: Any) -> None:
    dataset = load(FileData(path=write(tmp_path / "a.jsonl", sums(10))), tokenizer, 0, 3, True)
    assert numbers(dataset) == ([0, 1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert dataset.bad_rows == []
    assert dataset.statistics["data/train_rows"] == 7 and dataset.statistics["data/held_out_rows"] == 3
    assert dataset.statistics["data/prompt_tokens_max"] >= dataset.statistics["data/prompt_tokens_mean"] > 0


def test_eval_path_gives_its_first_rows(tmp_path: Path, tokenizer: Any) -> None:
    spec = FileData(path=write(tmp_path / "a.jsonl", sums(4)), eval_path=write(tmp_path / "b.jsonl", sums(3, start=3)))
    dataset = load(spec, tokenizer, 0, 2, True)
    assert numbers(dataset) == ([0, 1, 2, 3], [3, 4])
    assert dataset.statistics["data/held_out_rows_also_in_train"] == 1
    with pytest.raises(DataError, match=r"eval\.samples=4, but there are only 3 held-out rows; use eval\.samples=3"):
        load(spec, tokenizer, 0, 4, True)
    assert len(load(spec, tokenizer, 0, 0, True).held_out) == 0


def test_without_evaluation_nothing_is_held_out(tmp_path: Path, tokenizer: Any) -> None:
    dataset = load(FileData(path=write(tmp_path / "a.jsonl", sums(2))), tokenizer, 0, 0, True)
    assert numbers(dataset) == ([0, 1], [])


def test_too_few_rows(tmp_path: Path, tokenizer: Any) -> None:
    spec = FileData(path=write(tmp_path / "a.jsonl", sums(3)))
    with pytest.raises(
        DataError, match=r"has 3 rows: holding out eval\.samples=3 .* use a smaller eval\.samples \(0: no"
    ):
        load(spec, tokenizer, 0, 3, True)
    with pytest.raises(DataError, match="no rows to train on"):
        load(FileData(path=write(tmp_path / "empty.jsonl", [])), tokenizer, 0, 0, True)


def test_bad_rows_stop_the_run_and_are_listed(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.jsonl", ["{", *sums(3), {"prompt": "x " * 100}, {"prompt": 3}])
    with pytest.raises(DataError) as caught:
        load(FileData(path=file, max_length=64), tokenizer, 0, 1, True)
    first, *rows = str(caught.value).splitlines()
    assert first.startswith(f"3 of 6 rows can't be used, the first is {file}:1: broken JSON")
    assert "use data.on_bad_row=skip to leave them out" in first
    assert [row.rpartition(": ")[2] for row in rows] == [f"{file}:1", f"{file}:5", f"{file}:6"]
    assert rows[0].startswith("  1 x broken JSON") and "tokens, data.max_length is 64" in rows[1]
    assert rows[2].startswith("  1 x prompt is an int, expected a string or a list of messages")


def test_one_bad_row_is_one_line_and_many_are_cut(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError) as caught:
        load(FileData(path=write(tmp_path / "a.jsonl", [{}, *sums(3)])), tokenizer, 0, 1, True)
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(DataError) as caught:
        load(FileData(path=write(tmp_path / "a.jsonl", [{}] * 30)), tokenizer, 0, 1, True)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 and lines[0].startswith("30 of 30 rows")
    assert lines[1].startswith("  30 x no 'messages' or 'prompt'") and lines[1].endswith("a.jsonl:1,2,3,4,5 ...")


def test_bad_rows_can_be_skipped_and_are_reported(tmp_path: Path, tokenizer: Any) -> None:
    spec = FileData(
        path=write(tmp_path / "a.jsonl", [{"prompt": 3}, *sums(3)]),
        eval_path=write(tmp_path / "b.jsonl", ["{", *sums(1)]),
        on_bad_row=OnBadRow.skip,
    )
    dataset = load(spec, tokenizer, 0, 1, True)
    assert [row.where for row in dataset.bad_rows] == [f"{spec.path}:1", f"{spec.eval_path}:1"]
    assert dataset.statistics["data/bad_rows"] == 2 and len(dataset.train) == 3
    nothing = FileData(path=write(tmp_path / "c.jsonl", [{}]), on_bad_row=OnBadRow.skip)
    with pytest.raises(DataError, match="no rows to train on after 1 bad row was left out"):
        load(nothing, tokenizer, 0, 0, True)


def test_truncated_rows_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.jsonl", [*sums(2), {"prompt": "x " * 100, "n": 2}])
    dataset = load(FileData(path=file, max_length=64, truncation=Truncation.left), tokenizer, 0, 1, False)
    assert dataset.statistics["data/truncated_rows"] == 1 and dataset.statistics["data/prompt_tokens_max"] == 64


def test_held_out_rows_need_responses_only_where_asked(tmp_path: Path, tokenizer: Any) -> None:
    spec = FileData(path=write(tmp_path / "a.jsonl", [*sums(2), {"prompt": "x", "n": 2}]))
    with pytest.raises(
        DataError, match=r"1 of 2 held-out rows have no .* first is .*a\.jsonl:3; use eval\.responses=student"
    ):
        load(spec, tokenizer, 0, 2, True)
    assert len(load(spec, tokenizer, 0, 2, False).held_out) == 2


def test_reasoning_gym_never_shares_rows(tokenizer: Any) -> None:
    spec = ReasoningGymData(size=30)
    dataset = load(spec, tokenizer, 7, 8, True)
    assert len(dataset.train) == 30 and len(dataset.held_out) == 8
    assert not set(dataset.train.wheres) & set(dataset.held_out.wheres)
    assert dataset.statistics["data/held_out_rows_also_in_train"] == 0
    assert dataset.train.columns[0]["task"] == "gsm_symbolic" and "answer" in dataset.train.columns[0]["entry"]
    again = load(spec, tokenizer, 7, 8, True)
    assert again.train.tokens.tolist() == dataset.train.tokens.tolist()
    assert again.held_out.response_tokens.tolist() == dataset.held_out.response_tokens.tolist()


def test_hub_splits(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"train": sums(3), "test": sums(2, start=5)}
    monkeypatch.setattr(
        "rlhf.data.dataset.read_hub",
        lambda spec, split: RowSource(split, lambda: ((f"{split}[{i}]", row) for i, row in enumerate(rows[split]))),
    )
    assert numbers(load(HubData(name="x", eval_split="test"), tokenizer, 0, 1, True)) == ([0, 1, 2], [5])
    assert numbers(load(HubData(name="x"), tokenizer, 0, 1, True)) == ([0, 1], [2])


def test_held_out_rows_without_response_are_passed_over_under_skip(tmp_path: Path, tokenizer: Any) -> None:
    rows = [*sums(3), {"prompt": "x", "n": 3}, *sums(1, start=4)]
    skip = OnBadRow.skip
    one = load(FileData(path=write(tmp_path / "a.jsonl", rows), on_bad_row=skip), tokenizer, 0, 2, True)
    assert numbers(one) == ([0, 1, 3], [2, 4]) and one.bad_rows == []  # still good to train on
    own = FileData(path=write(tmp_path / "b.jsonl", sums(2)), eval_path=str(tmp_path / "a.jsonl"), on_bad_row=skip)
    two = load(own, tokenizer, 0, 4, True)
    assert numbers(two) == ([0, 1], [0, 1, 2, 4])
    assert [str(row) for row in two.bad_rows] == [
        f"{tmp_path}/a.jsonl:4: held out without the reference response that eval.responses=dataset needs"
    ]
    assert two.statistics["data/bad_rows"] == 1
    with pytest.raises(DataError, match=r"only 0 rows have the reference .*; use eval\.samples=0, or eval\.responses"):
        load(FileData(path=write(tmp_path / "c.jsonl", [{"prompt": "x"}] * 3), on_bad_row=skip), tokenizer, 0, 2, True)


@pytest.mark.parametrize("on_bad_row", list(OnBadRow))
@pytest.mark.parametrize("streaming", [False, True])
def test_a_template_that_refuses_every_row_is_named_once(
    on_bad_row: OnBadRow, streaming: bool, tmp_path: Path, tokenizer: Any
) -> None:
    broken = tiny_tokenizer(chat_template="{{ raise_exception('tools are needed') }}{{ messages }}")
    broken.name_or_path = "my-model"
    spec = FileData(path=write(tmp_path / "a.jsonl", sums(3)), on_bad_row=on_bad_row, streaming=streaming)
    with pytest.raises(DataError) as caught:
        load(spec, broken, 0, 2, True)
    assert str(caught.value).startswith(
        "the chat template of my-model refuses every row (3 of 3): tools are needed; mend the template"
    )
    assert "\n" not in str(caught.value)


def test_columns_of_ones_own_files(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1), "n": i} for i in range(3)]
    file = write(tmp_path / "a.jsonl", rows)
    dataset = load(FileData(path=file, prompt_column="question", response_column="answer"), tokenizer, 0, 1, True)
    assert numbers(dataset) == ([0, 1], [2]) and dataset.train.columns[0] == {"n": 0}
    with pytest.raises(DataError, match=r"3 of 3 .* has the columns question, answer, n \(map one with data\.prompt_"):
        load(FileData(path=file), tokenizer, 0, 1, True)


def test_rows_that_are_all_unusable_are_not_to_be_skipped(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": 1}, {"prompt": 2}])
    with pytest.raises(DataError, match="2 of 2 rows") as refused:
        load(FileData(path=file), tokenizer, 0, 0, True)
    assert "skip" not in str(refused.value)
