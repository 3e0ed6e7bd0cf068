"""Reward functions in processes of their own: what they are given, what becomes of what they do, and how it is told."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from rlhf import processes
from rlhf.config.compose import sections_of
from rlhf.config.data import FileData, OnBadRow
from rlhf.config.reward import FunctionReward
from rlhf.config.rollout import VllmRollout
from rlhf.data.dataset import load
from rlhf.data.read import CHUNK
from rlhf.data.rows import Needs
from rlhf.errors import ConfigError, RewardError
from rlhf.preflight import check_reward_functions
from rlhf.rewards.build import FunctionRewarder, check, names_of, rewarder_of
from rlhf.rewards.pool import Worker
from rlhf.types import ROW, Rewards, Sequences
from tests.unit.tiny import tiny_tokenizer

FILE = """
import os
import time


def lengths(completions):
    return [len(text) for text in completions]


async def later(completions):
    return [1.0 for _ in completions]


def one_by_one(completions):
    yield 1.0


def level(completions, level, scale=1.0):
    return [None if value is None else value * scale for value in level]


def scales(completions, scale=1.0, **columns):
    return [scale] * len(completions)


def everything(completions, **columns):
    assert sorted(columns) == ["completion_ids", "level", "name", "prompts"], sorted(columns)
    assert all(prompt.startswith("what is") for prompt in columns["prompts"])
    return [len(ids) for ids in columns["completion_ids"]]


def process(completions):
    time.sleep(0.2)
    return [os.getpid()] * len(completions)


def calls(completions):
    return [len(completions)] * len(completions)


def raises(completions):
    return [1 / (text != "bad") for text in completions]


def messages(completions):
    return [len(one[0]["content"]) for one in completions]


def leaves(completions):
    raise SystemExit(0)


def ends(completions):
    os._exit(3)


def hangs(completions):
    if "bad" in completions:
        time.sleep(600)
    return [1.0] * len(completions)


def slow(completions):
    time.sleep(0.7 * len(completions))
    return [1 / (text != "bad") for text in completions]


def moody(completions):
    time.sleep(600 if "late" in completions else 0)
    return raises(completions)


def once(completions):
    if len(completions) == 1:
        os._exit(3)
    raise KeyError("level")


def nan(completions):
    return [float("nan") if text == "bad" else 0.0 for text in completions]


def huge(completions):
    return [1e39 if text == "bad" else 0.0 for text in completions]


def words(completions):
    return ["x" if text == "bad" else 0.0 for text in completions]


def short(completions):
    return [0.0]


def unpicklable(completions):
    return lambda: completions


def generator(completions):
    return (0.0 for text in completions)


def arrays(completions):
    import numpy

    return numpy.array([text == "bad" for text in completions])


def nobody(completions):
    return [None] * len(completions)


class Silent(Exception):
    def __str__(self):
        raise KeyError


def silent(completions):
    raise Silent


def forks(completions):
    if os.fork() == 0:
        return [9.0] * len(completions)
    return [float(len(text)) for text in completions]


def leaves_a_fork(completions):
    if os.fork() == 0:
        raise SystemExit(0)
    return [1.0] * len(completions)


def closes(completions):
    os.closerange(3, 100)
    return [1.0] * len(completions)


def cut_off(completions):
    (connection,) = (fd for fd in range(3, 100) if is_a_socket(fd))
    os.write(connection, bytes([0, 0, 16, 0, 1]))
    os._exit(5)


def begins_to_answer(completions):
    (connection,) = (fd for fd in range(3, 100) if is_a_socket(fd))
    os.write(connection, bytes([0, 0, 16, 0, 1]))
    time.sleep(100)


def is_a_socket(fd):
    import stat

    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def starts_others(completions):
    import subprocess

    child = subprocess.Popen(["sleep", "600"])
    return [child.pid] * len(completions)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def batch(texts: list[str]) -> Sequences:
    tokenizer = tiny_tokenizer()
    ids = [np.asarray(tokenizer(text)["input_ids"], dtype=np.int32) for text in texts]
    prompts = [np.asarray(tokenizer(f"what is {row}")["input_ids"], dtype=np.int32) for row in range(len(texts))]
    return Sequences.join(np.arange(len(texts)), prompts, ids)


