"""Users' environments in their processes: what they are given, what they keep, and how it is said that they fail."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf.config.environment import MultiTurn
from rlhf.environments import Turn
from rlhf.environments.pool import EnvironmentPool, check
from rlhf.errors import ConfigError, EnvironmentFailed
from rlhf.types import ROW
from tests.unit.test_plugins import EXAMPLES
from tests.unit.test_rewards import Mute, Opens, of_a_module_elsewhere

CODE = """
import enum, os, pathlib, subprocess, time
from rlhf.environments import Environment, Turn
from rlhf.plugins import register_environment

@register_environment("counts")
class Counts(Environment):
    def __init__(self, start: int = 0, folder: str = "") -> None:
        self.turn, self.folder = start, folder

    def reset(self, level: int, seed: int, word: str = "none") -> None:
        self.said = f"{level} {seed} {word} {os.getpid()}"

    def step(self, response: str) -> Turn:
        self.turn += 1
        return Turn(f"{self.said} {self.turn} {response}", reward=self.turn, done=response == "over")

    def close(self) -> None:
        if self.folder:
            pathlib.Path(self.folder, self.said.split()[1]).touch()

class Said(enum.StrEnum):
    wrong = "try again"

class Unusual(Counts):
    def step(self, response: str) -> Turn:
        if response == "fork" and os.fork() == 0:
            return Turn("from the child")
        return Turn(Said.wrong)

class Fails(Counts):
    def reset(self, **columns) -> None:
        self.columns = columns
        assert "data row" not in columns
        if columns["level"] == 9:
            raise KeyError("nine")

    def step(self, response: str):
        match response:
            case "hang": time.sleep(60)
            case "start": return Turn(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))
            case "exit": os._exit(3)
            case "silent": return Turn()
            case "wrong": return "a text"
            case "nan": return Turn("x", reward=float("nan"))
            case "raise": raise ValueError("no such move")
        return Turn(str(sorted(self.columns)))

class NoStep(Environment):
    def reset(self, **columns) -> None: ...

class Plain:
    def reset(self): return 5
    def step(self, response): return Turn(done=True)

def function(): ...

class Picky(Counts):
    def __init__(self, size: int = 0) -> None:
        if size > 3:
            raise ValueError("size is 3 at most")

class AsyncStep(Counts):
    async def step(self, response): return Turn(done=True)

class GeneratorReset(Counts):
    def reset(self, **columns): yield

class NoResponse(Counts):
    def step(self): return Turn(done=True)

class NoSelf(Counts):
    def reset(): ...

class CloseAsks(Counts):
    def close(self, reason): ...

class AsyncInit(Counts):
    async def __init__(self): ...
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def pools() -> Iterator[list[EnvironmentPool]]:
    made: list[EnvironmentPool] = []
    yield made
    for pool in made:
        pool.close()
        pool.close()


def pool_of(pools: list[EnvironmentPool], name: str, plugins: list[str] | None = None, **keys: Any) -> EnvironmentPool:
    pools.append(EnvironmentPool(MultiTurn(name=name, **keys), plugins or []))
    return pools[-1]


def test_each_conversation_keeps_its_state_in_its_process(
    file: Path, tmp_path: Path, pools: list[EnvironmentPool]
) -> None:
    options = {"start": 2, "folder": str(tmp_path)}
    pool = pool_of(pools, "counts", [str(file)], options=options, processes=2)
    rows = [{"level": level, "unused": object} for level in range(5)]
    pool.reset(rows, [100, 101, 102, 103, 104]).result()
    first = pool.step([0, 1, 2, 3, 4], list("abcde")).result()
    assert all(isinstance(turn, Turn) and not turn.done and turn.reward == 3 for turn in first)
    second = pool.step([3, 0, 4], ["x", "over", "z"]).result()
    assert [turn.reward for turn in second] == [4, 4, 4] and [turn.done for turn in second] == [False, True, False]
    for turn, (level, text) in zip(second, [(3, "x"), (0, "over"), (4, "z")], strict=True):
        before = first[level].observation.split()
        assert turn.observation.split() == [str(level), str(100 + level), "none", before[3], "4", text]
    assert len({turn.observation.split()[3] for turn in first}) == 2, "two processes"
    assert not (tmp_path / "101").exists()
    pool.end([0, 1, 2, 3, 4]).result()
    assert (tmp_path / "101").exists()
    pool.reset(rows[:1], [7]).result()
    assert pool.step([0], ["q"]).result()[0].reward == 3, "a new object"


