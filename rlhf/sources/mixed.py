"""The mixed source (GKD, arXiv 2306.13649, algorithm 1): a step is the student's own samples with probability
`algo.lmbda`, else it takes responses from elsewhere."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from rlhf.sources.live import LiveSource
from rlhf.sources.offpolicy import OffPolicy
from rlhf.sources.steps import Batch, Timed
from rlhf.types import Metrics, Rollouts


@dataclass(kw_only=True)
class MixedSource(LiveSource):
    """Both kinds of step take their rows from the same cursor. At lmbda=1 it does what `LiveSource` does, at 0 what
    `DatasetSource` does (but for the engine's part in the evaluation)."""

    lmbda: float
    off_policy: OffPolicy

    def weights(self, step: int, timed: Timed) -> int:
        """They go to the engine only if it is asked for anything before the next step."""
        generates = step <= self.steps and on_policy(self.lmbda, self.seed, step)
        if generates or self.evaluator.due(step - 1):
            return super().weights(step, timed)
        return self.trainer.version

    def responses(self, batch: Batch, version: int, timed: Timed) -> tuple[Rollouts, Metrics]:
        if on_policy(self.lmbda, self.seed, batch.step):
            rollouts, described = super().responses(batch, version, timed)
            return rollouts, {**described, "rollout/on_policy": 1.0}
        self.engine.sleep().result()  # the evaluation may have woken it
        rollouts, described = self.off_policy.responses(batch, version, timed)
        return rollouts, {**described, "rollout/on_policy": 0.0}


def on_policy(lmbda: float, seed: int, step: int) -> bool:
    """Whether a step trains on the student's samples. Depends on nothing but these: a run that was resumed draws the
    same, and more of `lmbda` adds on-policy steps without moving those there are."""
    digest = hashlib.blake2b(struct.pack("<2q", seed, step), digest_size=8, person=b"lmbda").digest()
    return int.from_bytes(digest, "little") < lmbda * 2**64
