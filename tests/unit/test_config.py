"""Groups, specs and checks; every refusal is one line that names the key and the remedy."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from rlhf import launch
from rlhf.backends.keep import KEEPER
from rlhf.config.algo import GRPO
from rlhf.config.arguments import check_arguments
from rlhf.config.checks import left_by_lmbda
from rlhf.config.cluster import Device
from rlhf.config.compose import to_run
from rlhf.config.lora import modules_of
from rlhf.config.messages import explain, interrupted
from rlhf.config.model import SmolLM2With24Layers
from rlhf.config.names import OTHER_VALUES, OURS
from rlhf.config.registry import GROUPS, PROJECT_ROOT, SECTIONS, target_of
from rlhf.config.rollout import VllmRollout
from rlhf.config.run import Eval, Run
from rlhf.config.train import Train
from rlhf.errors import ConfigError, ModelError
from rlhf.stopping import Stopped

CONF = PROJECT_ROOT / "conf"
RECIPES = sorted(path.stem for path in (PROJECT_ROOT / "recipes").glob("*.yaml"))
CPU_RECIPES = sorted(f"cpu/{path.stem}" for path in (PROJECT_ROOT / "recipes" / "cpu").glob("*.yaml"))
GROUP_OPTIONS = [(group, option) for group, options in GROUPS.items() for option in options]
REQUIRED = {
    "model=hf": ["model.path=student", "teacher.model=teacher"],
    "data=file": ["data.path=rows.jsonl"],
    "data=hub": ["data.name=a/b"],
    "data=plugin": ["data.function=rows.py:easy"],
    "reward=functions": ["reward.functions=[format]"],
    "environment=multi_turn": ["environment.name=mine.py:Mine"],
}

NOT_YET = "is not available yet; what works today:"
REFUSED = {
    "distill=sampled": "algo=gkd compares distributions, and distill=sampled asks about one token of each; use "
    "distill=topk or distill=fullvocab",
    "distill=none": "algo=gkd needs teacher scores, got distill=none; use distill=topk or distill=fullvocab",
    "teacher=none": "algo=gkd needs a teacher, got teacher=none; use teacher=colocated or teacher=standalone",
    "reward=functions": "algo=gkd learns from a teacher and would ignore reward.*; use reward=none",
}


@pytest.fixture(scope="module", autouse=True)
def hydra_context() -> Iterator[None]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@functools.cache
def composed(*overrides: str) -> DictConfig:
    return compose("config", list(overrides))


def run_of(*overrides: str) -> Run:
    return to_run(composed(*overrides))


def refusal(*overrides: str) -> str:
    """The line a user reads."""
    with pytest.raises(Exception) as caught:
        check_arguments(list(overrides))
        run_of(*overrides)
    line = explain(caught.value)
    assert line is not None, f"no line for {caught.value!r}"
    assert "\n" not in line
    return line


# -- Groups and options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "option"), GROUP_OPTIONS)
def test_every_option_composes_or_refuses(group: str, option: str) -> None:
    choice = f"{group}={option}"
    overrides = [choice, *REQUIRED.get(choice, [])]
    if choice in REFUSED:
        assert refusal(*overrides) == REFUSED[choice]
    else:
        assert type(getattr(run_of(*overrides), group)) is GROUPS[group][option]


@pytest.mark.parametrize(("group", "option"), GROUP_OPTIONS)
def test_yaml_selects_its_own_spec(group: str, option: str) -> None:
    """`_target_` is the registered class, and defaults are the dataclass's unless the file states them."""
    choice = f"{group}={option}"
    node = OmegaConf.to_container(composed(choice)[group], resolve=False)
    spec = GROUPS[group][option]
    assert isinstance(node, dict) and node.pop("_target_") == target_of(spec)
    assert getattr(importlib.import_module(spec.__module__), spec.__qualname__) is spec
    stated = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{option}.yaml"), resolve=False)
    assert isinstance(stated, dict) and stated.pop("defaults")[0] == f"/schema/{group}/{option}@_here_"
    defaults = OmegaConf.to_container(OmegaConf.structured(spec), resolve=False)
    assert isinstance(defaults, dict)
    assert node == defaults | stated
    assert all(defaults[key] != value for key, value in stated.items()), "a YAML states deviations only"


def test_the_default_configuration() -> None:
    run = run_of("run.name=x")
    assert run.run.dir == "outputs/x"
    for section, spec in SECTIONS.items():
        if section != "run":
            assert getattr(run, section) == spec()
    chosen = [entry for entry in OmegaConf.load(CONF / "config.yaml").defaults if not isinstance(entry, str)]
    for entry in chosen:
        for group, option in entry.items():
            if group in GROUPS:
                assert type(getattr(run, group)) is GROUPS[group][option]


