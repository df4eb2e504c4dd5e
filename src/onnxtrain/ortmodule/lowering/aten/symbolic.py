"""Lowers arithmetic on symbolic numbers. Symbolic ints are int64 scalars, symbolic floats are float64 scalars."""

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


@lower("aten.sym_size.int")
def sym_size(low: Lowering, x: ir.Value, dim: int) -> Any:
    size = low.fake(0).shape[dim]
    return size if isinstance(size, int) else low.op.Squeeze(low.op.dim(x, dim % len(low.fake(0).shape)), [0])


@lower("aten.sym_numel.default")
def sym_numel(low: Lowering, x: ir.Value) -> Any:
    count = low.fake(0).numel()
    return count if isinstance(count, int) else low.op.Size(x)


@lower("aten._local_scalar_dense.default")
def item(low: Lowering, x: ir.Value) -> ir.Value:
    """Lowers `tensor.item()`."""
    kind = {torch.SymInt: INT64, torch.SymFloat: DOUBLE, torch.SymBool: BOOL}.get(type(low.result))
    if kind is None:
        raise low.unsupported(str(low.fake(0).dtype))
    # `item()` returns a Python number, which has no gradient.
    x = low.op.stop_gradient(x)
    if low.fake(0).shape:
        x = low.op.Reshape(x, low.op.const(np.array([], np.int64)))
    return low.tensor(x, kind)


def _promoted(low: Lowering, *values: Any) -> tuple[ir.Value, ...]:
    """Returns all operands as float64 scalars if any of them is a float, else as int64 scalars."""
    floats = any(v.dtype == DOUBLE if isinstance(v, ir.Value) else isinstance(v, float) for v in values)
    return tuple(low.tensor(value, DOUBLE if floats else INT64) for value in values)


