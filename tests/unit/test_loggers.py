"""Sinks: what they write is read back with the tools people read it with."""

import json
import signal
import socket
import sys

import pytest
import torch.utils.tensorboard  # noqa: F401  here, so that no test counts the seconds of this import
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf.config.logger import Logger, WandbMode
from rlhf.errors import ConfigError, RlhfError
from rlhf.loggers.base import Continued, MetricLog, build
from rlhf.loggers.jsonl import Jsonl, read

NONE = {"console": False, "jsonl": False, "tensorboard": False}


class Failing:
    """Writes one step, then its disk is full."""

    def __init__(self):
        self.calls = []

    def log(self, step, metrics):
        self.calls.append(step)
        if step == 2:
            raise OSError("no space left\non device")

    def summary(self, values):
        self.calls.append("summary")

    def close(self):
        self.calls.append("close")


class Recording(Failing):
    def log(self, step, metrics):
        self.calls.append(step)


def test_failing_sink_is_dropped_and_reported_once(capsys):
    failing, recording = Failing(), Recording()
    log = MetricLog([failing, recording])
    for step in (1, 2, 3):
        log.log(step, {"time/train": 2, "time/step": 3})
    log.summary({})
    log.close()
    assert failing.calls == [1, 2]
    assert recording.calls == [1, 2, 3, "summary", "close"]
    assert log.seconds == {"train": 6.0, "step": 9.0}
    assert capsys.readouterr().err == (
        "warning: logger.failing failed and is off for the rest of the run: OSError: no space left on device\n"
    )


def test_one_failing_close_does_not_keep_the_others_open(capsys):
    failing, recording = Failing(), Recording()
    failing.close = lambda: 1 / 0
    MetricLog([failing, recording]).close()
    assert recording.calls == ["close"]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_without_console_phase_is_silent_and_warnings_go_to_stderr(tmp_path, capsys):
    log = build(Logger(**NONE), tmp_path / "run", "name", {}, 3)
    log.phase("train")
    log.warn("two\nlines")
    out = capsys.readouterr()
    assert (out.out, out.err) == ("", "warning: two lines\n")
    assert list((tmp_path / "run").iterdir()) == []


def test_jsonl_is_valid_and_complete_after_every_step(tmp_path):
    sink = Jsonl(tmp_path)
    sink.log(1, {"train/loss": 0.5, "train/lr": 1e-5})
    sink.log(2, {"train/loss": float("nan"), "train/grad_norm": float("-inf")})
    sink.log(2, {"eval/forward_kl": 0.25})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # not closed yet
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [row["step"] for row in rows] == [1, 2, 2]
    assert rows[0].keys() == {"step", "time", "train/loss", "train/lr"}
    assert rows[1]["train/loss"] is None
    assert rows[1]["nonfinite"] == {"train/loss": "nan", "train/grad_norm": "-inf"}
    sink.close()
    steps = read(tmp_path)
    assert list(steps) == [1, 2]
    assert str(steps[2]["train/loss"]) == "nan"
    assert (steps[2]["train/grad_norm"], steps[2]["eval/forward_kl"]) == (float("-inf"), 0.25)


@pytest.mark.parametrize("text", ["{", "[]", '{"train/loss": 1}'])
def test_jsonl_names_a_broken_line(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + text + "\n")
    with pytest.raises(RlhfError, match="line 2"):
        read(tmp_path)


def test_tensorboard_reads_back(tmp_path):
    log = build(Logger(**NONE | {"tensorboard": True}), tmp_path, "name", {"train": {"lr": 1e-5}}, 2)
    log.log(1, {"train/loss": 0.5, "eval/forward_kl": 2.0})
    log.log(2, {"train/loss": 0.25})
    log.summary({"steps": 2, "checkpoint": tmp_path})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "eval/forward_kl"}
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.25)]
    text = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert '"lr": 1e-05' in text["config/text_summary"]
    assert '"steps": 2' in text["summary/text_summary"]


