"""The Ray cluster that a run uses: its own on loopback, or the one it is told to join."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

from hybridflow.single_controller import health
from hybridflow.utils.errors import MachineError

SLOT = "hybridflow_slot"
"""Ray resource that one logical CPU slot takes, where the cluster has it; without it CPU slots are not counted."""
DEFAULT_SLOTS = 64
"""Logical CPU slots of a Ray that we start: more ranks than that on one machine are surely a mistake."""
LAPTOP_BYTES = 64 << 30
"""Below this much memory the object store of our own Ray is kept small; Ray itself would take 30 %."""
KNOCK_TIMEOUT_S = 5.0
"""Seconds in which the head of a cluster takes a connection."""
LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0, Ray's daemons listen on 127.0.0.1 only, on Linux too. Without it Ray (2.60) replaces a loopback address by
the machine's outside one and listens on every interface."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_prestart_worker_first_driver": "0",  # idle workers that no group would use
    "RAY_enable_metrics_collection": "0",
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """What ``start_ray`` connected to."""

    owned: bool
    """Whether this run started it, and so ends it."""
    processes: tuple[int, ...] = ()
    """Pids of its daemons, when owned."""


def start_ray(ray_init: Mapping[str, Any] | None = None) -> Cluster:
    """The cluster, connected.

    ``address`` in ``ray_init`` or RAY_ADDRESS joins a cluster. Otherwise Ray starts on loopback: dashboard and usage
    statistics off, worker output in Ray's log files only (errors carry their last lines), ``hybridflow_slot`` resources
    for logical slots. A driver that is connected already stays so, and does not own the cluster.

    Args:
        ray_init: arguments of ``ray.init``; they win over the defaults here.

    Raises:
        MachineError: no cluster at the address, or Ray did not start; an argument that ``ray.init`` does not have.
    """
    if ray.is_initialized():
        return Cluster(owned=False)
    wanted = {key: value for key, value in (ray_init or {}).items() if value is not None}
    if "runtime_env" in wanted:
        wanted["runtime_env"] = with_text_variables(wanted["runtime_env"])
    address = wanted.pop("address", None) or os.environ.get("RAY_ADDRESS")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    before = set(health.descendants([os.getpid()]))
    if address and address != "local":
        _knock(str(address))
    try:
        if address and address != "local":
            logging.getLogger(maybe_enable_token_auth_if_token_available.__module__).setLevel(logging.ERROR)
            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # a head does so, a driver does not
            ray.init(address=address, **{**quiet, **wanted})
            return Cluster(owned=False)
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        _stay_on_loopback(True)
        ray.init(address="local", **{**quiet, **_loopback(), **wanted})
    except Exception as error:  # Ray asserts, and looks into arguments without judging them
        _stay_on_loopback(False)
        where = f"join the Ray cluster at {address!r}" if address else "start Ray on this machine"
        given = f" with ray_kwargs.ray_init={wanted}" if wanted else ""
        raise MachineError(f"could not {where}{given}: {str(error) or repr(error)}") from error
    return Cluster(owned=True, processes=tuple(set(health.descendants([os.getpid()])) - before))


def with_text_variables(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """``runtime_env`` as Ray takes it: ``env_vars.NAME=1`` of a command line is a number, and Ray wants texts."""
    found = dict(runtime_env)
    if isinstance(found.get("env_vars"), Mapping):
        found["env_vars"] = {str(name): str(value) for name, value in found["env_vars"].items() if value is not None}
    return found


def _knock(address: str) -> None:
    """Asks in a moment what Ray would ask for minutes.

    Raises:
        MachineError: nobody listens at ``HOST:PORT``.
    """
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=KNOCK_TIMEOUT_S).close()
    except OSError as error:
        raise MachineError(
            f"no Ray cluster at {address} (ray_kwargs.ray_init.address or RAY_ADDRESS): {error}. Start one there "
            "(bash scripts/ray_node.sh head PORT), or leave the address out for a Ray of this run's own"
        ) from error


def _stay_on_loopback(wanted: bool) -> None:
    ray_constants.ENABLE_RAY_CLUSTER = not wanted  # Ray read the variable when it was imported
    if wanted:
        os.environ[LOOPBACK_SWITCH] = "0"
    else:
        os.environ.pop(LOOPBACK_SWITCH, None)


def _loopback() -> dict[str, Any]:
    settings: dict[str, Any] = {
        "include_dashboard": False,
        "resources": {SLOT: DEFAULT_SLOTS},
    }
    memory = psutil.virtual_memory().total
    if memory < LAPTOP_BYTES:
        settings["object_store_memory"] = max(128 << 20, min(1 << 30, memory // 20))
    return settings


def stop_ray(cluster: Cluster) -> None:
    """Ends our own Ray and every process of it, or leaves a cluster that we joined; may be called twice."""
    if not cluster.owned:
        return
    processes = [*cluster.processes, *health.descendants(cluster.processes)]
    ray.shutdown()
    left = health.wait_gone(processes, timeout_s=5.0)
    health.kill(left)
    _stay_on_loopback(False)
