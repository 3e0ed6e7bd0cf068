"""Everything that can be found wrong before a process or a GPU is taken: checkpoints, tokenizers, rows, lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf import assets, tokenizers
from rlhf.backends.megatron import adapters
from rlhf.backends.megatron.adapters import Adapter
from rlhf.backends.megatron.architecture import Architecture, refuse_unknown_fields
from rlhf.backends.megatron.tensors import check_weights
from rlhf.batching import steps_of
from rlhf.config.algo import GRPO
from rlhf.config.checks import check_schedule, said_of
from rlhf.config.cluster import Device
from rlhf.config.distill import FullVocab, TopK
from rlhf.config.environment import MultiTurn
from rlhf.config.reward import FunctionReward
from rlhf.config.run import MOST_STEPS, Run
from rlhf.config.teacher import ColocatedTeacher, OwnTeacher, ReferenceTeacher, StandaloneTeacher
from rlhf.data.dataset import Dataset, load
from rlhf.data.rows import Needs
from rlhf.data.turns import TurnMarkup, find_markup
from rlhf.distill.user_loss import UserLoss
from rlhf.doubts import doubts
from rlhf.environments.pool import check as check_environment
from rlhf.errors import ConfigError, ModelError
from rlhf.memory import check_cache, check_memory, longest_sample
from rlhf.rewards.build import check as check_rewards
from rlhf.rewards.verify import has_verifier, solves
from rlhf.types import Metrics

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM's CPU attention (0.32); the driver can't ask it without importing vLLM."""
MOST_LOGIT_BIASES = 1024
"""Of a request on a GPU (vLLM 0.32, `MAX_NUM_LOGIT_BIAS_TOKENS`; its runner for CPUs takes any number)."""


@dataclass(frozen=True)
class Inputs:
    """What the run works with, checked."""

    student: Path
    teacher: Path | None
    architecture: Architecture
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    dataset: Dataset
    steps: int
    """Steps of the run, whether `run.steps` or `run.epochs` says so."""
    teacher_stop_token_ids: tuple[int, ...] = ()
    """What ends a response that the teacher writes: its own end-of-sequence tokens as well; () where it writes none."""
    adapter: Adapter | None = None
    """The student's LoRA adapter; None: every weight is trained."""
    markup: TurnMarkup | None = None
    """How the chat template goes on after a turn of the model; None where there is one turn."""
    warnings: tuple[str, ...] = ()
    """What may turn out to be wrong while the run goes on."""

    @property
    def base_teaches(self) -> bool:
        """Student and teacher are one checkpoint, of which the student trains an adapter only."""
        return self.adapter is not None and self.teacher == self.student


def check_inputs(run: Run) -> Inputs:
    """Resolve and check everything the run names.

    Raises:
        ModelError, DataError, ConfigError: in one line, with the key and the remedy.
    """
    name = f"model.path={run.model.path}"
    student, architecture = check_student(run.model.path, run.model.drop_layers)
    own = teachers_prompts(run) if isinstance(run.teacher, OwnTeacher) else {}
    adapter = adapters.resolve(run.model.lora, architecture, name_of_base(run, student))
    _check_lengths(run, architecture, name, {**students_prompts(run), **own})
    _check_divisible("train.tensor_parallel", run.train.tensor_parallel, architecture, name)
    if run.engine is not None:
        _check_divisible("rollout.tensor_parallel", run.engine.tensor_parallel, architecture, name)
        _check_head_dim(run, architecture, name)
    check_memory(run, architecture)
    tokenizer = tokenizers.load_tokenizer(student)
    tokenizers.check_vocabulary(tokenizer, architecture.vocab, name)
    teacher = None
    if isinstance(run.teacher, ColocatedTeacher | StandaloneTeacher):
        teacher = _check_teacher(run, student, architecture, tokenizer)
    elif isinstance(run.teacher, OwnTeacher):
        _check_k(run, architecture.vocab)
    stop_token_ids = tokenizers.stop_token_ids(student, tokenizer, architecture.vocab)
    if not stop_token_ids:
        raise ModelError(f"{name} names no end-of-sequence token; add eos_token_id to its config")
    if run.engine is not None:
        extra = tokenizers.extra_stop_token_ids(tokenizer, run.engine.stop_token_ids, run.engine.stop_tokens)
        stop_token_ids = tuple(sorted({*stop_token_ids, *extra}))
    markup = None
    if isinstance(run.environment, MultiTurn):
        markup = find_markup(tokenizer, run.data, run.environment, stop_token_ids)
    teacher_stops: tuple[int, ...] = ()
    if run.writer is not None and teacher is not None:
        teacher_stops = tuple(
            sorted({*stop_token_ids, *tokenizers.stop_token_ids(teacher, tokenizer, architecture.vocab)})
        )
    dataset = load(
        run.data,
        tokenizer,
        seed=run.run.seed,
        eval_samples=run.eval.samples,
        eval_needs_response=run.reads_reference_responses,
        needs=Needs.of(run.algo, run.rollout, run.reward, run.environment),
    )
    check_lesson(run, dataset.statistics)
    if isinstance(run.distill, TopK | FullVocab):
        loss = UserLoss.of(run.distill.loss, run.plugins)
        if loss is not None:
            loss.check()
    warnings: list[str] = []
    if isinstance(run.reward, FunctionReward):
        warnings += check_reward_functions(run.reward, dataset, run.plugins)
    if isinstance(run.environment, MultiTurn):
        names, _ = dataset.train_column_names()
        check_environment(run.environment, names, run.plugins)
    if run.eval.accuracy and not can_be_verified(dataset):
        raise ConfigError(
            "eval.accuracy=true needs held-out rows with a verifier, which data=reasoning_gym has; use "
            "eval.accuracy=null"
        )
    steps = _steps(run, dataset)
    warnings += doubts(run, student, teacher, steps, dataset)
    return Inputs(
        student,
        teacher,
        architecture,
        tokenizer,
        stop_token_ids,
        dataset,
        steps,
        teacher_stops,
        adapter,
        markup,
        tuple(warnings),
    )


