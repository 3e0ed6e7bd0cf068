"""`python -m rlhf.report RUN_DIR`: prints the summary of a run again, or of one so far, and draws its curves."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import rich.console

from rlhf.errors import DataError, RlhfError, one_line
from rlhf.loggers.jsonl import FILE as METRICS
from rlhf.report.partial import summarise
from rlhf.report.plot import plot_run
from rlhf.report.summary import FILE as SUMMARY
from rlhf.report.summary import read, show


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlhf.report", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder of a run, such as outputs/NAME")
    run_dir = parser.parse_args(arguments).run_dir
    try:
        if (run_dir / METRICS).is_file():
            plot_run(run_dir)
        if (run_dir / SUMMARY).is_file() or not (run_dir / METRICS).is_file():
            summary = read(run_dir)
            summary.directory = run_dir  # it may have been moved since
        else:
            summary = summarise(run_dir)
        try:
            show(summary, rich.console.Console(highlight=False))
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{run_dir / SUMMARY} isn't a summary of this version of rlhf: {error}") from error
    except RlhfError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