FAILURES = {
    "hang": r"step: took more than environment\.timeout_s=1 seconds",
    "exit": "step: ended its process with exit code 3",
    "silent": "step: step gave no observation, though the conversation isn't done",
    "wrong": r"step: step gave str 'a text', expected Turn\(observation, reward, done\)",
    "nan": "step: step gave float nan as reward, expected a finite number",
    "raise": r"step: raised ValueError: no such move, line \d+ of .*mine.py",
}


@pytest.mark.parametrize("said", FAILURES)
def test_a_failure_names_environment_and_row(said: str, file: Path, pools: list[EnvironmentPool]) -> None:
    pool = pool_of(pools, f"{file}:Fails", timeout_s=1.0, processes=1)
    pool.reset([{"level": 1, ROW: "a:1"}, {"level": 2, ROW: "a:2"}], [0, 0]).result()
    assert pool.step([0], ["fine"]).result() == [Turn("['level', 'seed']")]
    with pytest.raises(EnvironmentFailed, match=rf"environment.name=.*:Fails, {FAILURES[said]}.*, on a:2$") as caught:
        pool.step([0, 1], ["fine", said]).result()
    assert "\n" not in str(caught.value)


def test_reset_may_fail_and_gives_nothing(file: Path, pools: list[EnvironmentPool]) -> None:
    with pytest.raises(EnvironmentFailed, match=r"reset: raised KeyError: 'nine', line \d+ of .*, on a:1"):
        pool_of(pools, f"{file}:Fails").reset([{"level": 9, ROW: "a:1"}], [0]).result()
    with pytest.raises(EnvironmentFailed, match="reset: reset gave int 5, expected None, on conversation 0"):
        pool_of(pools, f"{file}:Plain").reset([{}], [0]).result()


def test_closing_ends_what_hangs_and_what_it_started(file: Path, pools: list[EnvironmentPool]) -> None:
    pool = pool_of(pools, f"{file}:Fails", processes=1)
    pool.reset([{"level": 1}], [0]).result()
    (process,) = pool._processes
    (turn,) = pool.step([0], ["start"]).result()
    assert psutil.pid_exists(int(turn.observation))
    waiting = pool.step([0], ["hang"])
    time.sleep(0.2)
    pool.close()
    with pytest.raises(EnvironmentFailed, match="the environments were stopped"):
        waiting.result()
    assert not psutil.pid_exists(process.process.pid)
    assert not psutil.pid_exists(int(turn.observation))


