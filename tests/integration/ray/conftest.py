"""One Ray cluster per test session: its start costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridflow.single_controller.cluster import SLOT, Cluster, start_ray, stop_ray


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Our own Ray with two logical slots."""
    started = start_ray({"resources": {SLOT: 2}})
    yield started
    stop_ray(started)