def test_files_and_registry_agree() -> None:
    files = {(path.parent.name, path.stem) for path in CONF.glob("*/*.yaml")}
    assert files == set(GROUP_OPTIONS)
    sections = {field.name for field in dataclasses.fields(Run)}
    assert sections == set(GROUPS) | set(SECTIONS) | {"plugins", "resume"}
    assert set(composed()) == sections


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_a_run(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_of(f"+recipes={recipe}")
    assert run.run.name == recipe
    assert run_of(f"+recipes={recipe}", "run.steps=3").run.steps == 3


# -- Ranges ------------------------------------------------------------------------------------------------------------

OUT_OF_RANGE = [
    "algo.beta=-0.1",
    "algo.beta=1.1",
    "algo.beta=nan",
    "algo.lmbda=-1",
    "algo.lmbda=2",
    "algo.lmbda=nan",
    "algo.sft_alpha=-1",
    "cluster.threads=0",
    "cluster.object_store_gb=0",
    "cluster.start_timeout_s=0",
    "cluster.address=''",
    "data.max_length=0",
    "data.max_teacher_length=0",
    "data.max_response_length=0",
    "data.preprocessor=''",
    "data.size=0",
    "data.task=''",
    "distill.k=0",
    "distill.temperature=0",
    "distill.temperature=inf",
    "eval.samples=-1",
    "eval.every=-1",
    "eval.max_response_tokens=0",
    "model.provider=mcore_bridge",
    "model.path=''",
    "model.drop_layers=[-1]",
    "model.drop_layers=[3,3]",
    "placement.max_staleness=1",
    "rollout.gpus=0",
    "rollout.tensor_parallel=0",
    "rollout.tensor_parallel=2",
    "rollout.max_new_tokens=0",
    "rollout.temperature=-1",
    "rollout.temperature=0.001",
    "cluster.start_timeout_s=1e9",
    "rollout.top_p=-0.5",
    "rollout.top_p=0",
    "rollout.top_p=2",
    "rollout.min_p=1.5",
    "rollout.top_k=-1",
    "rollout.max_num_seqs=0",
    "rollout.kv_cache_gb=0",
    "rollout.logprob_gap_warning=0",
    "run.name=a/b",
    "run.name=..",
    "run.name=''",
    "run.steps=0",
    "run.steps=99999999999999999999",
    "run.seed=-1",
    "run.seed=4294967296",
    "run.save_every=-1",
    "teacher.model=''",
    "train.gpus=0",
    "train.tensor_parallel=0",
    "train.tensor_parallel=2",
    "train.sequence_parallel=true",
    "train.global_batch_samples=0",
    "train.micro_batch_tokens=0",
    "train.lr=0",
    "train.lr=nan",
    "train.lr=inf",
    "train.warmup_steps=-1",
    "train.min_lr=1e-6",
    "train.lr_schedule=wsd",
    "train.decay_steps=4",
    "train.weight_decay=-1",
    "train.adam_beta1=-0.1",
    "train.adam_beta1=1",
    "train.adam_beta2=-0.1",
    "train.adam_beta2=1",
    "train.adam_eps=0",
    "train.clip_grad=-1",
]


@pytest.mark.parametrize("override", OUT_OF_RANGE)
def test_values_out_of_range_name_their_key(override: str) -> None:
    key, _, value = override.partition("=")
    config = copy.deepcopy(composed())
    OmegaConf.update(config, key, yaml.safe_load(value))
    with pytest.raises(InstantiationException) as caught:
        to_run(config)
    line = explain(caught.value)
    assert line is not None and key in line and "\n" not in line


def test_learning_rate_schedules_fit_the_run() -> None:
    linear, wsd = "train.lr_schedule=linear", "train.lr_schedule=wsd"
    assert "train.min_lr must be in [0, 1e-05], got -1" in refusal(linear, "train.min_lr=-1")
    assert "train.min_lr must be in [0, 1e-05], got 1" in refusal(linear, "train.min_lr=1")
    assert "train.warmup_steps=17 and train.decay_steps=0 don't fit run.steps=16" in refusal("train.warmup_steps=17")
    assert "train.warmup_steps=9 and train.decay_steps=8 don't fit" in refusal(
        wsd, "train.warmup_steps=9", "train.decay_steps=8"
    )


def test_layouts() -> None:
    """What each layout means, and what the trainer then does with lengths."""
    two, four = ("train.gpus=2", "rollout.gpus=2"), ("train.gpus=4", "rollout.gpus=4")
    for overrides, data_parallel, sequence_parallel, multiple in [
        ((), 1, False, 1),
        (two, 2, False, 1),
        ((*two, "train.distributed_optimizer=true"), 2, False, 1),
        ((*two, "train.tensor_parallel=2"), 1, True, 2),
        ((*two, "train.tensor_parallel=2", "train.sequence_parallel=true"), 1, True, 2),
        ((*two, "train.tensor_parallel=2", "train.padding_free=false"), 1, False, 1),
        ((*two, "train.tensor_parallel=2", "train.padding_free=false", "train.sequence_parallel=true"), 1, True, 2),
        ((*two, "train.padding_free=false", "train.sequence_parallel=false"), 2, False, 1),
        ((*four, "train.tensor_parallel=2", "train.distributed_optimizer=true"), 2, True, 2),
    ]:
        train = run_of(*overrides).train
        assert (train.data_parallel, train.uses_sequence_parallel) == (data_parallel, sequence_parallel), overrides
        assert (train.pad_multiple, train.padded(7)) == (multiple, 7 if multiple == 1 else 8), overrides


def test_both_refusals_of_fullvocab_and_paths() -> None:
    assert "distill.temperature must be in [0.01, 100]" in refusal("distill=fullvocab", "distill.temperature=-1")
    assert "data.path is empty" in refusal("data=file", "data.path=''")
    assert "data.name is empty" in refusal("data=hub", "data.name=''")
    assert "data.split is empty" in refusal("data=hub", "data.name=a/b", "data.split=''")
    assert "model.path is empty" in refusal("model=hf", "model.path=''")


def test_epochs_stand_in_for_steps() -> None:
    run = run_of("run.steps=null", "run.epochs=2", "train.warmup_steps=17")
    assert (run.run.steps, run.run.epochs) == (None, 2)
    file = ("data=file", "data.path=a.jsonl", "data.streaming=true")
    assert run_of(*file, "run.steps=null", "run.epochs=2").data.streaming
    assert "run.epochs must be in [1, 10000000], got 0" in refusal("run.steps=null", "run.epochs=0")


def test_every_batch_size_names_its_unit() -> None:
    """A number of things per batch says of what: samples, tokens, rows, sequences, steps."""
    units = ("samples", "tokens", "seqs", "steps", "rows")
    for spec in (Train, VllmRollout, Eval):
        for field in dataclasses.fields(spec):
            if "batch" in field.name or field.name.startswith("max_"):
                assert field.name.endswith(units), field.name


def test_limits_themselves_are_allowed() -> None:
    run_of("algo.beta=0", "rollout.top_p=1", "rollout.temperature=0", "train.adam_beta1=0", "train.clip_grad=0")
    run_of("algo.beta=1", "eval.samples=0", "run.seed=2147483647", "cluster.threads=1", "train.warmup_steps=16")


# -- Across keys, options and groups -----------------------------------------------------------------------------------

CONTRADICTIONS = {
    "model.path=mine": f"model=smollm2_24l would remove layers {SmolLM2With24Layers().drop_layers} from "
    "model.path=mine; for your own checkpoint use model=hf model.path=mine",
    "logger.wandb_project=x": "logger.wandb_project=x has no effect without Weights & Biases; use logger=wandb, or "
    "leave logger.wandb_project=rlhf",
    "logger.wandb_entity=x": "logger.wandb_entity=x has no effect without Weights & Biases; use logger=wandb, or leave "
    "logger.wandb_entity=null",
    "logger.wandb_mode=offline": "logger.wandb_mode=offline has no effect without Weights & Biases; use logger=wandb, "
    "or leave logger.wandb_mode=online",
    "cluster=attached cluster.object_store_gb=4": "cluster.object_store_gb=4.0 has no effect with cluster.address=auto "
    "(a Ray that runs already); set the size where that Ray is started, or leave cluster.object_store_gb=2.0",
    "eval.samples=0 eval.every=2": "eval.every=2 has no effect with eval.samples=0 (no evaluation); use "
    "eval.samples=16, or leave eval.every=0",
    "eval.samples=0 eval.responses=student": "eval.responses=student has no effect with eval.samples=0 (no "
    "evaluation); use eval.samples=16, or leave eval.responses=dataset",
    "eval.samples=0 eval.max_response_tokens=5": "eval.max_response_tokens=5 has no effect with eval.samples=0 (no "
    "evaluation); use eval.samples=16, or leave eval.max_response_tokens=128",
    "eval.responses=student eval.max_response_tokens=5": "eval.max_response_tokens=5 has no effect with "
    "eval.responses=student; use rollout.max_new_tokens, or leave eval.max_response_tokens=128",
    "data=file data.path=a.jsonl data.eval_path=b.jsonl eval.samples=0": "data.eval_path=b.jsonl has no effect with "
    "eval.samples=0 (no evaluation); use eval.samples=16, or leave data.eval_path=null",
    "data=hub data.name=a/b data.eval_split=test eval.samples=0": "data.eval_split=test has no effect with "
    "eval.samples=0 (no evaluation); use eval.samples=16, or leave data.eval_split=null",
    "rollout.temperature=0 rollout.top_p=0.9": "rollout.top_p=0.9 has no effect with rollout.temperature=0 (greedy); "
    "use rollout.temperature=1, or leave rollout.top_p=1.0",
    "rollout.temperature=0 rollout.top_k=5": "rollout.top_k=5 has no effect with rollout.temperature=0 (greedy); "
    "use rollout.temperature=1, or leave rollout.top_k=0",
    "rollout.temperature=0 rollout.logprob_gap_warning=0.1": "rollout.logprob_gap_warning=0.1 has no effect with "
    "rollout.temperature=0 (greedy); use rollout.temperature=1, or leave rollout.logprob_gap_warning=null",
    "rollout.top_k=5 rollout.logprob_gap_warning=0.1": "rollout.logprob_gap_warning=0.1 has no effect when the "
    "sampler's distribution is cut: its log-probabilities aren't the model's; use rollout.top_p=1 rollout.top_k=0 "
    "rollout.min_p=0, or leave rollout.logprob_gap_warning=null",
    "train.micro_batch_tokens=300": "train.micro_batch_tokens=300 can't hold one sample of data.max_length=256 + "
    "rollout.max_new_tokens=128 tokens; use at least 384",
    "train.micro_batch_tokens=400 eval.max_response_tokens=200": "train.micro_batch_tokens=400 can't hold one held-out "
    "sample of data.max_length=256 + eval.max_response_tokens=200 tokens; use at least 456",
    "train.gpus=2": "placement=colocate shares one set of devices: train.gpus=2 and rollout.gpus=1 must be equal; "
    "make them so, or use placement=separate",
    "train.gpus=3 train.tensor_parallel=2": "train.gpus=3 must be divisible by train.tensor_parallel=2",
    "train.sequence_parallel=true": "train.sequence_parallel=true has no effect with train.tensor_parallel=1: no "
    "devices share a sequence; use train.tensor_parallel=2 with train.gpus=2, or train.sequence_parallel=null",
    "train.gpus=2 train.tensor_parallel=2 train.sequence_parallel=false": "train.padding_free=true with "
    "train.tensor_parallel=2 needs sequence parallelism; use train.sequence_parallel=true (or null), or "
    "train.padding_free=false",
    "train.gpus=2 train.tensor_parallel=2 train.distributed_optimizer=true": "train.distributed_optimizer=true has no "
    "effect with train.gpus=2 train.tensor_parallel=2: one copy of the model has no other to share with; use "
    "train.gpus=4 or more, or train.distributed_optimizer=false",
    "train.gpus=8 train.tensor_parallel=2 train.global_batch_samples=3": "train.global_batch_samples=3 can't feed the "
    "4 copies of the model that train.gpus=8 train.tensor_parallel=2 make; use train.global_batch_samples=4 or more",
    "train.gpus=4 rollout.gpus=4 eval.samples=3": "eval.samples=3 can't feed the 4 copies of the model that "
    "train.gpus=4 train.tensor_parallel=1 make; use eval.samples=4 or more, or eval.samples=0",
    "train.gpus=2 rollout.gpus=2 train.tensor_parallel=2 train.micro_batch_tokens=385 rollout.max_new_tokens=129": (
        "train.micro_batch_tokens=385 can't hold one sample of data.max_length=256 + rollout.max_new_tokens=129 "
        "tokens; use at least 386"
    ),
    "placement.max_staleness=1": "placement.max_staleness=1 needs roles on devices of their own; placement=colocate "
    "allows 0; use placement=separate",
    "teacher.gpus=2": "unknown key teacher.gpus with teacher=colocated; teacher=standalone has it",
    "teacher=standalone teacher.gpus=3 teacher.tensor_parallel=2": "teacher.gpus=3 must be divisible by "
    "teacher.tensor_parallel=2",
    "teacher=standalone teacher.gpus=0": "teacher.gpus must be at least 1, got 0",
    "teacher=standalone teacher.engine.kv_cache_gb=0": "teacher.engine.kv_cache_gb must be greater than 0, got 0.0",
    "teacher=standalone +teacher.engine.foo=1": "unknown key teacher.engine.foo; teacher.engine has dtype, "
    "enforce_eager, kv_cache_gb, logits_mb, max_num_batched_tokens, max_num_seqs",
    "teacher=standalone teacher.engine.max_num_batched_tokens=8": "teacher.engine.max_num_batched_tokens=8 is less "
    "than a token for each of teacher.engine.max_num_seqs=64; raise it, or lower teacher.engine.max_num_seqs",
    "teacher=standalone distill=fullvocab teacher.engine.logits_mb=77": "teacher.engine.logits_mb=77 has no effect "
    "without distill=topk, for which the teacher's logits are made; use distill=topk, or leave "
    "teacher.engine.logits_mb=1280",
    "teacher=standalone teacher.engine=5": "teacher.engine: a section; set its keys one by one",
    "teacher=standalone model=hf model.path=x": "the default teacher goes with the default student only; name yours: "
    "teacher.model=FOLDER (a Hugging Face checkpoint with the student's tokenizer)",
    "placement=separate placement.max_staleness=2": "placement.max_staleness must be in [0, 1], got 2",
    "run.epochs=2": "run.steps=16 and run.epochs=2 both say how long the run is; keep one: run.steps=null "
    "run.epochs=2, or run.epochs=null",
    "run.steps=null": "run.steps=null and run.epochs=null: how long is the run? use run.steps=16, or run.epochs=1",
    "data=file data.path=a.jsonl data.streaming=true data.on_bad_row=skip run.steps=null run.epochs=2": "run.epochs=2 "
    "needs to know how many rows there are, and data.streaming=true data.on_bad_row=skip doesn't count them first; use "
    "run.steps, or data.streaming=false",
    "data=hub data.name=a/b data.streaming=true": "data=hub data.streaming=true meets bad rows while training, where "
    "data.on_bad_row=error would end the run; use data.on_bad_row=skip, or data.streaming=false",
    "data=file data.path=a.jsonl data.shuffle_buffer=5": "data.shuffle_buffer=5 has no effect with "
    "data.streaming=false data.shuffle=true; use data.streaming=true data.shuffle=true, or leave "
    "data.shuffle_buffer=10000",
    "data=file data.path=hf://a/b": "data.path=hf://a/b is on a hub; use data=hub data.name=hf://a/b (and data.split, "
    "data.eval_split)",
    "data=hub data.name=ms://b": "data.name=ms://b is no id of ModelScope; write data.name=ms://OWNER/NAME",
    "data=hub data.name=a/b data.prompt_column=c data.response_column=c": "data.prompt_column=c and "
    "data.response_column=c are one column",
    "rollout.stop_tokens=[x,x]": "rollout.stop_tokens=['x', 'x'] names one twice; keep one",
    "resume=null": "resume=null must be never, auto, or the folder of a run or a checkpoint",
    "resume=3": "resume=3 must be never, auto, or the folder of a run or a checkpoint",
    "resume=auto": "resume=auto continues from what run.save_every writes, and run.save_every=0 writes nothing; "
    "use e.g. run.save_every=50",
    "resume=auto run.save_every=1 run.overwrite=true": "resume=auto continues what run.overwrite=true deletes; "
    "keep one",
    "run.keep_last=2": "run.keep_last=2 has no effect with run.save_every=0; use run.save_every=50, or leave "
    "run.keep_last=0",
    "eval.keep_best=false": "eval.keep_best=false has no effect with eval.every=0; use eval.every=10, or leave "
    "eval.keep_best=true",
    "rollout=none algo.lmbda=0.5": "algo.lmbda=0.5 trains on the student's own samples, and rollout=none starts no "
    "engine to take them; use algo.lmbda=0, or rollout=vllm",
    "rollout=none eval.responses=student": "eval.responses=student needs an engine, and rollout=none starts none; use "
    "eval.responses=dataset",
    "algo.lmbda=0 eval.responses=student": "eval.responses=student needs an engine, and algo.lmbda=0 starts none; use "
    "eval.responses=dataset",
    "algo.sft_alpha=1": "algo.sft_alpha=1.0 has no effect where every response is the student's own (algo.lmbda=null); "
    "use algo.lmbda=0.5 or rollout=none, or leave algo.sft_alpha=0.0",
    "data.max_response_length=64": "data.max_response_length=64 has no effect where every response is the student's "
    "own (algo.lmbda=null); use algo.lmbda=0.5 or rollout=none, or leave data.max_response_length=512",
    "rollout=none train.micro_batch_tokens=700": "train.micro_batch_tokens=700 can't hold one sample of "
    "data.max_length=256 + data.max_response_length=512 tokens; use at least 768",
    "data.max_teacher_length=4000": "train.micro_batch_tokens=4096 can't hold one sample of "
    "data.max_teacher_length=4000 + rollout.max_new_tokens=128 tokens; use at least 4128",
    "algo=opsd teacher=none": "algo=opsd needs a teacher, got teacher=none; use teacher=colocated or "
    "teacher=standalone",
    "placement=separate placement.max_staleness=1 algo.lmbda=0.5": "placement.max_staleness=1 with algo.lmbda=0.5 "
    f"{NOT_YET} algo.lmbda=1, or placement.max_staleness=0",
    "placement=separate placement.max_staleness=1 teacher=self": "placement.max_staleness=1 with teacher=self, whose "
    f"weights are trained while it is asked {NOT_YET} placement.max_staleness=0, or another teacher",
    "placement=separate rollout=none": "placement=separate gives the engine devices of its own, and rollout=none "
    "starts none; use placement=colocate",
    "algo=opsd distill=none": "algo=opsd needs teacher scores, got distill=none; use distill=topk or distill=fullvocab",
    "algo.seq_kd=true": "algo.seq_kd=true needs a teacher that writes; use teacher=standalone, or responses the "
    "teacher wrote before: algo.seq_kd=false rollout=none data=file data.path=FILE",
    "algo.seq_kd=true algo.lmbda=0.5 teacher=self": "algo.seq_kd=true needs a teacher that writes; use "
    "teacher=standalone, or responses the teacher wrote before: algo.seq_kd=false rollout=none data=file "
    "data.path=FILE",
    "algo.seq_kd=true teacher=standalone": "algo.seq_kd=true has no effect where every response is the student's own "
    "(algo.lmbda=null); use algo.lmbda=0.5 or rollout=none, or leave algo.seq_kd=false",
    "teacher=standalone teacher.generation.temperature=0": "teacher.generation.temperature=0.0 has no effect with "
    "algo.seq_kd=false (the teacher writes nothing); use algo.seq_kd=true, or leave teacher.generation.temperature=1.0",
    "teacher=standalone algo.seq_kd=true rollout=none data.max_response_length=64": "data.max_response_length=64 has "
    "no effect with algo.seq_kd=true, where the teacher writes the responses; use teacher.generation.max_new_tokens, "
    "or leave data.max_response_length=512",
    "teacher=standalone algo.seq_kd=true rollout=none teacher.generation.max_new_tokens=5000": "train."
    "micro_batch_tokens=4096 can't hold one sample of data.max_length=256 + teacher.generation.max_new_tokens=5000 "
    "tokens; use at least 5256",
    "teacher.offload=true": "teacher.offload=true has no effect with cluster.device=cpu, where device and host memory "
    "are one; use cluster.device=cuda, or leave teacher.offload=false",
    "teacher=reference teacher.ema_decay=0.5": "unknown key teacher.ema_decay with teacher=reference; "
    "teacher=self has it",
    "teacher=self teacher.ema_decay=2": "teacher.ema_decay must be in [0.0, 1.0], got 2.0",
}


MODULES = "use all-linear, attention, mlp or a list of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
OFF = "has no effect with model.lora.rank=0 (no adapters); use model.lora.rank=16, or leave"
CONTRADICTIONS |= {
    "model.lora.alpha=8": f"model.lora.alpha=8.0 {OFF} model.lora.alpha=32.0",
    "model.lora.dropout=0.1": f"model.lora.dropout=0.1 {OFF} model.lora.dropout=0.0",
    "model.lora.save=merged": f"model.lora.save=merged {OFF} model.lora.save=both",
    "model.lora.target=mlp": f"model.lora.target=mlp {OFF} model.lora.target=all-linear",
    "model.lora.path=a model.lora.rank=8": "model.lora.rank=8 has no effect with model.lora.path, whose adapter brings "
    "its own; leave out model.lora.path, or leave model.lora.rank=0",
    "model.lora.rank=-1": "model.lora.rank must be at least 0, got -1",
    "model.lora.rank=8 model.lora.alpha=0": "model.lora.alpha must be greater than 0, got 0.0",
    "model.lora.rank=8 model.lora.dropout=1": "model.lora.dropout must be in [0, 1), got 1.0",
    "model.lora.rank=8 model.lora.target=[q_proj,lm_head]": "model.lora.target=[q_proj,lm_head]: embedding and LM head "
    f"are never adapted; {MODULES}",
    "model.lora.rank=8 model.lora.target=[attention,up_proj]": "model.lora.target=[attention,up_proj]: attention is no "
    f"module that can be adapted; {MODULES}",
    "model.lora.rank=8 model.lora.target=qproj": "model.lora.target=qproj: qproj is no module that can be adapted; "
    f"{MODULES}",
    "model.lora.rank=8 model.lora.target=[]": f"model.lora.target=[] names nothing; {MODULES}",
    "model.lora.rank=8 model.lora.target=[q_proj,q_proj]": "model.lora.target=[q_proj,q_proj] names a module twice",
    "model.lora.rank=8 model.lora.target=[[q_proj]]": "model.lora.target=[['q_proj']]: ['q_proj'] is no module that "
    f"can be adapted; {MODULES}",
    "model.lora.path=''": "model.lora.path is empty; write e.g. model.lora.path=FOLDER",
    "model.lora.rnk=8": "unknown key model.lora.rnk; did you mean model.lora.rank?",
}


@pytest.mark.parametrize("overrides", CONTRADICTIONS)
def test_contradictions_are_refused(overrides: str) -> None:
    assert refusal(*overrides.split()) == CONTRADICTIONS[overrides]


def test_a_rank_switches_lora_on() -> None:
    assert not run_of().model.lora.enabled
    lora = run_of("model.lora.rank=16", "model.lora.target=[v_proj,q_proj]", "model.lora.save=adapter").model.lora
    assert lora.enabled and lora.rank == 16 and modules_of(lora.target) == ("q_proj", "v_proj")
    assert run_of("model.lora.path=folder", "model.lora.dropout=0.1").model.lora.enabled
    words = {word: modules_of(word) for word in ("all-linear", "attention", "mlp")}
    assert words["all-linear"] == words["attention"] + words["mlp"] and len(set(words["all-linear"])) == 7


def test_what_looks_like_a_contradiction_but_is_none() -> None:
    assert run_of("logger=wandb", "logger.wandb_project=x", "logger.wandb_mode=offline").logger.wandb
    assert run_of("model=hf", "model.path=mine", "teacher.model=big").model.drop_layers == []
    assert "name yours: teacher.model=FOLDER" in refusal("model=hf", "model.path=mine")
    assert run_of("model.drop_layers=[1]").model.drop_layers == [1]
    assert run_of("cluster=attached").cluster.address == "auto"
    assert run_of("teacher.offload=true", "cluster.device=cuda").teacher.offload
    for layout in ("train.gpus=2 rollout.gpus=2", "placement=separate", "teacher=standalone"):
        assert run_of("cluster.device=cuda", *layout.split()).cluster.device is Device.cuda
    assert run_of("teacher=standalone", "algo.seq_kd=true", "algo.lmbda=0").writer is not None
    assert run_of("eval.responses=student").eval.max_response_tokens == 128
    assert run_of("eval.samples=0", "train.micro_batch_tokens=384").eval.samples == 0
    options = run_of("data.task=chain_sum", "data.options.min_terms=2").data
    assert options == run_of("data.task=chain_sum", "data.options={min_terms: 2}").data
    assert vars(options)["options"] == {"min_terms": 2}


WITHOUT_OFF_POLICY_STEPS = ("algo.lmbda=1", "algo.sft_alpha=0.1", "data.max_response_length=64")
WITHOUT_A_WRITER = (
    *("algo.lmbda=1", "algo.seq_kd=true", "algo.sft_alpha=0.1"),
    *("teacher=standalone", "teacher.generation.top_k=5"),
)
WITHOUT_AN_ENGINE = ("algo.lmbda=0", "rollout.temperature=0.7", "rollout.max_new_tokens=512", "rollout.stop_tokens=[x]")
LEFT = "without effect, since every response is the student's own; use algo.lmbda=0.5, or leave them at their defaults"
LEFT_BY_LMBDA = {
    WITHOUT_OFF_POLICY_STEPS: f"algo.lmbda=1 leaves algo.sft_alpha=0.1, data.max_response_length=64 {LEFT}",
    WITHOUT_A_WRITER: f"algo.lmbda=1 leaves algo.sft_alpha=0.1, algo.seq_kd=true, teacher.generation.top_k=5 {LEFT}",
    WITHOUT_AN_ENGINE: "algo.lmbda=0 leaves rollout.max_new_tokens=512, rollout.temperature=0.7, "
    "rollout.stop_tokens=['x'] without effect, since no engine is started; use algo.lmbda=0.5, or leave them at their "
    "defaults",
}


@pytest.mark.parametrize("overrides", LEFT_BY_LMBDA)
def test_what_lmbda_leaves_without_effect(overrides: tuple[str, ...]) -> None:
    """Alone it is refused, as far as it can be taken back; a job of a sweep, also continued alone, runs with it."""
    if "algo.lmbda=1" in overrides:
        assert refusal(*overrides) == LEFT_BY_LMBDA[overrides]
    else:
        assert run_of(*overrides).engine is None
    job = to_run(composed(*overrides), sweep=True)
    assert left_by_lmbda(job) == LEFT_BY_LMBDA[overrides]
    continued = to_run(composed(*overrides, "resume=outputs/before"))
    assert left_by_lmbda(continued) == LEFT_BY_LMBDA[overrides]


def test_the_command_tells_a_sweep_from_a_run_alone(tmp_path: Path) -> None:
    given = ["model=hf", "model.path=nowhere", "teacher.model=nowhere", f"run.dir={tmp_path}", "logger.console=false"]
    config = composed(*WITHOUT_OFF_POLICY_STEPS, *given)
    with pytest.raises(ConfigError, match=r"^algo.lmbda=1 leaves"):
        launch.objective(config)
    with pytest.raises(ModelError, match=r"^model.path=nowhere is not a folder"):
        launch.objective(config, sweep=True)


def test_what_lmbda_uses() -> None:
    for overrides in ("algo.lmbda=0", "algo.lmbda=1", "", "rollout=none algo.lmbda=0 algo.sft_alpha=1"):
        assert left_by_lmbda(run_of(*overrides.split())) is None, overrides
    for given in LEFT_BY_LMBDA:
        between = ["algo.lmbda=0.5", *given[1:]]
        assert left_by_lmbda(run_of(*between)) is None


def test_where_responses_come_from() -> None:
    for overrides, lmbda, limits in [
        ((), 1, {"rollout.max_new_tokens": 128}),
        (("algo.lmbda=0.5",), 0.5, {"rollout.max_new_tokens": 128, "data.max_response_length": 512}),
        (("algo.lmbda=0",), 0, {"data.max_response_length": 512}),
        (("rollout=none",), 0, {"data.max_response_length": 512}),
        (("rollout=none", "algo.lmbda=0", "algo=opsd"), 0, {"data.max_response_length": 512}),
        (("algo.lmbda=0", "train.gpus=2"), 0, {"data.max_response_length": 512}),  # rollout.gpus isn't used
    ]:
        run = run_of(*overrides)
        assert (run.lmbda, run.response_limits) == (lmbda, limits), overrides
        assert run.engine is (run.rollout if lmbda else None)


def test_grpo_brings_its_partners() -> None:
    config = composed("algo=grpo")
    assert config.teacher._target_ == target_of(GROUPS["teacher"]["none"])
    assert config.distill._target_ == target_of(GROUPS["distill"]["none"])
    assert config.reward._target_ == target_of(GROUPS["reward"]["functions"])
    assert isinstance(run_of("algo=grpo").algo, GRPO), "it runs as it is"
    assert composed("algo=grpo", "teacher=colocated").teacher._target_ == target_of(GROUPS["teacher"]["colocated"])


def test_run_checks_itself_on_construction() -> None:
    run = run_of()
    changed = dataclasses.replace(run.train, micro_batch_tokens=10)
    with pytest.raises(ConfigError, match="can't hold one sample"):
        dataclasses.replace(run, train=changed)
    apart = "gives the engine devices of its own, and rollout=none starts none; use placement=colocate"
    with pytest.raises(ConfigError, match=apart):
        dataclasses.replace(run_of("rollout=none"), placement="separate")
    with pytest.raises(ConfigError, match="shares one set of devices"):
        dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, gpus=2))