@contextlib.contextmanager
def rewarder(spec: FunctionReward) -> Iterator[FunctionRewarder]:
    run: Any = SimpleNamespace(reward=spec, plugins=[])
    made = rewarder_of(run, SimpleNamespace(tokenizer=tiny_tokenizer()))
    try:
        yield made
    finally:
        made.close()


def scored(texts: list[str], rows: list[dict[str, Any]] | None = None, **options: Any) -> Rewards:
    with rewarder(FunctionReward(**options)) as made:
        return made.score(batch(texts), rows or [{} for _ in texts]).result()


# ---- what functions are given, and what comes of their numbers -------------------------------------------------------


def test_the_total_is_the_weighted_sum_in_the_order_of_the_responses(file: Path) -> None:
    texts, rows = ["a", "bbb", "cc"], [{"level": 3}, {"level": 1}, {"level": 2}]
    functions = [f"{file}:lengths", f"{file}:level"]
    rewards = scored(texts, rows, functions=functions, weights=[1.0, -2.0], options={"level": {"scale": 10}})
    assert rewards.parts["lengths"].tolist() == [1, 3, 2] and rewards.parts["level"].tolist() == [30, 10, 20]
    assert rewards.total.tolist() == [1 - 60, 3 - 20, 2 - 40] and rewards.total.dtype == np.float32


def test_a_function_gets_what_its_signature_names(file: Path) -> None:
    rows = [{"level": 1, "name": "x", ROW: "rows.jsonl:1"}, {"level": 2, "name": "y", ROW: "rows.jsonl:2"}]
    texts = ["what is the answer", "no"]
    rewards = scored(texts, rows, functions=[f"{file}:everything"])
    assert rewards.total.tolist() == [len(tiny_tokenizer()(text)["input_ids"]) for text in texts]


def test_special_tokens_are_no_text(file: Path) -> None:
    tokens = np.asarray([*tiny_tokenizer()("ab")["input_ids"], tiny_tokenizer().eos_token_id], dtype=np.int32)
    sequences = Sequences.join(np.arange(1), [tokens], [tokens])
    with rewarder(FunctionReward(functions=[f"{file}:lengths"])) as made:
        assert made.score(sequences, [{}]).result().total.tolist() == [2]


def test_a_function_that_does_not_apply_counts_nothing(file: Path) -> None:
    functions = [f"{file}:lengths", f"{file}:level"]
    rewards = scored(["a", "bb"], [{"level": 5}, {}], functions=functions)
    assert rewards.total.tolist() == [6, 2]
    assert np.isnan(rewards.parts["level"]).tolist() == [False, True]


def test_a_response_that_no_function_judges_is_an_error(file: Path) -> None:
    with pytest.raises(RewardError, match=r"applies to rows\.jsonl:7 \('what is 1'\): all gave None"):
        scored(["a", "b"], [{"level": 1}, {ROW: "rows.jsonl:7", "level": None}], functions=[f"{file}:level"])


def test_several_processes_keep_the_order(file: Path) -> None:
    texts = [chr(97 + number % 26) * (number % 7 + 1) for number in range(60)]
    names = [f"{file}:lengths", f"{file}:process", "length", f"{file}:calls"]
    options = {"length": {"target": 1, "slack": 9}}
    with rewarder(FunctionReward(functions=names, options=options, chunk_rows=7, processes=3)) as made:
        found = [made.score(batch(texts), [{}] * 60).result() for _ in range(2)]
    for rewards in found:
        assert rewards.parts["lengths"].tolist() == [len(text) for text in texts]
        assert rewards.parts["calls"].tolist() == [7.0] * 56 + [4.0] * 4
        assert len(set(rewards.parts["process"].tolist())) == 3
        assert len(set(rewards.parts["length"].tolist())) > 1
    assert found[0].parts["length"].tolist() == found[1].parts["length"].tolist()
    assert scored(texts, functions=[f"{file}:calls"]).total.tolist() == [60.0] * 60


