"""LoRA adapters as files: which tensors one consists of, and peft's folder of them. Without torch, for the driver.

adapter/                      what peft's `PeftModel.from_pretrained(base, folder)` loads
  adapter_config.json
  adapter_model.safetensors   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight [rank, in], and
                              lora_B.weight [out, rank], of each module
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.assets import read_json
from rlhf.backends.megatron.architecture import Architecture
from rlhf.backends.megatron.fields import Fields, shown
from rlhf.backends.megatron.tensors import Shape, expected_shapes
from rlhf.config.lora import ALL_LINEAR, Lora, LoraSave, modules_of
from rlhf.errors import ModelError
from rlhf.export import ADAPTER as FOLDER
from rlhf.export import ADAPTER_CONFIG as CONFIG
from rlhf.export import ADAPTER_WEIGHTS as WEIGHTS
from rlhf.shards import WIDTHS, read_header

PREFIX = "base_model.model."
"""What peft puts before a module's own name."""

READ = {"r", "lora_alpha", "peft_type"}
HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
"""Fields that say nothing of what an adapter computes. Dropout is this run's own, and the modules that are adapted are
those that the file has tensors for."""
IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Fields with these values alone. (Initialisations such as PiSSA change the base, too.) Any other field must be empty
or false: rsLoRA, DoRA, ranks that differ, modules that are saved whole, ..."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A run's adapter, its keys resolved."""

    rank: int
    alpha: float
    dropout: float
    modules: tuple[str, ...]
    """Hugging Face modules of a layer, e.g. q_proj."""
    base: str
    """The base as adapter_config.json names it."""
    save: LoraSave = LoraSave.both
    path: Path | None = None
    """The folder it starts from; None: a new one."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def resolve(lora: Lora, architecture: Architecture, base: str) -> Adapter | None:
    """What the keys of `model.lora` mean for this model; None: no adapter.

    Args:
        base: what the student is, for those who load the adapter.

    Raises:
        ModelError: `model.lora.path` is no adapter for this model, or one that isn't understood in full; or
            `model.lora.rank` is higher than that of a matrix it adapts.
    """
    if not lora.enabled:
        return None
    if lora.path is not None:
        return read(lora, architecture, base)
    modules = modules_of(lora.target)
    weight, shape = min(adapted(architecture, modules).items(), key=lambda item: min(item[1]))
    if lora.rank > min(shape):
        raise ModelError(
            f"model.lora.rank={lora.rank} is more than {weight} of {list(shape)} can have; use model.lora.rank="
            f"{min(shape)} or less"
        )
    return Adapter(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        modules=modules,
        base=base,
        save=lora.save,
    )


def adapted(architecture: Architecture, modules: tuple[str, ...]) -> dict[str, Shape]:
    """Weights with an adapter -> their shapes [out, in]."""
    return {
        name: shape
        for name, shape in expected_shapes(architecture).items()
        if name.endswith(tuple(f".{module}.weight" for module in modules))
    }


def factor_names(weight: str) -> tuple[str, str]:
    """A weight's Hugging Face name -> peft's names of A and B."""
    stem = PREFIX + weight.removesuffix(".weight")
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def factor_shapes(architecture: Architecture, adapter: Adapter) -> dict[str, Shape]:
    """Every tensor of an adapter, by peft's name."""
    shapes: dict[str, Shape] = {}
    for weight, (rows, columns) in adapted(architecture, adapter.modules).items():
        a, b = factor_names(weight)
        shapes |= {a: (adapter.rank, columns), b: (rows, adapter.rank)}
    return shapes


def parameters(architecture: Architecture, adapter: Adapter | None) -> tuple[int, int]:
    """(trained, all) parameters of a student."""
    base = sum(map(math.prod, expected_shapes(architecture).values()))
    if adapter is None:
        return base, base
    own = sum(map(math.prod, factor_shapes(architecture, adapter).values()))
    return own, base + own


def peft_config(adapter: Adapter) -> dict[str, Any]:
    """`adapter_config.json`."""
    whole = int(adapter.alpha) == adapter.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if whole else adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": list(adapter.modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
    }


def read(lora: Lora, architecture: Architecture, base: str) -> Adapter:
    """The adapter in the folder `lora.path`; of its files only names and shapes are read.

    Raises:
        ModelError: it isn't one, isn't for this model, or asks for something that isn't implemented.
    """
    assert lora.path is not None
    where, folder = f"model.lora.path={lora.path}", Path(lora.path).expanduser()
    if not (folder / CONFIG).is_file():
        inside = folder / FOLDER / CONFIG
        remedy = f"model.lora.path={lora.path}/{FOLDER}" if inside.is_file() else "a folder that peft wrote"
        raise ModelError(f"{where} is no folder with {CONFIG}; use {remedy}")
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{where} has no {WEIGHTS}; save it again with peft's save_pretrained")
    config = read_json(folder / CONFIG)
    _refuse_other_kinds(config, where)
    fields = Fields(config, where, CONFIG)
    stored = read_header(folder / WEIGHTS)
    found = {match[1] for name in stored if (match := re.search(r"\.(\w+)\.lora_[AB]\.weight$", name))}
    adapter = Adapter(
        rank=fields.count("r"),
        alpha=fields.positive("lora_alpha"),
        dropout=lora.dropout,
        modules=tuple(module for module in ALL_LINEAR if module in found),
        base=base,
        save=lora.save,
        path=folder.resolve(),
    )
    expected = factor_shapes(architecture, adapter)
    for name in [*expected, *stored]:
        if name not in stored:
            raise ModelError(f"{where}: {WEIGHTS} lacks {name}, which an adapter of this model has")
        if name not in expected:
            raise ModelError(f"{where}: {WEIGHTS} holds {name}, which no adapter of this model has")
        if stored[name].shape != expected[name]:
            raise ModelError(
                f"{where}: {name} has the shape {list(stored[name].shape)}, with this model and r={adapter.rank} it is "
                f"{list(expected[name])}; use the model.path that the adapter was made for"
            )
        if stored[name].dtype not in WIDTHS:
            raise ModelError(
                f"{where}: {name} is stored as {stored[name].dtype}; usable are float32, bfloat16, float16"
            )
    if not stored:
        raise ModelError(f"{where}: {WEIGHTS} holds no tensors")
    return adapter


def _refuse_other_kinds(config: Mapping[str, Any], where: str) -> None:
    """Whatever the formula B A x alpha / r on plain linear modules leaves out."""
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{where}: {CONFIG} has peft_type={shown(config.get('peft_type'))}, implemented: LORA")
    for name, value in config.items():
        if name in READ | HARMLESS:
            continue
        if name in IMPLEMENTED:
            good = any(value == other and type(value) is type(other) for other in IMPLEMENTED[name])
        else:
            good = not value
        if not good:
            raise ModelError(f"{where}: {CONFIG} has {name}={shown(value)}, which isn't implemented")
