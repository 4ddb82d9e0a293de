"""Ray in the background: it starts while this process imports torch, which takes as long and needs nothing of it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from hybridflow.config.root import PPOConfig
from hybridflow.utils.optional import load

CLUSTER = "hybridflow.single_controller.cluster"


class ClusterStart:
    """The cluster that ``trainer.controller=ray`` needs, being started or joined in a thread.

    The thread lives as long as the run: the kernel ends Ray's daemons when the thread that made them ends.
    """

    def __init__(self, config: PPOConfig) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hybridflow-ray")
        self._cluster: Future[Any] | None = None
        if config.trainer.controller == "ray":
            self._cluster = self._thread.submit(_start, dict(config.ray_kwargs.ray_init))

    def enter(self, stack: ExitStack) -> None:
        """Waits until the cluster stands; ``stack`` ends it if it is ours. Without Ray nothing happens.

        Raises:
            MachineError, ConfigError: as ``start_ray``.
        """
        stack.callback(self._thread.shutdown)
        if self._cluster is not None:
            stack.callback(load(f"{CLUSTER}:stop_ray"), self._cluster.result())


def _start(ray_init: dict[str, Any]) -> Any:
    return load(f"{CLUSTER}:start_ray")(ray_init)
