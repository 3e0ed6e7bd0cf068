"""`python -m rlhf.launch [GROUP=OPTION ...] [KEY=VALUE ...]`: compose, check, run. `-m` sweeps over A,B,C; `--help KEY`
explains."""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until `watch`: Python would say with a traceback what it was importing.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import atexit
import contextlib
import gc
import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import hydra
import rich.console
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlhf.backends.keep import end_kept_ray
from rlhf.config.about import about, words_of
from rlhf.config.arguments import check_arguments, check_folders, check_resume
from rlhf.config.compose import to_run
from rlhf.config.messages import explain, interrupted, words_of_stop
from rlhf.config.registry import PROJECT_ROOT, register
from rlhf.stopping import Stopped, exit_code, unstoppable, watch
from rlhf.sweep import Job, failures
from rlhf.sweep import show as show_sweep
from rlhf.sweep import write as write_sweep

register()
FULL_ERROR = os.environ.get("HYDRA_FULL_ERROR") == "1"
failed: list[str] = []
"""The errors of this process's jobs, already reported. Their text alone: an error keeps what its run held alive."""
jobs: list[Job] = []
"""Those of a sweep, in order; the last one may not have ended."""


def objective(config: DictConfig, sweep: bool = False) -> float | None:
    """One run of a composed configuration, or one job of a sweep. Returns what `execute.objective_of` says of it."""
    run = to_run(config, sweep)
    from rlhf.execute import execute  # after the checks: it takes seconds to import

    return execute(run, OmegaConf.to_container(config, resolve=True), sweep)


def job(config: DictConfig) -> float | None:
    """What Hydra calls, once or for each job of a sweep. Reports its own error, so that a sweep goes on."""
    command = HydraConfig.get()
    sweep = command.mode is RunMode.MULTIRUN
    done = Job(command.job.num if sweep else 0, command.overrides.task, Path(command.runtime.output_dir))
    if sweep:
        jobs.append(done)
    try:
        check_folders(config, command.run.dir, sweep)
        check_resume(config, command.sweep, sweep)
        if sweep:
            config.run.dir = command.runtime.output_dir
            config.run.name = f"{config.run.name}-{command.job.num}"
            if config.logger.wandb and config.logger.wandb_group is None:
                config.logger.wandb_group = Path(command.sweep.dir).name
            print(f"job {command.job.num}: {' '.join(command.overrides.task)}", flush=True)
        result = objective(config, sweep)
        done.ended()
        return result
    except Exception as error:
        if interrupted(error):
            raise Stopped from error
        report(error, f"job {command.job.num} ({' '.join(command.overrides.task)}): " if sweep else "")
        done.error = explain(error) or repr(error)
        failed.append(done.error)
        return None
    finally:
        gc.collect()  # what the run had in Ray's object store, which may outlive it


def report(error: Exception, prefix: str = "") -> None:
    """One line for an error of the user, or the traceback: for a bug, or with HYDRA_FULL_ERROR=1."""
    message = explain(error)
    if FULL_ERROR or message is None:
        traceback.print_exception(error)
    else:
        print(f"error: {prefix}{message}", file=sys.stderr)


def help_of(entry: Callable[[], object]) -> str:
    """What Hydra says for `--help`, without the classes of the options, which nobody sets."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        entry()
    return "".join(line for line in said.getvalue().splitlines(True) if not line.lstrip().startswith("_target_:"))


def main() -> None:
    """The command. Exit code 1 if anything failed, 130 after Ctrl-C, 143 after SIGTERM."""
    watch()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra re-raises instead of printing several lines of its own
    entry = hydra.main(version_base="1.3", config_path=str(PROJECT_ROOT / "conf"), config_name="config")(job)
    try:
        try:
            if words := words_of(sys.argv[1:]):
                print(about(words))
            else:
                check_arguments(sys.argv[1:])
                if {"--help", "-h"} & set(sys.argv[1:]):
                    print(help_of(entry), end="")
                else:
                    entry()
        finally:
            with unstoppable():
                end_kept_ray()  # also where the sweep was interrupted
            if jobs:
                show_sweep(jobs, write_sweep(jobs, jobs[0].folder.parent), rich.console.Console(highlight=False))
            sys.stdout.flush()
            if line := failures(jobs):
                print(f"error: {line}", file=sys.stderr)
    except KeyboardInterrupt as stop:
        otherwise = "interrupted" if jobs else "interrupted; nothing was started"
        print(f"warning: {words_of_stop(stop) or otherwise}", file=sys.stderr)
        sys.exit(exit_code())
    except BrokenPipeError:  # `--help | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        report(error)
        failed.append(str(error))
    if failed:
        sys.exit(1)


def leave(code: int) -> NoReturn:
    """End this process without the exit handlers of C++. Where a run was stopped, or failed, in a call of Ray (2.60),
    they take its connections apart while its threads still use them: now and then a segmentation fault, whose exit code
    would take the place of ours."""
    with unstoppable():
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    try:
        main()
    except SystemExit as ended:
        if "ray" in sys.modules and isinstance(ended.code, int):
            leave(ended.code)
        raise