def test_several_batches_may_be_on_their_way(file: Path) -> None:
    with rewarder(FunctionReward(functions=[f"{file}:lengths"])) as made:
        futures = [made.score(batch(["a" * n]), [{}]) for n in (1, 2, 3)]
        assert [future.result().total.item() for future in futures] == [1, 2, 3]


def test_functions_of_one_name_keep_their_whole_names(file: Path) -> None:
    assert names_of(FunctionReward(functions=["a.f", "b.f", "b.g"])) == ["a.f", "b.f", "g"]


# ---- what goes wrong -------------------------------------------------------------------------------------------------

FAILURES = [
    ("raises", r"raised ZeroDivisionError: division by zero, line \d+ of .*/mine\.py, on r:1 \('what is 1'\)"),
    ("messages", r"raised TypeError: string indices .*\(completions are strings, not messages\), on r:0"),
    ("leaves", r"raised SystemExit: 0, line \d+ of .*mine\.py, on r:0"),
    ("ends", r"ended its process with exit code 3, on 3 completions, the first of r:0 .*\(reward\.chunk_rows=1 tells"),
    ("nan", r"gave nan, expected a finite number, on r:1"),
    ("huge", r"gave 1e\+39, expected a finite number, on r:1"),
    ("words", r"gave str 'x', expected a number, on r:1"),
    ("short", r"gave 1 rewards for 3 completions"),
    ("unpicklable", r"gave function <function .*>, expected a list of 3 numbers"),
    ("generator", r"gave generator .*, expected a list of 3 numbers"),
    ("silent", r"raised Silent, line \d+ of .*mine\.py, on r:0"),
    (
        "closes",
        r"has closed the connection to the run, or written into it: a file descriptor that it didn't open, on 3 comp",
    ),
    ("cut_off", r"ended its process with exit code 5, on 3 completions"),
]
ROWS = [{ROW: f"r:{number}"} for number in range(3)]


@pytest.mark.parametrize(("name", "message"), FAILURES)
def test_a_failure_names_the_function_and_the_row(name: str, message: str, file: Path) -> None:
    with pytest.raises(RewardError) as caught:
        scored(["good", "bad", "good"], ROWS, functions=[f"{file}:lengths", f"{file}:{name}"])
    assert str(caught.value).startswith(f"reward.functions={file}:{name} ") and "\n" not in str(caught.value)
    assert re.search(message, str(caught.value)), str(caught.value)


def test_the_longest_limit_can_be_waited_for(file: Path) -> None:
    assert scored(["a"], functions=[f"{file}:lengths"], timeout_s=1e6).total.tolist() == [1]


def test_numpy_results_are_numbers(file: Path) -> None:
    assert scored(["good", "bad"], functions=[f"{file}:arrays"]).total.tolist() == [0, 1]


def test_a_function_that_hangs_is_killed_and_the_next_batch_is_scored(file: Path) -> None:
    spec = FunctionReward(functions=[f"{file}:hangs"], timeout_s=2.0, chunk_rows=1, processes=1)
    with rewarder(spec) as made:
        assert made.score(batch(["good"]), [{}]).result().total.tolist() == [1]
        process = made.pool.workers[0].process
        with pytest.raises(RewardError, match=r"hangs took more than reward\.timeout_s=2 seconds, on r:1"):
            made.score(batch(["good", "bad"]), ROWS[:2]).result()
        assert process.poll() == -signal.SIGKILL
        assert made.score(batch(["good"]), [{}]).result().total.tolist() == [1]