def test_tensorboard_takes_back_what_came_after_the_step_resumed_from(tmp_path):
    spec = Logger(**NONE | {"tensorboard": True})
    log = build(spec, tmp_path, "name", {"part": 1}, 4)
    for step in (1, 2, 3):
        log.log(step, {"train/loss": step / 10})
    log.sinks[0]._writer.flush()  # and no close: the process was killed
    log = build(spec, tmp_path, "name", {"part": 2}, 4, Continued(step=2))
    for step in (3, 4):
        log.log(step, {"train/loss": float(step)})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = [(event.step, round(event.value, 3)) for event in events.Scalars("train/loss")]
    assert scalars == [(1, 0.1), (2, 0.2), (3, 3.0), (4, 4.0)]
    texts = [(event.step, event.tensor_proto.string_val[0]) for event in events.Tensors("config/text_summary")]
    assert [(step, b'"part": 1' in text) for step, text in texts] == [(0, True), (2, False)]


def test_tensorboard_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"logger\.tensorboard=true needs .* pip install tensorboard"):
        build(Logger(**NONE | {"tensorboard": True}), tmp_path, "name", {}, 1)


@pytest.fixture
def wandb_home(tmp_path, monkeypatch):
    """The client as on a fresh machine: no login, its server is a socket that notes who connects."""
    import wandb

    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, address)
        wandb.teardown()  # the client keeps settings and a service process for the life of this one
        yield server
        wandb.teardown()


def test_wandb_offline_writes_files_and_uses_no_network(tmp_path, wandb_home, capfd):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    hooks = sys.exit, sys.excepthook, sys.stdout
    spec = Logger(**NONE, wandb=True, wandb_mode=WandbMode.offline, wandb_project="proj", wandb_entity="team")
    spec.wandb_group = "my-sweep"
    log = build(spec, tmp_path / "run", "my-run", {"algo": {"beta": 0.5}}, 2)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert hooks == (sys.exit, sys.excepthook, sys.stdout)
    log.log(1, {"train/loss": 0.5})
    log.log(1, {"eval/forward_kl": 0.25})
    log.log(2, {"train/loss": float("nan")})
    log.summary({"steps": 2, "eval_before": {"eval/forward_kl": 1.0}})
    log.close()
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    content = written.read_bytes()
    for text in ("my-run", "proj", "team", "my-sweep", "beta", "train/loss", "eval/forward_kl", "eval_before"):
        assert text.encode() in content
    with pytest.raises(BlockingIOError):
        wandb_home.accept()
    out = capfd.readouterr()
    assert (out.out, out.err) == ("", "")


def test_wandb_goes_on_with_its_run(tmp_path, wandb_home, capfd):
    spec = Logger(**NONE, wandb=True, wandb_mode=WandbMode.offline)
    log = build(spec, tmp_path, "my-run", {}, 4)
    first = log.wandb_id
    log.log(1, {"train/loss": 0.5})
    log.close()
    log = build(spec, tmp_path, "my-run", {}, 4, Continued(step=1, wandb_id=first))
    log.log(2, {"train/loss": 0.25})
    log.close()
    assert first and log.wandb_id == first
    written = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert {path.stem for path in written} == {f"run-{first}"}
    log = build(spec, tmp_path / "new", "other", {}, 4)
    log.close()
    assert log.wandb_id != first
    out = capfd.readouterr()
    assert (out.out, out.err) == ("", "")


def test_wandb_online_without_login(tmp_path, wandb_home, capfd):
    with pytest.raises(ConfigError, match=r"logger=wandb: .*`wandb login`.*logger\.wandb_mode=offline") as error:
        build(Logger(**NONE, wandb=True), tmp_path, "name", {}, 1)
    assert "\n" not in str(error.value)
    with pytest.raises(BlockingIOError):
        wandb_home.accept()
    out = capfd.readouterr()
    assert (out.out, out.err) == ("", "")


def test_wandb_malformed_key(tmp_path, wandb_home, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(ConfigError, match=r"WANDB_API_KEY invalid.*`wandb login`"):
        build(Logger(**NONE, wandb=True), tmp_path, "name", {}, 1)


def test_wandb_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="logger=wandb needs the package wandb: pip install wandb"):
        build(Logger(**NONE, wandb=True), tmp_path, "name", {}, 1)
