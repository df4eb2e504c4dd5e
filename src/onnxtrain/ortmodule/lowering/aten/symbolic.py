"""Lowers arithmetic on symbolic numbers: sizes of tensors as int64 scalars, fractions of sizes as float64 scalars."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.ortmodule.lowering._table import Lowering, lower
from onnxtrain.ortmodule.lowering.aten.arithmetic import floored_quotient

INT64, DOUBLE, BOOL = ir.DataType.INT64, ir.DataType.DOUBLE, ir.DataType.BOOL


@lower("getitem")
def getitem(low: Lowering, values: Any, index: int) -> Any:
    return values[index]


def _scalar(low: Lowering, size: ir.Value) -> ir.Value:
    return low.op.Squeeze(size, [0])


@lower("aten.sym_size.int")
def sym_size(low: Lowering, x: ir.Value, dim: int) -> Any:
    size = low.fake(0).shape[dim]
    return size if isinstance(size, int) else _scalar(low, low.op.dim(x, dim % len(low.fake(0).shape)))


@lower("aten.sym_numel.default")
def sym_numel(low: Lowering, x: ir.Value) -> Any:
    count = low.fake(0).numel()
    return count if isinstance(count, int) else low.op.Size(x)


@lower("aten._local_scalar_dense.default")
def item(low: Lowering, x: ir.Value) -> ir.Value:
    """Lowers `tensor.item()` to a scalar."""
    kind = {torch.SymInt: INT64, torch.SymFloat: DOUBLE, torch.SymBool: BOOL}.get(type(low.result))
    if kind is None:
        raise low.unsupported(str(low.fake(0).dtype))
    # In PyTorch a Python number has no gradient.
    x = low.op.stop_gradient(x)
    if low.fake(0).shape:
        x = low.op.Reshape(x, low.op.const(np.array([], np.int64)))
    return low.tensor(x, kind)


def _common(low: Lowering, *values: Any) -> tuple[ir.Value, ...]:
    """Returns the operands as float64 scalars if any is a float, else as int64 scalars."""
    floats = any(v.dtype == DOUBLE if isinstance(v, ir.Value) else isinstance(v, float) for v in values)
    return tuple(low.tensor(value, DOUBLE if floats else INT64) for value in values)


def _folded(python: Callable[..., Any], emit: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the lowering of a function of numbers: `python` if all arguments are numbers, else `emit`."""

    def number(low: Lowering, *values: Any) -> Any:
        if not any(isinstance(value, ir.Value) for value in values):
            return python(*values)
        return emit(low, *values)

    return number


def _arithmetic(op_type: str) -> Callable[..., Any]:
    return lambda low, *values: low.op.emit(op_type, *_common(low, *values))


def _sum(low: Lowering, terms: Any) -> Any:
    total, *rest = terms
    for term in rest:
        both_known = not (isinstance(total, ir.Value) or isinstance(term, ir.Value))
        total = total + term if both_known else low.op.Add(*_common(low, total, term))
    return total


lower("sym_sum")(_sum)


