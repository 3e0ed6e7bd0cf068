"""The errors a user may see. Each message says what is wrong, which keys or files, and what to write instead.

`assert` is for our own bugs; everything a user can cause raises one of these, and `rlhf.launch` prints it as one line.
"""

from __future__ import annotations

import difflib


class RlhfError(Exception):
    """Base of every error meant for the user: one line, no traceback unless HYDRA_FULL_ERROR=1."""


class ConfigError(RlhfError):
    """A key, or a pair of keys, that can't be used; found while composing, before anything heavy is imported."""


class DataError(RlhfError):
    """Rows, files or tokenizers that can't be used. The message lists file, line and reason."""


class ModelError(RlhfError):
    """A checkpoint that is missing, of an unsupported architecture, or that doesn't fit its partner."""


class CheckpointError(RlhfError):
    """A checkpoint that can't be written, or training state that can't be read or continued from."""


class ClusterError(RlhfError):
    """The machines can't hold the run: too few devices, or Ray couldn't be reached."""


class RoleDied(RlhfError):
    """A trainer or engine process ended in the middle of a run."""


class RoleFailed(RlhfError):
    """A call to a trainer or engine process raised something that isn't ours. The traceback is its cause."""


class StaleWeights(RlhfError):
    """An engine was asked to generate with another weight version than it holds."""


class MisalignedScores(RlhfError):
    """Teacher scores don't cover exactly the response rows they are joined to."""


class RewardError(RlhfError):
    """A reward function that failed, took too long, or gave something that is no number."""


class EnvironmentFailed(RlhfError):
    """An environment that failed, took too long, or gave something that is no turn."""


class TrainingDiverged(RlhfError):
    """A gradient that isn't finite, or a log-probability that is not a number."""


def one_line(text: object) -> str:
    """`text` on a single line."""
    return " ".join(str(text).split())


def counted(number: int, what: str) -> str:
    """`1 row was`, `2 rows were`."""
    return f"{number} {what} was" if number == 1 else f"{number} {what}s were"


def nearest(word: str, known: list[str]) -> str:
    """`; did you mean ...?`, or nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
