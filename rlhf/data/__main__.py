"""`python -m rlhf.data FILE`: checks a file of rows without starting anything.

Lists the rows that can't be used with their reasons, and how long prompts and responses are in tokens. Exit code 1 if
there are bad rows.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import rich.console
import rich.table
from rich.text import Text

from rlhf import assets, tokenizers
from rlhf.config.data import FileData, OnBadRow
from rlhf.config.model import BUILT_IN
from rlhf.data.dataset import Dataset, load
from rlhf.errors import RlhfError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlhf.data", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="a .jsonl, .json or .parquet file, or a quoted glob of them")
    parser.add_argument("--model", default=BUILT_IN, help="whose tokenizer and chat template (%(default)s)")
    parser.add_argument("--max-length", type=int, default=FileData.max_length, help="data.max_length (%(default)s)")
    parser.add_argument("--list", type=int, default=20, metavar="N", help="bad rows to list (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        tokenizer = tokenizers.load_tokenizer(assets.resolve(options.model, key="--model"))
        spec = FileData(path=options.file, max_length=options.max_length, on_bad_row=OnBadRow.skip)
        dataset = load(spec, tokenizer, seed=0, eval_samples=0, eval_needs_response=False)
    except RlhfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(dataset, options.list, rich.console.Console(highlight=False))
    return 1 if dataset.bad_rows else 0


def show(dataset: Dataset, listed: int, console: rich.console.Console) -> None:
    """Print counts, lengths and the first bad rows."""
    table = dataset.train
    console.print(f"{len(table)} rows can be used, {len(dataset.bad_rows)} can't")
    lengths = rich.table.Table("tokens", box=None, pad_edge=False)
    for title in ("rows", "mean", "median", "95 %", "longest"):
        lengths.add_column(title, justify="right", min_width=8)
    responses = table.response_lengths[table.response_lengths > 0]
    for name, values in (("prompts", table.lengths), ("responses", responses)):
        numbers = [values.mean(), *np.quantile(values, (0.5, 0.95, 1.0))] if len(values) else []
        lengths.add_row(name, str(len(values)), *(f"{number:.0f}" for number in numbers))
    console.print(lengths)
    for row in dataset.bad_rows[:listed]:
        console.print(Text(f"  {row}"), soft_wrap=True)
    if len(dataset.bad_rows) > listed:
        console.print(f"  ... and {len(dataset.bad_rows) - listed} more (--list N)")


if __name__ == "__main__":
    sys.exit(main())
