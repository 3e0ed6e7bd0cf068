"""A checkpoint folder is understood in full, or refused in one line that names the field or the file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from rlhf import assets
from rlhf.backends.megatron import architecture
from rlhf.backends.megatron.architecture import FAMILIES, Architecture, refuse_unknown_fields
from rlhf.backends.megatron.fields import Fields
from rlhf.backends.megatron.tensors import SHAPES
from rlhf.errors import ModelError
from rlhf.preflight import check_checkpoint, check_student
from rlhf.tokenizers import check_vocabulary
from tests.unit.tiny import save_tiny_llama, tiny_tokenizer

GONE = object()
"""The field is taken out of the file."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
REAL: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    },
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Mistral-7B-v0.3": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32768,
    },
}
"""What the files of published models say."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=2)


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A checkpoint of one's own to spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def refused(folder: Path, message: str) -> None:
    """The folder is refused in one line that matches `message`."""
    with pytest.raises(ModelError, match=message) as caught:
        check_checkpoint(assets.resolve(str(folder)), "model.path=it")
    assert "\n" not in str(caught.value)


def edit(folder: Path, **fields: Any) -> None:
    config = assets.read_config(folder) | fields
    kept = {name: value for name, value in config.items() if value is not GONE}
    (folder / "config.json").write_text(json.dumps(kept))


# ---- config.json ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": GONE}, r"^model\.path=it: config\.json has no hidden_size$"),
        ({"vocab_size": GONE}, "has no vocab_size"),
        ({"model_type": GONE}, 'has no model_type; a LlamaForCausalLM has "llama"'),
        ({"architectures": GONE}, "has no architectures, expected a list of one name"),
        ({"architectures": "LlamaForCausalLM"}, 'architectures="LlamaForCausalLM", expected a list'),
        ({"architectures": []}, r"architectures=\[\], expected a list of one name"),
        ({"architectures": [["x"]]}, r'architectures=\[\["x"\]\], expected a list of one name'),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM, "),
        ({"architectures": ["Qwen2ForCausalLM"]}, 'model_type="llama"; a Qwen2ForCausalLM has "qwen2"'),
        ({"hidden_size": "64"}, 'hidden_size="64", expected a whole number of at least 1'),
        ({"hidden_size": None}, "hidden_size=null, expected a value"),
        ({"intermediate_size": [128]}, r"intermediate_size=\[128\], expected a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads=0, expected a whole number of at least 1"),
        ({"num_attention_heads": 4.0}, r"num_attention_heads=4\.0, expected a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers=true, expected a whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1, expected a whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3, expected a divisor of num_attention_heads=4"),
        ({"num_attention_heads": 6, "head_dim": None}, "num_attention_heads=6, expected a divisor of hidden_size=64"),
        ({"head_dim": 15}, "heads of 15 dimensions; RoPE needs an even number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0, expected a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=NaN, expected a number above 0"),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings="false", expected true or false'),
        ({"attention_bias": 1}, "attention_bias=1, implemented: false"),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu", implemented: "silu"'),
        ({"attention_dropout": 0.1}, r"attention_dropout=0\.1, implemented: 0"),
        ({"sliding_window": 16}, "sliding_window=16 .*; implemented: null"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*, expected null, or "),
        ({"quantization_config": {"bits": 4}}, r'quantization_config=\{"bits": 4\}, which isn\'t implemented'),
        ({"attention_chunk_size": 64}, "attention_chunk_size=64, which isn't implemented"),
        ({"pad_token_id": 512}, "pad_token_id=512, expected less than vocab_size=512"),
        ({"logit_scale": 0.5}, r"logit_scale=0\.5, implemented: 1"),
        ({"initializer_range": "wide"}, "transformers refuses config.json: .*initializer_range"),
    ],
)
def test_fields_that_cannot_be_used(folder: Path, fields: dict[str, Any], message: str) -> None:
    edit(folder, **fields)
    refused(folder, message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": "linear"}, 'rope_parameters="linear", expected an object'),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, r'rope_parameters\.rope_type="yarn", implemented: '),
        ({"rope_parameters": {"rope_type": ["default"]}}, r'rope_parameters\.rope_type=\["default"\], implemented'),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            r"rope_parameters\.partial_rotary_factor=0\.5, expected 1",
        ),
        ({"partial_rotary_factor": 0.5}, r"has partial_rotary_factor=0\.5, expected 1"),
        ({"rope_parameters": {"rope_theta": 1e4, "mscale": 2}}, r"rope_parameters\.mscale=2, which isn't implemented"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            r"rope_parameters\.full_attention=.* isn't impl",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            r'rope_scaling\.type="linear", but rope_parameters\.rope_type="default"; remove one',
        ),
        ({"rope_theta": 5e5}, r"contradicts itself: rope_theta=500000\.0, but rope_parameters\.rope_theta=10000\.0"),
        ({"rope_parameters": {"rope_theta": "big"}}, r'rope_parameters\.rope_theta="big", expected a number above 0'),
        (
            {"rope_parameters": GONE, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            r"^model\.path=it: config\.json has no rope_scaling\.low_freq_factor$",
        ),
        (
            {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
            r"high_freq_factor=1\.0, expected more than rope_parameters\.low_freq_factor=1",
        ),
        ({"rope_parameters": {**LLAMA3, "factor": 0.5}}, r"rope_parameters\.factor=0\.5, expected at least 1"),
    ],
)
def test_rope_fields_that_cannot_be_used(folder: Path, fields: dict[str, Any], message: str) -> None:
    edit(folder, **fields)
    refused(folder, message)


def test_both_spellings_of_rope_are_one(folder: Path) -> None:
    spellings = [
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 500000, "rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 5e5}},
    ]
    config = assets.read_config(folder)
    del config["rope_parameters"]
    read = [Architecture.from_config({**config, **spelling}, "it") for spelling in spellings]
    assert read[0] == read[1] == read[2]
    scaling = read[0].rope_scaling
    assert scaling is not None and read[0].rope_theta == 5e5
    assert (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor) == (8.0, 1.0, 4.0)
    assert scaling.original_max_positions == 64


def test_bookkeeping_is_harmless(tiny: Path, folder: Path) -> None:
    edit(
        folder,
        _name_or_path="x",
        unsloth_fixed=True,
        auto_map={"AutoModel": "x.Y"},
        _attn_implementation_autoset=True,
        is_llama_config=True,
        rope_interleaved=False,
        torch_dtype="bfloat16",
        pad_token_id=3,
        use_cache=False,
        pretraining_tp=1,
        initializer_range=0.5,
        layer_types=["full_attention"] * 2,
        partial_rotary_factor=1.0,
        original_max_position_embeddings=64,
    )
    assert check_checkpoint(folder, "it") == check_checkpoint(tiny, "it")


def test_a_field_that_transformers_knows_and_we_do_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later transformers may give a family a field; here it has one that nobody has thought about."""

    class LaterConfig(CONFIG_MAPPING["llama"]):  # type: ignore[misc]
        def to_dict(self) -> dict[str, Any]:
            return {**super().to_dict(), "residual_multiplier": 1.0}

    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "llama", LaterConfig)
    edit(folder, residual_multiplier=1.0)
    check_checkpoint(folder, "it")
    edit(folder, residual_multiplier=0.2)
    refused(
        folder, r"residual_multiplier=0\.2, which isn't implemented; a model without it \(residual_multiplier=1\.0\)"
    )


