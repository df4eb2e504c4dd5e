"""One module per family of ops; importing this package registers them all."""

from . import activation, indexing, math, reduction, shape

__all__ = ["activation", "indexing", "math", "reduction", "shape"]
