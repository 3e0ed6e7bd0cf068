"""Which rewarder a configuration means. A stand-in, replaced by the real one: one dotted function, called in a row."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf.roles.doubles import Done
from rlhf.types import Rewards, Sequences


@dataclass(frozen=True)
class FunctionRewarder:
    """`function(response, columns) -> float` a response."""

    function: Callable[[str, Mapping[str, Any]], float]
    tokenizer: Any

    def score(self, sequences: Sequences, rows: Sequence[Mapping[str, Any]]) -> Done[Rewards]:
        values = []
        for tokens, length, row in zip(sequences.rows(), sequences.prompt_lengths, rows, strict=True):
            values.append(float(self.function(self.tokenizer.decode(tokens[length:], skip_special_tokens=True), row)))
        total = np.array(values, dtype=np.float32)
        return Done(Rewards(total, {"function": total}))


def rewarder_of(run: Any, inputs: Any) -> FunctionRewarder:
    """The rewarder of `reward=functions`."""
    (name,) = run.reward.functions
    if name == "reasoning_gym":
        from rlhf.rewards.verify import solves

        return FunctionRewarder(lambda response, row: float(solves(response, row)), inputs.tokenizer)
    module, _, function = name.rpartition(".")
    return FunctionRewarder(getattr(importlib.import_module(module), function), inputs.tokenizer)
