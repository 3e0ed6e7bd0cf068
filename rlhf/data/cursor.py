"""Which rows come next: seeded epochs without end, resumable at any row."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Int64

from rlhf.errors import DataError


class EpochCursor:
    """Walks over n rows again and again. The order of an epoch depends on (seed, epoch) alone.

    Example: `EpochCursor(3, seed=0, shuffle=False)` takes `[0, 1]`, then `[2, 0]`: batches cross epoch borders.
    """

    def __init__(self, n: int, seed: int, shuffle: bool) -> None:
        assert n > 0
        self.n, self.seed, self.shuffle = n, seed, shuffle
        self.epoch = 0
        self.position = 0
        """Rows of this epoch that were taken already."""
        self._order = self._epoch_order()

    def take(self, count: int) -> Int64[np.ndarray, " count"]:
        """The next `count` row numbers."""
        parts: list[np.ndarray] = []
        while count > 0:
            if self.position == self.n:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._epoch_order()
            part = self._order[self.position : self.position + count]
            parts.append(part)
            self.position += len(part)
            count -= len(part)
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    def state(self) -> dict[str, Any]:
        """Everything `restore` needs; plain values, fit for JSON."""
        return {"n": self.n, "seed": self.seed, "shuffle": self.shuffle, "epoch": self.epoch, "position": self.position}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state` was taken.

        Raises:
            DataError: the state is of other rows, another seed or another shuffling.
        """
        keys = {"n": "number of training rows", "seed": "run.seed", "shuffle": "data.shuffle"}
        for name, meaning in keys.items():
            if state[name] != getattr(self, name):
                raise DataError(
                    f"can't resume: {meaning} was {state[name]} and is {getattr(self, name)} now; "
                    "use the data and settings the run was started with"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._epoch_order()

    def _epoch_order(self) -> Int64[np.ndarray, " n"]:
        if not self.shuffle:
            return np.arange(self.n, dtype=np.int64)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.n)
