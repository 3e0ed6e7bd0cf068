"""LoRA (arXiv 2106.09685) on Megatron's fused, tensor-parallel linear layers, with peft's numbers.

A linear layer gets `+ alpha / rank * B A dropout(x)`: A [rank, in], B [out, rank]. Megatron fuses q, k, v and gate, up;
each of these Hugging Face modules has an A and a B of its own, as in peft, so adapters can be exchanged. Forward they
are put together: A's one above the other, B's in blocks, in the rows that the fused weight has for their module.

Tensor-parallel ranks split one factor as they split the weight, the other is a copy on each rank:
    column-parallel (qkv, fc1)   A copied   B's rows split     rank x tokens numbers are gathered (or only copied)
    row-parallel (proj, fc2)     A's columns split   B copied  rank x tokens numbers are summed
Under sequence parallelism a copied factor sees this rank's tokens only: the mark `sequence_parallel` has Megatron sum
its gradient over the ranks. The frozen base has no gradients, no optimizer state and no part in DDP's buffers.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import safe_open
from torch import Tensor, nn

from rlhf.backends.megatron.adapters import WEIGHTS, Adapter, factor_names, factor_shapes
from rlhf.backends.megatron.architecture import Architecture
from rlhf.backends.megatron.partition import Partition
from rlhf.backends.megatron.weights import Same, rule_of

LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


class Factors(nn.Module):
    """A and B of each adapted Hugging Face module in one linear layer of Megatron's; `linear.adapter`."""

    def __init__(
        self, linear: Any, weight: str, adapter: Adapter, architecture: Architecture, partition: Partition
    ) -> None:
        """
        Args:
            weight: Megatron's name of the layer's weight.
        """
        super().__init__()
        self.on = True
        self.spec, self.architecture, self.partition = adapter, architecture, partition
        self.rule, self.weights = rule_of(weight)
        parts = self.rule.to_hf(architecture, linear.weight.detach())
        self.rows = [len(part) for part in parts]
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        self.rule_a, self.rule_b = (Same(), Same(0)) if self.rule.split == 0 else (Same(1), Same())
        for hf_weight, part in zip(self.weights, parts, strict=True):
            if (module := module_of(hf_weight)) in adapter.modules:
                self.a[module] = _parameter(part.new_empty(adapter.rank, part.shape[1]), self.rule_a, partition)
                self.b[module] = _parameter(part.new_empty(part.shape[0], adapter.rank), self.rule_b, partition)

    def forward(self, inputs: Tensor) -> Tensor:
        """[tokens, batch, in] -> what is added to the layer's output [tokens, batch, out], split as both are."""
        if self.spec.dropout and self.training:  # a mask a module, as in peft
            low = torch.cat([F.linear(self.dropped(inputs), a) for a in self.a.values()], dim=-1)
        else:
            low = F.linear(inputs, torch.cat(list(self.a.values())))
        return F.linear(self._shared(low * self.spec.scale), self._fused())

    def dropped(self, inputs: Tensor) -> Tensor:
        """Ranks with the same inputs draw the same mask; ranks with parts of them draw different ones."""
        if self.partition.size == 1 or not (self.partition.sequence_parallel or self.rule.split == 1):
            return F.dropout(inputs, self.spec.dropout)
        with get_cuda_rng_tracker().fork():
            return F.dropout(inputs, self.spec.dropout)

    def _shared(self, low: Tensor) -> Tensor:
        """A's output [tokens, batch, modules x rank], as this rank's B takes it."""
        if self.partition.size == 1:
            return low
        group, by_sequence = self.partition.group, self.partition.sequence_parallel
        if self.rule.split == 0:
            if by_sequence:
                return mappings.gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=group)
            return mappings.copy_to_tensor_model_parallel_region(low, group=group)
        if by_sequence:
            return mappings.reduce_scatter_to_sequence_parallel_region(low, group=group)
        return mappings.reduce_from_tensor_model_parallel_region(low, group=group)

    def _fused(self) -> Tensor:
        """[out, modules x rank]: each B in the rows of its module and the columns of its A, zeros elsewhere."""
        rank, modules = self.spec.rank, list(self.b)
        blocks = []
        for weight, rows in zip(self.weights, self.rows, strict=True):
            if (module := module_of(weight)) in self.b:
                place = modules.index(module)
                blocks.append(F.pad(self.b[module], (place * rank, (len(modules) - 1 - place) * rank)))
            else:
                blocks.append(self.b[modules[0]].new_zeros(rows, len(modules) * rank))
        return self.rule.to_megatron(self.architecture, blocks)

    def merge(self, parts: list[Tensor]) -> list[Tensor]:
        """This rank's parts of the base's weights -> new tensors with the adapter in them. Rounded once, at the end."""
        return [
            (part.float() + self.spec.scale * (self.b[module].float() @ self.a[module].float())).to(part.dtype)
            if (module := module_of(weight)) in self.b
            else part
            for weight, part in zip(self.weights, parts, strict=True)
        ]

    def named(self) -> Iterator[tuple[str, Tensor, Same]]:
        """(peft's name, this rank's part, how it is split)."""
        for weight in self.weights:
            if (module := module_of(weight)) in self.b:
                name_a, name_b = factor_names(weight)
                yield name_a, self.a[module], self.rule_a
                yield name_b, self.b[module], self.rule_b


