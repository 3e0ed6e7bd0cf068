"""What is taken of a teacher's hidden rows as they pass: any split into steps, any order. vLLM isn't needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.backends.vllm.capture import Capture, ScoreCapture, Span, Wanted
from rlhf.backends.vllm.engine import number_of
from rlhf.backends.vllm.setup import ScorerSetup
from rlhf.config.distill import Tail
from rlhf.config.teacher import TeacherEngine
from rlhf.distill.topk import TopKDistill
from rlhf.losses.heads import VocabHead
from rlhf.losses.policy import sampled_logprobs
from rlhf.losses.rows import TopKScores
from tests.unit.tiny import save_tiny_llama

DISTILL = TopKDistill(k=4, tail=Tail.bucket, temperature=0.7)
LENGTHS = {"0": 7, "1": 3, "2": 5}
"""Tokens of each request's prompt."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("capture") / "model", layers=1)


def capture_of(model: Path, head: str | None = "lm_head.weight") -> Capture:
    setup = ScorerSetup(
        model=model,
        engine=TeacherEngine(),
        max_model_len=64,
        distill=DISTILL,
        head=head,
        vocab=512,
        seed=0,
    )
    return Capture(setup, torch.device("cpu"))


@pytest.fixture
def hidden(model: Path) -> dict[str, torch.Tensor]:
    """What the teacher has at each position of each request."""
    width = capture_of(model).head.shape[1]
    return {name: torch.randn(length, width) for name, length in LENGTHS.items()}


WANTED = {
    "0": Wanted(np.array([1, 2, 3, 4, 5, 6]), np.array([9, 8, 7, 6, 5, 4], dtype=np.int32), 7),
    "1": Wanted(np.array([0, 2]), np.array([3, 2], dtype=np.int32), 3),
    "2": Wanted(np.array([4]), np.array([1], dtype=np.int32), 5),
}


def run(
    capture: Capture, hidden: dict[str, torch.Tensor], steps: list[list[tuple[str, int, int]]]
) -> dict[str, object]:
    """Let steps of (request, first position, count) pass -> scores by request."""
    found: dict[str, object] = {}
    for step in steps:
        rows, spans, offset = [], [], 2  # something else comes first
        rows.append(torch.full((2, hidden["0"].shape[1]), torch.nan))
        for name, first, count in step:
            spans.append(Span(name, first, count, offset))
            rows.append(hidden[name][first : first + count])
            offset += count
        capture.passed(torch.cat(rows), spans)
        for requests, scores in capture.take(wait=False):
            start = 0
            for request in requests:
                stop = start + len(WANTED[request].rows)
                found[request] = scores[start:stop] if hasattr(scores, "__getitem__") else scores.logprobs[start:stop]
                start = stop
    return found


STEPS = [
    [[("0", 0, 7), ("1", 0, 3), ("2", 0, 5)]],
    [[("2", 0, 5)], [("1", 0, 3), ("0", 0, 2)], [("0", 2, 4)], [("0", 6, 1)]],
    [[("0", 0, 4), ("2", 0, 3)], [("0", 0, 3)], [("2", 3, 2), ("0", 3, 4), ("1", 0, 3)]],  # "0" was put off
    [[("unknown", 0, 3), ("1", 0, 1)], [("1", 1, 2), ("2", 0, 5), ("0", 0, 7)]],
]


@pytest.mark.parametrize("steps", STEPS)
def test_any_split_gives_the_same_scores(model: Path, hidden: dict[str, torch.Tensor], steps) -> None:
    hidden = hidden | {"unknown": torch.randn(3, hidden["0"].shape[1])}
    capture = capture_of(model)
    assert capture.head is not None
    capture.expect(WANTED, "scores")
    found = run(capture, hidden, steps)
    assert sorted(found) == ["0", "1", "2"]
    for name, scores in found.items():
        assert isinstance(scores, TopKScores)
        expected = DISTILL.score(VocabHead(hidden[name][torch.from_numpy(WANTED[name].rows)], capture.head))
        assert torch.equal(scores.ids, expected.ids)
        torch.testing.assert_close(scores.logprobs, expected.logprobs)
        torch.testing.assert_close(scores.log_normaliser, expected.log_normaliser)
    assert not capture.held and not capture.wanted  # nothing stays


def test_hidden_rows_and_log_probabilities(model: Path, hidden: dict[str, torch.Tensor]) -> None:
    capture = capture_of(model)
    assert capture.head is not None
    capture.expect(WANTED, "hidden")
    for name, scores in run(capture, hidden, STEPS[1]).items():
        assert torch.equal(scores.hidden, hidden[name][torch.from_numpy(WANTED[name].rows)])
    capture.expect(WANTED, "logprobs", 0.7)
    for name, logprobs in run(capture, hidden, STEPS[1]).items():
        head = VocabHead(hidden[name][torch.from_numpy(WANTED[name].rows)], capture.head)
        expected = sampled_logprobs(head, torch.from_numpy(WANTED[name].targets).long(), 0.7)
        torch.testing.assert_close(logprobs, expected)
    without_head = capture_of(model, head=None)
    without_head.expect(WANTED, "scores")
    assert torch.equal(run(without_head, hidden, STEPS[0])["2"].hidden, hidden["2"][4:5])


def test_what_was_left_over_is_forgotten(model: Path, hidden: dict[str, torch.Tensor]) -> None:
    capture = capture_of(model)
    capture.expect(WANTED, "scores")
    assert run(capture, hidden, [[("0", 0, 3)]]) == {}
    capture.expect({"1": WANTED["1"]}, "scores")
    assert list(run(capture, hidden, [[("0", 3, 4), ("1", 0, 3)]])) == ["1"]
    assert not capture.held


def test_an_unknown_model_runner_is_told(model: Path) -> None:
    class Worker(ScoreCapture):
        rank, device, model_runner = 0, torch.device("cpu"), object()

    assert Worker().rlhf_capture(capture_of(model).setup) is None


def test_names() -> None:
    assert number_of("12-a1b2") == "12" and number_of("3") == "3"
