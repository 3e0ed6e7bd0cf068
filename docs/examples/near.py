"""An example of your own reward function: the nearer the last number of a completion, the better.

    python -m rlhf.launch ... reward=functions plugins=[docs/examples/near.py] reward.functions=[near] \
        reward.options.near.width=5

What a function is given and may return: docs/rewards.md. It reads the column `answer` of the data.
"""

import re

from rlhf.plugins import register_reward


@register_reward("near")
def near(completions: list[str], answer: list[float | None], width: float = 10.0) -> list[float | None]:
    """1 at the answer, falling to 0 at a distance of `width`; None for rows that have no answer."""
    rewards: list[float | None] = []
    for completion, right in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?\d+(?:\.\d+)?", completion)
        if right is None:
            rewards.append(None)
        else:
            rewards.append(max(0.0, 1 - abs(float(numbers[-1]) - right) / width) if numbers else 0.0)
    return rewards
