"""`python -m rlhf.launch [GROUP=OPTION ...] [KEY=VALUE ...]`: compose, check, run; returns the objective."""

from __future__ import annotations

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlhf.config.messages import explain
from rlhf.config.registry import PROJECT_ROOT, register

register()


def objective(config: DictConfig) -> float | None:
    """One run of a composed configuration. Returns the held-out forward KL, or None without evaluation."""
    from rlhf.config.compose import to_run
    from rlhf.execute import execute

    return execute(to_run(config), OmegaConf.to_container(config, resolve=True))


def job(config: DictConfig) -> float | None:
    """What Hydra calls. A job of a sweep raises, and the others go on; a single run hands its error to `main`,
    since Hydra would print a line of its own above it."""
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        config.run.dir = HydraConfig.get().runtime.output_dir
        return objective(config)
    try:
        return objective(config)
    except Exception as error:
        failure.append(error)
        return None


failure: list[Exception] = []
"""The error of a single run, on its way from Hydra's job to `main`."""


def main() -> None:
    """The command. User errors are one line and exit code 1; HYDRA_FULL_ERROR=1 brings the traceback."""
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra re-raises instead of printing several lines of its own
    entry = hydra.main(version_base="1.3", config_path=str(PROJECT_ROOT / "conf"), config_name="config")(job)
    try:
        entry()
        if failure:
            raise failure[0]
    except KeyboardInterrupt:
        sys.exit(130)  # the run has said what was saved
    except Exception as error:
        message = explain(error)
        if full_error or message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
