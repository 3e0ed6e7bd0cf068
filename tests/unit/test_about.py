"""`--help KEY`: the page of the configuration in a terminal."""

from __future__ import annotations

import pytest

from rlhf.config.about import _entries, about, words_of
from rlhf.errors import ConfigError


def test_a_key_with_its_options_default_and_meaning() -> None:
    first, *meaning = about(["distill.k"]).splitlines()
    assert first == "distill.k   int, default 64   (distill=topk)"
    assert " ".join(line.strip() for line in meaning).startswith("Tokens kept a position")
    assert "(distill=topk or distill=fullvocab)" in about(["distill.temperature"])


def test_choices_are_explained() -> None:
    text = about(["distill.tail"])
    assert "bucket: One more outcome" in text and "drop: The k terms" in text and "`" not in text


def test_the_last_part_of_a_key_and_a_whole_group_will_do() -> None:
    assert {line.split()[0] for line in about(["temperature"]).splitlines() if not line.startswith(" ") and line} == {
        "rollout.temperature",
        "distill.temperature",
        "teacher.generation.temperature",
    }
    assert "placement.max_staleness" in about(["placement"])
    assert about(["run.steps", "distill.k"]).count("default") >= 2


def test_the_names_of_other_trainers() -> None:
    first, _, second, *_ = about(["learning_rate"]).splitlines()
    assert first == "learning_rate: here it is train.lr" and second.startswith("train.lr   float, default 1e-05")
    assert "algo.clip_high   float" in about(["epsilon_high"])
    assert "placement.max_staleness" in about(["vllm_mode"])
    text = about(["beta"])
    assert text.startswith("algo.beta ") and "\nbeta with algo=grpo: here it is algo.kl_coef\n" in text


def test_a_word_that_names_nothing() -> None:
    with pytest.raises(ConfigError, match=r"--help distil\.k: .* did you mean distill\.k\?"):
        about(["distil.k"])
    with pytest.raises(ConfigError, match=r"docs/configuration\.md"):
        about(["xyzzyq"])


def test_every_key_of_the_page_is_found() -> None:
    for entry in _entries():
        assert entry.meaning and entry.key in about([entry.key])


def test_only_what_is_asked() -> None:
    assert words_of(["distill=topk", "--help"]) == []
    assert words_of(["distill.k"]) == []
    assert words_of(["--help", "distill.k", "run.steps=3"]) == ["distill.k"]
