"""Group `data`: the rows prompts come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rlhf.config.base import refuse_unused, require, require_at_least, require_text, written
from rlhf.hub import hub_id


class OnBadRow(Enum):
    """What a row that can't be used does to the run."""

    error = "error"
    """Stop before anything starts and list the rows."""
    skip = "skip"
    """Leave the rows out; their number and the list are reported all the same."""


class Truncation(Enum):
    """What happens to a prompt longer than `data.max_length` tokens."""

    error = "error"
    """It is a bad row."""
    left = "left"
    """Its first tokens are cut off."""


@dataclass(kw_only=True)
class DataCommon:
    """What every source of rows has."""

    max_length: int = 512
    """Longest prompt in tokens, chat template included."""
    truncation: Truncation = Truncation.error
    """error | left: what happens to longer prompts."""
    max_teacher_length: int | None = None
    """Longest `teacher_prompt` in tokens, chat template included; `data.truncation` counts here, too.
    null: as `data.max_length`."""
    max_response_length: int = 512
    """Reference responses are cut to this many tokens where they are trained on (`rollout=none`, `algo.lmbda`)."""
    preprocessor: str | None = None
    """Changes every row before it is checked: `opsd_reference_solution` (makes a `teacher_prompt` of prompt and
    reference response), or your own function from a row to a row: a name that one of `plugins` registers,
    `package.module.function` or `file.py:function`."""
    on_bad_row: OnBadRow = OnBadRow.error
    """error | skip: rows without a usable prompt, broken JSON, wrong types, over-long prompts."""
    shuffle: bool = True
    """Visit the rows in a new seeded order each epoch."""
    system_prompt: str | None = None
    """Put before every conversation that has no system message of its own."""
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    """Variables for the tokenizer's chat template, e.g. `data.chat_template_args.enable_thinking=false` for Qwen3. null
    takes one out again that a recipe puts in."""

    def __post_init__(self) -> None:
        require_at_least("data.max_length", self.max_length, 1)
        if self.max_teacher_length is not None:
            require_at_least("data.max_teacher_length", self.max_teacher_length, 1)
        require_at_least("data.max_response_length", self.max_response_length, 1)
        self.chat_template_args = {name: value for name, value in self.chat_template_args.items() if value is not None}
        if self.preprocessor is not None:
            require_text("data.preprocessor", self.preprocessor, "opsd_reference_solution")

    @property
    def teacher_length(self) -> int:
        """What `max_teacher_length` means."""
        return self.max_length if self.max_teacher_length is None else self.max_teacher_length


@dataclass(kw_only=True)
class ReasoningGymData(DataCommon):
    """Procedural tasks with reference solutions from the package `reasoning-gym`; nothing to download."""

    task: str = "gsm_symbolic"
    """Name of the task, e.g. gsm_symbolic, chain_sum, countdown."""
    size: int = 2000
    """Rows generated for training."""
    options: dict[str, Any] = field(default_factory=dict)
    """Passed to the task, e.g. `data.options.min_terms=2` for chain_sum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("data.size", self.size, 1)
        require_text("data.task", self.task, "gsm_symbolic")


@dataclass(kw_only=True)
class RowsData(DataCommon):
    """Rows that exist already, in files or on a hub."""

    prompt_column: str | None = None
    """Column that holds the prompt, if it isn't called `messages` or `prompt`."""
    response_column: str | None = None
    """Column that holds the reference response, if it isn't called `response`."""
    streaming: bool = False
    """Read rows while training instead of before it, for rows that don't fit into memory. Files are read through
    once before anything starts all the same, unless `data.on_bad_row=skip`; rows of a hub need it."""
    shuffle_buffer: int = 10000
    """With `data.streaming=true`: each row is drawn from the next so many; `data.shuffle=false` keeps their order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("prompt_column", "response_column"):
            if (column := getattr(self, key)) is not None:
                require_text(f"data.{key}", column, "question")
        require(
            self.prompt_column is None or self.prompt_column != self.response_column,
            f"data.prompt_column={self.prompt_column} and data.response_column={self.response_column} are one column",
        )
        require_at_least("data.shuffle_buffer", self.shuffle_buffer, 1)
        if not (self.streaming and self.shuffle):
            why = f"with data.streaming={written(self.streaming)} data.shuffle={written(self.shuffle)}"
            remedy = "use data.streaming=true data.shuffle=true"
            refuse_unused(self, "data", ("shuffle_buffer",), why, remedy)


@dataclass(kw_only=True)
class PluginData(RowsData):
    """Rows from a function of yours that returns or yields them as dicts, the same ones each time it is called."""

    function: str = "???"
    """A name that one of `plugins` registers (`@register_dataset`), `package.module.function` or `file.py:function`."""
    eval_function: str | None = None
    """Held-out rows, the first `eval.samples` of them; null holds out the last ones of `function`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the functions, e.g. `data.options.level=3`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("function", "eval_function"):
            if (value := getattr(self, key)) is not None:
                require_text(f"data.{key}", value, "rows.py:easy")


@dataclass(kw_only=True)
class FileData(RowsData):
    """Your own rows: JSONL, JSON, CSV or Parquet files with `messages` or `prompt` columns."""

    path: str = "???"
    """A file that ends in .jsonl, .jsonl.gz, .json, .csv or .parquet, a glob of them, a folder that holds files of one
    of these kinds, or a folder made by `datasets.save_to_disk`."""
    eval_path: str | None = None
    """Held-out rows, the first `eval.samples` of them; null holds out the last ones of `path`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_text("data.path", self.path, "rows.jsonl")
        for key in ("path", "eval_path"):
            value = getattr(self, key)
            require(
                value is None or hub_id(value, f"data.{key}") is None,
                f"data.{key}={value} is on a hub; use data=hub data.name={value} (and data.split, data.eval_split)",
            )


@dataclass(kw_only=True)
class HubData(RowsData):
    """A dataset of a hub, or a folder `datasets` can load."""

    name: str = "???"
    """openai/gsm8k or hf://openai/gsm8k (Hugging Face), ms://OWNER/NAME (ModelScope), or a folder."""
    subset: str | None = None
    """Configuration of the dataset, e.g. main."""
    split: str = "train"
    """Rows to train on."""
    eval_split: str | None = None
    """Held-out rows, the first `eval.samples` of them; null holds out the last ones of `split`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_text("data.name", self.name, "openai/gsm8k")
        require_text("data.split", self.split, "train")
        hub_id(self.name, "data.name")
        require(
            not self.streaming or self.on_bad_row is OnBadRow.skip,
            "data=hub data.streaming=true meets bad rows while training, where data.on_bad_row=error would end the run;"
            " use data.on_bad_row=skip, or data.streaming=false",
        )
