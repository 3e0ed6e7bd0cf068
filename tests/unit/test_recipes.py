"""The recipes: what they compose to, that they fit the models they name, and that their pages say what is so."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rlhf.backends.megatron.architecture import Architecture, refuse_unknown_fields
from rlhf.config.cluster import Device
from rlhf.config.compose import to_run
from rlhf.config.data import HubData
from rlhf.config.names import OURS
from rlhf.config.placement import Separate
from rlhf.config.registry import GROUPS, PROJECT_ROOT, SECTIONS, register
from rlhf.config.reward import FunctionReward
from rlhf.config.run import Run
from rlhf.config.teacher import ColocatedTeacher, StandaloneTeacher
from rlhf.config.train import DType
from rlhf.data.dataset import load, open_sources
from rlhf.data.rows import Needs
from rlhf.memory import check_cache, longest_sample
from rlhf.rewards.built_in import math_verify
from tests.unit.tiny import save_tiny_llama

ALL = sorted(path.stem for path in (PROJECT_ROOT / "recipes").glob("*.yaml"))
LARGE = [name for name in ALL if name.endswith("_qwen3")]
SMALL = sorted(path.stem for path in (PROJECT_ROOT / "recipes" / "cpu").glob("*.yaml"))
DOCS = PROJECT_ROOT / "docs"
FROM_MS_SWIFT = (DOCS / "from_ms_swift.md").read_text(encoding="utf-8")
RECIPES = (DOCS / "recipes.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def hydra_context() -> Iterator[None]:
    register()
    with initialize_config_dir(str(PROJECT_ROOT / "conf"), version_base="1.3"):
        yield


@functools.cache
def run_of(*overrides: str) -> Run:
    return to_run(compose("config", list(overrides)))


def value_of(run: Run, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), run)


def devices(run: Run) -> int:
    """Of all roles."""
    engine = run.engine.gpus if run.engine is not None and isinstance(run.placement, Separate) else 0
    teacher = run.teacher.gpus if isinstance(run.teacher, StandaloneTeacher) else 0
    return run.train.gpus + engine + teacher


# ---- what they are ---------------------------------------------------------------------------------------------------


def test_every_large_recipe_has_its_twin_and_no_other() -> None:
    assert SMALL == LARGE and len(LARGE) >= 7


@pytest.mark.parametrize("name", LARGE)
def test_a_large_recipe_is_one_for_gpus(name: str) -> None:
    run = run_of(f"+recipes={name}")
    assert run.run.name == name and run.cluster.device is Device.cuda and run.train.dtype is DType.bfloat16
    assert run.engine is None or run.engine.dtype is DType.bfloat16
    assert not isinstance(run.teacher, StandaloneTeacher) or run.teacher.engine.dtype is DType.bfloat16
    assert isinstance(run.data, HubData) and run.data.name == "openai/gsm8k" and run.data.eval_split == "test"
    assert run.data.chat_template_args == {"enable_thinking": False}
    assert run_of(f"+recipes={name}", "logger=wandb", "run.steps=30").logger.wandb


@pytest.mark.parametrize("name", SMALL)
def test_a_twin_is_its_recipe_in_small(name: str) -> None:
    large, small = run_of(f"+recipes={name}"), run_of(f"+recipes=cpu/{name}")
    for group in ("algo", "distill", "teacher", "placement", "rollout", "reward"):
        assert type(getattr(small, group)) is type(getattr(large, group)), group
    for group in ("distill", "placement"):
        assert getattr(small, group) == getattr(large, group), group
    if isinstance(large.reward, FunctionReward):
        assert small.reward.functions == [*large.reward.functions, "length"], "dense, so that something is learned"
    sizes = {"num_generations", "steps_per_generation"}
    for field in dataclasses.fields(large.algo):
        if field.name not in sizes:
            assert getattr(small.algo, field.name) == getattr(large.algo, field.name), field.name
    assert small.model.lora == large.model.lora
    assert small.data.preprocessor == large.data.preprocessor and small.data.chat_template_args == {}
    assert small.run.name == f"{name}_cpu" and small.run.steps == 2
    assert small.cluster.device is Device.cpu and small.train.dtype is DType.float32
    assert devices(small) == 1 + isinstance(small.placement, Separate) + isinstance(small.teacher, StandaloneTeacher)


def test_any_other_rows_go_with_a_recipe() -> None:
    for data in (["data=file", "data.path=a.jsonl"], ["data=reasoning_gym"], ["data.name=ms://modelscope/gsm8k"]):
        run = run_of("+recipes=gkd_colocate_qwen3", *data)
        assert run.data.system_prompt and run.data.chat_template_args
    assert run_of("+recipes=gkd_colocate_qwen3", "data.chat_template_args.enable_thinking=null").data == (
        dataclasses.replace(run_of("+recipes=gkd_colocate_qwen3").data, chat_template_args={})
    )
    whole = run_of("+recipes=gkd_colocate_qwen3", "model.lora.rank=0", "train.distributed_optimizer=true")
    assert not whole.model.lora.enabled


# ---- whether they fit the models they name ---------------------------------------------------------------------------

QWEN3 = {
    "Qwen/Qwen3-0.6B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "Qwen/Qwen3-1.7B": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16),
    "Qwen/Qwen3-4B": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "Qwen/Qwen3-8B": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32),
}
"""What their config.json say, as far as they differ."""


def architecture_of(name: str) -> Architecture:
    config = dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=151643,
        eos_token_id=151645,
        head_dim=128,
        hidden_act="silu",
        initializer_range=0.02,
        max_position_embeddings=40960,
        max_window_layers=28,
        num_key_value_heads=8,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        tie_word_embeddings=name != "Qwen/Qwen3-8B",
        torch_dtype="bfloat16",
        transformers_version="4.51.0",
        use_cache=True,
        use_sliding_window=False,
        vocab_size=151936,
        **QWEN3[name],
    )
    refuse_unknown_fields(config, name)
    return Architecture.from_config(config, name)


@pytest.mark.parametrize("name", LARGE)
def test_a_large_recipe_fits_its_models(name: str) -> None:
    """Layouts divide them, caches hold the longest sample, and every sequence has positions."""
    run = run_of(f"+recipes={name}")
    student = architecture_of(run.model.path)
    teachers = [run.teacher.model] if isinstance(run.teacher, ColocatedTeacher | StandaloneTeacher) else []
    for model in (student, *map(architecture_of, teachers)):
        assert all(number % run.train.tensor_parallel == 0 for number in model.split_numbers.values())
        assert longest_sample(run) <= min(model.max_positions, run.train.micro_batch_tokens)
    if run.engine is not None:
        longest = run.data.max_length + run.engine.max_new_tokens
        check_cache("rollout.kv_cache_gb", run.engine.kv_cache_gb, 16 * longest, student, run.engine.dtype)
    if isinstance(run.teacher, StandaloneTeacher):
        (teacher,) = map(architecture_of, teachers)
        engine = run.teacher.engine
        check_cache("teacher.engine.kv_cache_gb", engine.kv_cache_gb, 16 * longest_sample(run), teacher, engine.dtype)


# ---- GSM8K -----------------------------------------------------------------------------------------------------------

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""
ANSWER = "She has 3+4=<<3+4=7>>7 apples.\nThey cost 7*1000=<<7*1000=7000>>7,000.\n#### 7,000"


@pytest.fixture
def gsm8k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder laid out as the dataset is on the hub."""
    from datasets import Dataset

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    (tmp_path / "README.md").write_text(CARD)
    for name, rows in (("main/train", 6), ("main/test", 4), ("socratic/train", 3)):
        path = tmp_path / f"{name}-00000-of-00001.parquet"
        path.parent.mkdir(exist_ok=True)
        table = [{"question": f"{name} {number}: what do the apples cost?", "answer": ANSWER} for number in range(rows)]
        Dataset.from_list(table).to_parquet(path)
    return tmp_path


