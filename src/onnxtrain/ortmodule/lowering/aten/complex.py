"""Lowers ops on complex tensors, which are represented as pairs of real tensors of the same shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.ortmodule.lowering._table import (
    COMPONENTS,
    LOWERINGS,
    Complex,
    Lowering,
    is_float,
    lower,
    lower_complex,
    same_sizes,
)
from onnxtrain.ortmodule.lowering.aten.linalg import matmul
from onnxtrain.ortmodule.lowering.aten.pointwise import atan2, hypot


def as_complex(low: Lowering, value: Any) -> Complex:
    """Converts a real or complex tensor or number to `Complex`, with the dtype of the result's real part."""
    if isinstance(value, Complex):
        return Complex(low.tensor(value.re, low.dtype), low.tensor(value.im, low.dtype))
    if isinstance(value, complex):
        return Complex(low.tensor(value.real, low.dtype), low.tensor(value.imag, low.dtype))
    real = low.tensor(value, low.dtype)
    return Complex(
        real, low.op.zeros_like(real) if isinstance(value, ir.Value) else low.tensor(0.0, low.dtype)
    )


def _part(low: Lowering, argument: Any, name: str) -> Any:
    """Returns the real or imaginary part of an argument. Sizes, axes, masks and indices are returned unchanged.

    Args:
        low: the lowering.
        argument: an argument of the op, possibly a list.
        name: "re" or "im".
    """
    if isinstance(argument, list | tuple):
        return [_part(low, item, name) for item in argument]
    if isinstance(argument, Complex):
        return getattr(argument, name)
    if isinstance(argument, complex | float):
        return complex(argument).real if name == "re" else complex(argument).imag
    if name == "im" and is_float(argument):
        return low.op.zeros_like(argument)
    return argument


_FILL_VALUES = {
    "constant_pad_nd": (2,), "fill": (1,), "full": (1,), "full_like": (1,), "masked_fill": (2,), "new_full": (2,),
    "scalar_tensor": (0,), "scatter": (3,), "where": (1, 2),
}  # fmt: skip
"""Maps each op to the positions of its arguments that are fill values. Its other numbers are sizes or axes."""


def _by_parts(function: Callable[..., Any]) -> Callable[..., Complex]:
    """Returns a complex lowering that applies a real lowering to the real and the imaginary parts separately."""

    def lowered(low: Lowering, *args: Any, **kwargs: Any) -> Any:
        fill_values = _FILL_VALUES.get(str(low.node.target).split(".")[1].replace("_copy", ""), ())
        # `_part` returns ints unchanged, as sizes or axes, but takes the imaginary part of a float, which is 0.
        args = tuple(float(a) if i in fill_values and isinstance(a, int) else a for i, a in enumerate(args))
        parts = [
            function(low, *_part(low, args, name), **{key: _part(low, v, name) for key, v in kwargs.items()})
            for name in ("re", "im")
        ]
        if isinstance(parts[0], tuple | list):
            return tuple(Complex(re, im) for re, im in zip(*parts, strict=True))
        return Complex(*parts)

    return lowered


_LINEAR = (
    "view", "reshape", "_unsafe_view", "_reshape_alias", "t", "permute", "transpose", "squeeze", "unsqueeze",
    "expand", "repeat", "cat", "stack", "split", "split_with_sizes", "unbind", "slice", "select", "flip",
    "roll", "diagonal", "tril", "triu", "unfold", "as_strided", "constant_pad_nd", "index", "index_put",
    "index_select", "gather", "scatter", "scatter_add", "slice_scatter", "select_scatter", "diagonal_scatter",
    "copy", "masked_fill", "where", "sum", "mean", "cumsum", "clone", "alias", "lift_fresh", "contiguous",
    "positive", "detach", "zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty",
    "empty_strided", "new_empty_strided", "full", "fill", "full_like", "new_full", "zero", "masked_select",
    "_unsafe_index", "_unsafe_index_put", "scalar_tensor",
)  # fmt: skip
"""Ops that only move elements, or are linear with real coefficients, so they apply to each part separately."""


def register_linear_functions() -> None:
    """Registers complex lowerings of the ops in `_LINEAR`. Their real lowerings must already be registered."""
    for name, function in list(LOWERINGS.items()):
        if name.startswith("aten.") and name.split(".")[1] in _LINEAR:
            lower_complex(name)(_by_parts(function))


