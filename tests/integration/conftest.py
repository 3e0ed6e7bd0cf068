"""Ray and Megatron's process groups for the tests that need them: one a module, as starting takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlhf.backends.cluster import RayCluster
from rlhf.config.cluster import Cluster
from tests.unit.tiny import save_tiny_llama


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """One device that two roles share, as under placement=colocate."""
    cluster = RayCluster(Cluster(object_store_gb=1.0), bundles=1)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def megatron_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Process groups of one rank, made by a real trainer on a throw-away model."""
    from rlhf.backends.megatron.trainer import MegatronTrainer
    from tests.integration.megatron import end_groups, trainer_setup

    folder = save_tiny_llama(tmp_path_factory.mktemp("groups") / "model", layers=1)
    end_groups()
    MegatronTrainer(trainer_setup(folder, folder))
    yield
    end_groups()
