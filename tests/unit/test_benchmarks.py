"""The benchmark of the losses on tiny sizes: it runs, and what it measures is right."""

from __future__ import annotations

import json
import sys

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
