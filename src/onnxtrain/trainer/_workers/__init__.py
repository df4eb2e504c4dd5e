"""Trains one model with several workers: coordinates the run's files, steps, callbacks and evaluations."""

from __future__ import annotations

from onnxtrain.trainer._workers.fit import run_fit
from onnxtrain.trainer._workers.group import WorkerGroup, join_workers

__all__ = ["WorkerGroup", "join_workers", "run_fit"]
