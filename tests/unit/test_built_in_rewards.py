"""The built-in reward functions, against what a person would say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhf.config.data import ReasoningGymData
from rlhf.config.reward import FunctionReward
from rlhf.data.dataset import load
from rlhf.data.rows import Needs
from rlhf.rewards.built_in import FACTORIES
from rlhf.rewards.sandbox import Limits, passed, program_of
from rlhf.types import ROW
from tests.unit.test_rewards import batch, rewarder, scored
from tests.unit.tiny import tiny_tokenizer


def rewards(name: str, completions: list[str], options: dict[str, Any] | None = None, **columns: Any) -> list[Any]:
    """In this process."""
    return list(FACTORIES[name](**(options or {})).function(completions=completions, **columns))


@pytest.mark.parametrize(
    ("right", "completion", "reward"),
    [
        ("72", "so the answer is 72.", 1),
        ("72", "so the answer is 73.", 0),
        ("She has 3 + 4 = 7 apples.\n#### 1,234", r"thus \boxed{1234}", 1),
        (r"\frac{1}{2}", "<answer>0.5</answer>", 1),
        (r"\boxed{x^2+1}", "<answer>1+x^2</answer>", 1),
        ("x^2+1", r"it is \boxed{x^2+2}", 0),
        ("(1, 2)", "$(1,2)$", 1),
        ("7", "", 0),
        ("7", "<answer>7</answer> and then 8 <answer>9</answer>", 0),
        ("the cat", "I think so.\nThe answer is: The cat.", 1),
        ("the cat", "The answer is: the dog.", 0),
        (None, "5", None),
    ],
)
def test_math_is_compared_as_mathematics(right: str | None, completion: str, reward: float | None) -> None:
    assert rewards("math_verify", [completion], response=[right]) == [reward]
    assert rewards("math_verify", [completion], {"column": "gold"}, gold=[right]) == [reward]


def test_mathematics_that_never_ends_is_wrong_and_the_rest_is_judged() -> None:
    """A tower of powers isn't computed to its end; not within the library's limit, so ours is used."""
    spec = FunctionReward(functions=["math_verify"], timeout_s=4.0, processes=1)
    with rewarder(spec) as made:
        texts = ["the answer is 7", r"\boxed{9^{9^{9^{9}}}}", "the answer is 7"]
        total = made.score(batch(texts), [{"response": "7"}] * 3).result().total
    assert total.tolist() == [1, 0, 1]


def test_exercises_are_judged_by_their_own_verifier() -> None:
    spec = ReasoningGymData(task="chain_sum", size=3)
    data = load(spec, tiny_tokenizer(), 0, 0, False, needs=Needs(for_rewards=True))
    rows = list(data.train.columns)
    assert [row[ROW] for row in rows] == [f"chain_sum[{number}]" for number in range(3)]
    assert rows[0]["response"] == rows[0]["entry"]["answer"]
    texts = [f"The answer is {rows[0]['entry']['answer']}.", "I don't know", f"<answer>{rows[2]['response']}</answer>"]
    assert scored(texts, rows, functions=["reasoning_gym"]).total.tolist() == [1, 0, 1]
    entry = {"answer": "12"}
    partly = rewards("reasoning_gym", ["12 apples or so"], {"partial": True}, task=["gsm_symbolic"], entry=[entry])
    assert partly != [None]
    assert rewards("reasoning_gym", ["12"], task=[None], entry=[None]) == [None]


def test_forms() -> None:
    texts = [
        "so <answer>4</answer>",
        "<answer> </answer>",
        "4",
        "<answer>4</answer> or not",
        "a\nb <answer>\n4</answer>\n",
    ]
    assert rewards("format", texts) == [1, 0, 0, 0, 1]
    assert rewards("format", ["12", "12a"], {"pattern": r"\d+"}) == [1, 0]


def test_a_pattern_that_never_ends_gives_nothing() -> None:
    spec = FunctionReward(functions=["format"], options={"format": {"pattern": "(a+)+b"}}, timeout_s=3.0, processes=2)
    with rewarder(spec) as made:
        total = made.score(batch(["ab", "a" * 60, "aab"]), [{}] * 3).result().total
        assert total.tolist() == [1, 0, 1] and made.pool.choked == 1


def test_long_completions() -> None:
    ids = [[0] * length for length in (1, 4, 5, 6, 8, 9)]
    assert rewards("length", [""] * 6, {"target": 4, "slack": 4}, completion_ids=ids) == [0, 0, -0.25, -0.5, -1, -1]
    assert rewards("length", [""] * 6, {"target": 4, "slack": 0}, completion_ids=ids) == [0, 0, -1, -1, -1, -1]


# ---- programs --------------------------------------------------------------------------------------------------------

LIMITS = Limits(timeout_s=5, cpu_s=3, memory_mb=512)
TESTS = ["assert add(1, 2) == 3", "assert add(1, 1) == 2\nassert add(0, 0) == 0"]


def test_the_last_block_is_the_program() -> None:
    assert program_of("a\n```python\nx = 1\n```\nb\n```\nx = 2\n```\n") == "x = 2\n"
    assert program_of("```python\nx = 1") == "x = 1"
    assert program_of("x = 1") == "x = 1"


@pytest.mark.parametrize(
    ("program", "count"),
    [
        ("def add(a, b):\n    return a + b", 2),
        ("def add(a, b):\n    return 3 if a == 1 and b == 2 else 0", 1),
        ("def add(a, b):\n    return a - b", 0),
        ("def add(a, b:", 0),
        ("raise SystemExit(0)", 0),
        ("import os\nos._exit(0)", 0),
        ("print('x' * 10**6)\ndef add(a, b):\n    return a + b", 2),
        ("x = [0] * 10**9\ndef add(a, b):\n    return a + b", 0),
        ("open('big', 'wb').write(b'0' * (64 << 20))\ndef add(a, b):\n    return a + b", 0),
        ("import os\nassert os.listdir() == []\ndef add(a, b):\n    return a + b", 2),
        ("def add(a, b):\n    if b == 1:\n        raise SystemExit\n    return a + b", 1),
    ],
)
def test_programs(program: str, count: int) -> None:
    assert passed(program, TESTS, LIMITS) == count


def test_programs_that_do_not_end() -> None:
    started = time.monotonic()
    assert passed("import time\ntime.sleep(600)", TESTS, Limits(timeout_s=0.5, cpu_s=3, memory_mb=512)) == 0
    assert passed("while True: pass", TESTS, Limits(timeout_s=60, cpu_s=1, memory_mb=512)) == 0
    assert time.monotonic() - started < 10


def test_nothing_that_a_program_started_is_left(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    program = f"""
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open({str(mark)!r}, "w").write(str(child.pid))
def add(a, b): return a + b
"""
    mine = psutil.Process().children(recursive=True)
    assert passed(program, TESTS, LIMITS) == 2
    assert not psutil.pid_exists(int(mark.read_text()))
    assert psutil.Process().children(recursive=True) == mine
    assert os.environ.get("HOME") != "/nowhere"


class Program:
    """One that goes on after it has started another one, in a session of its own."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark
        self.text = f"""```python
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open({str(mark) + "_"!r}, "w").write(str(child.pid))
os.rename({str(mark) + "_"!r}, {str(mark)!r})
time.sleep(600)
```"""

    def started(self) -> psutil.Process:
        """The one it has started, once it runs."""
        deadline = time.monotonic() + 60
        while not self.mark.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return psutil.Process(int(self.mark.read_text()))


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    made = Program(tmp_path / "pid")
    yield made
    if made.mark.exists() and psutil.pid_exists(int(made.mark.read_text())):
        psutil.Process(int(made.mark.read_text())).kill()