@lower_complex("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default")
def ones(low: Lowering, *args: Any, **kwargs: Any) -> Complex:
    # Not in `_LINEAR`, because the imaginary part is 0.
    real = LOWERINGS[str(low.node.target)](low, *_part(low, args, "re"), **kwargs)
    return Complex(real, low.op.zeros_like(real))


@lower_complex("aten._to.default", "prims.convert_element_type.default")
def convert_dtype(low: Lowering, x: Any, *_: Any, **__: Any) -> Complex | ir.Value:
    if low.result.dtype in COMPONENTS:
        return as_complex(low, x)
    # PyTorch discards the imaginary part.
    real: ir.Value = x.re
    return real


@lower_complex("aten.complex.default")
def from_parts(low: Lowering, re: ir.Value, im: ir.Value) -> Complex:
    if same_sizes(low.fake(0), low.fake(1)):
        return Complex(re, im)
    # The parts of a `Complex` must have the same shape.
    shape = low.op.Shape(low.op.Add(re, im))
    return Complex(low.op.Expand(re, shape), low.op.Expand(im, shape))


@lower_complex("aten.polar.default")
def polar(low: Lowering, magnitude: ir.Value, angle: ir.Value) -> Complex:
    return Complex(low.op.Mul(magnitude, low.op.Cos(angle)), low.op.Mul(magnitude, low.op.Sin(angle)))


@lower_complex("aten.view_as_complex.default")
def view_as_complex(low: Lowering, x: ir.Value) -> Complex:
    return Complex(low.op.Gather(x, 0, axis=-1), low.op.Gather(x, 1, axis=-1))


@lower_complex("aten.view_as_real.default")
def view_as_real(low: Lowering, z: Complex) -> ir.Value:
    return low.op.Concat(low.op.Unsqueeze(z.re, [-1]), low.op.Unsqueeze(z.im, [-1]), axis=-1)


@lower_complex("aten.real.default")
def real(low: Lowering, z: Complex) -> ir.Value:
    return z.re


@lower_complex("aten.imag.default")
def imag(low: Lowering, z: Complex) -> ir.Value:
    return z.im


@lower_complex(
    "aten._conj.default",
    "aten._conj_physical.default",
    "aten.conj_physical.default",
    "aten._neg_view.default",
)
def conjugate(low: Lowering, z: Complex) -> Complex:
    if "neg" in str(low.node.target):
        return Complex(low.op.Neg(z.re), low.op.Neg(z.im))
    return Complex(z.re, low.op.Neg(z.im))


@lower_complex("aten.resolve_conj.default", "aten.resolve_neg.default")
def resolve(low: Lowering, z: Complex) -> Complex:
    return z


@lower_complex(
    "aten.add.Tensor",
    "aten.add.Scalar",
    "aten.sub.Tensor",
    "aten.sub.Scalar",
    "aten.rsub.Tensor",
    "aten.rsub.Scalar",
)
def add(low: Lowering, a: Any, b: Any, alpha: Any = 1) -> Complex:
    name = str(low.node.target).split(".")[1]
    a, b = as_complex(low, a), as_complex(low, b)
    if name == "rsub":
        a, b = b, a
    if alpha != 1:
        b = _complex_product(low, b, as_complex(low, alpha))
    combine = low.op.Add if name == "add" else low.op.Sub
    return Complex(combine(a.re, b.re), combine(a.im, b.im))


@lower_complex("aten.neg.default")
def neg(low: Lowering, z: Complex) -> Complex:
    return Complex(low.op.Neg(z.re), low.op.Neg(z.im))


def _complex_product(low: Lowering, a: Complex, b: Complex) -> Complex:
    """Returns the elementwise product a * b."""
    op = low.op
    return Complex(
        op.Sub(op.Mul(a.re, b.re), op.Mul(a.im, b.im)), op.Add(op.Mul(a.re, b.im), op.Mul(a.im, b.re))
    )


def _scaled(low: Lowering, z: Complex, factor: Any) -> Complex:
    """Returns z times a real factor."""
    factor = low.tensor(factor, low.dtype)
    return Complex(low.op.Mul(z.re, factor), low.op.Mul(z.im, factor))


def _is_real(value: Any) -> bool:
    return not isinstance(value, Complex | complex)


@lower_complex("aten.mul.Tensor", "aten.mul.Scalar")
def mul(low: Lowering, a: Any, b: Any) -> Complex:
    if _is_real(a) or _is_real(b):
        number, z = (a, b) if _is_real(a) else (b, a)
        return _scaled(low, as_complex(low, z), number)
    return _complex_product(low, as_complex(low, a), as_complex(low, b))


