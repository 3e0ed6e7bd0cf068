"""Adapters before any process starts: which tensors they have, and which folders are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.backends.megatron.adapters import (
    Adapter,
    factor_shapes,
    parameters,
    peft_config,
    resolve,
)
from rlhf.backends.megatron.architecture import Architecture
from rlhf.config.lora import ALL_LINEAR, Lora, LoraSave
from rlhf.errors import ModelError
from rlhf.export import save_hf
from tests.unit.test_memory import ARCHITECTURE

NEW = Adapter(rank=4, alpha=8.0, dropout=0.1, modules=("q_proj", "v_proj"), base="org/base")
LAYER_0 = "base_model.model.model.layers.0.self_attn."


def written(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None] | None = None) -> Path:
    """The folder of NEW, after `change(configuration, tensors)`."""
    tensors = {name: torch.zeros(shape) for name, shape in factor_shapes(ARCHITECTURE, NEW).items()}
    config = peft_config(NEW)
    if change is not None:
        change(config, tensors)
    save_hf(folder / "saved", None, folder, "float32", adapter=(config, tensors.items()))
    return folder / "saved" / "adapter"


def test_what_is_trained() -> None:
    """SmolLM2-135M: hidden 576, 9 query and 3 key heads of 64, 30 layers."""
    trained, every = parameters(ARCHITECTURE, NEW)
    assert trained == 30 * 4 * ((576 + 9 * 64) + (576 + 3 * 64))
    base = parameters(ARCHITECTURE, None)
    assert base[0] == base[1] == every - trained
    everything = factor_shapes(ARCHITECTURE, Adapter(rank=2, alpha=1, dropout=0, modules=ALL_LINEAR, base=""))
    assert len(everything) == 30 * 7 * 2
    assert everything["base_model.model.model.layers.29.mlp.down_proj.lora_A.weight"] == (2, 1536)
    assert everything["base_model.model.model.layers.29.mlp.down_proj.lora_B.weight"] == (576, 2)


def test_keys_become_an_adapter() -> None:
    assert resolve(Lora(), ARCHITECTURE, "org/base") is None
    made = resolve(Lora(rank=4, alpha=8, dropout=0.1, target=["v_proj", "q_proj"]), ARCHITECTURE, "org/base")
    assert made == NEW and made.scale == 2


def test_a_rank_is_no_higher_than_that_of_the_matrices() -> None:
    """K and V of SmolLM2-135M are [192, 576]."""
    message = (
        "model.lora.rank=193 is more than model.layers.0.self_attn.k_proj.weight of [192, 576] can have; use "
        "model.lora.rank=192 or less"
    )
    with pytest.raises(ModelError) as caught:
        resolve(Lora(rank=193), ARCHITECTURE, "org/base")
    assert str(caught.value) == message
    for lora in (Lora(rank=192), Lora(rank=193, target="mlp")):
        assert resolve(lora, ARCHITECTURE, "org/base") is not None


def test_a_folder_becomes_the_adapter_that_was_written(tmp_path: Path) -> None:
    folder = written(tmp_path)
    lora = Lora(path=str(folder), dropout=0.3, save=LoraSave.adapter)
    read = resolve(lora, ARCHITECTURE, "base")
    assert read == Adapter(
        rank=4,
        alpha=8.0,
        dropout=0.3,
        modules=("q_proj", "v_proj"),
        base="base",
        save=LoraSave.adapter,
        path=folder,
    )


def set_field(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda config, tensors: config.update({name: value})


def lose(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda config, tensors: tensors.pop(name)


def add(name: str, tensor: torch.Tensor) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda config, tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_field("peft_type", "IA3"), 'has peft_type="IA3", implemented: LORA'),
        (set_field("use_rslora", True), "use_rslora=true, which isn't implemented"),
        (set_field("use_dora", True), "use_dora=true, which isn't implemented"),
        (set_field("bias", "all"), 'bias="all", which isn\'t implemented'),
        (set_field("init_lora_weights", "pissa"), 'init_lora_weights="pissa", which isn\'t implemented'),
        (set_field("rank_pattern", {"q_proj": 8}), 'rank_pattern={"q_proj": 8}, which isn\'t implemented'),
        (set_field("layers_to_transform", [0]), r"layers_to_transform=\[0\], which isn't implemented"),
        (set_field("modules_to_save", ["lm_head"]), r'modules_to_save=\["lm_head"\], which isn\'t implemented'),
        (set_field("of_next_year", 1), "of_next_year=1, which isn't implemented"),
        (set_field("r", 8), r"lora_A\.weight has the shape \[4, 576\], with this model and r=8 it is \[8, 576\]"),
        (set_field("r", "4"), 'adapter_config.json has r="4", expected a whole number'),
        (set_field("lora_alpha", 0), "adapter_config.json has lora_alpha=0, expected a number above 0"),
        (lose(f"{LAYER_0}q_proj.lora_B.weight"), r"lacks base_model\S*0\.self_attn\.q_proj\.lora_B\.weight, which an"),
        (
            add("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 576)),
            r"holds base_model\.model\.lm_head\.lora_A\.weight, which no adapter of this model has",
        ),
        (
            add(f"{LAYER_0}q_proj.lora_A.weight", torch.zeros(4, 576, dtype=torch.float8_e4m3fn)),
            r"q_proj\.lora_A\.weight is stored as F8_E4M3; usable are float32, bfloat16, float16",
        ),
    ],
)
def test_what_is_not_understood_is_refused(
    change: Callable[[dict[str, Any], dict[str, Any]], None], said: str, tmp_path: Path
) -> None:
    folder = written(tmp_path, change)
    with pytest.raises(ModelError, match=said) as caught:
        resolve(Lora(path=str(folder)), ARCHITECTURE, "base")
    assert str(caught.value).startswith(f"model.lora.path={folder}: ") and "\n" not in str(caught.value)


def test_folders_that_are_none(tmp_path: Path) -> None:
    folder = written(tmp_path)
    cases = {
        tmp_path: "is no folder with adapter_config.json; use a folder that peft wrote",
        folder.parent: f"is no folder with adapter_config.json; use model.lora.path={folder}",
    }
    for path, said in cases.items():
        with pytest.raises(ModelError, match=said):
            resolve(Lora(path=str(path)), ARCHITECTURE, "base")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors; save it again"):
        resolve(Lora(path=str(folder)), ARCHITECTURE, "base")


def test_another_model_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path)
    values = {name: getattr(ARCHITECTURE, name) for name in ARCHITECTURE.__dataclass_fields__}
    for change, said in [
        ({"layers": 31}, r"lacks .*layers\.30"),
        ({"layers": 29}, r"holds .*layers\.29"),
        ({"heads": 6}, "shape"),
    ]:
        with pytest.raises(ModelError, match=said):
            resolve(Lora(path=str(folder)), Architecture(**values | change), "base")


def test_the_configuration_is_plain_json(tmp_path: Path) -> None:
    config = json.loads((written(tmp_path) / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 8 and config["lora_dropout"] == 0.1
    assert config["target_modules"] == ["q_proj", "v_proj"] and config["base_model_name_or_path"] == "org/base"