def name_of_base(run: Run, student: Path) -> str:
    """How an adapter of the student names its base: as the hub does, else the folder."""
    on_hub = assets.on_hub(run.model.path, "model.path") and not run.model.drop_layers
    return run.model.path.removeprefix("hf://") if on_hub else str(student)


def check_reward_functions(spec: FunctionReward, dataset: Dataset, plugins: list[str]) -> list[str]:
    """Whether they can be loaded, and the rows have what they need; see `rewards.build.check`."""
    trained_on, are_all = dataset.train_column_names()
    held_out = dataset.held_out.column_names if len(dataset.held_out) else None
    return check_rewards(spec, trained_on, plugins, held_out, are_all)


def can_be_verified(dataset: Dataset) -> bool:
    """Whether every held-out row says how to tell a right answer, and knows its own for one."""
    rows = dataset.held_out.columns
    return len(rows) > 0 and all(has_verifier(row) and solves(str(row["entry"]["answer"]), row) for row in rows)


def _steps(run: Run, dataset: Dataset) -> int:
    """The length of the run in steps, once the rows are counted."""
    if run.run.steps is not None:
        return run.run.steps
    assert run.run.epochs is not None and dataset.train_rows is not None, "checked when the run was composed"
    steps = steps_of(run.run.epochs, dataset.train_rows, run.prompts_per_step)
    said = f"run.epochs={run.run.epochs}, which is {steps} steps over {dataset.train_rows} rows"
    if steps > MOST_STEPS:
        raise ConfigError(f"{said}: more than {MOST_STEPS}; lower run.epochs")
    check_schedule(run.train, steps * run.updates_per_step, said_of(run, said))
    return steps


def check_lesson(run: Run, statistics: Metrics) -> None:
    """A student that reads what its teacher reads, and is the teacher, learns nothing.

    Args:
        statistics: of the data, `Dataset.statistics`.

    Raises:
        ConfigError: nothing but such a teacher teaches.
    """
    if not isinstance(run.teacher, OwnTeacher) or statistics.get("data/teacher_prompt_rows") != 0:
        return
    # Other gradients take the student away from what the teacher keeps of it.
    moved = run.rewarded if isinstance(run.algo, GRPO) else run.algo.sft_alpha > 0 and run.lmbda < 1
    if run.teacher.ema_decay is not None and moved:
        return
    whose = "reference" if isinstance(run.teacher, ReferenceTeacher) else "self"
    alone = " with reward=none" if isinstance(run.algo, GRPO) and not run.rewarded else ""
    raise ConfigError(
        f"teacher={whose}{alone} has nothing to teach, since no row has a teacher_prompt: "
        "teacher and student read the same; use data.preprocessor=opsd_reference_solution (or your own), or "
        "teacher=colocated"
    )


def check_student(path: str, drop_layers: Sequence[int]) -> tuple[Path, Architecture]:
    """The student's folder and its architecture. Layers are dropped from a checkpoint only once it is known whole."""
    folder = assets.resolve(path)
    architecture = check_checkpoint(folder, f"model.path={path}")
    if drop_layers:
        folder = assets.resolve(path, drop_layers)
        architecture = check_checkpoint(folder, f"model.path={path}")
    return folder, architecture


def check_checkpoint(folder: Path, name: str) -> Architecture:
    """The architecture of a checkpoint whose configuration is understood in full and whose weights fit it.

    Args:
        folder: a Hugging Face folder, as `assets.resolve` gives it.
        name: the key and the value that the user wrote, for messages.

    Raises:
        ModelError: a field that isn't understood, or weights that are missing, too many, of another shape or unusable.
    """
    config = assets.read_config(folder)
    architecture = Architecture.from_config(config, name)
    refuse_unknown_fields(config, name)
    check_weights(folder, architecture, name)
    return architecture