# ---- before the run -------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    r"environment\.name=.*: there is no class Count in .*mine.py; did you mean Counts\?": ("Count", {}, [{}]),
    "is no class; write class function": ("function", {}, [{}]),
    "has no method step of its own; define it": ("NoStep", {}, [{}]),
    r"environment\.options=\{'begin': 1\} don't fit .*: got an unexpected keyword argument 'begin'": (
        "Counts",
        {"options": {"begin": 1}},
        [{}],
    ),
    r"Picky can't be made with environment\.options=\{'size': 9\}: Picky\(\.\.\.\) raised ValueError: size is 3 at "
    r"most, line \d+ of .*mine\.py$": ("Picky", {"options": {"size": 9}}, [{}]),
    r"AsyncStep\.step is an async function; write def step\(self, response\), line \d+ of .*mine\.py$": (
        "AsyncStep",
        {},
        [{}],
    ),
    r"GeneratorReset\.reset is a generator; write def reset\(self, \*\*columns\), line": ("GeneratorReset", {}, [{}]),
    r"NoResponse\.step can't be called: too many positional arguments; write def step\(self, response\), line": (
        "NoResponse",
        {},
        [{}],
    ),
    r"NoSelf\.reset can't be called: invalid method signature; write def reset\(self, \*\*columns\), line": (
        "NoSelf",
        {},
        [{}],
    ),
    r"CloseAsks\.close can't be called: missing a required argument: 'reason'; write def close\(self\), line": (
        "CloseAsks",
        {},
        [{}],
    ),
    r"AsyncInit\.__init__ is an async function; write def, line": ("AsyncInit", {}, [{}]),
    "reset needs a column 'level', which the data doesn't have; did you mean levels": ("Counts", {}, [{"levels": 1}]),
    "the data's column 'seed' has the name of what every environment is given": (
        "Counts",
        {},
        [{"level": 1, "seed": 2}],
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_used_is_refused_before_the_run(message: str, file: Path) -> None:
    name, keys, rows = REFUSED[message]
    with pytest.raises(ConfigError, match=message) as caught:
        check(MultiTurn(name=f"{file}:{name}", **keys), {column for row in rows for column in row}, [])
    assert "\n" not in str(caught.value)


def test_names_of_plugins_and_names_that_do_not_exist(file: Path) -> None:
    check(MultiTurn(name="counts"), {"level"}, [str(file)])
    with pytest.raises(ConfigError, match=r"environment\.name=count doesn't exist; did you mean counts\?"):
        check(MultiTurn(name="count"), {"level"}, [str(file)])


def test_the_example(pools: list[EnvironmentPool]) -> None:
    """A right answer is worth half after each wrong one."""
    plugin = str(EXAMPLES / "second_try.py")
    entry = {"question": "3 + 4?", "answer": "7", "metadata": {}}
    rows = [{"task": "chain_sum", "entry": entry}] * 2
    check(MultiTurn(name="second_try"), rows[0], [plugin])
    pool = pool_of(pools, "second_try", [plugin], processes=1)
    pool.reset(rows, [0, 0]).result()
    right, wrong = pool.step([0, 1], ["The answer is 7.", "The answer is 8."]).result()
    assert right == Turn("", 1.0, True) and not wrong.done and wrong.reward == 0
    assert pool.step([1], ["The answer is 7."]).result() == [Turn("", 0.5, True)]


def test_a_users_own_kind_of_string_is_text(file: Path, pools: list[EnvironmentPool]) -> None:
    pool = pool_of(pools, f"{file}:Unusual", processes=1)
    pool.reset([{"level": 1}], [0]).result()
    (turn,) = pool.step([0], ["a"]).result()
    assert turn.observation == "try again" and type(turn.observation) is str


def test_a_fork_that_comes_back_does_not_answer(file: Path, pools: list[EnvironmentPool]) -> None:
    pool = pool_of(pools, f"{file}:Unusual", processes=1)
    pool.reset([{"level": 1}, {"level": 2}], [0, 1]).result()
    for _ in range(3):
        turns = pool.step([0, 1], ["fork", "a"]).result()
        assert [turn.observation for turn in turns] == ["try again"] * 2
    pool.end([0, 1]).result()


def test_columns_that_only_the_driver_can_read_are_named(
    file: Path, tmp_path: Path, pools: list[EnvironmentPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of(pools, f"{file}:Fails")
    with pytest.raises(
        EnvironmentFailed, match=r"reset: can't be given the row's columns: ModuleNotFoundError: .*r:1$"
    ):
        pool.reset([{"level": of_a_module_elsewhere(tmp_path, monkeypatch), ROW: "r:1"}], [0]).result()


@pytest.mark.parametrize(("value", "reason"), [(Mute(), "Silent"), (Opens(), "FileNotFoundError: .*")])
def test_columns_whose_pickling_fails_in_its_own_way_are_named(
    value: object, reason: str, file: Path, pools: list[EnvironmentPool]
) -> None:
    pool = pool_of(pools, f"{file}:Fails")
    with pytest.raises(EnvironmentFailed, match=rf"reset: can't be given the row's columns: {reason}, on r:1$"):
        pool.reset([{"level": value, ROW: "r:1"}], [0]).result()
