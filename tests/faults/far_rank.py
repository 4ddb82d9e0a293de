"""A driver of one rank on each of two nodes: ``python -m tests.faults.far_rank ADDRESS NODE METHOD [NUMBERS]``.

The rank on NODE gets into the trouble that METHOD of the workers of groups makes; what the driver says is printed.
"""

from __future__ import annotations

import sys

from hybridflow.single_controller.cluster import start_ray, stop_ray
from hybridflow.single_controller.ray_group import RayGroup
from hybridflow.single_controller.resource_pool import ResourcePool
from hybridflow.utils.errors import WorkerError
from tests.unit.single_controller.contract import SPECS


def main(address: str, node: str, method: str, *numbers: str) -> None:
    cluster = start_ray({"address": address})
    group = RayGroup(ResourcePool([1, 1]), SPECS)
    group.wait_ready()
    rank = next(rank for rank in range(2) if f"(node {node}," in group.who(rank))
    try:
        group.call("echo", method, rank=rank, **({"numbers": int(numbers[0])} if numbers else {})).wait()
    except WorkerError as error:
        print(error)
    finally:
        group.shutdown()
        stop_ray(cluster)


if __name__ == "__main__":
    main(*sys.argv[1:])