def module_of(weight: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `q_proj`."""
    return weight.split(".")[-2]


def _parameter(tensor: Tensor, rule: Same, partition: Partition) -> nn.Parameter:
    """With the marks that Megatron sums gradients and their norm by."""
    parameter = nn.Parameter(tensor)
    parameter.tensor_model_parallel = rule.split is not None  # type: ignore[attr-defined]
    parameter.sequence_parallel = partition.sequence_parallel and rule.split is None  # type: ignore[attr-defined]
    return parameter


def attach(module: Any, architecture: Architecture, adapter: Adapter, partition: Partition, seed: int) -> None:
    """Freeze a GPTModel and put the adapter on it: the one of `adapter.path`, or a new one that changes nothing yet."""
    module.requires_grad_(False)
    for number, layer in enumerate(module.decoder.layers):
        for name in LINEARS:
            linear = layer.get_submodule(name)
            factors = Factors(linear, f"decoder.layers.{number}.{name}.weight", adapter, architecture, partition)
            if factors.a:
                linear.adapter = factors
                linear.register_forward_hook(_add)
    if adapter.path is None:
        shapes = factor_shapes(architecture, adapter)
        fill(module, architecture, lambda name: initial(name, shapes[name], seed), partition)
    else:
        with safe_open(adapter.path / WEIGHTS, "pt") as file:
            fill(module, architecture, file.get_tensor, partition)


def _add(linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
    """Megatron's linear layers return their output, and a bias that is added later."""
    if not linear.adapter.on:
        return output
    return output[0] + linear.adapter(inputs[0]), output[1]


def initial(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A factor's first values, as in peft: A kaiming-uniform with a=sqrt(5), B zero. They follow from seed and name, so
    every layout begins alike."""
    tensor = torch.zeros(shape)
    if ".lora_A." in name:
        # torch's generator on CPU takes the lower 32 bits of a seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
    return tensor


@torch.no_grad()
def fill(module: Any, architecture: Architecture, tensor_of: Callable[[str], Tensor], partition: Partition) -> None:
    """Set this rank's part of every factor, asked for by peft's name."""
    for factors in factors_of(module):
        for name, parameter, rule in factors.named():
            parameter.copy_(rule.part(architecture, tensor_of(name), partition))


def factors_of(module: Any) -> list[Factors]:
    """Of every adapted layer, in the model's order."""
    return [factors for factors in module.modules() if isinstance(factors, Factors)]


@torch.no_grad()
def tensors(module: Any, architecture: Architecture, partition: Partition) -> Iterator[tuple[str, Tensor]]:
    """(peft's name, whole tensor) of every factor; all ranks that share the model go through it."""
    for factors in factors_of(module):
        for name, parameter, rule in factors.named():
            yield name, rule.whole(architecture, parameter.detach(), partition)


@contextmanager
def switched_off(module: Any) -> Iterator[None]:
    """The base as it was, while this is entered."""
    for factors in factors_of(module):
        factors.on = False
    try:
        yield
    finally:
        for factors in factors_of(module):
            factors.on = True
