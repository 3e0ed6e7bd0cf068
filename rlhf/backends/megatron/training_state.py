"""What one trainer process needs to go on exactly where it was: bit-exact, and only for the same layout.

rank_0.pt   {"model": {name: tensor}, "optimizer": [[{"main": tensor, "step": ..., ...}]], "rng": {...}, "num_steps": 2}

`optimizer` is a list of parameter groups, each a list of parameters in Megatron's order, which the layout decides.
Copies of the model (data-parallel ranks) hold the same weights and, without the distributed optimizer, the same
moments: those are written once, by the first copy, and read by all. `teacher` is the average
of past weights that teacher=self may score with. `main` is there for bfloat16 only: the float32
parameters that AdamW steps; otherwise it steps the model's own. Under LoRA `model` is the adapter: the frozen base
comes from its own checkpoint again, and `frozen` has a sum of each tensor's bits, by which another base is noticed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.errors import CheckpointError, one_line

MOMENTS = {"step", "exp_avg", "exp_avg_sq"}
"""What AdamW keeps of a parameter."""


@dataclass(frozen=True)
class RankState:
    """What one trainer process has to save, and to fill again."""

    rank: int
    first_copy: int
    """The rank whose weights this one's are a copy of; `rank` itself in the first copy."""
    module: Any
    optimizer: Any
    schedule: Any
    sharded: bool
    """Each copy has its own part of the optimizer (the distributed optimizer)."""
    teacher: list[Tensor]
    """What the teacher has of the student's past (an average of its weights); copies have the same."""


def save(folder: Path, own: RankState) -> None:
    """Write this rank's part."""
    state: dict[str, Any] = {"num_steps": own.schedule.num_steps, "rng": random_states()}
    if own.rank == own.first_copy:
        state["model"] = {name: parameter.detach() for name, parameter in trained(own.module).items()}
        state["frozen"] = frozen_sums(own.module)
        state["teacher"] = own.teacher
    if own.rank == own.first_copy or own.sharded:
        of_model = {parameter.untyped_storage().data_ptr() for parameter in own.module.parameters()}
        state["optimizer"] = [
            [
                moments
                if parameter.untyped_storage().data_ptr() in of_model
                else {"main": parameter.detach(), **moments}
                for parameter, moments in group
            ]
            for group in adam_states(own.optimizer)
        ]
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(_compact(state), folder / file_of(own.rank))


@torch.no_grad()
def load(folder: Path, own: RankState) -> int:
    """What `save` wrote, into a trainer of the same layout -> optimizer steps done.

    Raises:
        CheckpointError: a file that can't be read, or is of another model.
    """
    stored = _read(folder / file_of(own.rank))
    first = stored if own.rank == own.first_copy else _read(folder / file_of(own.first_copy))
    parameters = trained(own.module)
    if parameters.keys() != first["model"].keys():
        raise CheckpointError(f"{folder} is the state of another model; use model.path of the run it is from")
    if frozen_sums(own.module) != first.get("frozen", {}):
        raise CheckpointError(
            f"{folder} is the state of an adapter on another base: the weights of model.path have changed since; use "
            "those of the run it is from"
        )
    for name, tensor in first["model"].items():
        _fill(parameters[name], tensor, folder)
    for tensor, stored_tensor in zip(own.teacher, first["teacher"], strict=True):
        _fill(tensor, stored_tensor, folder)
    stored_groups = (stored if own.sharded else first)["optimizer"]
    for group, stored_group in zip(parameter_groups(own.optimizer), stored_groups, strict=True):
        for (adam, parameter), moments in zip(group, stored_group, strict=True):
            if "main" in moments:
                _fill(parameter, moments.pop("main"), folder)
            # Fresh tensors: AdamW adds to `step` in place, once a parameter, so no two may share one.
            adam.state[parameter] = {
                name: value.clone() if name == "step" else value.to(parameter.device, copy=True)
                for name, value in moments.items()
            }
    own.schedule.num_steps = stored["num_steps"]
    own.schedule.step(increment=0)  # sets the learning rates, which the next step may report
    restore_random_states(stored["rng"])
    return int(own.schedule.num_steps)


def trained(module: Any) -> dict[str, Tensor]:
    """The parameters that aren't frozen."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def frozen_sums(module: Any) -> dict[str, int]:
    """Of each frozen parameter, the sum of its numbers' bits read as integers: exact, whatever the order."""
    integers = {2: torch.int16, 4: torch.int32}
    return {
        name: int(parameter.detach().view(integers[parameter.element_size()]).sum(dtype=torch.int64))
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    }


def file_of(rank: int) -> str:
    return f"rank_{rank}.pt"


def parameter_groups(optimizer: Any) -> Iterator[list[tuple[Any, Tensor]]]:
    """Of each group: torch's AdamW, and the parameters it steps: float32, main copies or shards where there are any."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            yield [(part.optimizer, parameter) for parameter in group["params"]]


def adam_states(optimizer: Any) -> Iterator[list[tuple[Tensor, dict[str, Tensor]]]]:
    """Of each group: its parameters and their moments."""
    for group in parameter_groups(optimizer):
        states = [(parameter, dict(adam.state[parameter])) for adam, parameter in group]
        assert all(state.keys() == MOMENTS for _, state in states), "saved after the first step, of torch's AdamW"
        yield states


def random_states() -> dict[str, Any]:
    """Of every generator that code in this process may draw from, as what `torch.load(weights_only=True)` reads."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),  # on CPU, `megatron_device` answers with torch's own
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states({name: state.clone() for name, state in states["megatron"].items()})


def _fill(parameter: Tensor, stored: Tensor, folder: Path) -> None:
    if parameter.shape != stored.shape or parameter.dtype != stored.dtype:
        raise CheckpointError(
            f"{folder} holds a tensor of {stored.dtype} {tuple(stored.shape)} where this run has {parameter.dtype} "
            f"{tuple(parameter.shape)}; use the model and the layout it was written with"
        )
    parameter.copy_(stored)


def _compact(value: Any) -> Any:
    """Views cut out of their buffers: torch writes whole storages otherwise, Megatron's hold all parameters."""
    if isinstance(value, Tensor):
        value = value.cpu()
        return value.clone() if value.untyped_storage().nbytes() != value.nbytes else value
    if isinstance(value, dict):
        return {name: _compact(item) for name, item in value.items()}
    return [_compact(item) for item in value] if isinstance(value, list) else value


def _read(path: Path) -> dict[str, Any]:
    try:
        # Mapped: the state is read as it is copied, and never twice in memory.
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # zip, pickle and file errors of many kinds
        raise CheckpointError(
            f"{path} can't be read ({one_line(error)[:200]}); continue from another checkpoint: resume=FOLDER"
        ) from error
    return state
