"""Memory asked for by name, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.backends.megatron.architecture import Architecture
from rlhf.config.cluster import Cluster
from rlhf.config.data import FileData
from rlhf.config.rollout import VllmRollout
from rlhf.config.run import Eval, EvalResponses
from rlhf.config.teacher import StandaloneTeacher, TeacherEngine
from rlhf.config.train import DType
from rlhf.errors import ConfigError
from rlhf.memory import cache_bytes_per_token, check_cache, check_memory, longest_sample
from tests.unit.test_execute import run_of
from tests.unit.tiny import SMOLLM2

ARCHITECTURE = Architecture.from_config(SMOLLM2, "test")


def test_bytes_of_a_token() -> None:
    """SmolLM2: key and value of 3 heads of 64 numbers in each of 30 layers."""
    assert cache_bytes_per_token(ARCHITECTURE, DType.float32) == 30 * 2 * 3 * 64 * 4
    assert cache_bytes_per_token(ARCHITECTURE, DType.bfloat16) == 30 * 2 * 3 * 64 * 2


@pytest.mark.parametrize("share", [0.99, 1.0])
def test_a_cache_holds_the_longest_sample(share: float, tmp_path: Path) -> None:
    """512 + 128 tokens in blocks of 128, and one block more."""
    size = (5 + 1) * 128 * 46080 / 2**30
    run = run_of(tmp_path, rollout=VllmRollout(kv_cache_gb=size * share), data=FileData(path="x", max_length=512))
    if share == 1:
        check_memory(run, ARCHITECTURE)
        return
    with pytest.raises(ConfigError, match=r"rollout\.kv_cache_gb=.* can't hold one sample of 640 tokens; .* 0\.033$"):
        check_memory(run, ARCHITECTURE)


def test_the_cache_of_a_standalone_teacher_is_asked_for_by_name(tmp_path: Path) -> None:
    teacher = StandaloneTeacher(gpus=2, engine=TeacherEngine(kv_cache_gb=1e5))
    with pytest.raises(ConfigError, match=r"^teacher\.engine\.kv_cache_gb=100000 and rollout\.kv_cache_gb=1 and "):
        check_memory(run_of(tmp_path, teacher=teacher), ARCHITECTURE)
    with pytest.raises(ConfigError, match=r"teacher\.engine\.kv_cache_gb=0\.01 can't hold one sample of 640 tokens"):
        check_cache("teacher.engine.kv_cache_gb", 0.01, 640, ARCHITECTURE, DType.float32)


def test_the_longest_sample_is_a_response_or_a_reference(tmp_path: Path) -> None:
    data, rollout = FileData(path="x", max_length=512), VllmRollout(max_new_tokens=100)
    for settings, longest in [
        (Eval(samples=2, max_response_tokens=200), 712),
        (Eval(samples=2, max_response_tokens=50), 612),
        (Eval(samples=2, responses=EvalResponses.student), 612),
        (Eval(samples=0), 612),
    ]:
        assert longest_sample(run_of(tmp_path, data=data, rollout=rollout, eval=settings)) == longest


def test_more_than_the_machine_has(tmp_path: Path) -> None:
    for sections in ({"rollout": VllmRollout(kv_cache_gb=1e6)}, {"cluster": Cluster(object_store_gb=1e6)}):
        with pytest.raises(ConfigError, match=r"kv_cache_gb=.* and cluster\.object_store_gb=.* GiB of free memory"):
            check_memory(run_of(tmp_path, **sections), ARCHITECTURE)