@pytest.mark.parametrize("name", ["slow", "once"])
def test_looking_for_the_row_of_a_failure_does_not_hide_it(name: str, file: Path) -> None:
    """The whole batch takes 2.8 of the 4 seconds, and so do its completions one by one."""
    with pytest.raises(RewardError) as caught:
        scored(["good"] * 3 + ["bad"], [*ROWS, {}], functions=[f"{file}:{name}"], timeout_s=4.0)
    error = "ZeroDivisionError: division by zero" if name == "slow" else "KeyError: 'level'"
    assert re.search(rf"{name} raised {error}, line \d+ of .*, on 4 completions, the first of r:0", str(caught.value))


def test_a_failure_is_forgotten_with_the_next_call(file: Path) -> None:
    with rewarder(FunctionReward(functions=[f"{file}:moody"], timeout_s=2.0, processes=1)) as made:
        with pytest.raises(RewardError, match=r"moody raised ZeroDivisionError: .*, on r:1"):
            made.score(batch(["good", "bad"]), ROWS[:2]).result()
        with pytest.raises(RewardError, match=r"moody took more than reward\.timeout_s=2 seconds, on 2 completions"):
            made.score(batch(["good", "late"]), ROWS[:2]).result()


SIGNALS = [(number, number.name) for number in (signal.SIGSEGV, signal.SIGTERM, signal.SIGPIPE)]


@pytest.mark.parametrize(("number", "name"), [*SIGNALS, (40, "signal 40")])
def test_a_process_that_a_signal_ends_is_told_with_it(number: int, name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        f"import signal\ndef f(completions):\n    signal.signal({number}, 0), signal.raise_signal({number})"
    )
    with pytest.raises(RewardError, match=rf"f ended its process by {name}, on r:0"):
        scored(["a"], ROWS[:1], functions=[f"{path}:f"])


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_the_whole_group_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """The process that watches is in the group, too."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import os, pathlib, subprocess, time\n"
        "def f(completions):\n"
        "    child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(child.pid))\n"
        f"    os.killpg(os.getpgrp(), {int(number)}), time.sleep(600)\n"
    )
    with pytest.raises(RewardError, match=rf"f ended its process by {number.name}, on r:0"):
        scored(["a"], ROWS[:1], functions=[f"{path}:f"])
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(("name", "rewards"), [("forks", [1, 3]), ("leaves_a_fork", [1, 1])])
def test_a_fork_that_comes_back_does_not_answer(name: str, rewards: list[float], file: Path) -> None:
    with rewarder(FunctionReward(functions=[f"{file}:{name}"], processes=1)) as made:
        for _ in range(3):
            assert made.score(batch(["a", "bbb"]), ROWS[:2]).result().total.tolist() == rewards


def test_a_process_that_reads_no_more_is_ended(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STUCK_S", 1)
    with rewarder(FunctionReward(functions=[f"{file}:lengths"], processes=1)) as made:
        made.score(batch(["a"]), [{}]).result()
        (server,) = psutil.Process(made.pool.workers[0].process.pid).children()
        server.suspend()
        with pytest.raises(RewardError, match=r"lengths took nothing of what it was sent for 1 seconds, on r:0"):
            made.score(batch(["a" * 2_000_000]), ROWS[:1]).result(timeout=30)
        assert made.score(batch(["bb"]), [{}]).result().total.tolist() == [2]


def test_an_answer_that_stands_still_in_its_middle_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STUCK_S", 1)
    with (
        rewarder(FunctionReward(functions=[f"{file}:begins_to_answer"], processes=1)) as made,
        pytest.raises(
            RewardError, match=r"begins_to_answer stood still for 1 seconds in the middle of an answer, on r:0"
        ),
    ):
        made.score(batch(["a"]), ROWS[:1]).result(timeout=30)


def test_two_workers_that_die_at_once_are_one_failure(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FunctionReward(functions=[f"{file}:hangs"], chunk_rows=1, processes=2)
    with rewarder(spec) as made:
        wait = made.pool._await

        def both_die(workers: list[Worker]) -> Any:
            if sum(worker.task is not None for worker in workers) == 2:
                for worker in workers:
                    worker.stop()
                    worker.process.wait()
            return wait(workers)

        monkeypatch.setattr(made.pool, "_await", both_die)
        with pytest.raises(RewardError, match=r"hangs ended its process by SIGKILL, on r:0"):
            made.score(batch(["bad", "bad"]), ROWS[:2]).result()
        assert not made.pool.workers
        assert made.score(batch(["good"]), [{}]).result().total.tolist() == [1]


def test_what_is_asked_around_the_end_gets_an_answer(file: Path) -> None:
    with rewarder(FunctionReward(functions=[f"{file}:hangs"])) as made:
        waiting = made.score(batch(["bad"]), [{}])
        made._jobs.put(None)
        late = made.score(batch(["a"]), [{}])
    after = made.score(batch(["a"]), [{}])
    for future in (waiting, late, after):
        with pytest.raises(RewardError, match="the reward functions were stopped"):
            future.result(timeout=10)
    made.close()


def test_scoring_and_closing_do_not_pass_each_other(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing begins while another thread is about to hand over its job."""
    with rewarder(FunctionReward(functions=[f"{file}:lengths"])) as made:
        closing = threading.Thread(target=made.close)
        jobs = made._jobs

        def put(job: Any) -> None:
            if job is not None and not closing.is_alive():
                closing.start()
                closing.join(0.5)  # it waits for this job to be there, or ends
            jobs.put(job)

        monkeypatch.setattr(made, "_jobs", SimpleNamespace(put=put, get=jobs.get, empty=jobs.empty))
        waiting = made.score(batch(["a"]), [{}])
        closing.join()
        with pytest.raises(RewardError, match="the reward functions were stopped"):
            waiting.result(timeout=10)


