"""`python -m rlhf.data FILE`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf.data.__main__ import main
from tests.unit.tiny import save_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("checker") / "model", layers=1))


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_lengths_and_bad_rows(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "how many"}, {"prompt": "how many apples", "response": "two"}, {"prompt": 3}, "{broken"]
    rows += [{"prompt": "what is the answer " * 30}]
    file = write(tmp_path / "rows.jsonl", rows)
    assert main([file, "--model", model, "--max-length", "40", "--list", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 rows can be used, 3 can't"
    assert lines[1].split() == ["tokens", "rows", "mean", "median", "95", "%", "longest"]
    assert lines[2].split()[:2] == ["prompts", "2"] and lines[3].split()[:2] == ["responses", "1"]
    assert f"{file}:3: prompt is an int" in lines[4] and f"{file}:4: broken JSON" in lines[5]
    assert lines[6] == "  ... and 1 more (--list N)"


def test_a_good_file(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path / "rows.jsonl", [{"prompt": "how many"}]), "--model", model]) == 0
    out = capsys.readouterr().out
    assert "1 rows can be used, 0 can't" in out and out.splitlines()[3].split() == ["responses", "0"]


def test_a_missing_file_is_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere.jsonl", "--model", model]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "nowhere.jsonl" in line