def _check_teacher(run: Run, student: Path, architecture: Architecture, tokenizer: Any) -> Path:
    """The teacher's folder, once it is known to fit the student."""
    name = f"teacher.model={run.teacher.model}"
    folder = assets.resolve(run.teacher.model, key="teacher.model")
    teacher = check_checkpoint(folder, name)
    _check_lengths(run, teacher, name, {**students_prompts(run), **teachers_prompts(run)})
    if isinstance(run.teacher, StandaloneTeacher):
        _check_divisible("teacher.tensor_parallel", run.teacher.tensor_parallel, teacher, name)
        _check_head_dim(run, teacher, name)
        engine = run.teacher.engine
        check_cache("teacher.engine.kv_cache_gb", engine.kv_cache_gb, longest_sample(run), teacher, engine.dtype)
        if run.writer is not None:
            longest = max(run.data.max_length, run.data.teacher_length) + run.writer.max_new_tokens
            check_cache("teacher.generation.kv_cache_gb", run.writer.kv_cache_gb, longest, teacher, engine.dtype)
    else:
        _check_divisible("train.tensor_parallel", run.train.tensor_parallel, teacher, name)
        if folder == student and run.model.lora.enabled and run.teacher.offload:
            raise ConfigError(
                f"teacher.offload=true has no effect with {name}: the teacher is the student's own base, with the "
                "adapter switched off; use teacher.offload=false"
            )
    try:
        tokenizers.check_same_tokens(student, folder)
    except ModelError as error:
        raise ModelError(f"model.path={run.model.path}, {name}: {error}") from error
    tokenizers.check_vocabulary(tokenizer, teacher.vocab, name)
    check_writer(run, architecture.vocab, teacher.vocab)
    shared = min(architecture.vocab, teacher.vocab)
    _check_k(run, shared)
    return folder


def check_writer(run: Run, students: int, teachers: int) -> None:
    """A teacher that writes can be kept from all rows of its head that stand for no token of the student.

    Args:
        students: rows of the student's head.
        teachers: of the teacher's.

    Raises:
        ConfigError: there are more of them than vLLM takes.
    """
    more = teachers - students
    if run.writer is not None and run.cluster.device is Device.cuda and more > MOST_LOGIT_BIASES:
        raise ConfigError(
            f"algo.seq_kd=true: teacher.model={run.teacher.model} has vocab_size={teachers}, {more} more than "
            f"model.path={run.model.path}, and vLLM on GPUs can keep a writer from {MOST_LOGIT_BIASES} tokens at most; "
            "use algo.seq_kd=false, or a teacher.model with a smaller vocab_size"
        )


def _check_k(run: Run, vocabulary: int) -> None:
    """A teacher has as many tokens as are asked for."""
    if isinstance(run.distill, TopK) and run.distill.k > vocabulary:
        raise ConfigError(
            f"distill.k={run.distill.k} exceeds the vocabulary of {vocabulary} tokens; use distill.k={vocabulary} or "
            "less, or distill=fullvocab"
        )


def students_prompts(run: Run) -> dict[str, int]:
    """Key -> longest prompts that the student reads, and a teacher without privileged ones."""
    return {"data.max_length": run.data.max_length}


def teachers_prompts(run: Run) -> dict[str, int]:
    """Key -> longest prompts that the teacher alone reads."""
    given = run.data.max_teacher_length
    return {} if given is None else {"data.max_teacher_length": given}


def _check_divisible(key: str, ranks: int, architecture: Architecture, name: str) -> None:
    """Tensor-parallel ranks get the same share of every layer."""
    for field, number in architecture.split_numbers.items():
        if number % ranks:
            raise ModelError(
                f"{name} has {field}={number}, which {key}={ranks} doesn't divide; use a {key} that does, e.g. 1"
            )


def _check_head_dim(run: Run, architecture: Architecture, name: str) -> None:
    """vLLM can run the model."""
    if run.cluster.device is Device.cpu and architecture.head_dim not in CPU_HEAD_DIMS:
        raise ModelError(
            f"{name} has head_dim={architecture.head_dim}; vLLM on CPU attends with "
            f"{', '.join(map(str, CPU_HEAD_DIMS))} only"
        )


def _check_lengths(run: Run, architecture: Architecture, name: str, prompts: dict[str, int]) -> None:
    """Every sequence the run may make has a position for each token.

    Args:
        prompts: key -> longest prompts this model reads.
    """
    budgets = dict(run.response_limits)
    if run.reads_reference_responses:
        budgets["eval.max_response_tokens"] = run.eval.max_response_tokens
    for prompt, prompt_tokens in prompts.items():
        for key, tokens in budgets.items():
            if prompt_tokens + tokens > architecture.max_positions:
                raise ConfigError(
                    f"{prompt}={prompt_tokens} + {key}={tokens} is more than the "
                    f"{architecture.max_positions} positions of {name}; lower one of them"
                )
