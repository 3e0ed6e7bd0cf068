"""An example of an environment: exercises of reasoning-gym, with further tries after a wrong answer.

    python -m rlhf.launch algo=grpo reward=none environment=multi_turn environment.max_turns=3 \
        plugins=[docs/examples/second_try.py] environment.name=second_try environment.options.discount=0.5

The columns `task` and `entry` are those of data=reasoning_gym. What an environment is given and may answer:
docs/environments.md.
"""

from rlhf.environments import Environment, Turn
from rlhf.plugins import register_environment
from rlhf.rewards.verify import solves


@register_environment("second_try")
class SecondTry(Environment):
    """1 for a right answer, times `discount` for each wrong one before it."""

    def __init__(self, discount: float = 0.5) -> None:
        self.worth, self.discount = 1.0, discount

    def reset(self, task: str, entry: dict) -> None:
        self.row = {"task": task, "entry": entry}

    def step(self, response: str) -> Turn:
        if solves(response, self.row):
            return Turn(reward=self.worth, done=True)
        self.worth *= self.discount
        return Turn("That is not right. Look for the mistake, and answer again.")
