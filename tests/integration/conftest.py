"""Ray for the tests that need it: one local cluster a session, as starting it takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlhf.backends.cluster import RayCluster
from rlhf.config.cluster import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """One device that two roles share, as under placement=colocate."""
    cluster = RayCluster(Cluster(object_store_gb=1.0), bundles=1)
    yield cluster
    cluster.close()