def is_gone(process: psutil.Process) -> bool:
    return not psutil.wait_procs([process], timeout=10)[1]


LONG: dict[str, Any] = dict(functions=["code"], options={"code": {"timeout_s": 300}}, processes=1)


def test_nothing_is_left_of_a_program_when_the_run_ends(program: Program) -> None:
    with rewarder(FunctionReward(**LONG, timeout_s=600)) as made:
        made.score(batch([program.text]), [{"tests": "pass"}])
        child = program.started()
        folder = Path(child.cwd())
        assert child.is_running()
    assert is_gone(child) and not folder.exists()


def test_nothing_is_left_of_a_program_that_takes_too_long(program: Program) -> None:
    with rewarder(FunctionReward(**LONG, timeout_s=5)) as made:
        assert made.score(batch([program.text]), [{"tests": "pass"}]).result().total.tolist() == [0]
        assert made.pool.choked == 1
        assert not psutil.pid_exists(int(program.mark.read_text()))


def test_nothing_is_left_of_a_program_that_ends_its_judge(program: Program) -> None:
    program.text = program.text.replace("time.sleep", "os.kill(os.getppid(), 9), time.sleep")
    with rewarder(FunctionReward(**LONG)) as made:
        assert made.score(batch([program.text]), [{"tests": "pass"}]).result().total.tolist() == [0]
        assert made.pool.choked == 1
        assert not psutil.pid_exists(int(program.mark.read_text()))


def test_nothing_is_left_of_a_program_when_the_driver_is_killed(program: Program) -> None:
    code = f"""
import time
from tests.unit.test_built_in_rewards import LONG, FunctionReward, batch, rewarder
with rewarder(FunctionReward(**LONG)) as made:
    made.score(batch([{program.text!r}]), [{{"tests": "pass"}}]).result()
"""
    with subprocess.Popen([sys.executable, "-c", code]) as driver:
        child = program.started()
        folder = Path(child.cwd())
        driver.kill()
    assert is_gone(child)
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()


def test_as_many_tests_as_there_are() -> None:
    many = Limits(timeout_s=30, cpu_s=20, memory_mb=512)
    assert passed("x = 1", ["assert x == 1"] * 2500, many) == 2500
    noisy = """
import os
for descriptor in range(3, 20):
    try:
        os.write(descriptor, b"0" * 10**6 + b"\\n")
    except OSError:
        pass
"""
    assert passed(noisy, ["", "assert False"], many) == 1


def test_shares_and_rows_without_tests() -> None:
    half = "```python\ndef add(a, b):\n    return 3 if a == 1 and b == 2 else 9\n```"
    assert rewards("code", [half, half, half], tests=[TESTS, TESTS[0], None]) == [0, 1, None]
    assert rewards("code", [half], {"partial": True, "column": "checks"}, checks=[TESTS]) == [0.5]
    with pytest.raises(ValueError, match="cpu_s=0 must be greater than 0"):
        FACTORIES["code"](cpu_s=0)
    with pytest.raises(ValueError, match=r"memory_mb=1000000000000 must be greater than 0 and at most 1000000000$"):
        FACTORIES["code"](memory_mb=10**12)
    most = Limits(timeout_s=30, cpu_s=10**9, memory_mb=10**9)
    assert passed("x = 1", ["assert x == 1"], most) == 1, "limits that the kernel takes"
