"""Environments: what a model talks with over several turns. `from rlhf.environments import Environment, Turn`."""

from rlhf.environments.base import Environment, Turn

__all__ = ["Environment", "Turn"]