# -- What Hydra and OmegaConf refuse, in our words ---------------------------------------------------------------------

MISTAKES = {
    # options and groups
    "algo=foo": "algo=foo doesn't exist; options: gkd, grpo, opsd",
    "teacher=colocate": "teacher=colocate doesn't exist; did you mean colocated?; options: colocated, none, "
    "reference, self, standalone",
    "algo=": "algo= doesn't exist; options: gkd, grpo, opsd",
    "algos=gkd": "unknown key algos; did you mean algo?",
    "algo@x=gkd": "unknown group algo@x; did you mean algo?",
    "+algo=grpo": "+algo=grpo: algo is chosen already; write algo=grpo",
    "algo=null": "a group takes the name of one option (see --help), got NoneType",
    "algo=[gkd,grpo]": "a group takes the name of one option (see --help), got several",
    "~algo": "algo must be an option of its group; choose one of algo=gkd, algo=grpo, algo=opsd",
    "algo._target_=os.system": "algo must be an option of its group; choose one of algo=gkd, algo=grpo, algo=opsd",
    "recipes=demo": "recipes has no default; write +recipes=demo",
    "+recipes=dem": f"recipes=dem doesn't exist; did you mean demo?; options: {', '.join(RECIPES)}",
    "+recipes=cpu/opsd": "recipes=cpu/opsd doesn't exist; did you mean cpu/opsd_qwen3?; options: "
    f"{', '.join(CPU_RECIPES)}",
    "+recipes=gpu/opsd": f"recipes=gpu/opsd doesn't exist; did you mean opsd?; options: {', '.join(RECIPES)}",
    "+recipes=parts/cpu": "+recipes=parts/cpu: parts/cpu is what recipes are made of, not a recipe; use e.g. "
    "+recipes=cpu/gkd_colocate_qwen3",
    "+recipes=[demo,parts/cpu]": "+recipes=[demo,parts/cpu]: parts/cpu is what recipes are made of, not a recipe; use "
    "e.g. +recipes=cpu/gkd_colocate_qwen3",
    # unknown keys
    "algo.bta=1": "unknown key algo.bta; did you mean algo.beta?",
    "distill.K=8": "unknown key distill.K; did you mean distill.k?",
    "run.save_steps=5": "unknown key run.save_steps; here it is run.save_every",
    "learning_rate=1e-5": "unknown key learning_rate; here it is train.lr",
    "model.name=x": "unknown key model.name; here it is model.path",
    "rollout.n=8": "unknown key rollout.n; here it is algo.num_generations (algo=grpo)",
    "delta=3": "unknown key delta; here it is algo.clip_dual (algo=grpo)",
    "algo=grpo loss_type=dapo": "unknown key loss_type; here it is algo.loss_mean",
    "algo=grpo beta=0.04": "unknown key beta; here it is algo.kl_coef",
    "vllm_mode=server": "unknown key vllm_mode; here it is placement",
    "resume_from_checkpoint=true": "unknown key resume_from_checkpoint; here it is resume",
    "per_device_train_batch_size=4": "unknown key per_device_train_batch_size; here it is train.global_batch_samples",
    "dataset=rows.jsonl": "unknown key dataset; here it is data.path (data=file)",
    "algo=grpo algo.beta=0.1": "unknown key algo.beta with algo=grpo; algo=gkd or algo=opsd has it; with algo=grpo it "
    "is algo.kl_coef",
    "beta=1": "unknown key beta; did you mean algo.beta?",
    "temperature=1": "unknown key temperature; did you mean rollout.temperature or distill.temperature?",
    "train.steps=1": "unknown key train.steps; did you mean run.steps?",
    "runs.steps=1": "unknown key runs; did you mean run?",
    "run.folder=x": "unknown key run.folder; run has dir, epochs, keep_last, name, overwrite, save_every, seed, steps",
    "distill=fullvocab distill.k=8": "unknown key distill.k with distill=fullvocab; distill=topk has it",
    "teacher=none teacher.model=x": "unknown key teacher.model with teacher=none; teacher=colocated or "
    "teacher=standalone has it",
    "+algo.bta=1": "unknown key algo.bta; did you mean algo.beta?",
    "++algo.bta=1": "unknown key algo.bta; did you mean algo.beta?",
    "+stepps=1": "unknown key stepps; did you mean run.steps?",
    "+run.dirr=x": "unknown key run.dirr; did you mean run.dir?",
    "+algo.beta=1": "+algo.beta: the key exists already; write algo.beta=VALUE",
    "~algo.beta": "~algo.beta: keys can't be removed; write algo.beta=VALUE",
    # types
    "algo.beta=abc": "algo.beta: 'abc' is not a number",
    "algo.beta=": "algo.beta: '' is not a number",
    "algo.beta=[1,2]": "algo.beta: '[1, 2]' is not a number",
    "data=file data.path=[a,b]": "data.path: takes one value, not a list",
    "data=file data.path={a:1}": "data.path: takes one value, not a mapping",
    "rollout.stop_token_ids=[x]": "rollout.stop_token_ids[0]: 'x' is not a whole number",
    "run.steps=1.5": "run.steps: '1.5' is not a whole number",
    "logger.wandb=maybe": "logger.wandb: 'maybe' is neither true nor false",
    "train.dtype=fp16": "train.dtype: Invalid value 'fp16', expected one of [float32, bfloat16]",
    "distill.tail=cut": "distill.tail: Invalid value 'cut', expected one of [bucket, renormalise, drop]",
    "model.drop_layers=3": "model.drop_layers: not a list; write [A,B,...]",
    "model.drop_layers=[1,a]": "model.drop_layers[1]: 'a' is not a whole number",
    "data.options=3": "data.options: Cannot assign int to Dict[str, Any]",
    "eval=null": "eval must be a section; set its keys one by one, eval.KEY=VALUE",
    "run=demo": "run must be a section; set its keys one by one, run.KEY=VALUE",
    "~eval": "eval must be a section; set its keys one by one, eval.KEY=VALUE",
    # missing values
    "model=hf": "missing value: write model.path=FOLDER (the student's Hugging Face checkpoint)",
    "teacher.model=???": "missing value: write teacher.model=FOLDER (a Hugging Face checkpoint with the student's "
    "tokenizer)",
    "model=hf data=hub": "missing values: write data.name=openai/gsm8k, model.path=FOLDER (the student's Hugging Face "
    "checkpoint)",
    "model=hf data=file algo=grpo": "missing values: write data.path=rows.jsonl, model.path=FOLDER (the student's "
    "Hugging Face checkpoint)",
    # overrides that can't be read
    "algo.beta==3": "can't read 'algo.beta==3'",
    "algo.beta": "can't read 'algo.beta'",
    "algo.beta=[1,2": "can't read 'algo.beta=[1,2'",
    "algo.beta=0,1": "algo.beta=0,1 has several values: add -m to run each, or quote the value",
    "run.name=${nope}": "run.name: Interpolation key 'nope' not found",
    "run.dir=${nope:1}": "run.dir: Unsupported interpolation type nope",
    # the command line itself
    "algo.beta=0 algo.beta=1": "algo.beta is given twice, algo.beta=0 and algo.beta=1; keep one",
    "hydra.sweep.dir=x": "hydra.sweep.dir=x is for a sweep, and has no effect without -m; add -m, or leave it out",
    "algo=gkd +algo=grpo": "algo is given twice, algo=gkd and algo=grpo; keep one",
    "--learning_rate 1e-5": "unrecognized arguments: --learning_rate; --learning_rate: here it is train.lr=1e-5 "
    "(see --help; options such as -m come first, and keys have no dashes: KEY=VALUE)",
    "--lr=1": "unrecognized arguments: --lr=1 (see --help; options such as -m come first, and keys have no dashes: "
    "KEY=VALUE)",
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_mistakes_are_one_helpful_line(overrides: str) -> None:
    line, expected = refusal(*overrides.split()), MISTAKES[overrides]
    assert line.startswith(expected) if expected.startswith("can't read") else line == expected


def test_options_of_other_trainers_are_translated() -> None:
    def said(*arguments: str) -> str:
        with pytest.raises(ConfigError) as caught:
            check_arguments(list(arguments))
        return str(caught.value)

    assert "; --learning-rate: here it is train.lr=1e-5; --bf16: here it is train.dtype (see" in said(
        "--learning-rate=1e-5", "--bf16", "true"
    )
    assert "--beta: here it is algo.beta=0.5 (" in said("--beta", "0.5")
    assert "--beta: here it is algo.kl_coef=0.5 (" in said("algo=grpo", "--beta", "0.5")
    assert "--log_completions: here it is logger.rollouts (" in said("--log_completions", "run.steps=3")


def test_giving_the_same_value_twice_is_no_contradiction() -> None:
    check_arguments(["algo.beta=0", "algo.beta=0", "-m", "--cfg", "job"])


def test_keys_of_a_sweep_go_with_one() -> None:
    check_arguments(["-m", "hydra.sweep.dir=x"])
    check_arguments(["hydra.sweep.dir=x", "hydra.mode=MULTIRUN"])
    check_arguments(["hydra.sweep.dir=x", "++hydra.mode=MULTIRUN"])
    with pytest.raises(ConfigError, match="is for a sweep"):
        check_arguments(["hydra.sweep.dir=x", "hydra.mode=RUN"])


def test_bugs_are_not_explained_away() -> None:
    assert explain(TypeError("x")) is None
    assert explain(ValueError("x")) is None
    assert explain(PermissionError(13, "Permission denied", "/a/b")) == "Permission denied: /a/b"


# -- The command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Run]:
    """The runs that the command in this process would execute; `run.seed=13` is a bug."""
    runs: list[Run] = []

    def execute(run: Run, config: object, sweep: bool) -> float:
        if run.run.seed == 13:
            raise AssertionError("a bug")
        runs.append(run)
        return 0.5

    module = types.ModuleType("rlhf.execute")
    module.execute = execute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlhf.execute", module)
    monkeypatch.setattr(launch, "failed", [])
    monkeypatch.setattr(launch, "jobs", [])
    monkeypatch.setattr(launch, "FULL_ERROR", False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.chdir(tmp_path)
    return runs


def launched(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of the command in this process."""
    from hydra.core.global_hydra import GlobalHydra

    context = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["rlhf.launch", *arguments])
    try:
        launch.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        GlobalHydra.instance().hydra = context
    return 0


def test_one_bad_job_does_not_stop_a_sweep(
    executed: list[Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(monkeypatch, "-m", "algo.beta=0,9,1", "hydra.sweep.dir=sweep") == 1
    assert [run.algo.beta for run in executed] == [0, 1]
    assert [Path(run.run.dir).relative_to(Path.cwd()) for run in executed] == [Path("sweep/0"), Path("sweep/2")]
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "error: job 1 (algo.beta=9): algo.beta must be in [0.0, 1.0], got 9.0",
        "error: 1 of 3 jobs failed: job 1 (algo.beta=9)",
    ]
    jobs, sweep = out.split("\n\n")
    assert jobs.splitlines() == ["job 0: algo.beta=0", "job 1: algo.beta=9", "job 2: algo.beta=1"]
    assert sweep.splitlines()[0].startswith("Sweep: 3 jobs, 1 of them without a result; ")
    assert [line.split()[:2] for line in sweep.splitlines()[2:]] == [["0", "0"], ["2", "1"], ["1", "9"]]


def test_resume_auto_needs_a_folder_it_can_find_again(
    executed: list[Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = ["resume=auto", "run.save_every=1"]
    assert launched(monkeypatch, *auto, "run.name=mine") == 0
    assert launched(monkeypatch, "-m", *auto, "hydra.sweep.dir=multirun/mine") == 0
    assert [run.run.dir.removeprefix(f"{Path.cwd()}/") for run in executed] == ["outputs/mine", "multirun/mine/0"]
    assert launched(monkeypatch, *auto) == 1
    assert launched(monkeypatch, "-m", *auto) == 1
    named, swept, _ = capsys.readouterr().err.splitlines()
    assert named.startswith("error: resume=auto looks for ") and named.endswith("write run.name=NAME")
    assert swept.startswith("error: job 0 (") and swept.endswith("write hydra.sweep.dir=multirun/NAME")
    assert len(executed) == 2


def test_jobs_of_a_sweep_are_one_group_of_wandb(executed: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["-m", "algo.beta=0,1", "logger=wandb", "hydra.sweep.dir=multirun/mine"]
    assert launched(monkeypatch, *keys) == 0
    assert launched(monkeypatch, *keys[:-1], "logger.wandb_group=ours", "hydra.sweep.dir=multirun/other") == 0
    assert launched(monkeypatch, "logger=wandb") == 0
    assert [run.logger.wandb_group for run in executed] == ["mine", "mine", "ours", "ours", None]


def test_ray_outlives_the_jobs_of_a_sweep_and_nothing_else(
    executed: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def execute(run: Run, config: object, sweep: bool) -> None:
        seen.append(KEEPER.keeping)
        if run.algo.beta == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["rlhf.execute"], "execute", execute)
    assert launched(monkeypatch, "-m", "algo.beta=0,0.5") == 0 and not KEEPER.keeping
    assert launched(monkeypatch, "-m", "algo.beta=0,1,0.5", "hydra.sweep.dir=two") == 130 and not KEEPER.keeping
    assert launched(monkeypatch, "algo.beta=0") == 0 and not KEEPER.keeping
    assert seen == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("saved", "arguments", "said"),
    [
        ("interrupted; saved: step_1", [], "interrupted; saved: step_1"),
        ("", [], "interrupted; nothing was started"),
        ("", ["-m", "algo.beta=0,1"], "interrupted"),
    ],
)
def test_a_second_signal_does_not_hide_what_was_saved(
    saved: str,
    arguments: list[str],
    said: str,
    executed: list[Run],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def execute(run: Run, config: object, sweep: bool) -> None:
        try:
            raise Stopped(saved)
        finally:
            raise Stopped  # e.g. while loggers are closed

    monkeypatch.setattr(sys.modules["rlhf.execute"], "execute", execute)
    assert launched(monkeypatch, *arguments) == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"warning: {said}"


def test_a_sweep_that_works(executed: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, "-m", "algo.beta=0,1") == 0
    assert [run.algo.beta for run in executed] == [0, 1]


def test_a_bug_in_one_job_shows_its_traceback_and_the_others_run(
    executed: list[Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(monkeypatch, "-m", "run.seed=13,14") == 1
    assert len(executed) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-m algo.beta=0,abc", "algo.beta: 'abc' is not a number"),
        ("-m algo=gkd,nope", "algo=nope doesn't exist; options: gkd, grpo, opsd"),
        ("-m algo.beta=interval(0,1)", "BasicSweeper does not support sweep type : INTERVAL_SWEEP"),
        ("hydra.run.dir=x", "hydra.run.dir=x has no effect; use run.dir=x"),
        ("--resolve", "The --resolve flag can only be used in conjunction with --cfg or --help"),
        ("--config-name=nope", "Cannot find primary config 'nope'. Check that it's in your config search path."),
    ],
)
def test_nothing_starts_when_the_command_line_is_wrong(
    arguments: str,
    message: str,
    executed: list[Run],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launched(monkeypatch, *arguments.split()) == 1
    assert not executed
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_sweep_refuses_one_folder_for_all(
    executed: list[Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(monkeypatch, "-m", "run.dir=x", "algo.beta=0,1") == 1
    assert not executed
    assert "use hydra.sweep.dir=x" in capsys.readouterr().err


def command(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real command, from any folder."""
    clean = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}
    return subprocess.run(
        [sys.executable, "-m", "rlhf.launch", *arguments],
        cwd=cwd,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("algo.beta=9", "algo.beta must be in [0.0, 1.0], got 9.0"),
        ("lr=1", "unknown key lr; did you mean train.lr?"),
        ("model=hf", "missing value: write model.path=FOLDER (the student's Hugging Face checkpoint)"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(overrides: str, message: str, tmp_path: Path) -> None:
    done = command(*overrides.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {message}\n")
    assert not list(tmp_path.iterdir())


def test_full_error_brings_the_traceback(tmp_path: Path) -> None:
    done = command("algo.beta=9", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "algo.beta must be in" in done.stderr


def test_help_lists_every_option(tmp_path: Path) -> None:
    done = command("--help", cwd=tmp_path)
    recipes = done.stdout.partition("== Recipes (+recipes=NAME) ==\n")[2].partition("==")[0]
    assert set(RECIPES) <= set(recipes.replace(",", " ").split()) and "cpu/NAME" in recipes
    assert "_target_" not in done.stdout and "global_batch_samples: 16" in done.stdout
    assert done.returncode == 0 and done.stderr == ""
    for group, options in GROUPS.items():
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"  {group} ")]
        assert line.split(maxsplit=1)[1].replace(" (not yet)", "").split(", ") == list(options)
    assert "gkd (not yet)" not in done.stdout and "grpo (not yet)" not in done.stdout
    assert "docs/configuration.md" in done.stdout and "${" not in done.stdout.split("== Keys")[0]


def test_the_configuration_is_printed_whole(tmp_path: Path) -> None:
    done = command("--cfg", "job", "--resolve", "+recipes=demo", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    printed = OmegaConf.create(done.stdout)
    whole = OmegaConf.create(OmegaConf.to_yaml(composed("+recipes=demo"), resolve=True))
    assert printed == whole
    assert printed.run.dir == "outputs/demo" and "${" not in done.stdout


def test_nobody_reads_to_the_end(tmp_path: Path) -> None:
    """`--help | less`, left at once, ends without a traceback."""
    done = subprocess.run(
        f"{sys.executable} -m rlhf.launch --help | true; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_composing_imports_nothing_heavy(tmp_path: Path) -> None:
    code = """
import sys
import rlhf.launch as launch
from hydra import compose, initialize_config_dir
with initialize_config_dir(str(launch.PROJECT_ROOT / "conf"), version_base="1.3"):
    launch.to_run(compose("config", []))
heavy = {"torch", "ray", "vllm", "megatron", "transformers", "datasets", "wandb", "tensorboard"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_ctrl_c_inside_an_import_is_still_ctrl_c() -> None:
    try:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as stop:
            raise ModuleNotFoundError("could not import") from stop
    except ModuleNotFoundError as error:
        assert interrupted(error)
    assert not interrupted(ModuleNotFoundError("could not import"))


def test_every_name_of_others_leads_to_a_key_of_ours() -> None:
    page = (PROJECT_ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for name, key in OURS.items():
        assert f"| `{key}` |" in page or key in GROUPS, name
    assert set(OURS) >= OTHER_VALUES
