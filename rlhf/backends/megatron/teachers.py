"""Teachers in the trainer's process: a frozen checkpoint, the student as it is, or an average of what it was.

with teacher.at_work() as model:             # its weights are on the device, it is in eval mode
    rows = model.hidden_rows(micro)
head_of = teacher.lasting_head()             # for the loss, which puts the head on rows that were kept
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from rlhf.backends.megatron import layers
from rlhf.backends.megatron.model import Model
from rlhf.losses.fused.projection import compute_dtype
from rlhf.losses.heads import VocabHead


class Teacher:
    """A model that is asked. As it stands: the student itself, with the weights of the moment (teacher=self)."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @contextmanager
    def at_work(self) -> Iterator[Model]:
        """The model, ready for forward passes in eval mode; afterwards it is in the mode it was in."""
        mode = self.model.module.training
        self.model.module.eval()
        try:
            yield self.model
        finally:
            self.model.module.train(mode)

    def head(self, hidden: Tensor) -> VocabHead:
        """The head as it is now, without a gradient of its own."""
        head = self.model.head(hidden)
        return replace(head, weight=head.weight.detach())

    def lasting_head(self) -> Callable[[Tensor], VocabHead]:
        """The head as it is now, even if the weights change: kept hidden rows and their head are of one version."""
        now = layers.head_weight(self.model.module).detach()
        weight = now.to(compute_dtype(now), copy=True)
        return lambda hidden: replace(self.model.head(hidden), weight=weight)

    def after_step(self) -> None:
        """The student has taken an optimizer step."""

    def state(self) -> list[Tensor]:
        """What a resumed run can't get from a checkpoint folder: to be filled in place, then `state_filled`."""
        return []

    def state_filled(self) -> None:
        """The tensors of `state` have been read back."""


class FrozenTeacher(Teacher):
    """A checkpoint of its own (teacher=colocated)."""

    def __init__(self, model: Model, offload: bool) -> None:
        """
        Args:
            offload: keep all weights but the head's in host memory while the teacher isn't at work.
        """
        super().__init__(model)
        model.module.requires_grad_(False).eval()
        self._loss_weight: Tensor | None = None
        head = layers.head_weight(model.module)
        body = [weight for weight in model.module.parameters() if weight is not head] if offload else []
        self.host = [(weight, _in_host_memory(weight.data)) for weight in body]
        self._leave()

    @contextmanager
    def at_work(self) -> Iterator[Model]:
        device = layers.head_weight(self.model.module).device
        for weight, kept in self.host:
            weight.data = kept.to(device, non_blocking=True)
        try:
            yield self.model
        finally:
            self._leave()

    def _leave(self) -> None:
        """Free the device's copy of the body; it hasn't changed."""
        for weight, kept in self.host:
            weight.data = kept
        if self.host:
            torch.cuda.empty_cache()  # an engine on the same GPU is another process

    def lasting_head(self) -> Callable[[Tensor], VocabHead]:
        """Its weights never change, so they are in the loss's format once and for all."""
        if self._loss_weight is None:
            weight = layers.head_weight(self.model.module).detach()
            self._loss_weight = weight.to(compute_dtype(weight))
        kept = self._loss_weight
        return lambda hidden: replace(self.model.head(hidden), weight=kept)


def _in_host_memory(tensor: Tensor) -> Tensor:
    """A copy, pinned where there is a GPU to copy it back to."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)


class AverageTeacher(Teacher):
    """An exponential moving average of the student's weights over optimizer steps (teacher=self with an ema_decay)."""

    def __init__(self, model: Model, student: Model, decay: float) -> None:
        """
        Args:
            model: a second copy of the student.
        """
        super().__init__(model)
        model.module.requires_grad_(False).eval()
        self.student = student
        self.decay = decay
        # bfloat16 would round small steps away. Of float32 weights `float` makes no copy: it is the weight itself.
        self.averages = [weight.data.float() for weight in model.module.parameters()]

    @torch.no_grad()
    def after_step(self) -> None:
        weights = zip(self.averages, self.model.module.parameters(), self.student.module.parameters(), strict=True)
        for average, mine, students in weights:
            average.lerp_(students.float(), 1 - self.decay)
            mine.copy_(average)

    def state(self) -> list[Tensor]:
        return self.averages

    @torch.no_grad()
    def state_filled(self) -> None:
        for average, mine in zip(self.averages, self.model.module.parameters(), strict=True):
            mine.copy_(average)