def test_closing_ends_what_hangs_and_what_it_started(file: Path) -> None:
    spec = FunctionReward(functions=[f"{file}:starts_others", f"{file}:hangs"], processes=1)
    with rewarder(spec) as made:
        child = FunctionRewarder(FunctionReward(functions=[f"{file}:starts_others"]), tiny_tokenizer(), [])
        pid = int(child.score(batch(["a"]), [{}]).result().total.item())
        assert psutil.pid_exists(pid)
        child.close()
        waiting = made.score(batch(["bad"]), [{}])
        time.sleep(1.0)
    with pytest.raises(RewardError, match="were stopped"):
        waiting.result()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not made.pool.workers


def test_a_driver_that_is_killed_leaves_no_function_behind(file: Path) -> None:
    code = f"""
import time
from tests.unit.test_rewards import FunctionReward, FunctionRewarder, batch, tiny_tokenizer
made = FunctionRewarder(FunctionReward(functions=["{file}:hangs"], processes=2), tiny_tokenizer(), [])
made.score(batch(["bad"]), [{{}}])
while not made.pool.workers or made.pool.workers[0].task is None:
    time.sleep(0.05)
print(made.pool.workers[0].process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        worker = psutil.Process(int(driver.stdout.readline()))
        driver.kill()
    _, alive = psutil.wait_procs([worker], timeout=10)
    assert not alive


def test_a_worker_that_dies_between_two_batches_is_replaced(file: Path) -> None:
    with rewarder(FunctionReward(functions=[f"{file}:lengths"], processes=1)) as made:
        made.score(batch(["a"]), [{}]).result()
        os.kill(made.pool.workers[0].process.pid, signal.SIGKILL)
        made.pool.workers[0].process.wait()
        assert made.score(batch(["bb"]), [{}]).result().total.tolist() == [2]


def test_columns_that_cannot_be_sent_are_named(file: Path) -> None:
    with pytest.raises(RewardError, match=r"level can't be given the row's columns: .*pickle"):
        scored(["a"], [{"level": lambda: None}], functions=[f"{file}:level"])


class Silent(Exception):
    def __str__(self) -> str:
        raise KeyError


class Mute:
    """A column's value that can't be sent, and doesn't say why."""

    def __reduce__(self) -> str:
        raise Silent


class Opens:
    """A column's value that can be sent, but not received."""

    def __reduce__(self) -> tuple[object, ...]:
        return open, ("/nowhere/at/all",)