def _floor_division(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a function like `plain`, `//` or `//=`, that rounds symbolic floats as CPython does: 1.0 // 0.1 is 9.0.

    PyTorch (2.13) writes the floor of the quotient into a graph, which is 10.0.
    """

    def divide(a: Any, b: Any) -> Any:
        if (
            not any(isinstance(value, torch.SymFloat) for value in (a, b))
            or torch.is_tensor(a)
            or torch.is_tensor(b)
        ):
            return plain(a, b)
        # -1.0 // inf is -1.0.
        b = _sym_max(_sym_min(b, _LARGEST), -_LARGEST)
        return _sym_float(math.floor((a - a % b) / b + 0.5))

    return divide


# PyTorch (2.13) has no types for them.
_sym_max: Callable[[Any, Any], Any] = torch.sym_max
_sym_min: Callable[[Any, Any], Any] = torch.sym_min
_sym_float: Callable[[Any], Any] = torch.sym_float

_LARGEST = np.finfo(np.float64).max.item()

NUMBERS = {division: _floor_division(division) for division in (operator.floordiv, operator.ifloordiv)}
"""Replacements of functions of numbers in a Dynamo graph."""


def _floordiv(low: Lowering, a: Any, b: Any) -> Any:
    a, b = _common(low, a, b)
    if a.dtype == DOUBLE:
        return low.op.Floor(low.op.Div(a, b))
    return floored_quotient(low.op, a, b)


def _truediv(low: Lowering, a: Any, b: Any) -> Any:
    return low.op.Div(low.tensor(a, DOUBLE), low.tensor(b, DOUBLE))


def _mod(low: Lowering, a: Any, b: Any) -> Any:
    a, b = _common(low, a, b)
    if a.dtype != DOUBLE:
        return low.op.Mod(a, b)
    # Python's remainder has the sign of the divisor, C's that of the dividend.
    remainder = low.op.Mod(a, b, fmod=1)
    return low.op.Where(_has_other_sign(low, remainder, b), low.op.Add(remainder, b), remainder)


def _has_other_sign(low: Lowering, remainder: ir.Value, divisor: ir.Value) -> ir.Value:
    """Tells whether a remainder is not 0 and has another sign than the divisor."""
    zero = low.op.const(0.0, DOUBLE)
    differs = low.op.Xor(low.op.Less(remainder, zero), low.op.Less(divisor, zero))
    return low.op.And(differs, low.op.Not(low.op.Equal(remainder, zero)))


def _power(low: Lowering, a: Any, b: Any) -> Any:
    # ONNX Runtime computes powers of integers in float64.
    if isinstance(b, int) and 1 <= b <= 4:
        result = a
        for _ in range(b - 1):
            result = low.op.Mul(*_common(low, result, a))
        return result
    return low.op.Pow(low.tensor(a, DOUBLE), low.tensor(b, DOUBLE))


def _rounding(op_type: str) -> Callable[..., Any]:
    def rounded(low: Lowering, a: ir.Value) -> Any:
        return low.tensor(low.op.emit(op_type, a), INT64) if a.dtype == DOUBLE else a

    return rounded


def _compared(op_type: str, negated: bool = False) -> Callable[..., Any]:
    def compare(low: Lowering, a: Any, b: Any) -> Any:
        result = low.op.emit(op_type, *_common(low, a, b))
        return low.op.Not(result) if negated else result

    return compare


def _to_float(low: Lowering, a: ir.Value) -> ir.Value:
    # `float(math.floor(x))` may be NaN in a graph, where Python's `//` is.
    producer = a.producer()
    before = None if producer is None or producer.op_type != "Cast" else producer.inputs[0]
    rounding = None if before is None or before.dtype != DOUBLE else before.producer()
    if before is not None and rounding is not None and rounding.op_type in ("Floor", "Ceil"):
        return before
    return low.tensor(a, DOUBLE)


def _of_float(op_type: str) -> Callable[..., Any]:
    return lambda low, a: low.op.emit(op_type, low.tensor(a, DOUBLE))


def _log2(low: Lowering, a: ir.Value) -> ir.Value:
    return low.op.Mul(low.op.Log(low.tensor(a, DOUBLE)), low.op.const(1 / math.log(2), DOUBLE))


def _logic(op_type: str) -> Callable[..., Any]:
    """Returns the lowering of `&` or `|`, of conditions or of the bits of integers."""

    def logic(low: Lowering, *values: Any) -> Any:
        if all(v.dtype == BOOL if isinstance(v, ir.Value) else isinstance(v, bool) for v in values):
            return low.op.emit(op_type, *(low.tensor(value, BOOL) for value in values))
        return low.op.emit(f"Bitwise{op_type}", *(low.tensor(value, INT64) for value in values))

    return logic


def _shifted(by_power: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the lowering of `<<` or `>>` by a known number, as a product with, or a quotient by a power of two."""

    def shift(low: Lowering, a: Any, count: Any) -> Any:
        if not isinstance(count, int):
            raise low.unsupported("a number of bits that is not known")
        return by_power(low, a, 2**count)

    return shift


_FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (operator.add, _arithmetic("Add")),
    "sub": (operator.sub, _arithmetic("Sub")),
    "mul": (operator.mul, _arithmetic("Mul")),
    "neg": (operator.neg, _arithmetic("Neg")),
    "abs": (abs, _arithmetic("Abs")),
    "floordiv": (operator.floordiv, _floordiv),
    "truediv": (operator.truediv, _truediv),
    "mod": (operator.mod, _mod),
    "pow": (operator.pow, _power),
    "sym_max": (max, _arithmetic("Max")),
    "sym_min": (min, _arithmetic("Min")),
    "sym_float": (float, _to_float),
    "sym_int": (int, lambda low, a: low.tensor(a, INT64)),
    "trunc": (math.trunc, lambda low, a: low.tensor(a, INT64)),
    "floor": (math.floor, _rounding("Floor")),
    "ceil": (math.ceil, _rounding("Ceil")),
    "sym_sqrt": (math.sqrt, _of_float("Sqrt")),
    "_sym_sqrt": (math.sqrt, _of_float("Sqrt")),
    "_sym_sin": (math.sin, _of_float("Sin")),
    "_sym_cos": (math.cos, _of_float("Cos")),
    "_sym_tan": (math.tan, _of_float("Tan")),
    "_sym_sinh": (math.sinh, _of_float("Sinh")),
    "_sym_cosh": (math.cosh, _of_float("Cosh")),
    "_sym_tanh": (math.tanh, _of_float("Tanh")),
    "_sym_asin": (math.asin, _of_float("Asin")),
    "_sym_acos": (math.acos, _of_float("Acos")),
    "_sym_atan": (math.atan, _of_float("Atan")),
    "_sym_log2": (math.log2, _log2),
    "eq": (operator.eq, _compared("Equal")),
    "ne": (operator.ne, _compared("Equal", negated=True)),
    "lt": (operator.lt, _compared("Less")),
    "le": (operator.le, _compared("LessOrEqual")),
    "gt": (operator.gt, _compared("Greater")),
    "ge": (operator.ge, _compared("GreaterOrEqual")),
    "and_": (operator.and_, _logic("And")),
    "or_": (operator.or_, _logic("Or")),
    "lshift": (operator.lshift, _shifted(_arithmetic("Mul"))),
    "rshift": (operator.rshift, _shifted(_floordiv)),
    "sym_not": (operator.not_, _logic("Not")),
}
for _name, (_python, _emit) in _FUNCTIONS.items():
    lower(_name)(_folded(_python, _emit))


@lower("sym_ite")
def sym_ite(low: Lowering, condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, ir.Value):
        return a if condition else b
    return low.op.Where(condition, *_common(low, a, b))


@lower("aten.sym_is_contiguous.default")
def sym_is_contiguous(low: Lowering, x: ir.Value, *_: Any) -> bool:
    return bool(low.fake(0).is_contiguous(memory_format=torch.contiguous_format))


@lower("aten._assert_async.default", "aten._assert_async.msg", "aten._functional_assert_async.msg")
def assertion(
    low: Lowering, condition: ir.Value, message: str = "Expected a condition that holds", *_: Any
) -> ir.Value:
    # ONNX has no assertion: the condition is an output, which is checked when the graph has run.
    holds = low.tensor(condition, BOOL)
    low.assertions.append((holds, message))
    return low.op.const(0.0)
