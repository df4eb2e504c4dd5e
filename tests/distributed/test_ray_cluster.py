"""The cluster of Ray that workers are started in, with a stand-in for Ray.

`benchmarks/distributed/kills.py --hosts local` runs Ray itself.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest

from onnxtrain.distributed._ray import _connected


class Ray:
    """Records how it is started."""

    def __init__(self, processors: int) -> None:
        self.processors = float(processors)
        self.options: dict[str, Any] = {}
        self.running = False

    def is_initialized(self) -> bool:
        return self.running

    def init(self, **options: Any) -> None:
        self.options, self.running = options, True
        self.processors = float(options.get("num_cpus", self.processors))

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.processors}

    def shutdown(self) -> None:
        self.running = False


def test_workers_of_one_machine_may_outnumber_its_processors(caplog: pytest.LogCaptureFixture) -> None:
    """Without it Ray waits without end for a machine that has processors for the other workers."""
    ray = Ray(2)
    workers = 3 * (os.cpu_count() or 1)
    with caplog.at_level(logging.WARNING, "onnxtrain"), _connected(ray, "local", workers):
        assert ray.options["num_cpus"] == workers
    assert not ray.running
    assert not caplog.records


@pytest.mark.parametrize("connected", [False, True])
def test_a_cluster_without_a_processor_for_each_worker_is_named(
    connected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ray = Ray(2)
    ray.running = connected
    with caplog.at_level(logging.WARNING, "onnxtrain"), _connected(ray, "auto", 4):
        assert "num_cpus" not in ray.options
    # A connection of the program's own stays.
    assert ray.running == connected
    (record,) = caplog.records
    assert "the cluster has 2 CPUs, but each of 4 workers takes one" in record.getMessage()
