"""Group `rollout`: the engine that samples the student's responses."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf.config.base import (
    refuse_unused,
    require,
    require_at_least,
    require_between,
    require_positive,
    require_temperature,
    written,
)
from rlhf.config.train import DType


@dataclass(kw_only=True)
class VllmRollout:
    """vLLM, one engine process a replica (replicas = gpus / tensor_parallel)."""

    gpus: int = 1
    """Devices of all replicas together."""
    tensor_parallel: int = 1
    """Devices that share one replica; they must be of one node."""
    dtype: DType = DType.float32
    """float32 | bfloat16: the engine's weights and activations."""
    max_new_tokens: int = 128
    """Longest response in tokens."""
    temperature: float = 1.0
    """The sampler's temperature; 0 is greedy. `distill.temperature` is the loss's."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability; 1 keeps all."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Leave out tokens that are less likely than this share of the most likely one; 0 keeps all."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a response, besides the model's own end-of-sequence tokens."""
    stop_tokens: list[str] = field(default_factory=list)
    """The same by name, e.g. `rollout.stop_tokens=["<|endoftext|>"]`: added tokens of the tokenizer, not any text."""
    max_num_seqs: int = 64
    """Most requests the engine works on at once."""
    kv_cache_gb: float = 1.0
    """Key-value cache of one replica in GiB."""
    enforce_eager: bool = True
    """Run the engine without compilation or CUDA graphs."""
    logprob_gap_warning: float | None = None
    """Warn when the mean gap between the engine's and the trainer's log-probabilities exceeds this.
    null: 1e-3 when both are float32, else 0.1; never with placement.max_staleness=1 or algo.steps_per_generation > 1,
    where the weights differ."""

    def __post_init__(self) -> None:
        require_at_least("rollout.gpus", self.gpus, 1)
        require_at_least("rollout.tensor_parallel", self.tensor_parallel, 1)
        require_at_least("rollout.max_new_tokens", self.max_new_tokens, 1)
        require_temperature("rollout.temperature", self.temperature)
        require_between("rollout.top_p", self.top_p, 0, 1)
        require_positive("rollout.top_p", self.top_p)
        require_at_least("rollout.top_k", self.top_k, 0)
        require_between("rollout.min_p", self.min_p, 0, 1)
        if self.temperature == 0:
            why = "with rollout.temperature=0 (greedy)"
            unused = ("top_p", "top_k", "min_p", "logprob_gap_warning")
            refuse_unused(self, "rollout", unused, why, "use rollout.temperature=1")
        for key in ("stop_token_ids", "stop_tokens"):
            listed = list(getattr(self, key))
            require(len(set(listed)) == len(listed), f"rollout.{key}={written(listed)} names one twice; keep one")
        require_at_least("rollout.max_num_seqs", self.max_num_seqs, 1)
        require_positive("rollout.kv_cache_gb", self.kv_cache_gb)
        require(
            self.gpus % self.tensor_parallel == 0,
            f"rollout.gpus={self.gpus} must be divisible by rollout.tensor_parallel={self.tensor_parallel}",
        )
        if not self.whole_distribution:
            why = "when the sampler's distribution is cut: its log-probabilities aren't the model's"
            refuse_unused(
                self, "rollout", ("logprob_gap_warning",), why, "use rollout.top_p=1 rollout.top_k=0 rollout.min_p=0"
            )
        if self.logprob_gap_warning is not None:
            require_positive("rollout.logprob_gap_warning", self.logprob_gap_warning)

    @property
    def whole_distribution(self) -> bool:
        """Whether every token may be sampled: nothing is cut off and the rest raised in its place."""
        return self.top_p == 1 and self.top_k == 0 and self.min_p == 0

    @property
    def comparable_temperature(self) -> float | None:
        """At which the trainer's log-probabilities are those of the sampler; None where it cut its distribution or took
        no sample (greedy)."""
        return self.temperature if self.temperature > 0 and self.whole_distribution else None


@dataclass(kw_only=True)
class NoRollout:
    """No engine: every step trains on the rows' reference responses (off-policy distillation)."""
