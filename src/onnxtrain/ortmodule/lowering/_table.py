"""Defines the tables of lowerings, and `Lowering`, the first argument of the functions in `aten/`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

from onnxtrain import functions
from onnxtrain.emitter import Emitter
from onnxtrain.ortmodule._torch import PythonPrinter

# The canonical opset, for which the gradient rules are written.
OPSET = 21

DRAWN_BETWEEN_PARTS = "so that PyTorch draws them between two parts of the graph"
"""Suffix of the reason why a random op of data-dependent shape runs in PyTorch. Reports do not count such ops."""

DTYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float64: ir.DataType.DOUBLE,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int64: ir.DataType.INT64,
    torch.int32: ir.DataType.INT32,
    torch.int16: ir.DataType.INT16,
    torch.int8: ir.DataType.INT8,
    torch.uint8: ir.DataType.UINT8,
    torch.bool: ir.DataType.BOOL,
}

COMPONENTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
"""Maps each complex dtype to the dtype of its real and imaginary parts."""


@dataclass(frozen=True)
class Complex:
    """A complex tensor, stored as two real tensors, because most ONNX ops do not support complex dtypes.

    Attributes:
        re: the real part.
        im: the imaginary part, of the same shape.
    """

    re: ir.Value
    im: ir.Value


class UnsupportedATenOp(Exception):
    """Raised if an ATen op, or its arguments, cannot be lowered. The message names the op and the reason."""


LoweringFunction = Callable[..., Any]
F = TypeVar("F", bound=LoweringFunction)
LOWERINGS: dict[str, LoweringFunction] = {}
"""Lowering functions by overload, e.g. "aten.add.Tensor", or by op for all overloads, e.g. "aten.relu".

