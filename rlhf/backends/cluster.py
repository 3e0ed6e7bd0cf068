"""Ray: starting or joining it, and one placement group a run, on which the roles' processes are started."""

from __future__ import annotations

import os
import socket
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf.backends.calls import NOTICE_S, Process, ended, last_words
from rlhf.backends.daemons import end, is_actor, raylet_processes, still_runs
from rlhf.backends.keep import KEEPER, Kept
from rlhf.backends.ray_signals import signals_are_ours
from rlhf.config.cluster import Cluster, Device
from rlhf.errors import ClusterError

SLOT = "slot"
"""Custom resource that stands for a device on CPU: bundles of CPUs would never be ready on a small machine."""

GPU = "GPU"
"""Ray's own resource for GPUs; it shows an actor with a share of one that one only."""

WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
"""NVLink multicast is a state of the switch that all jobs of a host share, and a job that dies can leave it unusable;
neither a bucket of weights nor the hidden rows of a step need it. Whoever set these variables is asked instead."""

CONNECT_TIMEOUT_S = 10.0


def threads_each(nodes: list[str], cores: int) -> int:
    """CPU threads of each process: devices of a node share its cores, roles on one device take turns.

    Args:
        nodes: the node of each device.
    """
    return max(1, cores // max(Counter(nodes).values()))


def remedy(error: BaseException) -> str:
    """What to do where Ray couldn't be started: it keeps a token in the home folder and everything else elsewhere."""
    token = Path(os.path.expanduser("~/.ray/auth_token"))
    file = getattr(error, "filename", None)
    if file is not None and Path(file) in (token, *token.parents):
        return "it keeps a token in the home folder: set HOME to a folder you can write to"
    if "timed out" in str(error):
        return "the machine may be busy: try again when it is less so"
    return f"its files go to {temporary_folder()}, choose a shorter or roomier path with RAY_TMPDIR"


class RayCluster:
    """Ray and the run's placement group. Shuts down only what it started; in a sweep Ray stays for the next run."""

    def __init__(self, spec: Cluster, bundles: int) -> None:
        self.spec = spec
        self.resource = SLOT if spec.device is Device.cpu else GPU
        self.started = False
        self.group: PlacementGroup | None = None
        self.processes: list[Process] = []
        try:
            if KEEPER.kept is not None and not (KEEPER.kept.fits(spec, bundles) and still_runs(KEEPER.kept.spec)):
                end_ray()
                KEEPER.kept = None
            if not ray.is_initialized():
                self.started = True
                self._start(bundles)
                if KEEPER.keeping:
                    self.started = False
                    KEEPER.kept = Kept(spec, bundles)
            self.group = self._reserve(bundles)
        except BaseException:
            self.close()
            raise
        node_of = placement_group_table(self.group)["bundles_to_node_id"]
        self.nodes: list[str] = [node_of[bundle] for bundle in range(bundles)]
        """The node of each bundle."""
        threads = spec.threads or threads_each(self.nodes, len(os.sched_getaffinity(0)))
        self.environment = {"OMP_NUM_THREADS": str(threads)}
        if spec.device is Device.cpu:
            self.environment["CUDA_VISIBLE_DEVICES"] = ""  # holds on a machine with GPUs, too
        else:
            self.environment |= {name: os.environ.get(name, value) for name, value in WITHOUT_MULTICAST.items()}

    def _start(self, bundles: int) -> None:
        own_cluster: dict[str, Any] = {
            "include_dashboard": False,
            "resources": {SLOT: bundles} if self.spec.device is Device.cpu else None,  # Ray finds GPUs itself
            "object_store_memory": int(self.spec.object_store_gb * 2**30),
        }
        # Ray warns of changes in versions to come, and prints the errors that follow from one we report already.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        try:
            if self.spec.address not in (None, "auto"):
                check_answers(self.spec.address)
            with signals_are_ours():
                ray.init(
                    address=self.spec.address or "local",  # local: never one that happens to run here
                    log_to_driver=False,
                    logging_level="ERROR",
                    configure_logging=True,
                    **({} if self.spec.address else own_cluster),
                )
        except Exception as error:  # Ray also raises plain ones, e.g. when a machine is too busy to start it
            if self.spec.address is None:
                words = last_words(error).rstrip(".")
                raise ClusterError(f"Ray could not be started here: {words}; {remedy(error)}") from error
            raise ClusterError(
                f"no Ray cluster at cluster.address={self.spec.address} ({last_words(error)}); start one with `ray "
                f"start --head{self._resources(bundles)}`, or use cluster.address=null"
            ) from error

    def _reserve(self, bundles: int) -> PlacementGroup:
        """One bundle a device. More than the cluster has is an error; more than is free waits in Ray's queue."""
        total = ray.cluster_resources().get(self.resource, 0)
        if total < bundles and self.spec.device is Device.cuda:
            raise ClusterError(
                f"the run needs {bundles} GPU(s), the Ray cluster has {total:g}; lower train.gpus, rollout.gpus or "
                "teacher.gpus, or use cluster.device=cpu"
            )
        if total < bundles:
            raise ClusterError(
                f"the run needs {bundles} device(s), the Ray cluster has {total:g} of resource '{SLOT}'; start its "
                f"nodes with `{self._resources(bundles).strip()}` or lower train.gpus, rollout.gpus or "
                "teacher.gpus"
            )
        group = placement_group([{self.resource: 1.0}] * bundles, strategy="PACK")
        if not group.wait(self.spec.start_timeout_s):
            remove_placement_group(group)
            raise ClusterError(
                f"{bundles} device(s) did not become free within cluster.start_timeout_s="
                f"{self.spec.start_timeout_s:g} seconds; wait for the runs that use them, or raise it"
            )
        return group

    def _resources(self, bundles: int) -> str:
        """What to add to `ray start` so that a node has the devices."""
        return f" --resources='{{\"{SLOT}\": {bundles}}}'" if self.spec.device is Device.cpu else ""

    def start(
        self, name: str, cls: type, *args: Any, bundles: Sequence[int], share: float, environment: dict[str, str]
    ) -> Process:
        """`cls(*args)` as a Ray actor with a share of one device, or of several of a node.

        Args:
            bundles: of one node; the actor runs on the first and sees the GPUs of all, in this order.
        """
        options = self._options(bundles[0], share, environment | self._devices_of(name, bundles, share))
        process = Process(name, ray.remote(cls).options(**options).remote(*args), self.processes)
        self.processes.append(process)
        return process

    def _options(self, bundle: int, share: float, environment: dict[str, str]) -> dict[str, Any]:
        """Of an actor or a task with a share of a device."""
        device = {"resources": {SLOT: share}} if self.spec.device is Device.cpu else {"num_gpus": share}
        return {
            "num_cpus": 0,
            **device,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle),
            "runtime_env": {"env_vars": {**self.environment, **environment}},
        }

    def _devices_of(self, name: str, bundles: Sequence[int], share: float) -> dict[str, str]:
        """What shows an actor the GPUs of several bundles. Ray itself shows it those of its own bundle only, and tells
        only whoever runs there which one that is."""
        if len(bundles) == 1 or self.spec.device is Device.cpu:
            return {}
        asked = [ray.remote(gpus_here).options(**self._options(bundle, share, {})).remote() for bundle in bundles]
        try:
            found = ray.get(asked, timeout=self.spec.start_timeout_s)
        except RayError as error:
            raise ClusterError(f"could not find the GPUs of the {name} process: {last_words(error)}") from error
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(gpu for gpus in found for gpu in gpus),
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",  # Ray would set it again
        }

    def release(self) -> None:
        """Give the devices back, which ends the processes on them, and whoever waits for one of their answers fails.

        Where Ray goes on, return when they are gone: the next run must find the memory of their devices free.
        """
        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None
            if not self.started:
                with suppress(RayError):
                    list(ended(self.processes))
            if KEEPER.kept is not None:  # then this run is the only one of this process
                end([process for process in raylet_processes() if is_actor(process)], wait_s=NOTICE_S)

    def close(self) -> None:
        """Give the devices back; end Ray if this run started it."""
        self.release()
        if self.started:
            end_ray()
            self.started = False


def end_ray() -> None:
    """End Ray if this process has started it, or detach from it."""
    helpers = raylet_processes()
    ray.shutdown()
    end(helpers)


def gpus_here() -> list[str]:
    """As a Ray task: names of its GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    return list(ray.get_runtime_context().get_accelerator_ids()[GPU])


def check_answers(address: str) -> None:
    """Raise OSError unless something listens at HOST:PORT: Ray itself would try again for many minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()


def temporary_folder() -> str:
    """Where Ray puts its sockets, whose paths may have 107 bytes."""
    return os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
