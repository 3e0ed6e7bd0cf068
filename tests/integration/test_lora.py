"""LoRA against peft: logits, gradients, dropout, files; and what a frozen base is spared. Layouts: test_layouts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf.backends.megatron import adapters, lora, training_state
from rlhf.backends.megatron.adapters import Adapter
from rlhf.backends.megatron.device import megatron_device
from rlhf.backends.megatron.model import Model, load_model
from rlhf.backends.megatron.trainer import MegatronTrainer
from rlhf.backends.megatron.weights import base_parameters
from rlhf.batching import pack
from rlhf.config.lora import ALL_LINEAR, Lora, LoraSave
from rlhf.config.teacher import SelfTeacher
from rlhf.config.train import DType, Train
from rlhf.memory import training_bytes
from rlhf.types import Experience, MicroBatchPlan, Sequences
from tests.integration.megatron import (
    adapter_of,
    end_groups,
    experience_of,
    random_factors,
    random_sequences,
    save_tiny_model,
    set_factors,
    trainer_setup,
)

pytestmark = pytest.mark.usefixtures("megatron_groups")
LENGTHS = [(4, 12), (7, 5), (3, 21), (6, 6)]
SOME = ("k_proj", "v_proj", "o_proj", "up_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    save_tiny_model(folder / "qwen3", "qwen3", seed=1, initializer_range=0.1, tie_word_embeddings=True)
    save_tiny_model(folder / "llama", "llama", seed=2, initializer_range=0.1, attention_bias=True, mlp_bias=True)
    return folder


def peft_model(base: Path, adapter: Adapter, factors: dict[str, Tensor]) -> Any:
    reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=list(adapter.modules))
    model = get_peft_model(reference, config)
    assert set_peft_model_state_dict(model, factors).unexpected_keys == []
    return model.eval()


def rows_of(model: Any, sequences: Sequences) -> Tensor:
    """transformers' or peft's logits of the rows that score response tokens."""
    rows = []
    for tokens, prompt_length in zip(sequences.rows(), sequences.prompt_lengths, strict=True):
        rows.append(model(torch.from_numpy(tokens.copy()).long()[None]).logits[0, prompt_length - 1 : -1])
    return torch.cat(rows)


def logits_of(model: Model, sequences: Sequences) -> Tensor:
    with megatron_device():
        micro = pack(sequences, MicroBatchPlan(tuple(range(len(LENGTHS))), 64), padding_free=True)
        return model.head(model.hidden_rows(micro)).logits()


def sequences() -> Sequences:
    return random_sequences(250, LENGTHS)


def experience(step: int = 1) -> Experience:
    return experience_of(random_sequences(250, LENGTHS, seed=step), micro_batch_tokens=48, step=step)


def trainer_of(student: Path, teacher: Path | None = None, **kwargs: object) -> MegatronTrainer:
    end_groups()
    given: dict[str, Any] = dict(train=Train(lr=3e-3, weight_decay=0.1), adapter=adapter_of(), k=None)
    return MegatronTrainer(trainer_setup(student, teacher, **given | kwargs))


def moved(student: Path, teacher: Path | None = None, **kwargs: object) -> MegatronTrainer:
    """A trainer whose adapter does something."""
    trainer = trainer_of(student, teacher, **kwargs)
    assert trainer.setup.adapter is not None
    set_factors(trainer, random_factors(trainer.student.architecture, trainer.setup.adapter))
    return trainer


def close(found: Tensor, expected: Tensor, bound: float = 1e-5) -> bool:
    return bool((found - expected).abs().max() <= bound * expected.abs().max())


# ---- the same numbers as peft ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("qwen3", ALL_LINEAR),
        ("llama", SOME),
        pytest.param("qwen3", SOME, marks=pytest.mark.slow),
        pytest.param("llama", ALL_LINEAR, marks=pytest.mark.slow),
    ],
    ids=["qwen3-all", "llama-some", "qwen3-some", "llama-all"],
)
def test_logits_and_gradients_equal_peft(family: str, modules: tuple[str, ...], folder: Path) -> None:
    adapter = adapter_of(modules=modules)
    with megatron_device():
        model = load_model(folder / family, torch.float32, adapter=adapter)
        factors = random_factors(model.architecture, adapter)
        lora.fill(model.module, model.architecture, factors.__getitem__, model.partition)
    reference = peft_model(folder / family, adapter, factors)
    logits = logits_of(model, sequences())
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    with megatron_device():
        (logits * noise).sum().backward()
    expected = rows_of(reference, sequences())
    (expected * noise).sum().backward()
    assert close(logits, expected)

    gradients = {
        name.replace(".default.", "."): parameter.grad
        for name, parameter in reference.named_parameters()
        if "lora_" in name
    }
    found = {name: p.grad for factors in lora.factors_of(model.module) for name, p, _ in factors.named()}
    assert found.keys() == gradients.keys() == adapters.factor_shapes(model.architecture, adapter).keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
    assert all(p.grad is None for name, p in model.module.named_parameters() if ".adapter." not in name)


def test_a_new_adapter_changes_nothing_and_begins_as_in_peft(folder: Path) -> None:
    adapter = adapter_of(rank=32)
    with megatron_device(), torch.no_grad():
        base, model = (load_model(folder / "qwen3", torch.float32, adapter=a, seed=3) for a in (None, adapter))
        assert torch.equal(logits_of(model, sequences()), logits_of(base, sequences()))
        for (name, merged), (_, weight) in zip(model.tensors(), base.tensors(), strict=True):
            assert torch.equal(merged, weight), name
        factors = dict(model.adapter_tensors())
        again, other = (
            dict(load_model(folder / "qwen3", torch.float32, adapter=adapter, seed=seed).adapter_tensors())
            for seed in (3, 4)
        )
    reference = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder / "qwen3", dtype=torch.float32),
        LoraConfig(r=32, target_modules=list(ALL_LINEAR)),
    )
    parameters = reference.named_parameters()
    theirs = {name.replace(".default.", "."): p.detach() for name, p in parameters if "lora_" in name}
    assert factors.keys() == theirs.keys()
    for name, tensor in factors.items():
        assert tensor.shape == theirs[name].shape
        assert torch.equal(again[name], tensor)
        if ".lora_B." in name:
            assert not tensor.any() and not theirs[name].any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert 0.98 * bound < tensor.abs().max() <= bound and theirs[name].abs().max() <= bound
            assert float(tensor.std()) == pytest.approx(float(theirs[name].std()), rel=0.05)
            assert not torch.equal(other[name], tensor)
    assert len({float(tensor.sum()) for name, tensor in factors.items() if ".lora_A." in name}) == len(factors) / 2


def test_dropout_is_on_what_the_adapter_reads_and_only_while_training(folder: Path) -> None:
    trainer = moved(folder / "qwen3", folder / "llama", adapter=adapter_of(dropout=0.4))
    factors = trainer.student.module.decoder.layers[0].mlp.linear_fc1.adapter
    inputs = torch.randn(5, 1, 64)
    with megatron_device():
        torch.manual_seed(1)
        found = factors(inputs)
        torch.manual_seed(1)
        expected = torch.cat([F.dropout(inputs, 0.4) @ factors.a[m].T @ factors.b[m].T * 2 for m in factors.a], -1)
        torch.testing.assert_close(found, expected)
        assert not torch.equal(factors(inputs), found)
        factors.eval()
        plain = torch.cat([inputs @ factors.a[m].T @ factors.b[m].T * 2 for m in factors.a], -1)
        torch.testing.assert_close(factors(inputs), plain)
        factors.train()
    plan = experience().minibatches[0].plan
    evaluations = [trainer.evaluate(sequences(), plan) for _ in range(2)]
    assert evaluations[0] == evaluations[1]
    losses = []
    for _ in range(2):
        trainer.score(experience().sequences, experience().minibatches)
        losses.append(trainer.accumulate_gradients(experience().sequences, experience().minibatches[0]).weighted)
    assert losses[0] != losses[1]


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_both_exports_give_our_logits(family: str, folder: Path, tmp_path: Path) -> None:
    base = folder / family
    trainer = moved(base, folder / "qwen3", adapter=adapter_of(modules=SOME, base=str(base)))
    trainer.score(experience().sequences, experience().minibatches)
    trainer.train(experience())
    trainer.save(tmp_path / "saved")
    with torch.no_grad():
        ours = logits_of(trainer.student, sequences())
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        before = rows_of(plain, sequences())
        by_peft = PeftModel.from_pretrained(plain, tmp_path / "saved" / "adapter").eval()
        assert close(rows_of(merged, sequences()), ours)
        assert close(rows_of(by_peft, sequences()), ours)
        assert not close(before, ours, 0.1)


def test_an_adapter_is_gone_on_from(folder: Path, tmp_path: Path) -> None:
    """The first weights that an engine gets, and the first step, are those of the run that wrote it."""
    first = moved(folder / "qwen3", folder / "llama")
    first.save(tmp_path / "saved")
    weights = {name: tensor.clone() for name, tensor in first.student.tensors()}
    first.score(experience().sequences, experience().minibatches)
    metrics = first.train(experience())

    adapter = adapters.resolve(Lora(path=str(tmp_path / "saved" / "adapter")), first.student.architecture, "base")
    assert adapter is not None and (adapter.rank, adapter.alpha, adapter.modules) == (4, 8.0, ALL_LINEAR)
    second = trainer_of(folder / "qwen3", folder / "llama", adapter=adapter)
    synced = {
        name: torch.from_numpy(array.copy())
        for bucket in second.buckets("float32", max_bytes=50_000)
        for name, array in zip(bucket.names, bucket.arrays, strict=True)
    }
    base = load_file(folder / "qwen3" / "model.safetensors")
    assert synced.keys() == weights.keys() == base.keys()
    for name, weight in weights.items():
        assert torch.equal(synced[name], weight), name
        assert torch.equal(weight, base[name]) == ("_proj" not in name), name
    second.score(experience().sequences, experience().minibatches)
    again = second.train(experience())
    assert {**again, "time/train": 0} == {**metrics, "time/train": 0}


def test_peft_writes_what_we_read(folder: Path, tmp_path: Path) -> None:
    model = trainer_of(folder / "qwen3", folder / "llama").student
    theirs = peft_model(folder / "qwen3", adapter_of(), random_factors(model.architecture, adapter_of()))
    theirs.save_pretrained(tmp_path)
    adapter = adapters.resolve(Lora(path=str(tmp_path)), model.architecture, "base")
    assert adapter is not None
    read = trainer_of(folder / "qwen3", folder / "llama", adapter=adapter).student
    with torch.no_grad():
        assert close(logits_of(read, sequences()), rows_of(theirs, sequences()))


@pytest.mark.parametrize(
    ("save", "files"),
    [
        (LoraSave.adapter, {"adapter"}),
        (LoraSave.merged, {"model.safetensors", "config.json", "generation_config.json"}),
        (LoraSave.both, {"adapter", "model.safetensors", "config.json", "generation_config.json"}),
    ],
)
def test_checkpoints_hold_what_was_asked_for(save: LoraSave, files: set[str], folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder / "qwen3", folder / "llama", adapter=adapter_of(save=save))
    trainer.save(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == files
    if "adapter" in files:
        written = {path.name for path in (tmp_path / "saved" / "adapter").iterdir()}
        assert written == {"adapter_config.json", "adapter_model.safetensors"}


# ---- the base -------------------------------------------------------------------------------------------------------


def test_the_base_takes_no_part_in_training(folder: Path) -> None:
    trainer = moved(folder / "qwen3", folder / "llama")
    trained, every = adapters.parameters(trainer.student.architecture, adapter_of())
    assert every == sum(p.numel() for p in trainer.student.module.parameters())
    for step in (1, 2):
        trainer.score(experience(step).sequences, experience(step).minibatches)
        trainer.train(experience(step))
    own = [p for p in trainer.student.module.parameters() if p.requires_grad]
    assert trained == sum(p.numel() for p in own) < every / 4
    buckets = [bucket for buffer in trainer.ddp.buffers for bucket in buffer.buckets]
    assert sum(len(bucket.params) for bucket in buckets) == len(own)
    assert sum(buffer.numel_unpadded for buffer in trainer.ddp.buffers) == trained
    adam = [part.optimizer for part in trainer.optimizer.chained_optimizers]
    assert sum(s["exp_avg"].numel() for part in adam for s in part.state.values()) == trained
    assert all(
        p.grad is None and not hasattr(p, "main_grad") for p in trainer.student.module.parameters() if p not in set(own)
    )


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("adapter", [None, adapter_of()], ids=["all", "lora"])
def test_memory_is_what_the_summary_says(adapter: Adapter | None, dtype: DType, folder: Path) -> None:
    train = Train(dtype=dtype)
    trainer = trainer_of(folder / "qwen3", folder / "llama", adapter=adapter, train=train)
    trainer.score(experience().sequences, experience().minibatches)
    trainer.train(experience())
    weights = {p.data_ptr(): p for p in trainer.student.module.parameters()}
    mains = {
        p.data_ptr(): p for group in training_state.parameter_groups(trainer.optimizer) for _, p in group
    }  # in float32 the weights themselves
    moments = [
        state[name]
        for part in trainer.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    ]
    gradients = [buffer.grad_data for buffer in trainer.ddp.buffers]
    found = sum(tensor.nbytes for tensor in [*(weights | mains).values(), *moments, *gradients])
    assert found == pytest.approx(training_bytes(trainer.student.architecture, adapter, train), rel=0.01)


def test_a_hundred_merges_leave_the_base_as_it_was(folder: Path) -> None:
    trainer = moved(folder / "qwen3", folder / "llama")
    before = {name: parameter.detach().clone() for name, parameter in base_parameters(trainer.student.module)}
    for round_ in range(100):
        for _ in trainer.student.tensors():
            pass
        if round_ % 50 == 0:
            trainer.score(experience().sequences, experience().minibatches)
            trainer.train(experience())
    stored = load_file(folder / "qwen3" / "model.safetensors")
    for name, parameter in base_parameters(trainer.student.module):
        assert torch.equal(parameter, before[name]), name
    merged = dict(trainer.student.tensors())
    assert merged.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(merged[name], tensor) == ("_proj" not in name), name


# ---- teachers -------------------------------------------------------------------------------------------------------


def steps_of(trainer: MegatronTrainer) -> list[dict[str, float]]:
    found = []
    for step in (1, 2):
        trainer.score(experience(step).sequences, experience(step).minibatches)
        found.append({**trainer.train(experience(step)), "time/train": 0.0})
    return [*found, trainer.evaluate(sequences(), experience().minibatches[0].plan)]


@pytest.mark.parametrize("k", [8, None])
def test_the_base_teaches_without_a_second_copy(k: int | None, folder: Path) -> None:
    """Dropout of the student's adapter is no matter: the teacher hasn't got one."""
    adapter = adapter_of(dropout=0.3)
    expected = steps_of(moved(folder / "qwen3", folder / "qwen3", adapter=adapter, k=k))
    trainer = moved(folder / "qwen3", None, adapter=adapter, base_teacher=True, k=k)
    assert trainer.teacher is not None and trainer.teacher.model is trainer.student
    assert steps_of(trainer) == expected
    assert expected[0]["train/loss"] > 0.01


def test_a_live_student_teaches_with_its_adapter(folder: Path) -> None:
    """Under its own prompt it teaches nothing (a graph may be multiplied in another order); the base would."""
    losses = []
    for kind in (dict(self_teacher=SelfTeacher()), dict(base_teacher=True)):
        trainer = moved(folder / "qwen3", None, **kind)
        trainer.score(experience().sequences, experience().minibatches)
        losses.append(trainer.train(experience())["train/loss"])
    assert 0 <= losses[0] < 1e-7 and losses[1] > 0.01


def test_an_average_of_the_factors_teaches(folder: Path) -> None:
    trainer = moved(folder / "qwen3", None, self_teacher=SelfTeacher(ema_decay=0.75))
    assert trainer.teacher is not None
    average = {name: tensor.clone() for name, tensor in trainer.student.adapter_tensors()}
    for step in (1, 2, 3):
        trainer.score(experience(step).sequences, experience(step).minibatches)
        trainer.train(experience(step))
        for name, tensor in trainer.student.adapter_tensors():
            average[name] = 0.75 * average[name] + 0.25 * tensor
    now = {name: tensor.clone() for name, tensor in trainer.student.adapter_tensors()}
    with trainer.teacher.at_work() as model, torch.no_grad():
        logits = logits_of(model, sequences())
        for name, tensor in model.adapter_tensors():
            torch.testing.assert_close(tensor, average[name], rtol=1e-5, atol=1e-7)
            assert not torch.equal(tensor, now[name]), name
    for name, tensor in trainer.student.adapter_tensors():
        assert torch.equal(tensor, now[name]), name
    assert trainer.student.module.training
    with torch.no_grad():
        assert close(logits, rows_of(peft_model(folder / "qwen3", adapter_of(), average), sequences()))


def test_an_average_that_never_moves_is_the_adapter_of_the_start(folder: Path) -> None:
    trainer = moved(folder / "qwen3", None, self_teacher=SelfTeacher(ema_decay=1.0))
    assert trainer.teacher is not None
    start = {name: tensor.clone() for name, tensor in trainer.student.adapter_tensors()}
    steps_of(trainer)
    with trainer.teacher.at_work() as model:
        assert all(torch.equal(tensor, start[name]) for name, tensor in model.adapter_tensors())
    assert not any(torch.equal(tensor, start[name]) for name, tensor in trainer.student.adapter_tensors())