The copying variant of a view, e.g. `view_copy`, shares the lowering of the view.
"""

COMPLEX_LOWERINGS: dict[str, LoweringFunction] = {}
"""Lowering functions for calls that take or return complex tensors. They get and return `Complex`."""


def lower(*names: str) -> Callable[[F], F]:
    """Registers the decorated function `(low, *args, **kwargs)` as the lowering of ATen ops.

    The function takes the arguments of the op. Tensors and symbolic numbers are passed as `ir.Value`, everything else
    as Python values. A parameter annotated as `int`, `float`, `bool` or `list[int]` gets Python numbers: symbolic
    numbers are specialized, so a different value leads to a new capture. The function returns a value, or a tuple for
    an op with several results. The caller casts results to PyTorch's dtypes.

    Args:
        names: overloads, e.g. "aten.add.Tensor", or ops, e.g. "aten.relu" for all overloads.
    """
    return _register_in(LOWERINGS, names)


def lower_complex(*names: str) -> Callable[[F], F]:
    """Like `lower`, but registers the lowering for calls with a complex argument or result."""
    return _register_in(COMPLEX_LOWERINGS, names)


def _register_in(table: dict[str, LoweringFunction], names: Sequence[str]) -> Callable[[F], F]:
    """Returns a decorator that adds a function to `table` under each of `names`."""

    def register(function: F) -> F:
        for name in names:
            _check_overload(name)
            # The second registration would silently replace the first.
            assert name not in table, f"{name} is lowered twice"
            table[name] = function
        return function

    return register


def _check_overload(name: str) -> None:
    """Raises AssertionError if an existing ATen op lacks the overload `name`, e.g. for "aten.add.tensor"."""
    # A lowering with a misspelled name would never be found. Unknown ops are accepted, because other versions of
    # PyTorch may have them. A test checks the names against the installed version.
    domain, _, rest = name.partition(".")
    op, _, overload = rest.partition(".")
    packet = getattr(torch.ops.aten, op, None) if domain == "aten" and overload else None
    assert packet is None or overload in packet.overloads(), (
        f"PyTorch {torch.__version__} has no {name}; the overloads of aten.{op} are {', '.join(packet.overloads())}"
    )


@dataclass(frozen=True)
class RandomInput:
    """An ONNX input that PyTorch's generator fills at each call, so that seeds give the same results as in eager mode.

    Attributes:
        draw: returns a random tensor of the given shape.
        sizes: returns the shape, given the arguments of the ATen graph.
    """

    draw: Callable[[Sequence[int]], torch.Tensor]
    sizes: Callable[[Sequence[Any]], tuple[int, ...]]


@dataclass
class Lowered:
    """An ONNX graph, and how its inputs and outputs map to the ATen graph's.

    Attributes:
        model: the ONNX model. Its inputs are the placeholders in `inputs`, then `random`.
        inputs: for each ONNX input, except random ones, the index of its placeholder, e.g. [0, 2].
        complex: indices of the complex placeholders. Their ONNX input is `torch.view_as_real` of the tensor.
        outputs: a pair (kind, value) for each output of the ATen graph. The value is the index of an ONNX output for
            the kinds "tensor", "complex" (real and imaginary part along the last axis) and "number" (a Python number),
            the index of a placeholder for "placeholder", and the Python value itself for "constant".
        mutated: pairs (index of a placeholder, index of the ONNX output that is copied into it).
        assertions: pairs (index of a boolean ONNX output, message of the error to raise if an element is false).
        random: the random inputs, in the order in which eager PyTorch draws them.
    """

    model: ir.Model
    inputs: list[int] = field(default_factory=list)
    complex: set[int] = field(default_factory=set)
    outputs: list[tuple[str, Any]] = field(default_factory=list)
    mutated: list[tuple[int, int]] = field(default_factory=list)
    assertions: list[tuple[int, str]] = field(default_factory=list)
    random: list[RandomInput] = field(default_factory=list)


class Lowering:
    """The first argument of a lowering function: provides the ATen node and emits ONNX nodes.

    Attributes:
        op: emits nodes into the ONNX graph.
        node: the ATen node that is being lowered.
        env: the lowered value of each ATen node so far.
        placeholders: the inputs of the ATen graph.
        random: the random inputs so far, each with its ONNX value.
        assertions: pairs (boolean ONNX value that must be true at run time, message of the error to raise otherwise).
    """

    def __init__(self, graph: ir.Graph, model: ir.Model) -> None:
        self.op = Emitter(graph, functions=model.functions)
        self.node: fx.Node
        self.random: list[tuple[ir.Value, RandomInput]] = []
        self.env: dict[fx.Node, Any] = {}
        self.placeholders: list[fx.Node] = []
        self.assertions: list[tuple[ir.Value, str]] = []

    @property
    def result(self) -> Any:
        """The node's result as PyTorch traced it: a fake tensor, a symbolic number, or a tuple of these."""
        return self.node.meta["val"]

    @property
    def dtype(self) -> ir.DataType:
        """Dtype of the (first) result, or of its real part if it is complex."""
        value = self.result
        dtype = (value[0] if isinstance(value, tuple | list) else value).dtype
        return DTYPES[COMPONENTS.get(dtype, dtype)]

    @property
    def is_double(self) -> bool:
        """True if the (first) result is float64.

        Constants must then be tensors instead of attributes, because floating-point attributes are float32 in ONNX.
        """
        return self.dtype == ir.DataType.DOUBLE

    def fake(self, index: int) -> Any:
        """Returns argument `index` of the node as PyTorch traced it, e.g. a fake tensor with shape and dtype."""
        argument = self.node.args[index]
        return argument.meta["val"] if isinstance(argument, fx.Node) else argument

    @property
    def wide_dtype(self) -> ir.DataType:
        """Dtype in which PyTorch computes elementwise functions internally: float32 for half-precision results."""
        narrow = self.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        return ir.DataType.FLOAT if narrow else self.dtype

    def has_no_elements(self, *arguments: int) -> bool:
        """True if one of the arguments at these positions has no elements."""
        # Sizes of 0 are never symbolic: Dynamo specializes them.
        shapes = (getattr(self.fake(index), "shape", ()) for index in arguments)
        return any(isinstance(size, int) and size == 0 for shape in shapes for size in shape)

    def uses_result(self, index: int) -> bool:
        """True if any node reads result `index` of this node. The node must have several results."""
        return any(user.target is operator.getitem and user.args[1] == index for user in self.node.users)

    def specialized(self, number: Any) -> Any:
        """Specializes a symbolic number: guards on its current value, and returns that value.

        Other numbers are returned unchanged.
        """
        if isinstance(number, torch.SymInt):
            return int(number)
        if isinstance(number, torch.SymFloat):
            return float(number)
        return bool(number) if isinstance(number, torch.SymBool) else number

    def unsupported(self, case: str) -> UnsupportedATenOp:
        """Returns the error to raise for unsupported arguments. PyTorch then runs the node.

        Args:
            case: a noun phrase for error messages, e.g. "a norm of order 0.5".
        """
        return UnsupportedATenOp(f"{self.node.target} has no lowering to ONNX for {case}")

    def check(self, holds: ir.Value, message: str) -> None:
        """Adds a run-time check to the graph. If it fails, PyTorch runs the call and raises its own error.

        Args:
            holds: the condition, bool, of any shape. The check fails if any element is false.
            message: message of the error to raise if PyTorch raises none.
        """
        failures = self.op.ReduceSum(self.op.Cast(self.op.Not(holds), to=ir.DataType.FLOAT), keepdims=0)
        self.assertions.append((self.op.Equal(failures, 0.0), message))

    def refuse_overflow(self, *numbers: Any) -> None:
        """Raises UnsupportedATenOp if a finite Python number is out of range for the result's dtype."""
        for number in numbers:
            if not isinstance(number, ir.Value) and not _fits(number, self.dtype):
                raise self.unsupported(f"{number!r} as {self.dtype}")

    def tensor(self, value: Any, dtype: ir.DataType) -> ir.Value:
        """Casts an ONNX value to `dtype`, or turns a Python number into a constant of `dtype`.

        Raises:
            UnsupportedATenOp: the number is out of range for `dtype`. PyTorch then runs the op.
        """
        # A Cast to the same dtype would keep fusions from seeing the chain.
        if isinstance(value, ir.Value):
            if value.dtype == dtype:
                return value
            cast: ir.Value = self.op.Cast(value, to=dtype)
            cast.shape = value.shape
            return cast
        if isinstance(value, int | float) and not _fits(value, dtype):
            raise self.unsupported(f"{value!r} as {dtype}")
        return self.op.const(value, dtype)

    def tensors(self, *values: Any) -> tuple[ir.Value, ...]:
        """Returns `tensor(value, self.dtype)` for each value."""
        return tuple(self.tensor(value, self.dtype) for value in values)

    def wide(self, *values: Any) -> tuple[ir.Value, ...]:
        """Returns `tensor(value, self.wide_dtype)` for each value."""
        return tuple(self.tensor(value, self.wide_dtype) for value in values)

    def with_slope(self, y: ir.Value, x: ir.Value, slope: ir.Value) -> ir.Value:
        """Returns `y`, an elementwise function of `x`, with its gradient replaced by the cotangent times `slope`."""
        return self._shaped_like(y, self.op.call(functions.with_slope, y, x, slope))

    def with_slopes(
        self, y: ir.Value, a: ir.Value, slope_a: ir.Value, b: ir.Value, slope_b: ir.Value
    ) -> ir.Value:
        """Returns `y`, an elementwise function of `a` and `b`, with its two gradients replaced.

        The gradient with respect to `a` is the cotangent times `slope_a`, and with respect to `b`, times `slope_b`.
        Each is summed over the axes along which its operand is broadcast.
        """
        return self._shaped_like(y, self.op.call(functions.with_slopes, y, a, slope_a, b, slope_b))

    @staticmethod
    def _shaped_like(y: ir.Value, result: ir.Value) -> ir.Value:
        result.shape = y.shape
        return result

    def ints(self, values: Any) -> ir.Value:
        """Returns one or more integers, possibly symbolic, as an int64 tensor [n], e.g. the sizes for a Reshape."""
        items = list(values) if isinstance(values, list | tuple) else [values]
        if not any(isinstance(item, ir.Value) for item in items):
            return self.op.const(np.array(items, np.int64))
        parts = [self.op.Reshape(i, [1]) if isinstance(i, ir.Value) else self.op.const([i]) for i in items]
        return self.op.Concat(*parts, axis=0) if len(parts) > 1 else parts[0]

    def int_scalar(self, value: Any) -> ir.Value:
        """Returns an integer, possibly symbolic, as an int64 scalar."""
        return value if isinstance(value, ir.Value) else self.op.const(value, ir.DataType.INT64)

    def shape(self, fake: torch.Tensor) -> ir.Shape:
        """Returns the ONNX shape of a fake tensor."""
        return ir.Shape([_dimension(size) for size in fake.shape])

    def random_input(self, draw: Callable[[Sequence[int]], torch.Tensor], like: torch.Tensor) -> ir.Value:
        """Adds and returns a graph input that is filled with new random numbers at each call.

        Args:
            draw: returns a random tensor of the given shape.
            like: a fake tensor with the dtype and shape of the input.

        Raises:
            UnsupportedATenOp: the shape depends on the data.
        """
        value = ir.Value(
            name=self.op.unique_name("random"), shape=self.shape(like), type=ir.TensorType(DTYPES[like.dtype])
        )
        sizes = run_time_sizes(tuple(like.shape), self.placeholders)
        if sizes is None:
            raise self.unsupported(
                f"random numbers of the shape {list(like.shape)}, which depends on the data"
            )
        self.random.append((value, RandomInput(draw, sizes)))
        return value


