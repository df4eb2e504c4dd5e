"""Trains one model with several processes, on one machine or on many.

:class:`DataParallel` configures how the processes share the work of a `Trainer`, and :func:`launch` starts them. They
communicate through PyTorch, which is imported only if there are several processes.
"""

from __future__ import annotations

from onnxtrain.distributed._launch import launch
from onnxtrain.distributed._strategy import DataParallel

__all__ = ["DataParallel", "launch"]
