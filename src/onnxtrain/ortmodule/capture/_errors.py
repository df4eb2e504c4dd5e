"""Defines the exceptions that a backend raises through Dynamo to the code that started the capture."""

from __future__ import annotations

from onnxtrain.ortmodule._torch import ShortenTraceback


# Dynamo (PyTorch 2.13) re-raises exceptions of this base class, and wraps all other exceptions of a backend.
class RefusedByPyTorch(ShortenTraceback):
    """Eager PyTorch rejects the arguments of an operator.

    Args:
        message: PyTorch's error message.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class SymbolicBatchRefused(ShortenTraceback):
    """A graph cannot run in ONNX Runtime with a symbolic batch size, but may run with a fixed batch size."""

    def __init__(self) -> None:
        super().__init__("the batch size must be a number", first_useful_frame=None)
