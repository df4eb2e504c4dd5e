"""The sizes of the values of one elementwise program."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxtrain.fusion._windows import MOST_ROW, reduction_of, window_of
from onnxtrain.passes import Dims, dims_of


@dataclass(frozen=True)
class Domain:
    """Sizes of the values of a program. Along one axis values may have fewer columns than the program computes.

    Attributes:
        dims: sizes, as numbers and names, e.g. ("batch", 64, 12).
        axis: the axis of the columns, counted from the end, e.g. 1 for the last one; 0 if all values have one size.
        least: the smallest size of a value along this axis, e.g. 8.
        reduced: how many of the last axes the program's reductions are over, of the first ones if negative; 0 if there
            are none.
        whole: True if a reduction needs rows without further columns: a mean, maximum or minimum.
    """

    dims: Dims
    axis: int = 0
    least: int = 0
    reduced: int = 0
    whole: bool = False

    @property
    def width(self) -> int:
        """Number of columns; 0 without an axis of columns."""
        width = self.dims[-self.axis] if self.axis else 0
        assert isinstance(width, int)
        return width

    def merged(self, other: Domain) -> Domain | None:
        """Returns the domain of a program that computes the values of two domains; None if there cannot be one."""
        if len(self.dims) != len(other.dims) or 0 not in (
            self.reduced,
            other.reduced,
            self.reduced - other.reduced,
        ):
            return None
        axis = self.axis or other.axis
        if other.axis not in (0, axis):
            return None
        dims, sizes = list(self.dims), (self.least, other.least)
        if axis:
            mine, others = self.dims[-axis], other.dims[-axis]
            if not isinstance(mine, int) or not isinstance(others, int):
                return None
            dims[-axis] = max(mine, others)
            sizes = (self.least if self.axis else mine, other.least if other.axis else others)
        if any(
            size != dims[place] for place, size in enumerate(other.dims) if place != len(dims) - axis
        ) or any(size != dims[place] for place, size in enumerate(self.dims) if place != len(dims) - axis):
            return None
        domain = Domain(
            tuple(dims), axis, min(sizes), self.reduced or other.reduced, self.whole or other.whole
        )
        return domain if domain._is_possible() else None

    def contains(self, dims: Dims | None) -> bool:
        """True if a value with these sizes can be one of the domain's."""
        if dims is None or len(dims) != len(self.dims):
            return False
        own = dims[-self.axis] if self.axis else 0
        return all(
            size == whole or place == len(dims) - self.axis
            for place, (size, whole) in enumerate(zip(dims, self.dims, strict=True))
        ) and (not self.axis or (isinstance(own, int) and self.least <= own <= self.width))

    def with_columns(self, axis: int) -> Domain | None:
        """Returns the same domain with an axis of columns; None if it cannot have that axis."""
        size = self.dims[-axis] if axis <= len(self.dims) else None
        if not isinstance(size, int):
            return None
        domain = replace(self, axis=axis, least=size)
        return domain if domain._is_possible() else None

    def widened(self, width: int) -> Domain:
        """Returns a domain with at least `width` columns, or the domain itself if most of them would be wasted."""
        if width <= self.width:
            return self
        dims = list(self.dims)
        dims[-self.axis] = width
        domain = replace(self, dims=tuple(dims))
        return domain if domain._is_possible() else self

    def _is_possible(self) -> bool:
        """True if the kernel computes such programs, and at most a third of the columns is computed in vain."""
        if not self.axis:
            return True
        inner = [dim if isinstance(dim, int) else None for dim in self.dims[len(self.dims) - self.axis + 1 :]]
        if None in inner or math.prod(dim or 0 for dim in inner) * self.width not in range(1, MOST_ROW + 1):
            return False
        axes_stay = self.reduced < 0 and len(self.dims) + self.reduced >= self.axis
        return (
            3 * self.least >= 2 * self.width
            and not self.whole
            and (self.reduced == 0 or self.reduced >= self.axis or axes_stay)
        )


def domain_of(node: ir.Node) -> Domain:
    """Returns the domain of a program of one node: an elementwise op, a window or a reduction."""
    window, reduction = window_of(node), reduction_of(node)
    if window is not None:
        dims = list(dims_of(window.source) or ())
        dims[-window.axis] = max(window.size, window.source_size)
        return Domain(tuple(dims), window.axis, min(window.size, window.source_size))
    value = node.outputs[0] if reduction is None else node.inputs[0]
    assert value is not None
    found = dims_of(value)
    assert found is not None
    if reduction is None:
        return Domain(found)
    # Zeros after a row leave its sum as it is, but not its mean, maximum or minimum.
    return Domain(found, reduced=reduction.axes, whole=reduction.op_type != "ReduceSum")
