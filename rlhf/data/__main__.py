"""`python -m rlhf.data FILE [KEY=VALUE ...]`: checks rows without starting anything.

Lists the rows that can't be used with their reasons, and says how long prompts and responses are in tokens and how they
would fill batches. Exit code 1 if there are bad rows, none at all, or the rows can't be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import rich.console
from rich.text import Text

from rlhf import assets, tokenizers
from rlhf.config.arguments import check_arguments
from rlhf.config.compose import sections_of
from rlhf.config.messages import explain
from rlhf.data.bad_rows import BadRows
from rlhf.data.dataset import open_sources
from rlhf.data.rows import Needs
from rlhf.data.stream import survey
from rlhf.data.survey_report import show
from rlhf.errors import ConfigError
from rlhf.hub import hub_id

EXAMPLES = """examples:
  python -m rlhf.data rows.jsonl
  python -m rlhf.data rows.jsonl --model STUDENT data.max_length=1024 data.truncation=left
  python -m rlhf.data 'shards/*.parquet' data.prompt_column=question data.response_column=answer
  python -m rlhf.data hf://openai/gsm8k data.subset=main data.prompt_column=question data.response_column=answer
  python -m rlhf.data data=reasoning_gym data.task=chain_sum train.global_batch_samples=64

The keys are those of rlhf.launch; algo, data.*, eval.*, model.*, rollout and train.* matter here. Their
meaning: docs/configuration.md."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf.data",
        usage="%(prog)s [FILE] [KEY=VALUE ...] [--model MODEL] [--list N]",
        description="\n".join((__doc__ or "").splitlines()[2:]),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", metavar="FILE", nargs="*", help="a file, folder, quoted glob, hf://ID or ms://ID")
    parser.add_argument("--model", help="whose tokenizer and chat template, instead of model.path")
    parser.add_argument("--list", type=int, default=5, metavar="N", help="rows named for each reason (%(default)s)")
    options = parser.parse_intermixed_args(arguments)
    try:
        return check(options.rows, options.model, options.list)
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return 1


def check(arguments: list[str], model: str | None, listed: int) -> int:
    """See the module. Raises what `explain` words."""
    sections, seed = compose_keys(arguments)
    spec, eval_spec = sections["data"], sections["eval"]
    path, key = (model, "--model") if model else (sections["model"].path, "model.path")
    tokenizer = tokenizers.load_tokenizer(assets.resolve(path, key=key))
    needs = Needs.of(sections["algo"], sections["rollout"])
    console = rich.console.Console(highlight=False)
    unusable = False
    for source in open_sources(spec, seed, eval_spec.samples):
        if source is not None:
            found = survey(source, tokenizer, spec, BadRows(shown=listed), needs)
            console.print(Text(f"{source.name}", style="bold"), soft_wrap=True)
            show(found, sections, console)
            unusable = unusable or found.bad.count > 0 or not found.prompt_lengths
    return 1 if unusable else 0


def compose_keys(arguments: list[str]) -> tuple[dict[str, Any], int]:
    """The sections that matter, and run.seed, from `[FILE] KEY=VALUE ...`."""
    file = arguments[0] if arguments and ("=" not in arguments[0] or Path(arguments[0]).exists()) else None
    overrides = arguments if file is None else arguments[1:]
    check_arguments(overrides)
    values: dict[str, Any] = {}
    if file is not None:
        on_hub = hub_id(file, "FILE") is not None
        key = "data.name" if on_hub else "data.path"
        for override in overrides:
            if override.partition("=")[0] in ("data", key):
                raise ConfigError(f"{file} and {override} both name the rows; keep one")
        overrides = ["data=hub" if on_hub else "data=file", *overrides]
        values = {key: file}
    sections = sections_of(overrides, ("algo", "data", "eval", "model", "train", "rollout", "run"), values)
    return sections, sections["run"].seed


if __name__ == "__main__":
    sys.exit(main())
