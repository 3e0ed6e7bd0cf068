"""Group `data`: the rows prompts come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rlhf.config.base import require_at_least, require_text


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
    on_bad_row: OnBadRow = OnBadRow.error
    """error | skip: rows without a usable prompt, broken JSON, wrong types, over-long prompts."""
    shuffle: bool = True
    """Visit the rows in a new seeded order each epoch."""
    system_prompt: str | None = None
    """Put before every conversation that has no system message of its own."""
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    """Variables for the tokenizer's chat template, e.g. `data.chat_template_args.enable_thinking=false` for Qwen3."""

    def __post_init__(self) -> None:
        require_at_least("data.max_length", self.max_length, 1)


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
class FileData(DataCommon):
    """Your own rows: JSONL, JSON or Parquet files with `messages` or `prompt` columns."""

    path: str = "???"
    """A file, or a glob of files, ending in .jsonl, .json or .parquet."""
    eval_path: str | None = None
    """Held-out rows, the first `eval.samples` of them; null holds out the last ones of `path`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_text("data.path", self.path, "rows.jsonl")


@dataclass(kw_only=True)
class HubData(DataCommon):
    """A dataset of the Hugging Face hub, or a folder `datasets` can load."""

    name: str = "???"
    """Hub id or folder, e.g. openai/gsm8k."""
    subset: str | None = None
    """Configuration of the dataset, e.g. main."""
    split: str = "train"
    """Rows to train on."""
    eval_split: str | None = None
    """Held-out rows, the first `eval.samples` of them; null holds out the last ones of `split`."""
    prompt_column: str | None = None
    """Column that holds the prompt, if it isn't called `messages` or `prompt`."""
    response_column: str | None = None
    """Column that holds the reference response, if it isn't called `response`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_text("data.name", self.name, "openai/gsm8k")
        require_text("data.split", self.split, "train")