def _reciprocal(low: Lowering, z: Complex) -> Complex:
    """Returns 1 / z as conj(z) / |z|²."""
    op = low.op
    # Scaling by the larger part keeps the squares from overflowing. The result does not depend on the scale, so the
    # scale needs no gradient.
    scale = low.op.stop_gradient(op.Max(op.Abs(z.re), op.Abs(z.im)))
    re, im = op.Div(z.re, scale), op.Div(z.im, scale)
    square = op.Mul(op.Add(op.Mul(re, re), op.Mul(im, im)), scale)
    return Complex(op.Div(re, square), op.Div(op.Neg(im), square))


@lower_complex("aten.reciprocal.default")
def reciprocal(low: Lowering, z: Complex) -> Complex:
    return _reciprocal(low, z)


@lower_complex("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor")
def div(low: Lowering, a: Any, b: Any) -> Complex:
    a = as_complex(low, a)
    if _is_real(b):
        divisor = low.tensor(b, low.dtype)
        return Complex(low.op.Div(a.re, divisor), low.op.Div(a.im, divisor))
    return _complex_product(low, a, _reciprocal(low, as_complex(low, b)))


@lower_complex("aten.exp.default")
def exp(low: Lowering, z: Complex) -> Complex:
    magnitude = low.op.Exp(z.re)
    return Complex(low.op.Mul(magnitude, low.op.Cos(z.im)), low.op.Mul(magnitude, low.op.Sin(z.im)))


@lower_complex("aten.log.default")
def log(low: Lowering, z: Complex) -> Complex:
    return Complex(low.op.Log(absolute(low, z)), atan2(low, z.im, z.re))


@lower_complex("aten.abs.default")
def absolute(low: Lowering, z: Complex) -> ir.Value:
    # PyTorch's gradient of abs at 0 is 0. The gradient of hypot at 0 is NaN.
    op = low.op
    is_zero = op.And(op.Equal(z.re, 0.0), op.Equal(z.im, 0.0))
    return op.Where(is_zero, 0.0, hypot(low, op.Where(is_zero, 1.0, z.re), z.im))


@lower_complex("aten.angle.default")
def angle(low: Lowering, z: Complex) -> ir.Value:
    # The gradient of our atan2 at 0 is 0, like PyTorch's gradient of angle.
    return atan2(low, z.im, z.re)


@lower("aten._neg_view.default")
def neg_view(low: Lowering, x: ir.Value) -> ir.Value:
    # `z.conj().imag` is a view with the negative bit set.
    return low.op.Neg(x)


@lower("aten.angle.default")
def angle_of_real(low: Lowering, x: ir.Value) -> ir.Value:
    op = low.op
    x = low.tensor(x, low.dtype)
    # The angle is 0 or pi, or NaN for NaN.
    angle = op.Where(op.IsNaN(x), x, op.Where(op.Less(x, 0.0), op.const(torch.pi, like=x), 0.0))
    return low.with_slope(angle, x, op.zeros_like(x))


@lower_complex("aten.sgn.default")
def sgn(low: Lowering, z: Complex) -> Complex:
    magnitude = absolute(low, z)
    # sgn(0) is 0.
    magnitude = low.op.Where(low.op.Equal(magnitude, 0.0), 1.0, magnitude)
    return Complex(low.op.Div(z.re, magnitude), low.op.Div(z.im, magnitude))


@lower_complex("aten.pow.Tensor_Scalar")
def power(low: Lowering, z: Complex, exponent: Any) -> Complex:
    # Repeated multiplication, for small integer exponents only.
    if not isinstance(exponent, int | float) or exponent not in range(-8, 9):
        raise low.unsupported(f"complex numbers to the power {exponent}")
    if exponent == 0:
        return Complex(low.op.ones_like(z.re), low.op.zeros_like(z.re))
    result = z
    for _ in range(abs(int(exponent)) - 1):
        result = _complex_product(low, result, z)
    return result if exponent > 0 else _reciprocal(low, result)


@lower_complex("aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.matmul.default")
def complex_matmul(low: Lowering, a: Any, b: Any) -> Complex:
    a, b = as_complex(low, a), as_complex(low, b)
    op = low.op
    return Complex(
        op.Sub(matmul(low, a.re, b.re), matmul(low, a.im, b.im)),
        op.Add(matmul(low, a.re, b.im), matmul(low, a.im, b.re)),
    )