class Ends:
    def __reduce__(self) -> tuple[object, ...]:
        return next, (iter(()),)


@pytest.mark.parametrize(
    ("value", "reason"), [(Mute(), "Silent"), (Opens(), "FileNotFoundError: .*"), (Ends(), "StopIteration")]
)
def test_columns_whose_pickling_fails_in_its_own_way_are_named(value: object, reason: str, file: Path) -> None:
    with pytest.raises(RewardError, match=rf"level can't be given the row's columns: {reason}, on r:0"):
        scored(["a"], [{"level": value, ROW: "r:0"}], functions=[f"{file}:level"])


def of_a_module_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """An object such as a preprocessor's file makes, which only the driver has loaded."""
    (folder / "only_here.py").write_text("class Level:\n    pass\n")
    spec = importlib.util.spec_from_file_location("only_here", folder / "only_here.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "only_here", module)
    spec.loader.exec_module(module)
    return module.Level()


def test_columns_that_only_the_driver_can_read_are_named(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"level": of_a_module_elsewhere(tmp_path, monkeypatch), ROW: "r:0"}]
    with pytest.raises(RewardError, match=r"level can't be given the row's columns: ModuleNotFoundError: .*, on r:0"):
        scored(["a"], rows, functions=[f"{file}:level"])


# ---- before the run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("functions", "options", "message"),
    [
        (["math_verfy"], {}, r"math_verfy doesn't exist; did you mean math_verify\?; write math_verify,"),
        (["{}:length"], {}, r"there is no function length in .*mine\.py; did you mean lengths\?"),
        (["{}.gone:f"], {}, "can't be imported: FileNotFoundError"),
        (
            ["{}:level"],
            {},
            "level needs a column 'level', which the data doesn't have; there are prompts, completions,",
        ),
        (["code"], {}, "code needs a column 'tests', which the data doesn't have; did you mean test"),
        (["code"], {"code": {"colum": "x"}}, r"reward\.options\.code\.colum is no option of code; did you mean column"),
        (["length"], {}, r"reward\.functions=length needs reward\.options\.length\.target=VALUE"),
        (["{}:later"], {}, r"later is an async function; write a function that returns a list of numbers"),
        (["{}:one_by_one"], {}, r"one_by_one is a generator; write"),
        (["length"], {"length": {"target": 0}}, r"reward\.options\.length: target=0 must be at least 1"),
        (["length"], {"length": {"target": 2.5}}, r"reward\.options\.length\.target=2\.5 must be a whole number"),
        (["length"], {"length": {"target": True}}, r"reward\.options\.length\.target=true must be a whole number"),
        (["code"], {"code": {"partial": "maybe"}}, r"reward\.options\.code\.partial=maybe must be true or false"),
        (["code"], {"code": {"timeout_s": "long"}}, r"reward\.options\.code\.timeout_s=long must be a number"),
        (["math_verify"], {"math_verify": {"column": None}}, r"math_verify\.column=null must be text"),
        (["format"], {"format": {"pattern": "("}}, r"pattern=\( is no regular expression"),
        (["format"], {"fromat": {}}, r"reward\.options\.fromat is for a function that .* name; did you mean format\?"),
        (["{}:lengths"], {"lengths": {"x": 1}}, r"reward\.options\.lengths\.x is no option of .*; it has no options"),
        (
            ["{}:scales"],
            {"scales": {"scal": 1}},
            r"scales\.scal is no option of .*; did you mean scale\?; it has scale",
        ),
        (["shutil.which"], {}, r"shutil\.which takes no completions; write def which\(completions, \*\*columns\)"),
        (["{}:level"], {"level": {"completions": 1}}, r"level\.completions is what every function is given"),
    ],
)
def test_mistakes_are_found_before_a_model_loads(
    functions: list[str], options: dict[str, Any], message: str, file: Path
) -> None:
    spec = FunctionReward(functions=[name.format(file) for name in functions], options=options)
    with pytest.raises(ConfigError, match=message) as caught:
        check(spec, ["test", "question"], [])
    assert "\n" not in str(caught.value)


