"""Trains one model on several processes, on one machine or on many.

:class:`DataParallel` says how the processes share the work of a `Trainer`, and :func:`launch` starts them. PyTorch
connects them; it is imported when a process has others beside it.
"""

from __future__ import annotations

from onnxtrain.distributed._launch import launch
from onnxtrain.distributed._strategy import DataParallel

__all__ = ["DataParallel", "launch"]
