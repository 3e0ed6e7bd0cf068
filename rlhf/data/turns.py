"""How a chat template goes on after a turn of the model, as token ids to append to those the model wrote.

The model's tokens are never encoded again: `...<|im_start|>assistant\\n` + (model) `no idea<|im_end|>` + (appended)
`\\n<|im_start|>user\\nTry again.<|im_end|>\\n<|im_start|>assistant\\n` + (model) ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32

from rlhf.config.data import DataCommon
from rlhf.config.environment import MultiTurn
from rlhf.data.tokenise import tokenizer_name, with_system_prompt
from rlhf.errors import ConfigError, one_line

QUESTION, ANSWER, OBSERVATION = "The question, Q-1?", "The answer, A-2!", "The observation, O-3."
"""Texts that no template has of its own."""
LEAST_TOKENS = 8
"""An observation has room for, besides its markup: enough for any character."""


@dataclass(frozen=True)
class TurnMarkup:
    """Appends observations to conversations."""

    tokenizer: Any
    spec: DataCommon
    head: str
    """The rendered conversation up to and with the end of the model's turn."""
    end: int
    """The token with which the template ends a turn of the model. A turn that ends otherwise can't be continued."""
    limit: int
    """Most tokens of an observation, markup included."""

    def observation(self, text: str) -> tuple[Int32[np.ndarray, " o"], bool]:
        """What follows `end`: the user's turn, and the header of the model's next one; and whether the text had to be
        cut at its end to fit."""
        kept = text
        ids = self._encoded(kept)
        while len(ids) > self.limit and len(kept) > 1:
            kept = kept[: max(1, min(len(kept) - 1, len(kept) * self.limit // len(ids)))]
            ids = self._encoded(kept)
        return np.asarray(ids, dtype=np.int32), len(kept) < len(text)

    def _encoded(self, text: str) -> list[int]:
        rendered = render(self.tokenizer, self.spec, observation=text)
        if not rendered.startswith(self.head):
            raise ConfigError(
                f"{_template(self.tokenizer)} writes the turns before an observation otherwise because of it "
                f"({one_line(text)[:60]!r}); {REMEDY}"
            )
        return encode(self.tokenizer, rendered[len(self.head) :])


REMEDY = "use a model whose template appends turns to a conversation, or environment=none"


def find_markup(
    tokenizer: Any, spec: DataCommon, environment: MultiTurn, stop_token_ids: Sequence[int]
) -> TurnMarkup | None:
    """What the chat template says; None where no turn is followed by another.

    Raises:
        ConfigError: turns can't be appended, or `environment.max_observation_tokens` has no room for the markup.
    """
    if environment.max_turns == 1:
        return None
    template = _template(tokenizer)
    try:
        asked = render(tokenizer, spec)
        rendered = render(tokenizer, spec, observation=OBSERVATION)
    except Exception as error:  # templates raise whatever their Jinja code raises
        raise ConfigError(f"{template} refuses a conversation of several turns: {one_line(error)[:200]}") from error
    if rendered.count(ANSWER) != 1 or rendered.count(OBSERVATION) != 1:
        raise ConfigError(f"{template} doesn't write each turn of a conversation once; {REMEDY}")
    answered = rendered.index(ANSWER) + len(ANSWER)
    if environment.check_template and rendered[:answered] != asked + ANSWER:
        shown = one_line(rendered[len(_shared(asked, rendered)) : answered])[:60]
        raise ConfigError(
            f"{template} writes the model's earlier turns otherwise than it asked for them ({shown!r}); "
            "environment.check_template=false appends turns to what the model wrote all the same"
        )
    after = rendered[answered:]
    ends = {token: tokenizer.decode([token]) for token in stop_token_ids}
    fitting = [token for token, text in ends.items() if text and after.startswith(text)]
    if not fitting:
        raise ConfigError(
            f"{template} ends a turn of the model with {one_line(after[: after.index(OBSERVATION)])[:60]!r}, which "
            f"begins with none of the tokens that end a response ({', '.join(map(repr, ends.values()))}); name its "
            "token in rollout.stop_tokens"
        )
    end = max(fitting, key=lambda token: len(ends[token]))
    markup = TurnMarkup(tokenizer, spec, rendered[: answered + len(ends[end])], end, environment.max_observation_tokens)
    whole, appended = encode(tokenizer, rendered), encode(tokenizer, rendered[len(markup.head) :])
    if whole[-len(appended) - 1 :] != [end, *appended]:
        raise ConfigError(f"{template}: the tokens of a turn depend on the turn before it; {REMEDY}")
    around = len(encode(tokenizer, render(tokenizer, spec, observation="x")[len(markup.head) :])) - 1
    if environment.max_observation_tokens < around + LEAST_TOKENS:
        raise ConfigError(
            f"environment.max_observation_tokens={environment.max_observation_tokens} has no room: the chat template's "
            f"markup around an observation takes {around} tokens; use at least {around + LEAST_TOKENS}"
        )
    return markup


def render(tokenizer: Any, spec: DataCommon, observation: str | None = None) -> str:
    """A question; with an observation also an answer before it. The header of the model's next turn is at the end."""
    messages = [{"role": "user", "content": QUESTION}]
    if observation is not None:
        messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": observation}]
    return str(
        tokenizer.apply_chat_template(
            with_system_prompt(messages, spec.system_prompt),
            add_generation_prompt=True,
            tokenize=False,
            **spec.chat_template_args,
        )
    )


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _template(tokenizer: Any) -> str:
    return f"environment=multi_turn: the chat template of {tokenizer_name(tokenizer)}"


def _shared(a: str, b: str) -> str:
    """The longest common beginning."""
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]
