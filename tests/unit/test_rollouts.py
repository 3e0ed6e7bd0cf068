"""What the student wrote, written down and read back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rlhf.loggers.rollouts import FILE, read, recorded
from rlhf.types import Experience, Sequences, offsets_of
from tests.unit.tiny import tiny_tokenizer


def experience(step: int, logprobs: bool = True) -> Experience:
    tokens = tiny_tokenizer()("what is the answer to apples and pears", return_tensors="np")["input_ids"][0]
    half = len(tokens) // 2
    lengths = [half, len(tokens) - half]
    sequences = Sequences(
        sample_ids=np.array([7, 8]) + step,
        tokens=tokens.astype(np.int32),
        offsets=offsets_of(lengths),
        prompt_lengths=np.array([2, 3], dtype=np.int32),
        logprobs=-np.linspace(0.1, 1, len(tokens) - 5).astype(np.float32) if logprobs else None,
    )
    return Experience(step=step, version=step - 1, sequences=sequences, minibatches=())


def test_written_before_training_and_read_back_as_it_was(tmp_path: Path) -> None:
    made = [experience(1), experience(2)]
    for given, passed_on in zip(made, recorded(made, tmp_path, tiny_tokenizer(), print), strict=True):
        assert passed_on is given
        assert len((tmp_path / FILE).read_text().splitlines()) == 2 * given.step
    for step, sequences in read(tmp_path).items():
        expected = made[step - 1].sequences
        for name in ("sample_ids", "tokens", "offsets", "prompt_lengths"):
            assert np.array_equal(getattr(sequences, name), getattr(expected, name)), name
        assert sequences.logprobs is not None and expected.logprobs is not None
        assert np.allclose(sequences.logprobs, expected.logprobs, atol=1e-6)
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert (rows[0]["prompt"] + rows[0]["response"] + rows[1]["prompt"] + rows[1]["response"]).startswith("what is the")


def test_dataset_responses_have_no_logprobs(tmp_path: Path) -> None:
    list(recorded([experience(1, logprobs=False)], tmp_path, tiny_tokenizer(), print))
    assert read(tmp_path)[1].logprobs is None


def test_a_disk_that_is_full_ends_the_list_and_not_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / FILE).mkdir()  # can't be opened, as a full disk can't be written
    assert len(list(recorded([experience(1), experience(2)], tmp_path, tiny_tokenizer(), said.append))) == 2
    assert len(said) == 1 and said[0].startswith("logger.rollouts failed and is off for the rest of the run")


def test_conversations_are_written_turn_by_turn_and_read_back(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    texts = ["what is", "the answer", "step by step", "apples"]
    prompt, first, observation, last = (np.array(tokenizer(text)["input_ids"], dtype=np.int32) for text in texts)
    mask = np.repeat([True, False, True], [len(first), len(observation), len(last)])
    sequences = Sequences.join(
        np.array([3, 4]),
        [prompt, prompt],
        [np.concatenate([first, observation, last]), last],
        [np.zeros(len(first) + len(last), dtype=np.float32), np.ones(len(last), dtype=np.float32)],
        [mask, np.ones(len(last), dtype=bool)],
    )
    list(recorded([Experience(step=1, version=0, sequences=sequences, minibatches=())], tmp_path, tokenizer, print))
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert rows[0]["turns"] == [{"model": texts[1]}, {"environment": texts[2]}, {"model": texts[3]}]
    assert rows[1]["turns"] == [{"model": texts[3]}] and len(rows[0]["logprobs"]) == mask.sum()
    found = read(tmp_path)[1]
    for name, values in vars(sequences).items():
        assert np.array_equal(getattr(found, name), values), name
