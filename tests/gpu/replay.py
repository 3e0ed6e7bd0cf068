"""The optimizer steps of a finished run again, on its own samples, in another number format or on another device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hydra import compose, initialize_config_dir

from rlhf.algos.gkd import make_minibatches
from rlhf.backends.megatron.setup import TrainerSetup
from rlhf.backends.megatron.trainer import MegatronTrainer
from rlhf.config.compose import to_run
from rlhf.config.registry import PROJECT_ROOT, register
from rlhf.config.train import DType
from rlhf.execute import build_objective
from rlhf.loggers.rollouts import read
from rlhf.preflight import check_inputs
from rlhf.types import Experience


def replayed_losses(run_dir: Path, overrides: list[str], dtype: DType) -> list[float]:
    """train/loss of each step, on the GPU if the process sees one."""
    register()
    with initialize_config_dir(str(PROJECT_ROOT / "conf"), version_base="1.3"):
        run = to_run(compose("config", overrides))
    inputs = check_inputs(run)
    train = replace(run.train, dtype=dtype)
    trainer = MegatronTrainer(
        TrainerSetup(inputs.student, inputs.teacher, train, build_objective(run), inputs.steps, run.run.seed)
    )
    losses = []
    for step, sequences in sorted(read(run_dir).items()):
        minibatches = make_minibatches(sequences, train, data_parallel=1)
        trainer.score(sequences, minibatches)
        metrics = trainer.train(Experience(step, step - 1, sequences, minibatches))
        losses.append(metrics["train/loss"])
    return losses
