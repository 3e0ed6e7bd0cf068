"""Loading tokenizers, comparing two, and stop tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.errors import ConfigError, ModelError
from rlhf.tokenizers import check_same_tokens, extra_stop_token_ids, load_tokenizer, stop_token_ids
from tests.unit.tiny import tiny_tokenizer


def saved(folder: Path, tokenizer: Any = None) -> Path:
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def test_load(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved(tmp_path / "a"))
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    assert tokenizer.chat_template and tokenizer.eos_token == "<|im_end|>"


def test_load_failures(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty has no tokenizer; copy"):
        load_tokenizer(tmp_path / "empty")
    (saved(tmp_path / "broken") / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"the tokenizer in .*broken can't be loaded") as caught:
        load_tokenizer(tmp_path / "broken")
    assert "\n" not in str(caught.value)


def test_same_tokens_pass(tmp_path: Path) -> None:
    student = saved(tmp_path / "a")
    check_same_tokens(student, student)
    check_same_tokens(student, saved(tmp_path / "b", tiny_tokenizer(chat_template="other")))


def test_other_merges_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"id \d+: '\S+' vs '\S+', id .*, id .* and \d+ more; choose a teacher\.model"):
        check_same_tokens(saved(tmp_path / "a"), saved(tmp_path / "b", tiny_tokenizer(seed=1)))


def test_other_sizes_are_named(tmp_path: Path) -> None:
    larger = tiny_tokenizer()
    larger.add_tokens(["<|tool|>"], special_tokens=True)
    with pytest.raises(
        ModelError, match=r"differ: 512 vs 513 tokens, id 512: None vs '<\|tool\|>', special token 512: N"
    ):
        check_same_tokens(saved(tmp_path / "a"), saved(tmp_path / "b", larger))


def test_other_eos_is_named(tmp_path: Path) -> None:
    other = tiny_tokenizer()
    other.eos_token = "<|endoftext|>"
    with pytest.raises(ModelError, match=r"EOS '<\|im_end\|>' \(id 2\) vs '<\|endoftext\|>' \(id 0\)"):
        check_same_tokens(saved(tmp_path / "a"), saved(tmp_path / "b", other))


def test_stop_token_ids(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    assert stop_token_ids(tmp_path, tokenizer, 512) == (2,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert stop_token_ids(tmp_path, tokenizer, 512) == (0, 2, 7)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    tokenizer.eos_token = None
    assert stop_token_ids(tmp_path, tokenizer, 512) == (0, 2)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": "2"}))
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id is '2', expected a token id"):
        stop_token_ids(tmp_path, tokenizer, 512)
    for outside in (512, -1):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, outside]}))
        with pytest.raises(ModelError, match=rf"eos_token_id {outside} is no token of the model, .* 0 to 511"):
            stop_token_ids(tmp_path, tokenizer, 512)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"generation_config\.json holds a list, expected an object"):
        stop_token_ids(tmp_path, tokenizer, 512)


def test_extra_stop_tokens() -> None:
    tokenizer = tiny_tokenizer()
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|endoftext|>"])
    assert extra_stop_token_ids(tokenizer, [start, 300], ["<|endoftext|>"]) == tuple(sorted({start, end, 300}))
    assert extra_stop_token_ids(tokenizer, [], []) == ()
    size = len(tokenizer)
    for wrong in (size, -1):
        with pytest.raises(ConfigError, match=rf"stop_token_ids names {wrong}; .* 0 to {size - 1}$"):
            extra_stop_token_ids(tokenizer, [start, wrong], [])
    for text in ("what", "<|im_start|>user", ""):  # "what" is one token, but not wherever it stands
        with pytest.raises(ConfigError, match=r"stop_tokens names '.*', which is no added token .* <pad>, "):
            extra_stop_token_ids(tokenizer, [], [text])