@pytest.mark.parametrize("name", ["gkd_off_policy_qwen3", "grpo_colocate_qwen3", "opsd_qwen3"])
def test_rows_of_gsm8k(name: str, gsm8k: Path, tmp_path: Path) -> None:
    """The answer is the response, and what a verifier compares with; held-out rows are those of the split test."""
    from transformers import AutoTokenizer

    run = run_of(f"+recipes={name}", f"data.name={gsm8k}", "data.chat_template_args.enable_thinking=null")
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_llama(tmp_path / "model"))
    needs = Needs.of(run.algo, run.rollout, run.reward)
    dataset = load(run.data, tokenizer, seed=0, eval_samples=4, eval_needs_response=True, needs=needs)
    assert (len(dataset.train), len(dataset.held_out)) == (6, 4)
    assert all(dataset.train.response_lengths > 10)
    (train, held_out) = [source for source in open_sources(run.data, 0, 4) if source is not None]
    assert "main/train" in str(next(iter(train))) and "main/test" in str(next(iter(held_out)))
    if needs.teacher_prompt:
        assert all(dataset.train.teacher_lengths > dataset.train.lengths)
    if needs.for_rewards:
        columns = {key: [row[key] for row in dataset.train.columns] for key in dataset.train.columns[0]}
        assert columns["response"] == [ANSWER] * 6 and "answer" not in columns
        said = ["so it is\n#### 7000", "#### 7,000", "#### 7", "7000 or so", "no idea", ""]
        assert math_verify().function(said, **columns) == [1, 1, 0, 1, 0, 0]
        pattern = re.compile(run.reward.options["format"]["pattern"])
        assert [pattern.fullmatch(text) is not None for text in said] == [True, True, True, False, False, False]


