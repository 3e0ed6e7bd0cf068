"""rlhf: post-training of language models by distillation and reinforcement learning."""

__version__ = "0.1.0"
