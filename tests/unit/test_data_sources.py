"""Readers: files of every kind, the hub's loader, reasoning-gym."""

from __future__ import annotations

import gzip
import json
import logging
import random
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.config.data import HubData, OnBadRow, ReasoningGymData
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
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "lines.json").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "object.json").write_text('{"prompt": "a"}')
    (tmp_path / "latin.json").write_bytes(b'["\xff"]')
    (tmp_path / "bad.parquet").write_text("no parquet")
    twice = pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
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
        "twice.parquet": r"twice\.parquet names a column twice: prompt, prompt",
        "bad.parquet": r"bad\.parquet: not a readable Parquet file",
    }
    for name, message in cases.items():
        with pytest.raises(DataError, match=message) as caught:
            list(read_files(f"{tmp_path}/{name}"))
        assert "data.path" in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"data\.eval_path=x\.jsonl"):
        read_files("x.jsonl", "data.eval_path")


def test_what_json_cannot_hold_is_a_bad_row(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [
        b'{"prompt": "a", "level": ' + b"9" * 5000 + b"}",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"prompt": NaN}',
        b'{"prompt": "a", "level": -Infinity}',
        b'{"prompt": "a\0"}',
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "b\\u0000"}',
    ]
    file.write_bytes(b"\r\n".join(lines))
    *bad, (where, good) = read_files(str(file))
    assert (where, good) == (f"{file}:7", {"prompt": "b\0"})
    assert [row.reason.removeprefix("broken JSON: ") for _, row in bad] == [
        "Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits",
        "nested too deeply",
        "NaN is no JSON value, write null",
        "-Infinity is no JSON value, write null",
        "Invalid control character at at column 14",
        "it names 'prompt' twice",
    ]
    for line, reason in zip(
        lines[:3], ("Exceeds the limit .* 5000 digits$", "nested too deeply", "NaN is no"), strict=True
    ):
        (tmp_path / "b.json").write_bytes(b"[" + line + b"]")
        with pytest.raises(DataError, match=f"broken JSON: {reason}"):
            list(read_files(f"{tmp_path}/b.json"))


def test_gzip_and_csv(tmp_path: Path) -> None:
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"prompt": "a"}\n{'))
    assert [where for where, _ in read_files(str(packed))] == [f"{packed}:1", f"{packed}:2"]
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(DataError, match=r"data\.path: .*a\.jsonl\.gz can't be read"):
        list(read_files(str(packed)))
    table = tmp_path / "a.csv"
    long = "x" * 200_000
    table.write_text(f'\ufeffprompt,response\n"two\nlines",b\n\nc,\nd\n{long},e\n')
    assert list(read_files(str(table))) == [
        (f"{table}:3", {"prompt": "two\nlines", "response": "b"}),
        (f"{table}:5", {"prompt": "c", "response": None}),
        (f"{table}:6", BadRow(f"{table}:6", "1 values, the header has 2 columns")),
        (f"{table}:7", {"prompt": long, "response": "e"}),
    ]
    for text, message in [('a,b\n"x"y,z\n', r"a\.csv:2: broken CSV"), ("a,a\n1,2\n", "names a column twice: a, a")]:
        table.write_text(text)
        with pytest.raises(DataError, match=message):
            list(read_files(str(table)))


def test_folders(tmp_path: Path) -> None:
    import datasets

    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    (tmp_path / "README.md").write_text("about")
    assert [row["prompt"] for _, row in read_files(str(tmp_path))] == ["a", "b"]
    rows = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    rows.save_to_disk(str(tmp_path / "one"))
    source = read_files(f"{tmp_path}/one", streaming=True)
    assert list(source) == list(source) == [(f"{tmp_path}/one[{i}]", {"prompt": "ab"[i]}) for i in range(2)]
    datasets.DatasetDict(test=rows, train=rows).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(DataError, match=r"data\.path=.*two holds the splits test, train; name one, e\.g\. .*two/test"):
        read_files(f"{tmp_path}/two")
    (tmp_path / "one" / "data-00000-of-00001.arrow").write_text("x")
    with pytest.raises(DataError, match=r"data\.path: .*one can't be loaded: "):
        list(read_files(f"{tmp_path}/one"))


def test_files_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n")
    with pytest.raises(DataError, match=r"data\.path=/dev/null is no regular file"):
        read_files("/dev/null")
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(DataError, match=r"a\.json is one array, which can't be streamed; use \.jsonl"):
        read_files(f"{tmp_path}/a.json", streaming=True)

    def refuse(self: Path, *args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # tests may run as root, who is refused nothing
    with pytest.raises(DataError, match=r"^data\.path: .*a\.jsonl can't be read: .*Permission denied"):
        list(read_files(str(file)))


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


def test_hub_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load_dataset(name: str, subset: str | None, **options: Any) -> FakeRows:
        asked.append((name, subset, options))
        return FakeRows([{"question": "a", "answer": "b", "messages": "c"}])

    def load(name: str, **options: Any) -> Any:
        asked.append((name, options))
        return types.SimpleNamespace(ds_instance=FakeRows([{"prompt": "from ms"}]))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    modelscope = types.SimpleNamespace(MsDataset=types.SimpleNamespace(load=load))
    spec = HubData(name="ms://org/sums", subset="main", prompt_column="question")
    with pytest.raises(DataError, match=r"data\.name=ms://org/sums .* needs the package modelscope: pip install mod"):
        read_hub(spec, "train")
    monkeypatch.setitem(sys.modules, "modelscope", types.SimpleNamespace(msdatasets=modelscope))
    monkeypatch.setitem(sys.modules, "modelscope.msdatasets", modelscope)
    assert list(read_hub(spec, "train")) == [("ms://org/sums/train[0]", {"prompt": "from ms"})]
    read_hub(HubData(name="hf://org/sums", streaming=True, on_bad_row=OnBadRow.skip), "test")
    assert asked == [
        ("org/sums", {"subset_name": "main", "split": "train", "use_streaming": False}),
        ("org/sums", None, {"split": "test", "streaming": True}),
    ]


def test_a_hub_that_is_away_is_one_line_without_retries(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import datasets

    def load_dataset(*args: Any, **options: Any) -> Any:
        for name in ("huggingface_hub.utils._http", "datasets.load"):
            logging.getLogger(name).warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("Couldn't reach\nthe Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    level = logging.getLogger("huggingface_hub").level
    with pytest.raises(DataError, match=r"^data\.name=a/b, split train can't .*Error: .*`hf download a/b --repo"):
        read_hub(HubData(name="a/b"), "train")
    assert caplog.records == [] and logging.getLogger("huggingface_hub").level == level


def test_a_stream_tells_its_columns_with_its_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    stream = datasets.IterableDataset.from_generator(lambda: iter([{"question": "a"}, {"question": "b"}]))
    assert stream.column_names is None
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: stream)
    spec = HubData(name="a/b", streaming=True, on_bad_row=OnBadRow.skip, prompt_column="question")
    assert [row["question"] for _, row in read_hub(spec, "train")] == ["a", "b"]
    spec.prompt_column = None
    with pytest.raises(DataError, match=r"set data\.prompt_column; the columns are question"):
        read_hub(spec, "train")


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
