"""Which objective and which optimizer steps a configuration means."""

from __future__ import annotations

import functools
from collections.abc import Callable

from rlhf.algos.gkd import GKDObjective, make_minibatches
from rlhf.algos.grpo import GRPOObjective, plan_minibatches
from rlhf.algos.objective import Objective
from rlhf.config.algo import GRPO
from rlhf.config.checks_grpo import recomputes
from rlhf.config.distill import FullVocab, TopK
from rlhf.config.run import Run
from rlhf.distill.fullvocab import FullVocabDistill
from rlhf.distill.topk import TopKDistill
from rlhf.types import MiniBatch, Rollouts


def build_objective(run: Run) -> Objective:
    """The pure objective of a checked configuration."""
    if isinstance(run.algo, GRPO):
        assert run.engine is not None
        return GRPOObjective.from_spec(
            run.algo,
            run.engine.temperature,
            recompute_old=recomputes(run.algo, run.engine),
            comparable=run.engine.whole_distribution,
        )
    assert isinstance(run.distill, TopK | FullVocab), "checked when the configuration was composed"
    distill = (
        TopKDistill.from_spec(run.distill, run.plugins)
        if isinstance(run.distill, TopK)
        else FullVocabDistill.from_spec(run.distill, run.plugins)
    )
    return GKDObjective(
        beta=run.algo.beta,
        distill=distill,
        sampler_temperature=None if run.engine is None else run.engine.comparable_temperature,
    )


def minibatches_of(run: Run, data_parallel: int) -> Callable[[Rollouts], tuple[MiniBatch, ...]]:
    """Responses -> the optimizer steps that the algorithm takes on them."""
    algo, train = run.algo, run.train
    if isinstance(algo, GRPO):
        assert run.engine is not None
        return functools.partial(
            plan_minibatches,
            algo=algo,
            train=train,
            data_parallel=data_parallel,
            max_new_tokens=run.most_response_tokens,
        )
    return lambda rollouts: make_minibatches(rollouts.sequences, train, data_parallel, algo.sft_alpha)
