"""`data.streaming=true`: what is read when, in which order, and where a restored cursor goes on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.config.data import FileData, HubData, OnBadRow
from rlhf.data import hub_rows
from rlhf.data.cursor import Cursor, StreamCursor, TableCursor
from rlhf.data.dataset import load
from rlhf.data.raw import RawRows, RowSource
from rlhf.data.rows import BadRow
from rlhf.data.stream import RowStream
from rlhf.errors import DataError
from tests.unit.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def raw(count: int) -> list[Any]:
    return [{"prompt": f"{i} + 1?", "response": str(i + 1), "n": i} for i in range(count)]


def cursor_over(
    rows: list[Any], *, seed: int = 0, shuffle: bool = True, buffer: int = 4, **options: Any
) -> StreamCursor:
    """Over rows in memory that are given out one by one; `read` counts them."""
    spec = FileData(path="x", streaming=True, shuffle_buffer=buffer, on_bad_row=OnBadRow.skip)
    read: list[int] = []

    def reader() -> RawRows:
        for i, row in enumerate(rows):
            read.append(i)
            yield f"x:{i + 1}", row

    stream = RowStream(RowSource("data.path=x", reader), TOKENIZER, spec, skip=options.pop("skip", 0), rows=None)
    cursor = StreamCursor(stream, seed, shuffle, **options)
    cursor.read = read  # type: ignore[attr-defined]
    return cursor


def taken(cursor: Cursor, count: int) -> list[int]:
    draw = cursor.take(count)
    assert len(draw.table) == len(draw.numbers) == count
    return [columns["n"] for columns in draw.table.columns]


def test_rows_are_read_when_they_are_needed() -> None:
    cursor = cursor_over(raw(100), buffer=8)
    assert cursor.read == []  # type: ignore[attr-defined]
    taken(cursor, 3)
    assert len(cursor.read) == 8 + 3  # type: ignore[attr-defined]
    plain = cursor_over(raw(100), shuffle=False)
    assert taken(plain, 3) == [0, 1, 2] and len(plain.read) == 3  # type: ignore[attr-defined]


def test_an_epoch_gives_every_row_once_in_a_new_order() -> None:
    cursor = cursor_over(raw(20), skip=2)
    first, second = taken(cursor, 18), taken(cursor, 18)
    assert sorted(first) == sorted(second) == list(range(2, 20))
    assert first != second and first != sorted(first)
    assert taken(cursor_over(raw(20), skip=2), 18) == first != taken(cursor_over(raw(20), skip=2, seed=1), 18)
    assert taken(cursor_over(raw(3), shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]
    # no row comes before it can be in the buffer, and the buffer does mix
    assert all(n - 2 <= place + 4 for place, n in enumerate(first))
    places = Counter(taken(cursor_over(raw(4), seed=seed, buffer=4), 1)[0] for seed in range(80))
    assert set(places) == {0, 1, 2, 3}


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("before", [0, 1, 5, 9, 10, 24])
def test_a_restored_cursor_goes_on_exactly(shuffle: bool, before: int) -> None:
    rows = [*raw(4), "bad", *raw(11)[4:]]
    cursor = cursor_over(rows, shuffle=shuffle)
    cursor.take(before)
    state = json.loads(json.dumps(cursor.state_dict()))
    assert len(json.dumps(state)) < 300
    restored = cursor_over(rows, shuffle=shuffle)
    restored.take(3)
    restored.load_state_dict(state)
    assert restored.metrics() == cursor.metrics()
    for _ in range(4):
        assert taken(restored, 7) == taken(cursor, 7)
    assert restored.state_dict() == cursor.state_dict()


def test_a_table_cursor_is_restored_too(tmp_path: Path) -> None:
    spec = FileData(path=write(tmp_path, raw(10)))
    table = load(spec, TOKENIZER, 0, 0, False).train
    cursor, restored = TableCursor(table, 3, True), TableCursor(table, 3, True)  # type: ignore[arg-type]
    taken(cursor, 13)
    restored.load_state_dict(json.loads(json.dumps(cursor.state_dict())))
    assert restored.metrics() == {"data/epoch": 1.3}
    assert taken(restored, 9) == taken(cursor, 9)


def test_other_data_or_settings_are_refused_on_resume() -> None:
    state = cursor_over(raw(5)).state_dict()
    for cursor, message in [
        (cursor_over(raw(5), seed=1), r"run\.seed was 0 and is 1 now"),
        (cursor_over(raw(5), shuffle=False), r"data\.shuffle was True and is False now"),
        (cursor_over(raw(5), buffer=5), r"data\.shuffle_buffer was 4 and is 5 now"),
    ]:
        with pytest.raises(DataError, match=message):
            cursor.load_state_dict(state)
    with pytest.raises(DataError, match=r"the data was data\.path=y and is data\.path=x now"):
        cursor_over(raw(5)).load_state_dict({**state, "source": "data.path=y"})
    with pytest.raises(DataError, match=r"data\.path=x has fewer rows than it had"):
        cursor_over(raw(5)).load_state_dict({**state, "drawn": 6})


def test_bad_rows_are_reported_once_and_replaced() -> None:
    reported: list[BadRow] = []
    rows = ["bad", *raw(2), {"prompt": 3}]
    cursor = cursor_over(rows, on_bad_row=reported.append)
    assert sorted(taken(cursor, 6)) == [0, 0, 0, 1, 1, 1]
    assert sorted(row.where for row in reported) == ["x:1", "x:4"] and cursor.metrics()["data/bad_rows"] == 2
    with pytest.raises(DataError, match=r"^data\.path=x: none of its 3 rows can be used$"):
        cursor_over(["bad"] * 3).take(1)


def write(folder: Path, rows: list[Any], name: str = "a.jsonl") -> str:
    file = folder / name
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


def test_files_are_read_through_before_the_run(tmp_path: Path) -> None:
    spec = FileData(path=write(tmp_path, raw(30)), streaming=True)
    dataset = load(spec, TOKENIZER, 0, 4, True)
    assert [columns["n"] for columns in dataset.held_out.columns] == [0, 1, 2, 3]
    assert dataset.train_rows == 26 == dataset.statistics["data/train_rows"]
    whole = load(FileData(path=spec.path), TOKENIZER, 0, 0, False)
    assert dataset.statistics["data/prompt_tokens_mean"] == whole.statistics["data/prompt_tokens_mean"]
    cursor = dataset.cursor(0, True, lambda row: None)
    assert sorted(taken(cursor, 26)) == list(range(4, 30)) and cursor.metrics()["data/epoch"] == 1.0
    draw = cursor.take(1)
    assert draw.table.prompt(0).tolist() == whole.train.prompt(int(draw.numbers[0])).tolist()  # type: ignore[union-attr]

    write(tmp_path, [*raw(30), {"prompt": 3}, "{"])
    with pytest.raises(DataError) as caught:
        load(spec, TOKENIZER, 0, 4, True)
    first, *groups = str(caught.value).splitlines()
    assert first.startswith(f"2 of 32 rows can't be used, the first is {spec.path}:31: ") and len(groups) == 2
    with pytest.raises(
        DataError, match=r"a\.jsonl:3[12]: .*; it was usable before the run: its file must have changed"
    ):
        cursor.take(60)


def test_a_stream_without_enough_rows_is_found_out_before_the_run(tmp_path: Path) -> None:
    rows = [{"prompt": "x"}, *raw(2), "{", "{"]
    skip = OnBadRow.skip
    spec = FileData(path=write(tmp_path, rows), streaming=True, on_bad_row=skip)
    dataset = load(spec, TOKENIZER, 0, 1, True)
    assert [row.where for row in dataset.bad_rows] == [f"{spec.path}:1"] and dataset.train_rows is None
    with pytest.raises(DataError, match=r"no rows to train on besides the first 3, .* left out \(2 x broken JSON"):
        load(spec, TOKENIZER, 0, 2, True)
    with pytest.raises(DataError, match=r"eval\.samples=3, but there are only 2 held-out rows after 3 bad rows"):
        load(spec, TOKENIZER, 0, 3, True)
    with pytest.raises(DataError, match=r"1 of .* held out without the reference response"):
        good = FileData(path=write(tmp_path, rows[:3], "b.jsonl"), streaming=True)
        load(good, TOKENIZER, 0, 1, True)
    own = FileData(path=spec.path, eval_path=write(tmp_path, raw(3), "c.jsonl"), streaming=True, on_bad_row=skip)
    assert taken(load(own, TOKENIZER, 0, 2, True).cursor(0, False, lambda row: None), 0) == []
    assert load(own, TOKENIZER, 0, 2, True).train.skip == 0  # type: ignore[union-attr]


def test_a_hubs_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    stream = datasets.IterableDataset.from_generator(lambda: iter(raw(6)))
    monkeypatch.setattr(hub_rows, "_load", lambda spec, split, what: stream)
    spec = HubData(name="a/b", streaming=True, on_bad_row=OnBadRow.skip)
    dataset = load(spec, TOKENIZER, 0, 1, True)
    cursor = dataset.cursor(0, False, lambda row: None)
    assert taken(cursor, 7) == [1, 2, 3, 4, 5, 1, 2]
    assert np.array_equal(cursor.take(2).numbers, [3, 4])
