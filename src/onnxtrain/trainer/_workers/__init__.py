"""Trains one model on several workers: the files of the run, its steps, its callbacks and its evaluation."""

from __future__ import annotations

from onnxtrain.trainer._workers.group import Workers, join_workers

__all__ = ["Workers", "join_workers"]
