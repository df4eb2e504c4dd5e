"""One module per family of ops; importing this package registers them all."""

from . import activation, conv, math, reduction, shape

__all__ = ["activation", "conv", "math", "reduction", "shape"]
