"""Weights & Biases through its own client; files under `RUN_DIR/wandb`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.config.logger import Logger, WandbMode
from rlhf.errors import ConfigError, one_line
from rlhf.types import Metrics


def check(spec: Logger) -> None:
    """Raises ConfigError where logger=wandb can't work here: no package, or online and not logged in.

    Fast and without a network: call it before anything that takes minutes to start.
    """
    try:
        # Names rather than the module: a folder `wandb` in the working directory imports as an empty module.
        from wandb import Error, login, setup
    except ImportError as error:
        raise ConfigError(
            "logger=wandb needs the package wandb: pip install wandb, or choose another logger"
        ) from error
    with _own_hooks():
        setup(_settings(spec))
    if spec.wandb_mode is WandbMode.offline:
        return
    remedy = "run `wandb login` first, or write logger.wandb_mode=offline"
    try:
        logged_in = login(prompt=False, verify=False)
    except Error as error:
        raise ConfigError(f"logger=wandb: {one_line(error)}; {remedy}") from error
    if not logged_in:
        raise ConfigError(f"logger=wandb: not logged in to Weights & Biases; {remedy}")


class Wandb:
    """One W&B run, with `step` as the axis of every chart. `id`: of the run to go on with."""

    def __init__(
        self, spec: Logger, run_dir: Path, run_name: str, config: dict[str, Any], id: str | None = None
    ) -> None:
        check(spec)
        from wandb import Error, init

        try:
            with _own_hooks():
                self._run = init(
                    project=spec.wandb_project,
                    entity=spec.wandb_entity,
                    group=spec.wandb_group,
                    name=run_name,
                    config=config,
                    dir=run_dir,
                    mode=spec.wandb_mode.value,
                    id=id,
                    resume=None if id is None else "allow",
                    settings=_settings(spec),
                )
        except Error as error:
            raise ConfigError(
                f"logger=wandb: {one_line(error)}; mend it, or write logger.wandb_mode=offline"
            ) from error
        self.id: str = self._run.id
        # Our own axis instead of W&B's counter, which refuses a second line for the same step.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **metrics})

    def summary(self, values: dict[str, object]) -> None:
        self._run.summary.update(values)

    def close(self) -> None:
        """Also while an exception passes by; W&B then shows the run as failed."""
        from wandb import teardown

        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))
        teardown()  # what `setup` started; only then is everything on the disk


@contextmanager
def _own_hooks() -> Iterator[None]:
    """Keeps `sys.exit` and `sys.excepthook` as they are.

    The client replaces both, to learn whether the run failed, and then prints tracebacks; `Wandb.close` tells it.
    """
    hooks = sys.exit, sys.excepthook
    try:
        yield
    finally:
        sys.exit, sys.excepthook = hooks


def _settings(spec: Logger) -> Any:
    """Quiet, and hands off the process: the console is ours (a wrapped stdout breaks the progress bar)."""
    from wandb import Settings

    return Settings(mode=spec.wandb_mode.value, silent=True, console="off")
