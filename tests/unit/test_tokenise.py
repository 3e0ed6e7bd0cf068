"""Chat template, truncation, responses: token ids as the tokenizer gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhf.config.data import FileData, Truncation
from rlhf.data import tokenise
from rlhf.data.rows import BadRow, Row
from rlhf.data.tokenise import tokenise_rows
from rlhf.errors import DataError
from tests.unit.tiny import CHAT_TEMPLATE, tiny_tokenizer


def row(index: int, content: str, response: str | None = None, **columns: Any) -> Row:
    return Row(index, f"x:{index}", [{"role": "user", "content": content}], response, columns)


def test_prompts_and_responses() -> None:
    tokenizer = tiny_tokenizer()
    rows = [row(0, "what is 2 + 3", "five", level=1), row(1, "how many apples")]
    table, bad = tokenise_rows(rows, tokenizer, FileData())
    assert bad == [] and len(table) == 2
    for i, content in enumerate(["what is 2 + 3", "how many apples"]):
        text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        assert table.prompt(i).tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    response = table.response(0)
    assert response is not None and table.response(1) is None
    assert response.tolist() == [*tokenizer("five")["input_ids"], tokenizer.eos_token_id]
    assert table.tokens.dtype == table.response_tokens.dtype == np.int32
    assert table.offsets.dtype == table.response_offsets.dtype == np.int64
    assert table.wheres == ("x:0", "x:1") and table.columns == ({"level": 1}, {})
    assert not table.truncated.any()


def test_select_keeps_rows_together() -> None:
    table, _ = tokenise_rows(
        [row(i, "a" * (i + 1), "b" if i else None, n=i) for i in range(4)], tiny_tokenizer(), FileData()
    )
    part = table.select([3, 0])
    assert part.wheres == ("x:3", "x:0") and part.columns == ({"n": 3}, {"n": 0})
    assert part.prompt(0).tolist() == table.prompt(3).tolist() and part.prompt(1).tolist() == table.prompt(0).tolist()
    assert part.response_lengths.tolist() == [2, 0]
    assert len(table.select([])) == 0 and table.select([]).offsets.tolist() == [0]


def test_system_prompt_goes_before_conversations_without_one() -> None:
    tokenizer = tiny_tokenizer()
    own = Row(1, "x:1", [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}], None, {})
    table, _ = tokenise_rows([row(0, "hi"), own], tokenizer, FileData(system_prompt="yours"))
    assert tokenizer.decode(table.prompt(0)).startswith("<|im_start|>system\nyours<|im_end|>\n<|im_start|>user\nhi")
    assert tokenizer.decode(table.prompt(1)).startswith("<|im_start|>system\nmine<|im_end|>\n<|im_start|>user\nhi")


def test_long_prompts() -> None:
    rows = [row(0, "a"), row(1, "xyz " * 40)]
    whole, _ = tokenise_rows(rows, tiny_tokenizer(), FileData())
    tokens = whole.prompt(1)
    table, bad = tokenise_rows(rows, tiny_tokenizer(), FileData(max_length=32))
    assert table.wheres == ("x:0",)
    remedy = "use a larger one, or data.truncation=left"
    assert bad == [BadRow("x:1", f"prompt has {len(tokens)} tokens, data.max_length is 32 ({remedy})")]
    table, bad = tokenise_rows(rows, tiny_tokenizer(), FileData(max_length=32, truncation=Truncation.left))
    assert bad == [] and table.truncated.tolist() == [False, True]
    assert table.prompt(1).tolist() == tokens[-32:].tolist()


def test_the_longest_allowed_prompt_is_whole() -> None:
    length = len(tokenise_rows([row(0, "abc")], tiny_tokenizer(), FileData())[0].tokens)
    for truncation in Truncation:
        table, bad = tokenise_rows(
            [row(0, "abc")], tiny_tokenizer(), FileData(max_length=length, truncation=truncation)
        )
        assert bad == [] and not table.truncated.any() and len(table.tokens) == length


def test_a_refusing_template_costs_only_that_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "BATCH", 2)
    refuse = "{%- if 'no' in messages[0]['content'] -%}{{ raise_exception('not\\nthis') }}{%- endif -%}"
    tokenizer = tiny_tokenizer(chat_template=refuse + CHAT_TEMPLATE)
    table, bad = tokenise_rows(
        [row(0, "a"), row(1, "no"), row(2, "b"), row(3, "no"), row(4, "c")], tokenizer, FileData()
    )
    assert table.wheres == ("x:0", "x:2", "x:4")
    assert bad == [BadRow(f"x:{i}", "the chat template refuses it: not this") for i in (1, 3)]


def test_tokenizer_without_template_or_eos() -> None:
    with pytest.raises(DataError, match="has no chat template"):
        tokenise_rows([row(0, "a")], tiny_tokenizer(chat_template=None), FileData())
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="has no EOS token"):
        tokenise_rows([row(0, "a")], tokenizer, FileData())


def test_no_rows() -> None:
    table, bad = tokenise_rows([], tiny_tokenizer(), FileData())
    assert len(table) == 0 and bad == [] and table.tokens.dtype == np.int32


def test_template_arguments_reach_the_template_and_unknown_ones_are_refused() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if not thinking %}<no>{% endif %}"
    tokenizer = tiny_tokenizer(chat_template=template)
    plain, _ = tokenise_rows([row(0, "abc")], tokenizer, FileData())
    thinking, _ = tokenise_rows([row(0, "abc")], tokenizer, FileData(chat_template_args={"thinking": True}))
    assert tokenizer.decode(plain.tokens) == "abc<no>" and tokenizer.decode(thinking.tokens) == "abc"
    with pytest.raises(DataError, match=r"chat_template_args\.think has no effect: the chat template reads thinking"):
        tokenise_rows([row(0, "abc")], tokenizer, FileData(chat_template_args={"think": True}))
