"""Ray in the background: it starts while this process imports torch, which takes as long and needs nothing of it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from hybridflow.config.root import PPOConfig
from hybridflow.utils.errors import DeadlineError
from hybridflow.utils.optional import load

CLUSTER = "hybridflow.single_controller.cluster"


class ClusterStart:
    """The cluster that ``trainer.controller=ray`` needs, being started or joined in a thread.

    The thread lives as long as the run: the kernel ends Ray's daemons when the thread that made them ends.
    """

    def __init__(self, config: PPOConfig) -> None:
        self._over = threading.Event()
        self._cluster: Future[Any] | None = None
        self._deadline_s = config.trainer.timeouts.start_s
        self._address = config.ray_kwargs.ray_init.get("address")
        if config.trainer.controller == "ray":
            self._cluster = Future()
            arguments = (self._cluster, dict(config.ray_kwargs.ray_init), self._over)
            threading.Thread(target=_start, args=arguments, name="hybridflow-ray", daemon=True).start()

    def enter(self, stack: ExitStack) -> None:
        """Waits until the cluster stands; ``stack`` ends it if it is ours. Without Ray nothing happens.

        Raises:
            MachineError: as ``start_ray``.
            DeadlineError: it takes longer than ``trainer.timeouts.start_s``.
        """
        stack.callback(self._over.set)
        if self._cluster is not None:
            stack.callback(load(f"{CLUSTER}:stop_ray"), self._wait_for(self._cluster))

    def _wait_for(self, cluster: Future[Any]) -> Any:
        try:
            return cluster.result(self._deadline_s)
        except TimeoutError as error:
            if cluster.done():
                raise
            where = self._address or "this machine"
            raise DeadlineError(
                f"Ray on {where} was not there within {self._deadline_s:g} s (trainer.timeouts.start_s): it is still "
                "being started or joined. Its own logs are in /tmp/ray/session_latest/logs"
            ) from error


def _start(cluster: Future[Any], ray_init: dict[str, Any], over: threading.Event) -> None:
    """Starts or joins, and stays until the run is over."""
    try:
        cluster.set_result(load(f"{CLUSTER}:start_ray")(ray_init))
    except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for the cluster
        cluster.set_exception(error)
    over.wait()