def _constant_folded(python: Callable[..., Any], emit: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a lowering that calls `python` if all arguments are Python numbers, else `emit`."""

    def lowered(low: Lowering, *values: Any) -> Any:
        if not any(isinstance(value, ir.Value) for value in values):
            return python(*values)
        return emit(low, *values)

    return lowered


def _elementwise(op_type: str) -> Callable[..., Any]:
    """Returns a function that emits an ONNX op on promoted operands, e.g. "Add"."""
    return lambda low, *values: low.op.emit(op_type, *_promoted(low, *values))


def _sum(low: Lowering, terms: Any) -> Any:
    """Lowers `torch.sym_sum`."""
    total, *rest = terms
    for term in rest:
        both_known = not (isinstance(total, ir.Value) or isinstance(term, ir.Value))
        total = total + term if both_known else low.op.Add(*_promoted(low, total, term))
    return total


lower("sym_sum")(_sum)


def _floor_division(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wraps `plain`, the operator `//` or `//=`, to compute it for symbolic floats as CPython does: 1.0 // 0.1 is 9.0.

    PyTorch (2.13) traces the floor of the quotient, which is 10.0.
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
"""Replacements for functions of numbers when a Dynamo graph is traced."""


def _floordiv(low: Lowering, a: Any, b: Any) -> Any:
    a, b = _promoted(low, a, b)
    if a.dtype == DOUBLE:
        return low.op.Floor(low.op.Div(a, b))
    return floored_quotient(low.op, a, b)


def _truediv(low: Lowering, a: Any, b: Any) -> Any:
    return low.op.Div(low.tensor(a, DOUBLE), low.tensor(b, DOUBLE))


def _mod(low: Lowering, a: Any, b: Any) -> Any:
    a, b = _promoted(low, a, b)
    if a.dtype != DOUBLE:
        return low.op.Mod(a, b)
    # Python's `%` has the sign of the divisor, C's fmod the sign of the dividend.
    remainder = low.op.Mod(a, b, fmod=1)
    return low.op.Where(_has_other_sign(low, remainder, b), low.op.Add(remainder, b), remainder)


def _has_other_sign(low: Lowering, remainder: ir.Value, divisor: ir.Value) -> ir.Value:
    """Emits a bool that is true if the remainder is nonzero and its sign differs from the divisor's."""
    zero = low.op.const(0.0, DOUBLE)
    differs = low.op.Xor(low.op.Less(remainder, zero), low.op.Less(divisor, zero))
    return low.op.And(differs, low.op.Not(low.op.Equal(remainder, zero)))


def _power(low: Lowering, a: Any, b: Any) -> Any:
    # Multiplies, because ONNX Runtime computes powers of integers in float64.
    if isinstance(b, int) and 1 <= b <= 4:
        result = a
        for _ in range(b - 1):
            result = low.op.Mul(*_promoted(low, result, a))
        return result
    return low.op.Pow(low.tensor(a, DOUBLE), low.tensor(b, DOUBLE))


def _rounding(op_type: str) -> Callable[..., Any]:
    """Returns the lowering of `math.floor` ("Floor") or `math.ceil` ("Ceil") to an int64 scalar."""

    def rounded(low: Lowering, a: ir.Value) -> Any:
        return low.tensor(low.op.emit(op_type, a), INT64) if a.dtype == DOUBLE else a

    return rounded


def _comparison(op_type: str, negated: bool = False) -> Callable[..., Any]:
    """Returns the lowering of a comparison to an ONNX op, e.g. "Less", followed by a Not if `negated`."""

    def compare(low: Lowering, a: Any, b: Any) -> Any:
        result = low.op.emit(op_type, *_promoted(low, a, b))
        return low.op.Not(result) if negated else result

    return compare


def _to_float(low: Lowering, a: ir.Value) -> ir.Value:
    """Lowers `float(a)`."""
    # Undoes the Cast to int64 in `float(math.floor(x))`, which would lose NaN. Python's `//` of NaN is NaN.
    producer = a.producer()
    before = None if producer is None or producer.op_type != "Cast" else producer.inputs[0]
    rounding = None if before is None or before.dtype != DOUBLE else before.producer()
    if before is not None and rounding is not None and rounding.op_type in ("Floor", "Ceil"):
        return before
    return low.tensor(a, DOUBLE)


def _float_function(op_type: str) -> Callable[..., Any]:
    """Returns the lowering of a `math` function to an ONNX op, e.g. "Sqrt", computed in float64."""
    return lambda low, a: low.op.emit(op_type, low.tensor(a, DOUBLE))


def _log2(low: Lowering, a: ir.Value) -> ir.Value:
    return low.op.Mul(low.op.Log(low.tensor(a, DOUBLE)), low.op.const(1 / math.log(2), DOUBLE))


def _logic(op_type: str) -> Callable[..., Any]:
    """Returns the lowering of `&`, `|` or `not`, which emits a logical op for bools and a bitwise op for ints."""

    def logic(low: Lowering, *values: Any) -> Any:
        if all(v.dtype == BOOL if isinstance(v, ir.Value) else isinstance(v, bool) for v in values):
            return low.op.emit(op_type, *(low.tensor(value, BOOL) for value in values))
        return low.op.emit(f"Bitwise{op_type}", *(low.tensor(value, INT64) for value in values))

    return logic


def _shift(by_power: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the lowering of `<<` or `>>`, given a function that multiplies or divides by a power of two."""

    def shift(low: Lowering, a: Any, count: Any) -> Any:
        if not isinstance(count, int):
            raise low.unsupported("a symbolic number of bits")
        return by_power(low, a, 2**count)

    return shift


_FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (operator.add, _elementwise("Add")),
    "sub": (operator.sub, _elementwise("Sub")),
    "mul": (operator.mul, _elementwise("Mul")),
    "neg": (operator.neg, _elementwise("Neg")),
    "abs": (abs, _elementwise("Abs")),
    "floordiv": (operator.floordiv, _floordiv),
    "truediv": (operator.truediv, _truediv),
    "mod": (operator.mod, _mod),
    "pow": (operator.pow, _power),
    "sym_max": (max, _elementwise("Max")),
    "sym_min": (min, _elementwise("Min")),
    "sym_float": (float, _to_float),
    "sym_int": (int, lambda low, a: low.tensor(a, INT64)),
    "trunc": (math.trunc, lambda low, a: low.tensor(a, INT64)),
    "floor": (math.floor, _rounding("Floor")),
    "ceil": (math.ceil, _rounding("Ceil")),
    "sym_sqrt": (math.sqrt, _float_function("Sqrt")),
    "_sym_sqrt": (math.sqrt, _float_function("Sqrt")),
    "_sym_sin": (math.sin, _float_function("Sin")),
    "_sym_cos": (math.cos, _float_function("Cos")),
    "_sym_tan": (math.tan, _float_function("Tan")),
    "_sym_sinh": (math.sinh, _float_function("Sinh")),
    "_sym_cosh": (math.cosh, _float_function("Cosh")),
    "_sym_tanh": (math.tanh, _float_function("Tanh")),
    "_sym_asin": (math.asin, _float_function("Asin")),
    "_sym_acos": (math.acos, _float_function("Acos")),
    "_sym_atan": (math.atan, _float_function("Atan")),
    "_sym_log2": (math.log2, _log2),
    "eq": (operator.eq, _comparison("Equal")),
    "ne": (operator.ne, _comparison("Equal", negated=True)),
    "lt": (operator.lt, _comparison("Less")),
    "le": (operator.le, _comparison("LessOrEqual")),
    "gt": (operator.gt, _comparison("Greater")),
    "ge": (operator.ge, _comparison("GreaterOrEqual")),
    "and_": (operator.and_, _logic("And")),
    "or_": (operator.or_, _logic("Or")),
    "lshift": (operator.lshift, _shift(_elementwise("Mul"))),
    "rshift": (operator.rshift, _shift(_floordiv)),
    "sym_not": (operator.not_, _logic("Not")),
}
for _name, (_python, _emit) in _FUNCTIONS.items():
    lower(_name)(_constant_folded(_python, _emit))


@lower("sym_ite")
def sym_ite(low: Lowering, condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, ir.Value):
        return a if condition else b
    return low.op.Where(condition, *_promoted(low, a, b))


@lower("aten.sym_is_contiguous.default")
def sym_is_contiguous(low: Lowering, x: ir.Value, *_: Any) -> bool:
    return bool(low.fake(0).is_contiguous(memory_format=torch.contiguous_format))


@lower("onnxtrain.size.default")
def size_at_run_time(low: Lowering, x: ir.Value, dim: int) -> ir.Value:
    # ONNX Runtime would replace Shape with the size that Dynamo assumes. This size is not known before the run.
    if x.shape is not None:
        x.shape = ir.Shape([None if axis == dim else size for axis, size in enumerate(x.shape)])
    return low.op.Gather(low.op.Shape(x), low.int_scalar(dim))


@lower("aten._assert_async.default", "aten._assert_async.msg", "aten._functional_assert_async.msg")
def assertion(
    low: Lowering, condition: ir.Value, message: str = "Expected a condition that holds", *_: Any
) -> ir.Value:
    # ONNX has no assertions: the condition becomes an output, which is checked after the run.
    holds = low.tensor(condition, BOOL)
    low.assertions.append((holds, message))
    return low.op.const(0.0)
