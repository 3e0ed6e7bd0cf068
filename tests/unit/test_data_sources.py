"""Readers: files of every kind, the hub's loader, reasoning-gym."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.config.data import HubData, ReasoningGymData
from rlhf.data.exercises import read_reasoning_gym
from rlhf.data.files import read_files
from rlhf.data.hub_rows import read_hub
from rlhf.data.rows import BadRow
from rlhf.errors import DataError


def test_jsonl_keeps_line_numbers(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\n\n  \n{"prompt": }\r\n[1]\n{"x": "\xff"}\n{"prompt": "z"}'
    )
    assert list(read_files(str(file))) == [
        (f"{file}:1", {"prompt": "a\u2028b"}),
        (f"{file}:4", BadRow(f"{file}:4", "broken JSON: Expecting value at column 12")),
        (f"{file}:5", [1]),
        (f"{file}:6", BadRow(f"{file}:6", "not UTF-8: invalid start byte at byte 8")),
        (f"{file}:7", {"prompt": "z"}),
    ]


def test_json_parquet_and_mixed_globs(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "a"}, 3]))
    (tmp_path / "b.jsonl").write_text('{"prompt": "b"}\n')
    rows = [{"messages": [{"role": "user", "content": "c"}], "n": 1}, {"messages": None, "n": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    (tmp_path / "d").mkdir()
    assert list(read_files(f"{tmp_path}/*")) == [
        (f"{tmp_path}/a.json[0]", {"prompt": "a"}),
        (f"{tmp_path}/a.json[1]", 3),
        (f"{tmp_path}/b.jsonl:1", {"prompt": "b"}),
        (f"{tmp_path}/c.parquet[0]", rows[0]),
        (f"{tmp_path}/c.parquet[1]", rows[1]),
    ]


def test_a_file_name_with_brackets_is_no_glob(tmp_path: Path) -> None:
    file = tmp_path / "a[1].jsonl"
    file.write_text('{"prompt": "a"}\n')
    assert [where for where, _ in read_files(str(file))] == [f"{file}:1"]


def test_unusable_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "lines.json").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "object.json").write_text('{"prompt": "a"}')
    (tmp_path / "latin.json").write_bytes(b'["\xff"]')
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "empty").mkdir()
    cases = {
        "absent.jsonl": r"data\.path=.*no such file",
        "*.jsonl": r"data\.path=.*matches none",
        "a.txt": r"a\.txt ends in none of \.jsonl, \.jsonl\.gz, \.json, \.csv, \.parquet",
        "": r"holds \.json and \.parquet files; say which: 'data\.path=.*/\*\.json'",
        "empty": r"is a folder without files that end in \.jsonl",
        "lines.json": r"lines\.json:2: broken JSON: Extra data at column 1; .* end in \.jsonl",
        "object.json": r"object\.json: a \.json file is one array of objects",
        "latin.json": r"latin\.json: not UTF-8",
        "bad.parquet": r"bad\.parquet: not a readable Parquet file",
    }
    for name, message in cases.items():
        with pytest.raises(DataError, match=message) as caught:
            list(read_files(f"{tmp_path}/{name}"))
        assert "data.path" in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"data\.eval_path=x\.jsonl"):
        read_files("x.jsonl", "data.eval_path")


class FakeRows(list[dict[str, Any]]):
    column_names = ("question", "answer", "messages")


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(name: str, subset: str | None, split: str, streaming: bool) -> FakeRows:
        if split == "nosplit":
            raise ValueError("Unknown split\nnosplit")
        assert (name, subset) == ("org/sums", "main")
        return FakeRows([{"question": "2 + 3?", "answer": "5", "messages": "other"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def hub(**options: Any) -> HubData:
    return HubData(name="org/sums", subset="main", **options)


def test_hub_rows_are_given_as_they_are(fake_hub: None) -> None:
    rows = read_hub(hub(), "train")
    assert list(rows) == [("org/sums/train[0]", {"question": "2 + 3?", "answer": "5", "messages": "other"})]


def test_hub_failures_name_the_key(fake_hub: None) -> None:
    with pytest.raises(DataError, match=r"data\.prompt_column=q: .* the columns are question, answer, messages"):
        read_hub(hub(prompt_column="q"), "train")
    with pytest.raises(DataError, match=r"data\.response_column=r: .* the columns are question"):
        read_hub(hub(prompt_column="question", response_column="r"), "train")
    with pytest.raises(
        DataError, match=r"data\.name=org/sums data\.subset=main, split nosplit can't .* Unknown split nos"
    ):
        read_hub(hub(), "nosplit")


def test_hub_without_a_prompt_column(fake_hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRows, "column_names", ("question", "answer"))
    with pytest.raises(DataError, match=r"no column messages or prompt; set data\.prompt_column; .* question, answer"):
        read_hub(hub(), "train")


def test_hub_takes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "train.jsonl").write_text(
        '{"prompt": "a", "response": "b"}\n{"prompt": "c", "response": "d"}\n'
    )
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    spec = HubData(name=str(tmp_path / "sums"))
    assert [row["prompt"] for _, row in read_hub(spec, "train")] == ["a", "c"]
    with pytest.raises(DataError, match="split test can't be loaded"):
        read_hub(spec, "test")


def test_gsm_symbolic_gives_worked_solutions_and_entries() -> None:
    rows = list(read_reasoning_gym(ReasoningGymData(), 4, seed=0))
    import reasoning_gym  # after our reader: the first import warns, and warnings are errors here

    assert [where for where, _ in rows] == [f"gsm_symbolic[{i}]" for i in range(4)]
    assert len({row["prompt"] for _, row in rows}) == 4
    for _, row in rows:
        entry = row["entry"]
        assert row["response"] == entry["metadata"]["answer_cot"] and row["task"] == "gsm_symbolic"
        assert reasoning_gym.get_score_answer_fn(row["task"])(entry["answer"], entry) == 1.0


def test_reasoning_gym_follows_the_seed_and_leaves_global_generators_alone() -> None:
    spec = ReasoningGymData(task="chain_sum", options={"min_terms": 4, "max_terms": 6})
    random.seed(1)
    np.random.seed(1)
    expected = random.Random(1).random(), np.random.RandomState(1).rand()
    first = list(read_reasoning_gym(spec, 20, seed=0))
    assert (random.random(), np.random.rand()) == expected
    assert first == list(read_reasoning_gym(spec, 20, seed=0))
    assert first == list(read_reasoning_gym(spec, 25, seed=0))[:20]
    neighbour = {row["prompt"] for _, row in read_reasoning_gym(spec, 20, seed=1)}
    assert not neighbour & {row["prompt"] for _, row in first}
    assert first[0][1]["response"] == first[0][1]["entry"]["answer"]


def test_reasoning_gym_task_without_answers() -> None:
    (_, row), *_ = read_reasoning_gym(ReasoningGymData(task="graph_color"), 1, seed=0)
    assert row["response"] is None


def test_reasoning_gym_mistakes() -> None:
    cases = [
        (ReasoningGymData(task="gsm_symbolc"), r"data\.task=gsm_symbolc is no task .* close matches: gsm_symbolic"),
        (ReasoningGymData(task="zzzzzzzz"), "there are ab, .*zebra_puzzles"),
        (ReasoningGymData(options={"colour": 1}), r"data\.task=gsm_symbolic doesn't take data\.options=.*colour"),
        (ReasoningGymData(task="chain_sum", options={"min_terms": 9}), "max_terms must be >= min_terms"),
        (ReasoningGymData(options={"seed": 1}), r"data\.options can't set seed; use data\.size and run\.seed"),
    ]
    for spec, message in cases:
        with pytest.raises(DataError, match=message):
            read_reasoning_gym(spec, 2, seed=0)