def test_the_fields_said_to_be_read_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()

    class Recorder(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            asked.add(name)
            return super().get(name, default)

        def __contains__(self, name: object) -> bool:
            asked.add(str(name))
            return super().__contains__(name)

    monkeypatch.setattr(architecture, "Fields", lambda values, where: Fields(Recorder(values), where))
    Architecture.from_config(Recorder(REAL["Mistral-7B-v0.3"]), "it")
    assert asked == architecture.READ | architecture.IMPLEMENTED.keys()


@pytest.mark.parametrize("name", REAL)
def test_published_models_read_as_transformers_reads_them(name: str) -> None:
    config = REAL[name]
    ours = Architecture.from_config(config, name)
    refuse_unknown_fields(config, name)
    agree(ours, config)


def test_biases_are_optional_in_llama_only() -> None:
    llama = Architecture.from_config({**REAL["Llama-3.2-1B"], "attention_bias": True, "mlp_bias": True}, "it")
    assert (llama.qkv_bias, llama.proj_bias, llama.mlp_bias) == (True, True, True)
    for name in ("Qwen3-0.6B", "Mistral-7B-v0.3"):
        with pytest.raises(ModelError, match="has attention_bias=true, implemented: false"):
            Architecture.from_config({**REAL[name], "attention_bias": True}, "it")


@pytest.mark.parametrize("name", FAMILIES)
def test_absent_fields_mean_what_transformers_takes(name: str) -> None:
    config = {
        "architectures": [name],
        "model_type": FAMILIES[name].model_type,
        "hidden_size": 2048,
        "intermediate_size": 512,
        "max_position_embeddings": 128,
        "num_attention_heads": 32,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": 100,
    }
    if name == "MistralForCausalLM":
        with pytest.raises(ModelError, match=r"sliding_window=4096 .* what transformers takes where it has none"):
            Architecture.from_config(config, "it")
        config["sliding_window"] = None
    agree(Architecture.from_config(config, "it"), config)


def agree(ours: Architecture, config: dict[str, Any]) -> None:
    theirs = CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.heads, ours.kv_groups, ours.head_dim) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        head_dim,
    )
    assert (ours.layers, ours.hidden, ours.ffn_hidden) == (
        theirs.num_hidden_layers,
        theirs.hidden_size,
        theirs.intermediate_size,
    )
    assert (ours.tied, ours.norm_eps, ours.vocab) == (
        theirs.tie_word_embeddings,
        theirs.rms_norm_eps,
        theirs.vocab_size,
    )
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope["rope_theta"]
    assert (ours.rope_scaling is not None) == (rope["rope_type"] == "llama3")
    assert getattr(theirs, "sliding_window", None) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", r"config\.json holds a list, expected an object"),
        (b"{", r"config\.json can't be read as JSON: Expecting"),
        (b"", r"config\.json can't be read as JSON"),
        (b'{"a": "\xff"}', r"config\.json can't be read as JSON: 'utf-8' codec"),
    ],
)
def test_files_that_are_no_json_object(folder: Path, content: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(content)
    refused(folder, message)


# ---- weights --------------------------------------------------------------------------------------------------------


def write_index(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / assets.INDEX).write_text(text) and None


def write_weights(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors").write_bytes(content) and None


def with_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def in_two_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")


INDEX_OF_OTHERS = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (write_index("{"), r"index\.json can't be read as JSON"),
        (write_index("{}"), r"index\.json has no weight_map of tensor names to file names"),
        (write_index('{"weight_map": ["a"]}'), "has no weight_map"),
        (write_index('{"weight_map": {}}'), "has no weight_map"),
        (write_index('{"weight_map": {"a": 1}}'), "has no weight_map"),
        (write_index(INDEX_OF_OTHERS), r"names model-1\.safetensors, model-2\.safetensors, but there is no such file"),
        (
            lambda folder: (
                shutil.copy(folder / "model.safetensors", folder / "other.safetensors"),
                write_index('{"weight_map": {"a": "other.safetensors"}}')(folder),
            ),
            r"holds both model\.safetensors and a model\.safetensors\.index\.json that names other files",
        ),
        (write_weights(b"garbage" * 100), r"model\.safetensors is no safetensors file; download"),
        (write_weights(b""), r"model\.safetensors is no safetensors file"),
        (write_weights((2).to_bytes(8, "little") + b"[]"), r"model\.safetensors is no safetensors file, or is cut off"),
        (
            write_weights(b"version https://git-lfs.github.com/spec/v1\noid x\n"),
            "is a Git LFS pointer, not the weights",
        ),
        (cut_off, r"model\.safetensors has \d+ bytes, its header says \d+; download"),
        (in_two_files, r"both a\.safetensors and b\.safetensors hold the tensor "),
        (with_tensors(lambda t: t.pop("model.norm.weight")), r"the weights lack model\.norm\.weight; config\.json and"),
        (
            with_tensors(lambda t: t.update({"model.norm.weight": torch.ones(8)})),
            r"model\.norm\.weight has the shape \[8\], config\.json says \[64\]",
        ),
        (
            with_tensors(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})),
            r"the weights hold model\.layers\.0\.self_attn\.q_proj\.bias, which a LlamaForCausalLM of 2 layers",
        ),
        (
            with_tensors(lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
            r"model\.safetensors holds model\.norm\.weight as I8; usable are float32, bfloat16 and float16",
        ),
        (
            with_tensors(lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)})),
            r"model\.norm\.weight as F8_E4M3; usable are",
        ),
        (lambda folder: edit(folder, num_hidden_layers=1), r"hold model\.layers\.1\..* and 6 more tensors, which a "),
        (lambda folder: edit(folder, num_hidden_layers=3), r"lack model\.layers\.2\..* and 6 more tensors"),
        (
            lambda folder: edit(folder, vocab_size=100),
            r"embed_tokens\.weight has the shape \[512, 64\], config\.json says \[100, 64\]",
        ),
        (
            lambda folder: edit(folder, tie_word_embeddings=True),
            r"tie_word_embeddings=true, but the weights hold a lm_head\.weight that differs from model\.embed_tokens",
        ),
        (lambda folder: edit(folder, attention_bias=True), r"lack model\.layers\.0\.self_attn\.q_proj\.bias, "),
    ],
)
def test_weights_that_cannot_be_used(folder: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(folder)
    refused(folder, message)


def test_harmless_tensors(folder: Path) -> None:
    with_tensors(
        lambda t: t.update(
            {
                "lm_head.weight": t["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            }
        )
    )(folder)
    edit(folder, tie_word_embeddings=True)
    assert check_checkpoint(folder, "it").tied


def test_a_fault_of_the_source_is_found_before_layers_are_dropped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.json says 1 layer of 2: dropping by its numbers would lose the other one in silence."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    edit(folder, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"the weights hold model\.layers\.1\."):
        check_student(str(folder), [0])
    edit(folder, num_hidden_layers=2)
    student, cut = check_student(str(folder), [0])
    assert student.parent == tmp_path / "cache" and cut.layers == 1


def test_both_weight_tables_name_the_same_tensors() -> None:
    from rlhf.backends.megatron.weights import TABLE

    assert {name for _, names in TABLE.values() for name in names} == set(SHAPES)


# ---- tokenizer ------------------------------------------------------------------------------------------------------


def test_a_token_without_a_row_in_the_embedding() -> None:
    tokenizer = tiny_tokenizer()
    check_vocabulary(tokenizer, 512, "it")
    tokenizer.add_tokens(["<|tool|>"])
    with pytest.raises(
        ModelError,
        match=r"^it: the tokenizer has the token '<\|tool\|>' with id 512, but .* has vocab_size=512; .*\(513\)",
    ):
        check_vocabulary(tokenizer, 512, "it")