def test_a_part_of_gsm8k(gsm8k: Path) -> None:
    """What stands for `#2000` behind the name of a dataset."""
    run = run_of("data=gsm8k", f"data.name={gsm8k}", 'data.split="train[:2]"')
    (train, _) = open_sources(run.data, 0, 4)
    assert train is not None and len(list(train)) == 2


# ---- the pages -------------------------------------------------------------------------------------------------------

KEY = re.compile(rf"(?:{'|'.join((*GROUPS, *SECTIONS))})\.[a-z0-9_.]+(?:=\S+)?")
CHOICE = re.compile(rf"(?:{'|'.join(GROUPS)})=[a-z0-9_]+")


def rows_of(page: str, first: str) -> list[list[str]]:
    """The cells of all tables whose head begins with `first`."""
    rows, inside = [], False
    for line in page.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        inside = bool(cells) and (inside or cells[0] == first)
        if inside and cells[0] != first and not set(cells[0]) <= {"-"}:
            rows.append(cells)
    return rows


def named_in(text: str) -> list[str]:
    """What is written as code, word by word."""
    return [word for code in re.findall(r"`([^`]+)`", text) for word in code.split()]


def owners(key: str) -> list[type]:
    """The specs that have GROUP.KEY, by any option; of nested keys the section's."""
    group, *path = key.split(".")
    specs: set[Any] = set(GROUPS[group].values()) if group in GROUPS else {SECTIONS[group]}
    for name in path[:-1]:
        specs = {typing.get_type_hints(spec)[name] for spec in specs if name in typing.get_type_hints(spec)}
        if dict[str, Any] in specs:
            return [dict]  # free keys
    return [spec for spec in specs if path[-1] in {field.name for field in dataclasses.fields(spec)}]


def check_named(word: str) -> None:
    """A key or a choice of the configuration is one, and a value fits its type."""
    if CHOICE.fullmatch(word):
        group, _, option = word.partition("=")
        assert option in GROUPS[group], f"{word} doesn't exist"
        return
    key, given, value = word.partition("=")
    specs = owners(key)
    assert specs, f"{key} doesn't exist"
    if given and specs != [dict]:
        for spec in specs:
            OmegaConf.update(OmegaConf.structured(spec), key.rpartition(".")[2], yaml.safe_load(value))


def ours(text: str) -> list[str]:
    return [word for word in named_in(text) if KEY.fullmatch(word) or CHOICE.fullmatch(word)]


def test_every_key_named_for_those_from_ms_swift_exists() -> None:
    rows = rows_of(FROM_MS_SWIFT, "there")
    for _, here, differs in (row for row in rows if len(row) == 3):
        if here != "—":
            root = {"plugins", "resume"}
            assert named_in(here) and all(word in root or ours(f"`{word}`") for word in named_in(here)), here
        for word in ours(here) + ours(differs):
            check_named(word)
    assert len(rows) > 100
    for wrong in ("algo.bta", "data=gsm8", "train.lr_schedule=sine", "model.lora.rnk"):
        assert ours(f"`{wrong}`") == [wrong]
        with pytest.raises(Exception, match=r"doesn't exist|Invalid value"):
            check_named(wrong)