def test_a_limit_of_a_function_that_its_process_does_not_live_to_see() -> None:
    both = r"reward\.options\.code\.timeout_s={} must be below reward\.timeout_s={}, which ends the process first; "
    for own, timeout_s in ((60, 60.0), (90.5, 60.0), (None, 10.0)):
        options = {} if own is None else {"code": {"timeout_s": own}}
        spec = FunctionReward(functions=["code"], options=options, timeout_s=timeout_s)
        with pytest.raises(ConfigError, match=both.format(own or 10, f"{timeout_s:g}")):
            check(spec, ["tests"], [])
    check(FunctionReward(functions=["code"], options={"code": {"timeout_s": 59}}), ["tests"], [])


def test_a_file_that_breaks_says_in_which_line(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text("import json\n\njson.loads('{')\n")
    with pytest.raises(ConfigError, match=r"can't be imported: JSONDecodeError: .*, line 3 of .*breaks\.py"):
        check(FunctionReward(functions=[f"{tmp_path}/breaks.py:f"]), [], [])
    (tmp_path / "ends.py").write_text("import os\n\nos._exit(4)\n")
    with pytest.raises(ConfigError, match=r"importing them ended its process with exit code 4"):
        check(FunctionReward(functions=[f"{tmp_path}/ends.py:f"]), [], [])


def test_what_fits_is_accepted_and_nothing_is_called(file: Path) -> None:
    options = {"length": {"target": 5}, "level": {"scale": 2}}
    names = [f"{file}:level", f"{file}:ends", f"{file}:everything", "length", "format"]
    check(FunctionReward(functions=names, options=options), ["level"], [])


def test_columns_may_not_have_the_names_of_what_functions_get() -> None:
    with pytest.raises(ConfigError, match="the data's column 'prompts' has the name of what every reward function"):
        check(FunctionReward(functions=["format"]), ["prompts"], [])
    with pytest.raises(ConfigError, match=r"reward\.chunk_rows=2 has no effect on built-in functions"):
        check(FunctionReward(functions=["format"], chunk_rows=2), [], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(functions=[]), "reward=functions needs functions"),
        (dict(functions=["a", "a"]), "names a twice"),
        (dict(functions=[" "]), "names an empty one"),
        (dict(functions=["a"], weights=[1.0, 2.0]), r"has 2 numbers for 1 reward\.functions"),
        (dict(functions=["a"], weights=[float("nan")]), "must be finite"),
        (dict(functions=["a"], weights=[0.0]), "not all 0"),
        (dict(functions=["a"], options={"a": 1}), r"reward\.options\.a=1 must be a section"),
        (dict(functions=["a"], timeout_s=0), r"reward\.timeout_s must be greater than 0"),
        (dict(functions=["a"], timeout_s=1e9), r"reward\.timeout_s=1e\+09 is more than 1e\+06 seconds; use 1e\+06"),
        (dict(functions=["a"], chunk_rows=0), r"reward\.chunk_rows must be at least 1"),
        (dict(functions=["a"], processes=0), r"reward\.processes must be at least 1"),
    ],
)
def test_values_are_checked_while_composing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FunctionReward(**options)


