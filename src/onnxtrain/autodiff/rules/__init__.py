"""One module per family of ops; importing this package registers them all."""

from . import activation, einsum, linalg, math, reduction, shape

__all__ = ["activation", "einsum", "linalg", "math", "reduction", "shape"]
