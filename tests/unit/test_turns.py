"""How observations are appended: as the chat template would have written them, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.config.data import FileData
from rlhf.config.environment import MultiTurn
from rlhf.data.turns import TurnMarkup, find_markup
from rlhf.errors import ConfigError
from tests.unit.tiny import CHAT_TEMPLATE, tiny_tokenizer

FORGETS = CHAT_TEMPLATE.replace("assistant\n' }}{%- endif", "assistant\n<think>\n\n</think>\n\n' }}{%- endif")
"""As Qwen3's: thinking is asked for, and left out of earlier turns."""
assert FORGETS != CHAT_TEMPLATE


def markup_of(template: str = CHAT_TEMPLATE, stops: tuple[int, ...] = (2,), **keys: Any) -> TurnMarkup:
    arguments = keys.pop("arguments", {})
    environment = MultiTurn(name="a.b", **{"max_observation_tokens": 64, **keys})
    data = FileData(path="rows", chat_template_args=arguments)
    found = find_markup(tiny_tokenizer(chat_template=template), data, environment, stops)
    assert found is not None
    return found


@pytest.mark.parametrize("text", ["try again", "", " spaces \n\n", "Zoë: 日本 <|im_start|>", "3 + 4 = 8?"])
def test_appended_turns_are_those_of_the_template(text: str) -> None:
    """A conversation put together turn by turn has the tokens of one that is rendered at once."""
    markup, tokenizer = markup_of(), tiny_tokenizer()
    messages = [{"role": "user", "content": "what is 3 + 4"}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    for answer in ("the answer is 8", "7"):
        observation, cut = markup.observation(text)
        assert not cut
        tokens = [*tokens, *tokenizer(answer)["input_ids"], markup.end, *observation.tolist()]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokens == whole


@pytest.mark.parametrize("text", ["the answer " * 40, "日本語" * 40, "x" * 300])
def test_a_long_text_loses_its_end(text: str) -> None:
    markup = markup_of(max_observation_tokens=40)
    observation, cut = markup.observation(text)
    written = markup.tokenizer.decode(observation)
    assert cut and 20 < len(observation) <= 40
    kept = written.removeprefix("\n<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    assert kept and text.startswith(kept) and len(kept) < len(text)


def test_a_template_that_forgets_is_refused_unless_told_otherwise() -> None:
    with pytest.raises(ConfigError, match=r"writes the model's earlier turns otherwise .*check_template=false") as said:
        markup_of(FORGETS)
    assert "\n" not in str(said.value)
    markup = markup_of(FORGETS, check_template=False)
    written = markup.tokenizer.decode(markup.observation("no")[0])
    assert written == "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_the_system_prompt_and_arguments_are_the_datas() -> None:
    template = CHAT_TEMPLATE.replace("assistant\n' }}{%- endif", "assistant\n' ~ (mood or '') }}{%- endif")
    markup = markup_of(template, arguments={"mood": "kind "}, check_template=False)
    assert markup.tokenizer.decode(markup.observation("no")[0]).endswith("<|im_start|>assistant\nkind ")


REFUSED = {
    "refuses a conversation of several turns: only one": dict(
        template="{%- if messages|length > 1 -%}{{ raise_exception('only one') }}{%- endif -%}" + CHAT_TEMPLATE
    ),
    "doesn't write each turn of a conversation once": dict(
        template="{{ messages[-1]['content'] }}{%- if add_generation_prompt -%}A:{%- endif -%}"
    ),
    "begins with none of the tokens that end a response": dict(stops=(0,)),
    "environment.max_observation_tokens=12 has no room: the chat template's markup": dict(max_observation_tokens=12),
    "the tokens of a turn depend on the turn before it": dict(
        template="{%- for m in messages -%}{{ m['content'] ~ 'what ' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}A:{%- endif -%}",
        stops=(tiny_tokenizer().convert_tokens_to_ids("w"),),
        check_template=False,
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_continued_is_refused_in_one_line(message: str) -> None:
    with pytest.raises(ConfigError, match=message) as said:
        markup_of(**REFUSED[message])
    assert "\n" not in str(said.value)


def test_one_turn_needs_no_template() -> None:
    one = MultiTurn(name="a.b", max_turns=1)
    assert find_markup(tiny_tokenizer(chat_template=None), FileData(path="rows"), one, (2,)) is None
