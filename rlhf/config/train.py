"""Group `train`: Megatron layout, optimizer and batches."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rlhf.config.base import (
    refuse_unused,
    require,
    require_at_least,
    require_below,
    require_between,
    require_positive,
)


class DType(Enum):
    """Number format of a model's weights and activations."""

    float32 = "float32"
    """Four bytes a number."""
    bfloat16 = "bfloat16"
    """Two bytes a number: half the memory, about three significant digits."""


class LRSchedule(Enum):
    """How the learning rate falls after the warm-up."""

    constant = "constant"
    """It doesn't."""
    linear = "linear"
    """Along a line to `train.min_lr`."""
    cosine = "cosine"
    """Along half a cosine to `train.min_lr` (arXiv 1608.03983)."""
    wsd = "wsd"
    """Warm-up, stable, decay (arXiv 2404.06395): constant, then along a line over the last `train.decay_steps`."""


@dataclass(kw_only=True)
class Train:
    """The trainer."""

    gpus: int = 1
    """Devices, one trainer process each. On CPU a device is one process."""
    tensor_parallel: int = 1
    """Devices that share one copy of the model."""
    sequence_parallel: bool | None = None
    """Shard activations between tensor-parallel devices along the sequence, too; needed by padding_free with
    tensor_parallel > 1. null: there it is on, else off."""
    distributed_optimizer: bool = False
    """Shard optimizer states and gradient sums over data-parallel devices (ZeRO-1); same result."""
    dtype: DType = DType.float32
    """float32 | bfloat16: student and colocated teacher."""
    global_batch_samples: int = 16
    """Samples (prompt + response) in one optimizer step, over all devices; under algo=grpo so many responses, to
    1/`algo.num_generations` as many prompts."""
    micro_batch_tokens: int = 4096
    """Most tokens in one forward pass of one device; bounds memory, changes no result."""
    padding_free: bool = True
    """Pack a micro-batch into one sequence without padding. False pads rows to the longest; same result."""
    lr: float = 1e-5
    """Highest learning rate, reached after the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    lr_schedule: LRSchedule = LRSchedule.constant
    """constant | linear | cosine | wsd: how the learning rate falls after the warm-up, over the whole run."""
    min_lr: float = 0.0
    """Where the schedule ends, one step after the last; not used by constant."""
    decay_steps: int = 0
    """Last optimizer steps over which wsd falls; only used by wsd."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay; norms and biases are not decayed."""
    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.95
    """Decay of AdamW's second moment."""
    adam_eps: float = 1e-8
    """AdamW's epsilon."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    def __post_init__(self) -> None:
        require_at_least("train.gpus", self.gpus, 1)
        require_at_least("train.tensor_parallel", self.tensor_parallel, 1)
        require_at_least("train.global_batch_samples", self.global_batch_samples, 1)
        require_at_least("train.micro_batch_tokens", self.micro_batch_tokens, 1)
        require_positive("train.lr", self.lr)
        require_at_least("train.warmup_steps", self.warmup_steps, 0)
        require_between("train.min_lr", self.min_lr, 0, self.lr)
        require_at_least("train.decay_steps", self.decay_steps, 0)
        why = f"with train.lr_schedule={self.lr_schedule.name}"
        if self.lr_schedule is LRSchedule.constant:
            refuse_unused(self, "train", ("min_lr",), why, "use train.lr_schedule=linear, cosine or wsd")
        if self.lr_schedule is LRSchedule.wsd:
            require(
                self.decay_steps > 0,
                "train.lr_schedule=wsd needs train.decay_steps, the steps it falls over at the end",
            )
        else:
            refuse_unused(self, "train", ("decay_steps",), why, "use train.lr_schedule=wsd")
        require_at_least("train.weight_decay", self.weight_decay, 0)
        require_below("train.adam_beta1", self.adam_beta1, 0, 1)
        require_below("train.adam_beta2", self.adam_beta2, 0, 1)
        require_positive("train.adam_eps", self.adam_eps)
        require_at_least("train.clip_grad", self.clip_grad, 0)
        require(
            self.gpus % self.tensor_parallel == 0,
            f"train.gpus={self.gpus} must be divisible by train.tensor_parallel={self.tensor_parallel}",
        )
        require(
            not (self.sequence_parallel and self.tensor_parallel == 1),
            "train.sequence_parallel=true has no effect with train.tensor_parallel=1: no devices share a sequence; use "
            "train.tensor_parallel=2 with train.gpus=2, or train.sequence_parallel=null",
        )
        require(
            not (self.sequence_parallel is False and self.padding_free and self.tensor_parallel > 1),
            f"train.padding_free=true with train.tensor_parallel={self.tensor_parallel} needs sequence parallelism; "
            "use train.sequence_parallel=true (or null), or train.padding_free=false",
        )
        require(
            not (self.distributed_optimizer and self.data_parallel == 1),
            f"train.distributed_optimizer=true has no effect with train.gpus={self.gpus} train.tensor_parallel="
            f"{self.tensor_parallel}: one copy of the model has no other to share with; use "
            f"train.gpus={2 * self.tensor_parallel} or more, or train.distributed_optimizer=false",
        )
        require(
            self.global_batch_samples >= self.data_parallel,
            f"train.global_batch_samples={self.global_batch_samples} can't feed the {self.data_parallel} copies of the "
            f"model that train.gpus={self.gpus} train.tensor_parallel={self.tensor_parallel} make; use "
            f"train.global_batch_samples={self.data_parallel} or more",
        )

    @property
    def data_parallel(self) -> int:
        """Copies of the model, which share a batch."""
        return self.gpus // self.tensor_parallel

    @property
    def uses_sequence_parallel(self) -> bool:
        """What `sequence_parallel` means."""
        if self.sequence_parallel is None:
            return self.tensor_parallel > 1 and self.padding_free
        return self.sequence_parallel

    @property
    def pad_multiple(self) -> int:
        """Lengths are rounded up to this, so that each device gets as much of a sequence."""
        return self.tensor_parallel if self.uses_sequence_parallel else 1

    def padded(self, length: int) -> int:
        """`length` rounded up."""
        return -(-length // self.pad_multiple) * self.pad_multiple
