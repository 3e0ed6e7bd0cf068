"""Teachers in the trainer's process: a frozen checkpoint, the student as it is, or an average of what it was; under
LoRA also the student's own base.

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

from rlhf.backends.megatron import layers, lora
from rlhf.backends.megatron.model import Model, load_model
from rlhf.backends.megatron.setup import TrainerSetup
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
        frozen = self.model.adapter is not None  # with the rest of the base
        weight = now.to(compute_dtype(now), copy=not frozen)
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

    def head(self, hidden: Tensor) -> VocabHead:
        return self.lasting_head()(hidden)

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


class BaseTeacher(Teacher):
    """The student without its adapter: a colocated teacher that is the student's base, without a second copy of it."""

    @contextmanager
    def at_work(self) -> Iterator[Model]:
        with super().at_work() as model, lora.switched_off(model.module):
            yield model


class AverageAdapterTeacher(Teacher):
    """An exponential moving average of the student's adapter (teacher=self with an ema_decay, under LoRA).

    A and B are averaged, each for itself, as is common, which takes no second copy of the base. The product of averages
    isn't the average of the products: it leaves out how A and B varied together, which is small for slow averages. A
    decay of 1 is the adapter of the start, exactly.
    """

    def __init__(self, student: Model, decay: float) -> None:
        super().__init__(student)
        self.decay = decay
        self.own = [p for factors in lora.factors_of(student.module) for p in factors.parameters()]
        self.averages = [parameter.detach().float().clone() for parameter in self.own]

    @contextmanager
    def at_work(self) -> Iterator[Model]:
        students = [parameter.data for parameter in self.own]
        for parameter, average in zip(self.own, self.averages, strict=True):
            parameter.data = average.to(parameter.dtype)
        try:
            with super().at_work() as model:
                yield model
        finally:
            for parameter, kept in zip(self.own, students, strict=True):
                parameter.data = kept

    @torch.no_grad()
    def after_step(self) -> None:
        for average, students in zip(self.averages, self.own, strict=True):
            average.lerp_(students.float(), 1 - self.decay)

    def state(self) -> list[Tensor]:
        return self.averages


def teacher_of(setup: TrainerSetup, student: Model, dtype: torch.dtype) -> Teacher | None:
    """The teacher that lives in this process; None without one."""
    if setup.teacher is not None:
        return FrozenTeacher(load_model(setup.teacher, dtype, student.partition), setup.offload_teacher)
    if setup.base_teacher:
        return BaseTeacher(student)
    if setup.self_teacher is None:
        return None
    decay = setup.self_teacher.ema_decay
    if decay is None:
        return Teacher(student)
    if student.adapter is not None:
        return AverageAdapterTeacher(student, decay)
    second = load_model(setup.student, dtype, student.partition)
    if not setup.self_teacher.changes:
        return FrozenTeacher(second, offload=False)
    return AverageTeacher(second, student, decay)