def _fits(number: int | float, dtype: ir.DataType) -> bool:
    """True if a Python number is in the range of `dtype`. Infinities and NaN are in range for floating-point dtypes."""
    if dtype == ir.DataType.BOOL or not math.isfinite(number):
        return True
    return bool(dtype.min <= number <= dtype.max)


def is_float(value: Any) -> bool:
    """True if `value` is an ONNX value of a floating-point dtype."""
    return isinstance(value, ir.Value) and value.dtype is not None and value.dtype.is_floating_point()


def per_axis(numbers: Any, rank: int) -> list[Any]:
    """Returns a list of `rank` numbers. As in PyTorch, a single number applies to all axes."""
    items = list(numbers) if isinstance(numbers, list | tuple) else [numbers]
    return items * rank if len(items) == 1 else items


def same_sizes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the shapes of two fake tensors are equal for all values of their symbols."""
    # `a.shape == b.shape` would add a guard on the symbols, and other sizes would be recompiled.
    return tuple(map(str, a.shape)) == tuple(map(str, b.shape))


def memory_order(fake: torch.Tensor) -> list[int]:
    """Returns the axes from the slowest to the fastest in memory, e.g. [0, 2, 3, 1] for channels_last."""
    # Axes of size 1 have arbitrary strides, which must not reorder a contiguous tensor.
    if fake.is_contiguous():
        return list(range(fake.dim()))
    strides = fake.stride()
    return sorted(range(fake.dim()), key=lambda axis: -strides[axis])


def _dimension(size: int | torch.SymInt) -> int | str:
    """Returns a size as an int, or as a string if it is symbolic, e.g. "s0" or "2*s0"."""
    # A guard may have specialized the size.
    number = size if isinstance(size, int) else size.node.maybe_as_int()
    return str(size) if number is None else int(number)


def run_time_sizes(
    shape: Sequence[Any], placeholders: Sequence[fx.Node]
) -> Callable[[Sequence[Any]], tuple[int, ...]] | None:
    """Returns a function that computes `shape`, which may be symbolic, from the arguments of the ATen graph.

    Args:
        shape: sizes, as ints or symbols.
        placeholders: the inputs of the ATen graph. Their example values show which argument, or which axis of a tensor
            argument, has the value of each symbol.

    Returns:
        The function, or None if the shape depends on the data, e.g. on the number of true elements of a mask.
    """
    if all(isinstance(size, int) for size in shape):
        fixed = tuple(int(size) for size in shape)
        return lambda arguments: fixed
    sources: dict[Any, tuple[int, int | None]] = {}
    for index, node in enumerate(placeholders):
        fake = node.meta["val"]
        sizes = enumerate(fake.shape) if isinstance(fake, torch.Tensor) else [(None, fake)]
        for axis, size in sizes:
            expression = getattr(getattr(size, "node", None), "expr", None)
            if expression is not None and expression.is_Symbol:
                sources.setdefault(expression, (index, axis))
    expressions = [size if isinstance(size, int) else size.node.expr for size in shape]
    # Backed symbols, e.g. s0, are sizes of placeholders. Unbacked ones, e.g. u0, depend on the data.
    used = sorted(set().union(*(e.free_symbols for e in expressions if not isinstance(e, int))), key=str)
    if not sources.keys() >= set(used):
        return None
    printed = ", ".join(str(e) if isinstance(e, int) else _PRINTER.doprint(e) for e in expressions)
    # Compiled, as Dynamo compiles its guards, because substitution in sympy takes 0.1 ms per call.
    compute = eval(f"lambda {', '.join(map(str, used))}: ({printed},)", dict(SYMPY_INTERP))
    locations = [sources[symbol] for symbol in used]

    def evaluate(arguments: Sequence[Any]) -> tuple[int, ...]:
        values = [arguments[i] if axis is None else arguments[i].shape[axis] for i, axis in locations]
        return tuple(map(int, compute(*values)))

    return evaluate


_PRINTER = PythonPrinter()
