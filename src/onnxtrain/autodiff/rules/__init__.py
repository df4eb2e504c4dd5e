"""One module per family of ops; importing this package registers them all."""

from . import activation, math, reduction, shape

__all__ = ["activation", "math", "reduction", "shape"]