def test_the_command_line() -> None:
    keys = ["reward=functions", "reward.functions=[length,format]", "reward.weights=[1,0.5]"]
    keys += ["reward.options.length.target=256", "reward.options.length.slack=0"]
    spec = sections_of(keys, ("reward",), {})["reward"]
    assert spec == FunctionReward(
        functions=["length", "format"], weights=[1.0, 0.5], options={"length": {"target": 256, "slack": 0}}
    )
    check(spec, [], [])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_the_columns_of_the_data_are_known_before_the_run(streaming: bool, skip: bool, tmp_path: Path) -> None:
    """Those that only some rows have as well; of a stream that isn't read through those of its first rows."""
    rows = [{"response": "y", "held": 1}, {"level": 1}, *({} for _ in range(CHUNK)), {"name": 2}]
    rows = rows if streaming else [*rows[1:], rows[0]]  # the last ones are held out, of a stream the first ones
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x", **row}) + "\n" for row in rows))
    spec = FileData(path=str(path), streaming=streaming, on_bad_row=OnBadRow.skip if skip else OnBadRow.error)
    needs = Needs.of(None, VllmRollout(), FunctionReward(functions=["f"]))
    dataset = load(spec, tiny_tokenizer(), 0, 1, False, needs=needs)
    all_read = not (streaming and skip)
    expected = {"level", "name", ROW} if all_read else {"level", ROW}
    assert dataset.train_column_names() == (expected, all_read)
    assert dataset.held_out.column_names == {"held", "response", ROW}


def test_a_column_that_a_stream_may_still_have_is_a_warning(file: Path) -> None:
    spec = FunctionReward(functions=[f"{file}:level", f"{file}:lengths"])
    (warning,) = check(spec, ["levels"], [], are_all=False)
    assert re.search(
        r"mine\.py:level needs a column 'level', which none of the stream's first rows has; rows without it give None; "
        "did you mean levels",
        warning,
    )
    assert check(spec, ["level"], [], are_all=False) == []


def test_held_out_rows_must_have_the_columns_too(file: Path) -> None:
    spec = FunctionReward(functions=[f"{file}:level"])
    with pytest.raises(ConfigError, match=r"level needs a column 'level', which no held-out row has; did you mean lev"):
        check(spec, ["level"], [], held_out=["levels"])
    with pytest.raises(ConfigError, match="the data's column 'prompts' has the name"):
        check(spec, ["level"], [], held_out=["level", "prompts"])
    check(spec, ["level"], [], held_out=["level", ROW])


@pytest.mark.parametrize("streaming", [False, True])
def test_what_preflight_says_about_columns(streaming: bool, file: Path, tmp_path: Path) -> None:
    functions = FunctionReward(functions=[f"{file}:level"])

    def said(rows: list[dict[str, Any]], held_out: dict[str, Any], samples: int = 1) -> list[str]:
        for name, given in (("rows", rows), ("held", [held_out])):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": "x", **row}) + "\n" for row in given))
        path, held = str(tmp_path / "rows.jsonl"), str(tmp_path / "held.jsonl")
        skip = OnBadRow.skip if streaming else OnBadRow.error
        spec = FileData(path=path, eval_path=held if samples else None, streaming=streaming, on_bad_row=skip)
        needs = Needs.of(None, VllmRollout(), functions)
        return check_reward_functions(functions, load(spec, tiny_tokenizer(), 0, samples, False, needs=needs), [])

    assert said([{}, {"level": 1}], {"level": 2}) == []
    assert said([{}, {"level": 1}], {}, samples=0) == []
    with pytest.raises(ConfigError, match="'level', which no held-out row has"):
        said([{}, {"level": 1}], {"name": 1})
    if streaming:
        (warning,) = said([{}], {"level": 2})
        assert "which none of the stream's first rows has" in warning
    else:
        with pytest.raises(ConfigError, match="'level', which the data doesn't have"):
            said([{}], {"level": 2})


def test_an_option_is_not_displaced_by_a_column(file: Path) -> None:
    spec = FunctionReward(functions=[f"{file}:scales"], options={"scales": {"scale": 3.0}})
    with pytest.raises(ConfigError, match=r"reward\.options\.scales\.scale has the name of a column of the data"):
        check(spec, ["scale", "level"], [])
    check(spec, ["level"], [])
    rows = [{"scale": 7.0, "level": 1}]  # a column that a stream has later
    assert scored(["a"], rows, functions=spec.functions, options=spec.options).total.tolist() == [3]
    named = FunctionReward(functions=[f"{file}:level"], options={"level": {"scale": 3.0}})
    check(named, ["scale", "level"], [])  # it gets no other columns
