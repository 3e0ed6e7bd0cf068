"""Which rows come next: seeded epochs without end, resumable at any row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int64

from rlhf.config.data import OnBadRow
from rlhf.data.read import Numbered
from rlhf.data.rows import BadRow
from rlhf.data.stream import RowStream
from rlhf.data.table import PromptTable, concatenate
from rlhf.errors import DataError
from rlhf.types import Metrics


@dataclass(frozen=True)
class Draw:
    """The rows of one batch, in order."""

    table: PromptTable
    numbers: Int64[np.ndarray, " n"]
    """Which rows of the data they are; seeds the sampler."""


class Cursor(Protocol):
    """Where a run stands in its rows."""

    def take(self, count: int) -> Draw:
        """The next `count` rows. There is always a next one: after the last row of an epoch a new epoch begins."""
        ...

    def metrics(self) -> Metrics:
        """`data/epoch`: passes over the data so far, and what is only known while reading."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything `load_state_dict` needs; a few plain values, fit for JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where the state was taken.

        Raises:
            DataError: the state is of other rows, another seed or another shuffling.
        """
        ...


class EpochCursor:
    """Walks over n row numbers again and again. The order of an epoch depends on (seed, epoch) alone.

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

    def state_dict(self) -> dict[str, Any]:
        """See `Cursor.state_dict`."""
        return {"n": self.n, "seed": self.seed, "shuffle": self.shuffle, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Cursor.load_state_dict`."""
        _check_same(state, {"number of training rows": ("n", self.n), **_order_keys(self)})
        if not 0 <= state["position"] <= self.n or state["epoch"] < 0:
            where = f"row {state['position']} of epoch {state['epoch']}"
            raise DataError(f"can't resume: {where} is no place in {self.n} rows")
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._epoch_order()

    def _epoch_order(self) -> Int64[np.ndarray, " n"]:
        if not self.shuffle:
            return np.arange(self.n, dtype=np.int64)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.n)


class TableCursor:
    """Over rows in memory."""

    def __init__(self, table: PromptTable, seed: int, shuffle: bool) -> None:
        self.table = table
        self.order = EpochCursor(len(table), seed, shuffle)

    def take(self, count: int) -> Draw:
        numbers = self.order.take(count)
        return Draw(self.table.select(numbers), numbers)

    def metrics(self) -> Metrics:
        return {"data/epoch": self.order.epoch + self.order.position / self.order.n}

    def state_dict(self) -> dict[str, Any]:
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.load_state_dict(state)


class StreamCursor:
    """Over rows that are read, checked and tokenised when they are taken.

    An epoch is one pass over the source. Shuffled, each row is drawn from a buffer of the next `data.shuffle_buffer`
    rows, so that the order depends on (seed, epoch) and on the rows alone. The state counts the rows drawn in this
    epoch: continuing reads the epoch again up to there (without tokenising), which takes time but no space.
    """

    def __init__(
        self, stream: RowStream, seed: int, shuffle: bool, on_bad_row: Callable[[BadRow], None] = lambda row: None
    ) -> None:
        """`on_bad_row` is told every row that is left out, once."""
        self.stream, self.seed, self.shuffle, self.on_bad_row = stream, seed, shuffle, on_bad_row
        self.buffer = stream.spec.shuffle_buffer
        self.epoch = 0
        self.drawn = 0
        """Rows of this epoch that were drawn already, bad ones included."""
        self.usable = 0
        """Usable ones among them."""
        self.bad_rows = 0
        """Rows left out so far. Counted in the first epoch, since later ones meet the same."""
        self._rows = self._epoch_rows()

    def take(self, count: int) -> Draw:
        """See `Cursor.take`.

        Raises:
            DataError: no row of a whole epoch can be used, a source that can't be read on, or a bad row although the
                rows were checked before the run.
        """
        tables: list[PromptTable] = []
        numbers: list[int] = []
        while len(numbers) < count:
            chunk = self.stream.read(self._draw(count - len(numbers)))
            self.usable += len(chunk.numbers)
            self._report(chunk.bad)
            tables.append(chunk.table)
            numbers += chunk.numbers
        return Draw(concatenate(tables), np.asarray(numbers, dtype=np.int64))

    def metrics(self) -> Metrics:
        known = {} if self.stream.rows is None else {"data/epoch": self.epoch + self.usable / self.stream.rows}
        return {"data/epoch": float(self.epoch), "data/bad_rows": float(self.bad_rows), **known}

    def state_dict(self) -> dict[str, Any]:
        return {
            "source": self.stream.source.name,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "buffer": self.buffer,
            "epoch": self.epoch,
            "drawn": self.drawn,
            "usable": self.usable,
            "bad_rows": self.bad_rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        source, buffer = ("source", self.stream.source.name), ("buffer", self.buffer)
        _check_same(state, {"the data": source, "data.shuffle_buffer": buffer, **_order_keys(self)})
        self.epoch, self.drawn, self.usable = state["epoch"], 0, state["usable"]
        self.bad_rows = state["bad_rows"]
        self._rows = self._epoch_rows()
        for _ in range(state["drawn"]):
            if next(self._rows, None) is None:
                raise DataError(f"can't resume: {self.stream.source.name} has fewer rows than it had")
        self.drawn = state["drawn"]

    def _draw(self, count: int) -> list[Numbered]:
        """The next rows of this epoch, up to `count`; of the next epoch if it is over."""
        rows: list[Numbered] = []
        for row in self._rows:
            rows.append(row)
            if len(rows) == count:
                break
        self.drawn += len(rows)
        if not rows:
            if self.usable == 0:
                raise DataError(f"{self.stream.source.name}: none of its {self.drawn} rows can be used")
            self.epoch, self.drawn, self.usable = self.epoch + 1, 0, 0
            self._rows = self._epoch_rows()
        return rows

    def _report(self, bad: list[BadRow]) -> None:
        if bad and self.stream.spec.on_bad_row is OnBadRow.error:
            raise DataError(f"{bad[0]}; it was usable before the run: its file must have changed")
        if self.epoch == 0:
            self.bad_rows += len(bad)
            for row in bad:
                self.on_bad_row(row)

    def _epoch_rows(self) -> Iterator[Numbered]:
        rows = self.stream.numbered()
        if not self.shuffle:
            return rows
        return _shuffled(rows, self.buffer, np.random.default_rng([self.seed, self.epoch]))


def _shuffled(rows: Iterator[Numbered], size: int, generator: np.random.Generator) -> Iterator[Numbered]:
    """Each row from a random place of a buffer, where the next one of `rows` takes its place."""
    buffer: list[Numbered] = []
    for row in rows:
        if len(buffer) < size:
            buffer.append(row)
            continue
        place = int(generator.integers(size))
        drawn, buffer[place] = buffer[place], row
        yield drawn
    for place in generator.permutation(len(buffer)):
        yield buffer[place]


def _order_keys(cursor: EpochCursor | StreamCursor) -> dict[str, tuple[str, Any]]:
    return {"run.seed": ("seed", cursor.seed), "data.shuffle": ("shuffle", cursor.shuffle)}


def _check_same(state: dict[str, Any], keys: dict[str, tuple[str, Any]]) -> None:
    """`keys`: what a person calls it -> its name in the state, and its value now."""
    for meaning, (name, now) in keys.items():
        if state.get(name) != now:
            raise DataError(
                f"can't resume: {meaning} was {state.get(name)} and is {now} now; "
                "use the data and settings the run was started with"
            )
