"""`python -m rlhf.data FILE`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlhf.data.__main__ import main
from rlhf.data.survey_report import histogram
from tests.unit.tiny import save_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("checker") / "model", layers=1))


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_lengths_and_bad_rows(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "how many"}, {"prompt": "how many apples", "response": "two"}, {"prompt": 3}, "{broken"]
    rows += [{"prompt": "what is the answer " * 30}] * 3
    file = write(tmp_path / "rows.jsonl", rows)
    assert main([file, "--model", model, "data.max_length=40", "--list", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"data.path={file}", "2 rows can be used, 5 can't"]
    assert lines[2].split() == ["tokens", "rows", "mean", "5", "%", "median", "95", "%", "99", "%", "longest"]
    assert lines[3].split()[:2] == ["prompts", "2"] and lines[4].split()[:2] == ["responses", "1"]
    assert "train.global_batch_samples=16 with responses of rollout.max_new_tokens=128" in lines[-4]
    assert lines[-3].startswith("  3 x prompt has ") and lines[-3].endswith(f"{file}:5,6 ...")
    assert lines[-2].startswith("  1 x prompt is an int") and lines[-1].startswith("  1 x broken JSON")


def test_the_keys_are_the_launchers(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"q": "how many apples " * 9, "a": "two " * 9}, {"q": "how many pears", "a": "x"}]
    file = write(tmp_path / "a=b.jsonl", rows)
    keys = ["data.prompt_column=q", "data.response_column=a", "data.max_length=30", "data.truncation=left"]
    keys += ["eval.max_response_tokens=4", "train.global_batch_samples=8", "train.padding_free=false"]
    keys += [f"data.eval_path='{file}'", "rollout.max_new_tokens=10", "train.micro_batch_tokens=80"]
    assert main([file, "--model", model, *keys]) == 0
    out = capsys.readouterr().out
    assert out.count("2 rows can be used, 0 can't") == 2 and f"data.eval_path={file}" in out
    assert "1 prompts are cut to data.max_length=30 tokens" in out
    assert "1 responses are longer than eval.max_response_tokens=4" in out
    assert "in 4 micro-batches of at most train.micro_batch_tokens=80" in out
    assert main([file, "--model", model, *keys[:4], "train.micro_batch_tokens=40"]) == 0
    assert "no batch can be made: a sample of " in capsys.readouterr().out


def test_what_the_run_needs_of_its_rows(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "how many", "response": "two", "teacher_prompt": "two"}, {"prompt": "how many", "response": "x"}]
    file = write(tmp_path / "rows.jsonl", [*rows, {"prompt": "how many"}])
    assert main([file, "--model", model, "rollout=none", "data.max_response_length=20"]) == 1
    out = capsys.readouterr().out
    assert "2 rows can be used, 1 can't" in out and "1 x no reference response" in out
    assert "1 rows have a teacher_prompt" in out and "with responses of data.max_response_length=20" in out
    assert main([file, "--model", model, "algo=opsd"]) == 1
    assert "2 x no teacher_prompt, which algo=opsd needs" in capsys.readouterr().out
    assert main([file, "--model", model, "algo.lmbda=0.5", "data.preprocessor=opsd_reference_solution"]) == 1
    out = capsys.readouterr().out
    assert "1 x data.preprocessor=opsd_reference_solution raised ValueError: no reference response" in out


def test_a_file_without_rows_fails(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path / "EMPTY.JSONL", [" "]), "--model", model]) == 1
    assert capsys.readouterr().out.endswith("0 rows can be used, 0 can't\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.jsonl"], "data.path=nowhere.jsonl: no such file"),
        (["rows.jsonl", "data.max_lenth=3"], "unknown key data.max_lenth; did you mean data.max_length?"),
        (["rows.jsonl", "data.path=x"], "rows.jsonl and data.path=x both name the rows; keep one"),
        (["hf://a/b", "data=hub"], "hf://a/b and data=hub both name the rows; keep one"),
        (["hf://a", "data.split=x"], "FILE=hf://a is no id of the Hugging Face hub; write FILE=hf://OWNER/NAME"),
        (["data=hub"], "missing value: write data.name=openai/gsm8k"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--model", model]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


def test_histogram() -> None:
    assert histogram(np.array([5])) == ["5-5  1 " + "#" * 40]
    lines = histogram(np.array([1] * 4 + [7] * 2 + [20]))
    assert lines[0] == " 1- 3  4 " + "#" * 40
    assert lines[2] == " 7- 9  2 " + "#" * 20 and lines[1] == " 4- 6  0"
    assert lines[-1] == "19-20  1 " + "#" * 10 and len(lines) == 7
