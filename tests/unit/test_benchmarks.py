"""The benchmarks on tiny sizes: they run, and what the one of the losses measures is right."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import loss


def test_smoke(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["loss", "--smoke", "--no-peers", "--out", str(tmp_path)])
    loss.main()
    record = json.loads((tmp_path / "loss.json").read_text())
    assert record["name"] == "loss" and record["device"] == "cpu" and record["versions"]["torch"]
    for name in ("jsd", "fkl", "rkl"):
        assert record["metrics"][f"{name}_16_24_error"] < 2e-6
        assert record["metrics"][f"{name}_16_24_ms"] > 0
    assert record["metrics"]["topk8_16_ms"] > 0
    assert "jsd_16_24" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "key"),
    [("teacher_scoring", "score_topk64_over_prefill_tiny"), ("transport", "flat_over_prefill")],
)
def test_smoke_of_scoring(name, key, tmp_path):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = json.loads((tmp_path / f"{name}.json").read_text())["metrics"]
    assert metrics[key] > 0.5
