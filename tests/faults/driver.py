"""A driver that gets into trouble: ``python -m tests.faults.driver {local,ray} {raise,die} FOLDER``.

Writes the pids of its ranks to FOLDER/pids once they stand and keep rows, then raises without any clean-up, or waits to
be killed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from hybridflow.batch.batch import Batch
from hybridflow.single_controller.lanes import LaneGroup
from hybridflow.single_controller.local_group import LocalGroup
from tests.unit.single_controller.contract import SPECS


def open_group(kind: str) -> LaneGroup:
    if kind == "local":
        return LocalGroup(2, SPECS)
    from hybridflow.single_controller.cluster import start_ray  # seconds that the other kind need not wait
    from hybridflow.single_controller.ray_group import RayGroup
    from hybridflow.single_controller.resource_pool import ResourcePool

    start_ray()
    return RayGroup(ResourcePool([2]), SPECS)


def main(kind: str, trouble: str, folder: str) -> None:
    group = open_group(kind)
    pids = [info["pid"] for info in group.call("echo", "whoami").wait()]
    kept = group.keep(Batch({"x": torch.arange(8), "wide": torch.ones(8, 100)}))
    made = group.call("wide", "make", kept).wait()
    part = Path(folder) / "part"
    part.write_text(" ".join(map(str, pids)))
    part.rename(Path(folder) / "pids")
    if trouble == "raise":
        group.call("echo", "fail", rank=1).wait()
    time.sleep(600)
    del kept, made  # until here rows are kept by the driver and by both ranks


if __name__ == "__main__":
    main(*sys.argv[1:])
