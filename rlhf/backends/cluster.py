"""Ray: starting or joining it, one placement group a run, and futures whose failures are said plainly."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf.config.cluster import Cluster
from rlhf.errors import ClusterError, RlhfError, RoleDied, RoleFailed, one_line
from rlhf.stopping import watch

T = TypeVar("T")

SLOT = "slot"
"""Custom resource that stands for a device on CPU: bundles of CPUs would never be ready on a small machine."""

CONNECT_TIMEOUT_S = 10.0


@dataclass
class RayFuture(Generic[T]):
    """References of one role's call; `combine` makes one result of what the processes returned."""

    role: str
    references: list[Any]
    combine: Callable[[list[Any]], T]

    def result(self) -> T:
        return self.combine(wait_for(self.role, self.references))


def wait_for(role: str, references: list[Any], timeout_s: float | None = None) -> list[Any]:
    """`ray.get` with the failures a user can do something about.

    Raises:
        RoleDied: the process behind a reference ended, or the one whose result it needed.
        RlhfError: raised by the role itself, as it was.
        RoleFailed: the role raised anything else.
        ClusterError: not there within `timeout_s` seconds, or Ray itself failed.
    """
    with plain_failures(role):
        try:
            return ray.get(references, timeout=timeout_s)
        except GetTimeoutError:
            raise ClusterError(
                f"the {role} process was not ready within cluster.start_timeout_s={timeout_s:g} seconds"
            ) from None


def iterate(role: str, generator: Any) -> Iterator[Any]:
    """The references of a streaming call, with the same failures."""
    references = iter(generator)
    while True:
        with plain_failures(role):
            try:
                reference = next(references)
            except StopIteration:
                return
        yield reference


@contextmanager
def plain_failures(role: str) -> Iterator[None]:
    """Ray's exceptions -> ours; see `wait_for`."""
    try:
        yield
    except RayActorError as error:
        raise RoleDied(f"the {role} process ended unexpectedly: {last_words(error)}") from error
    except RayTaskError as error:
        if isinstance(error.cause, RlhfError):
            raise error.cause from None
        if isinstance(error.cause, RayActorError):  # what it was waiting for: weights, from the other role
            raise RoleDied(
                f"a process that the {role} waits for ended unexpectedly: {last_words(error.cause)}"
            ) from error
        raise RoleFailed(f"the {role} failed with {type(error.cause).__name__}: {last_words(error.cause)}") from error
    except RayError as error:
        raise ClusterError(f"Ray failed while the {role} was at work: {last_words(error)}") from error


def last_words(error: BaseException | None) -> str:
    """One line of at most 300 characters: the end, where Ray and most libraries put the reason."""
    text = one_line(error)
    return text if len(text) <= 300 else f"... {text[-300:]}"


class RayCluster:
    """Ray and the run's placement group. Shuts down only what it started."""

    def __init__(self, spec: Cluster, bundles: int) -> None:
        self.spec = spec
        self.started = False
        self.group: PlacementGroup | None = None
        self.threads = spec.threads or len(os.sched_getaffinity(0))
        self.environment = {
            "OMP_NUM_THREADS": str(self.threads),
            "CUDA_VISIBLE_DEVICES": "",  # device=cpu holds on a machine with GPUs, too
        }
        try:
            if not ray.is_initialized():
                self.started = True
                self._start(bundles)
            self.group = self._reserve(bundles)
        except BaseException:
            self.close()
            raise

    def _start(self, bundles: int) -> None:
        own_cluster: dict[str, Any] = {
            "include_dashboard": False,
            "resources": {SLOT: bundles},
            "object_store_memory": int(self.spec.object_store_gb * 2**30),
        }
        # Ray warns of changes in versions to come, and prints the errors that follow from one we report already.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        try:
            if self.spec.address not in (None, "auto"):
                check_answers(self.spec.address)
            ray.init(
                address=self.spec.address or "local",  # local: never one that happens to run here
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=True,
                **({} if self.spec.address else own_cluster),
            )
        except (OSError, RuntimeError, ValueError) as error:
            if self.spec.address is None:
                raise ClusterError(
                    f"Ray could not be started here: {last_words(error)}; its files go to {temporary_folder()}, choose "
                    "a shorter or roomier path with RAY_TMPDIR"
                ) from error
            raise ClusterError(
                f"no Ray cluster at cluster.address={self.spec.address} ({last_words(error)}); start one with `ray "
                f"start --head --resources='{{\"{SLOT}\": {bundles}}}'`, or use cluster.address=null"
            ) from error
        watch()  # ray.init has put its own handler of SIGTERM in place

    def _reserve(self, bundles: int) -> PlacementGroup:
        """One bundle a device. More than the cluster has is an error; more than is free waits in Ray's queue."""
        total = ray.cluster_resources().get(SLOT, 0)
        if total < bundles:
            raise ClusterError(
                f"the run needs {bundles} device(s), the Ray cluster has {total:g} of resource '{SLOT}'; start its "
                f"nodes with `--resources='{{\"{SLOT}\": {bundles}}}'` or lower train.gpus and rollout.gpus"
            )
        group = placement_group([{SLOT: 1.0}] * bundles, strategy="PACK")
        if not group.wait(self.spec.start_timeout_s):
            remove_placement_group(group)
            raise ClusterError(
                f"{bundles} device(s) did not become free within cluster.start_timeout_s="
                f"{self.spec.start_timeout_s:g} seconds; wait for the runs that use them, or raise it"
            )
        return group

    def actor(self, cls: type, bundle: int, share: float, environment: dict[str, str]) -> Any:
        """`cls` as a Ray actor class bound to a share of one device; call `.remote(...)` on it."""
        return ray.remote(cls).options(
            num_cpus=0,
            resources={SLOT: share},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle),
            runtime_env={"env_vars": {**self.environment, **environment}},
        )

    def close(self) -> None:
        """Give the devices back; end Ray if this run started it."""
        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None
        if self.started:
            helpers = raylet_processes()
            ray.shutdown()
            end(helpers)
            self.started = False


def check_answers(address: str) -> None:
    """Raise OSError unless something listens at HOST:PORT: Ray itself would try again for many minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()


def raylet_processes() -> list[psutil.Process]:
    """What Ray's daemon, a child of this process, has started: `ray.shutdown` leaves some to notice by themselves."""
    daemons = [child for child in psutil.Process().children() if child.name() == "raylet"]
    return [process for daemon in daemons for process in daemon.children(recursive=True)]


def end(processes: list[psutil.Process]) -> None:
    """SIGKILL for those that still run: nothing of theirs is worth keeping."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def temporary_folder() -> str:
    """Where Ray puts its sockets, whose paths may have 107 bytes."""
    return os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