SEEDS = """
model teacher_model offload_teacher_model gkd_logits_topk colocate_groups offload_model offload_optimizer sleep_level
external_plugins max_length max_completion_length vllm_max_model_len padding_free sequence_parallel
tensor_model_parallel_size micro_batch_size reward_funcs num_generations steps_per_generation vllm_engine_kwargs
lmbda beta temperature sft_alpha seq_kd teacher_model_server teacher_tag_key teacher_kl_coef nnodes offload_bridge
top_k top_p repetition_penalty stop_words vllm_tensor_parallel_size vllm_data_parallel_size vllm_max_num_seqs
vllm_gpu_memory_utilization vllm_enforce_eager vllm_enable_prefix_caching vllm_enable_lora vllm_max_lora_rank
global_batch_size generation_batch_size num_iterations async_generate sync_ref_model loss_type epsilon epsilon_high
delta importance_sampling_level overlong_filter log_entropy top_entropy_quantile off_policy_sequence_mask_delta
advantage_estimator scale_rewards kl_in_reward reward_weights dynamic_sample max_resample_times soft_max_length
soft_cache_length reward_model rollout_importance_sampling_mode log_rollout_offpolicy_metrics router_replay_mode
multi_turn_scheduler max_turns use_gym_env gym_env truncation_strategy save_steps save_safetensors no_save_optim
finetune mcore_model mcore_adapter report_to wandb_exp_name logging_steps log_completions
train.gpus rollout.gpus teacher.gpus
"""


def test_every_key_of_theirs_is_named() -> None:
    there = {word.rstrip(":") for row in rows_of(FROM_MS_SWIFT, "there") for word in named_in(row[0])}
    assert not [key for key in SEEDS.split() if key not in there]


VARIABLES = {  # by their names there, values other than the defaults
    "STUDENT_MODEL_ID": "ms://Qwen/Qwen3-1.7B",
    "TEACHER_MODEL_ID": "ms://Qwen/Qwen3-4B",
    "MODEL_GPUS": "2",
    "SAMPLER_GPUS": "1",
    "BATCH_SIZE": "8",
    "MAX_STEPS": "10",
    "LR": "1e-4",
    "GKD_BETA": "0.1",
    "GKD_TEMPERATURE": "2.0",
    "GKD_TOPK": "16",
}


def test_environment_variables_of_gkd_off_policy_are_overrides() -> None:
    rows = rows_of(FROM_MS_SWIFT, "there")
    keys = {row[0].strip("`"): named_in(row[1])[0] for row in rows if row[0].strip("`") in VARIABLES}
    assert set(keys) == set(VARIABLES)
    before = run_of("+recipes=gkd_off_policy_qwen3")
    after = run_of("+recipes=gkd_off_policy_qwen3", *(f"{keys[name]}={value}" for name, value in VARIABLES.items()))
    for name, value in VARIABLES.items():
        now = value_of(after, keys[name])
        assert now == type(now)(value) != value_of(before, keys[name])
    script = ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", 4, 4, 16, 1000, 5e-5, 0.5, 1.0, 64]
    assert [value_of(before, keys[name]) for name in VARIABLES] == script, "the script's defaults"


def test_the_page_of_recipes() -> None:
    """Every recipe, the GPUs it takes, and keys to change that it has."""
    table = {named_in(row[0])[0]: row for row in rows_of(RECIPES, "recipe")}
    assert sorted(table) == ALL
    for name, (_, _, gpus, change) in table.items():
        run = run_of(f"+recipes={name}")
        assert int(gpus) == (devices(run) if run.cluster.device is Device.cuda else 0), name
        assert named_in(change) == ours(change)
        for word in named_in(change):
            value_of(run, word)
    sources = {name for row in rows_of(FROM_MS_SWIFT, "there") if len(row) == 2 for name in named_in(row[1])}
    assert sources == set(LARGE)


def test_names_of_trl_are_answered_with_ours() -> None:
    """Those that have a counterpart, but for those that are called the same here."""
    rows = [row for row in rows_of((DOCS / "from_trl.md").read_text(encoding="utf-8"), "TRL") if len(row) == 3]
    same = {"temperature", "lmbda", "seq_kd", "num_generations", "steps_per_generation", "scale_rewards"}
    same |= {"warmup_steps", "weight_decay", "seed", "max_new_tokens"}
    not_typed = {"model", "train_dataset", "max_length", "peft_config", "environment_factory", "use_vllm"}
    named = {name for row in rows if row[1] for name in re.findall(r"`([a-z_]{3,})\b", row[0])}
    assert named - not_typed - same <= set(OURS) and len(named) > 40


@pytest.mark.parametrize("page", ["recipes", "from_ms_swift", "from_trl"])
def test_commands_of_the_pages_compose(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    commands = [line.partition("#")[0].split()[3:] for line in text.splitlines() if "    python -m rlhf.launch" in line]
    assert commands
    for command in commands:
        assert run_of(*(word for word in command if not word.startswith("--") and word != "job"))
    for word in ours(text):
        check_named(word)
