"""Native CPU kernels for the ops of domain `onnxtrain`; `library()` is what a session registers."""

from pathlib import Path

__all__ = ["FUNCTIONS", "library"]

FUNCTIONS = 1
"""Version of the functions that the kernels compute; onnxtrain uses kernels of its own version only."""


def library() -> Path:
    """Returns the path of the shared object, for `onnxruntime.SessionOptions.register_custom_ops_library`."""
    (path,) = [p for p in Path(__file__).parent.iterdir() if p.suffix in (".so", ".dylib")]
    return path
