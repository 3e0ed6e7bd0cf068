"""Which source a configuration means."""

from __future__ import annotations

from typing import Any

from rlhf.config.algo import GRPO
from rlhf.config.run import Run
from rlhf.roles.protocols import Engine, Rewarder
from rlhf.sources.ahead import AheadGroupSource, AheadSource, Background
from rlhf.sources.conversations import Conversations
from rlhf.sources.dataset import DatasetSource
from rlhf.sources.groups import GroupSource
from rlhf.sources.live import LiveSource
from rlhf.sources.mixed import MixedSource
from rlhf.sources.offpolicy import OffPolicy, ReferenceResponses, TeachersResponses
from rlhf.sources.steps import StepSource


def source_of(
    run: Run,
    engine: Engine | None,
    background: Background,
    writer: Engine | None = None,
    rewarder: Rewarder | None = None,
    conversations: Conversations | None = None,
    **fields: Any,
) -> StepSource:
    """The source, with the fields that every one has.

    Args:
        writer: holds the teacher's weights, where it writes responses.
    """
    if isinstance(run.algo, GRPO):
        assert engine is not None and run.engine is not None, "checked when the configuration was composed"
        fields |= {"engine": engine, "rollout": run.engine, "conversations": conversations}
        fields |= {"algo": run.algo, "rewarder": rewarder}
        if run.placement.max_staleness:
            return AheadGroupSource(background=background, **fields)
        return GroupSource(**fields)
    off_policy: OffPolicy = ReferenceResponses(run.data.max_response_length)
    if writer is not None:
        off_policy = TeachersResponses(writer, run.run.seed)
    if run.engine is None:
        return DatasetSource(off_policy=off_policy, **fields)
    assert engine is not None, "a placement starts the engine that the configuration has"
    fields |= {"engine": engine, "rollout": run.engine, "conversations": conversations}
    if run.placement.max_staleness:
        return AheadSource(background=background, **fields)
    if run.lmbda == 1:
        return LiveSource(**fields)
    return MixedSource(lmbda=run.lmbda, off_policy=off_policy, **fields)
