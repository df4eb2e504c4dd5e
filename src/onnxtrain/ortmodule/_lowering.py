"""From a functional ATen graph to an ONNX graph, one node after the other, by the table in `aten/`."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from onnxtrain.emitter import Emitter
from onnxtrain.fusion import RINormFusionPass, RMSNormFusionPass
from onnxtrain.passes import ReluAfterMaxPoolPass, infer_shapes, mark_stop_gradient

__all__ = [
    "DTYPES",
    "LOWERINGS",
    "Lowered",
    "Lowering",
    "RandomInput",
    "UnsupportedATenOp",
    "lower",
    "lower_graph",
]

OPSET = 21

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


class UnsupportedATenOp(Exception):
    """An ATen op, or some arguments of it, that ONNX Runtime cannot run; the message says which and why."""


LoweringFunction = Callable[..., Any]
F = TypeVar("F", bound=LoweringFunction)
LOWERINGS: dict[str, LoweringFunction] = {}
"""By the op's name without `_copy`: "aten.add.Tensor", or "aten.relu" for all overloads."""


def lower(*names: str) -> Callable[[F], F]:
    """Registers the decorated function `(low, *args, **kwargs)` as the lowering of ATen ops.

    It is called with the op's own arguments: tensors and symbolic numbers are `ir.Value`s, the rest is Python. A
    parameter annotated as `int`, `float` or `bool` gets a Python number: a symbolic one is guarded, so that another
    value captures another graph. The function returns a value, or a tuple for an op with several results. Values that
    come back with another dtype than PyTorch gives are cast.
    """

    def register(function: F) -> F:
        for name in names:
            assert name not in LOWERINGS, f"{name} is lowered twice"
            LOWERINGS[name] = function
        return function

    return register


@dataclass(frozen=True)
class RandomInput:
    """An input of the ONNX graph that PyTorch's generator fills at each call, so that seeds mean what they mean there.

    Attributes:
        draw: makes the tensor, given its shape.
        sizes: gives the shape, from the arguments of the ATen graph.
    """

    draw: Callable[[Sequence[int]], torch.Tensor]
    sizes: Callable[[Sequence[Any]], tuple[int, ...]]


@dataclass
class Lowered:
    """An ONNX graph, and how its inputs and outputs belong to those of the ATen graph.

    Attributes:
        model: inputs are the used placeholders that are tensors or unreachable symbolic integers, then `random`.
        inputs: per graph input before the random ones, the index of its placeholder.
        outputs: per output of the ATen graph: ("tensor" or "integer", index of the ONNX output), ("constant", a Python
            value) or ("placeholder", its index).
        mutated: (index of a placeholder, index of the ONNX output that it takes the value of).
        random: the random inputs in the order in which eager PyTorch draws them.
    """

    model: ir.Model
    inputs: list[int] = field(default_factory=list)
    outputs: list[tuple[str, Any]] = field(default_factory=list)
    mutated: list[tuple[int, int]] = field(default_factory=list)
    random: list[RandomInput] = field(default_factory=list)


class Lowering:
    """What a lowering function works with.

    Attributes:
        op: the emitter of the ONNX graph.
        node: the ATen node that is being lowered.
    """

    def __init__(self, graph: ir.Graph, model: ir.Model) -> None:
        self.op = Emitter(graph, functions=model.functions)
        self.node: fx.Node
        self.random: list[tuple[ir.Value, RandomInput]] = []
        self.env: dict[fx.Node, Any] = {}
        self.placeholders: list[fx.Node] = []

    @property
    def result(self) -> Any:
        """PyTorch's fake result of the node."""
        return self.node.meta["val"]

    @property
    def dtype(self) -> ir.DataType:
        """Element type of the (first) result."""
        value = self.result
        return DTYPES[(value[0] if isinstance(value, tuple | list) else value).dtype]

    @property
    def is_double(self) -> bool:
        """Whether the (first) result is float64: then numbers must not be attributes, which ONNX keeps in float32."""
        return self.dtype == ir.DataType.DOUBLE

    def fake(self, index: int) -> Any:
        """PyTorch's fake tensor of the node's argument `index`."""
        argument = self.node.args[index]
        return argument.meta["val"] if isinstance(argument, fx.Node) else argument

    def has_no_elements(self, *arguments: int) -> bool:
        """Whether one of the node's arguments is a tensor without elements: Dynamo captures those apart."""
        shapes = (getattr(self.fake(index), "shape", ()) for index in arguments)
        return any(isinstance(size, int) and size == 0 for shape in shapes for size in shape)

    def uses_result(self, index: int) -> bool:
        """Whether anything reads this one of the node's several results."""
        return any(user.target is operator.getitem and user.args[1] == index for user in self.node.users)

    def stopped(self, value: ir.Value) -> ir.Value:
        """Returns the value with the mark that stops gradients (`onnxtrain.passes.is_stop_gradient`)."""
        result: ir.Value = self.op.Identity(value)
        result.shape = value.shape
        node = result.producer()
        assert node is not None
        mark_stop_gradient(node)
        return result

    def unsupported(self, why: str) -> UnsupportedATenOp:
        """Returns the error that sends the graph to PyTorch."""
        return UnsupportedATenOp(f"{self.node.target}: {why}")

    def tensor(self, value: Any, dtype: ir.DataType) -> ir.Value:
        """Returns a value or a Python number as a value of `dtype`."""
        if isinstance(value, ir.Value):
            if value.dtype == dtype:
                return value
            cast: ir.Value = self.op.Cast(value, to=dtype)
            cast.shape = value.shape
            return cast
        return self.op.const(value, dtype)

    def tensors(self, *values: Any) -> tuple[ir.Value, ...]:
        """Returns the operands in the dtype of the result."""
        return tuple(self.tensor(value, self.dtype) for value in values)

    def ints(self, values: Any) -> Any:
        """Returns a list of integers, some of them symbolic, as what an ONNX input for shapes or axes takes."""
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
        """Returns a new graph input of the dtype and shape of a fake tensor that `draw` makes at each call."""
        value = ir.Value(name=self.op.unique_name("random"), shape=self.shape(like))
        value.type = ir.TensorType(DTYPES[like.dtype])
        sizes = run_time_sizes(tuple(like.shape), self.placeholders)
        if sizes is None:
            raise self.unsupported(
                f"random numbers of the shape {list(like.shape)}, which depends on the data"
            )
        self.random.append((value, RandomInput(draw, sizes)))
        return value


def _dimension(size: int | torch.SymInt) -> int | str:
    """A size as a number, also where a guard has found out that a symbol stands for one, or as a name."""
    known = size if isinstance(size, int) else size.node.maybe_as_int()
    return str(size) if known is None else int(known)


def run_time_sizes(
    shape: Sequence[Any], placeholders: Sequence[fx.Node]
) -> Callable[[Sequence[Any]], tuple[int, ...]] | None:
    """Returns the function that gives the sizes of a symbolic shape, from the arguments of the graph.

    None where these do not tell them: how many elements of a mask are true, for example.
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
    if any(not e.free_symbols <= sources.keys() for e in expressions if not isinstance(e, int)):
        return None

    def evaluate(arguments: Sequence[Any]) -> tuple[int, ...]:
        values = {
            symbol: arguments[index] if axis is None else arguments[index].shape[axis]
            for symbol, (index, axis) in sources.items()
        }
        return tuple(int(e) if isinstance(e, int) else int(e.subs(values)) for e in expressions)

    return evaluate


def lower_graph(graph_module: fx.GraphModule) -> Lowered:
    """Returns the ONNX graph of a functional ATen graph.

    Raises:
        UnsupportedATenOp: an op has no lowering, or not for its arguments.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="forward")
    model = ir.Model(graph, ir_version=10, producer_name="onnxtrain")
    lowered = _GraphLowering(graph_module, model).run()
    _infer_missing_shapes(model)
    RMSNormFusionPass()(model)
    RINormFusionPass()(model)
    ReluAfterMaxPoolPass()(model)
    return lowered


def _infer_missing_shapes(model: ir.Model) -> None:
    """Gives shapes to the values inside the lowering of an op; without them a gradient must broadcast at run time.

    Those that PyTorch knows are kept: it relates symbolic sizes where ONNX gives up.
    """
    values = [value for node in model.graph for value in node.outputs]
    known = {value: value.shape for value in values if value.shape is not None}
    if len(known) < len(values):
        infer_shapes(model)
    for value, shape in known.items():
        value.shape = shape


class _GraphLowering:
    def __init__(self, graph_module: fx.GraphModule, model: ir.Model) -> None:
        self.graph_module = graph_module
        self.result = Lowered(model)
        self.low = Lowering(model.graph, model)
        self.env = self.low.env
        self.placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
        self.low.placeholders = self.placeholders
        self.original: dict[fx.Node, Any] = {}

    def run(self) -> Lowered:
        graph_module = self.graph_module
        self._refuse_mutations()
        graph_module.graph.eliminate_dead_code(is_impure_node=_keeps)
        self._inputs()
        for node in graph_module.graph.nodes:
            if node.op == "call_function":
                self.env[node] = self._call(node)
            elif node.op == "get_attr":
                self.env[node] = self._attribute(node)
            elif node.op not in ("placeholder", "output"):
                raise UnsupportedATenOp(f"{node.op} {node.target}")
        self._outputs()
        return self.result

    def _refuse_mutations(self) -> None:
        """Only inputs may be written to: what a decomposition writes elsewhere would be lost with its dead result."""
        for node in self.graph_module.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if schema is None or not schema.is_mutable:
                continue
            if str(node.target) != "aten.copy_.default" or node.args[0] not in self.placeholders:
                raise UnsupportedATenOp(f"{node.target} writes to a tensor that is no input")

    def _inputs(self) -> None:
        graph = self.result.model.graph
        for index, node in enumerate(self.placeholders):
            fake = node.meta["val"]
            if not isinstance(fake, torch.Tensor):
                continue
            if fake.dtype not in DTYPES or fake.layout != torch.strided:
                raise UnsupportedATenOp(f"input {node.name}: {fake.dtype}, {fake.layout}")
            value = ir.Value(name=self.low.op.unique_name(f"input{index}"), shape=self.low.shape(fake))
            value.type = ir.TensorType(DTYPES[fake.dtype])
            graph.inputs.append(value)
            self.result.inputs.append(index)
            self.env[node] = self.original[node] = value
        for index, node in enumerate(self.placeholders):
            if node not in self.env and node.users:
                self.env[node] = self.original[node] = self._symbol(index, node)

    def _symbol(self, index: int, node: fx.Node) -> Any:
        """A symbolic integer: the size of an input's axis where there is one, else an input of its own."""
        symbol = node.meta["val"]
        if isinstance(symbol, int):
            return symbol
        for other in self.placeholders:
            fake = other.meta["val"]
            if isinstance(fake, torch.Tensor):
                for axis, size in enumerate(fake.shape):
                    if not isinstance(size, int) and str(size) == str(symbol):
                        return self.low.op.Reshape(
                            self.low.op.dim(self.env[other], axis), self.low.op.const(np.array([], np.int64))
                        )
        value = ir.Value(name=self.low.op.unique_name(f"input{index}"), shape=ir.Shape([]))
        dtype = ir.DataType.DOUBLE if isinstance(symbol, torch.SymFloat | float) else ir.DataType.INT64
        value.type = ir.TensorType(dtype)
        self.result.model.graph.inputs.append(value)
        self.result.inputs.append(index)
        return value

    def _attribute(self, node: fx.Node) -> ir.Value:
        tensor = getattr(self.graph_module, str(node.target))
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedATenOp(f"attribute {node.target} is a {type(tensor).__name__}")
        return self.low.op.const(tensor.detach().cpu().numpy(), DTYPES[tensor.dtype])

    def _call(self, node: fx.Node) -> Any:
        low = self.low
        low.node = node
        low.op.scope = f"{node.name}/"
        name = str(node.target).replace("_copy", "") if callable(node.target) else str(node.target)
        if name == "aten.copy_.default":
            destination = node.args[0]
            self.env[destination] = low.tensor(self.env[node.args[1]], low.dtype)  # type: ignore[index]
            return self.env[destination]  # type: ignore[index]
        function = LOWERINGS.get(name) or LOWERINGS.get(name.rpartition(".")[0])
        if function is None:
            function = LOWERINGS.get(getattr(node.target, "__name__", ""))
        if function is None:
            raise UnsupportedATenOp(f"{node.target} has no lowering to ONNX")
        fake: Any = node.meta.get("val")
        if name.startswith("aten.") and name != "aten.detach.default" and _is_empty(fake):
            if isinstance(fake, tuple | list):
                return tuple(None if part is None else self._empty(node, part) for part in fake)
            return self._empty(node, fake)
        try:
            args, kwargs = self._arguments(function, node)
            result = function(low, *args, **kwargs)
        except UnsupportedATenOp:
            raise
        except Exception as error:  # PyTorch can run the graph, whatever the lowering has not thought of
            raise UnsupportedATenOp(
                f"{node.target}: its lowering failed ({type(error).__name__}: {error}); please report it"
            ) from error
        return self._typed(result, node.meta.get("val"))

    def _arguments(self, function: LoweringFunction, node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
        """What the lowering is called with for a node."""
        names, numbers = _parameters(function)

        def value(argument: Any, name: str) -> Any:
            known = fx.node.map_arg(argument, self.env.__getitem__)
            return _number(argument.meta["val"]) if isinstance(known, ir.Value) and name in numbers else known

        names += ("",) * (len(node.args) - len(names))
        args = [value(argument, name) for argument, name in zip(node.args, names, strict=False)]
        return args, {name: value(argument, name) for name, argument in node.kwargs.items()}

    def _empty(self, node: fx.Node, fake: torch.Tensor) -> ir.Value:
        """A result without elements, for which many kernels are not made.

        It comes from the floating-point arguments, by a Floor: their gradients are zero, and not nothing.
        """
        op, dtype = self.low.op, DTYPES[fake.dtype]
        result = op.const(np.zeros(tuple(fake.shape), np.int8), dtype)
        for source in node.all_input_nodes if dtype.is_floating_point() else ():
            value = self.env[source]
            if isinstance(value, ir.Value) and value.dtype is not None and value.dtype.is_floating_point():
                none = op.Floor(op.Slice(op.Reshape(self.low.tensor(value, dtype), [-1]), [0], [0], [0]))
                result = op.Add(result, op.Reshape(none, op.const(list(fake.shape)), allowzero=1))
        typed = self._typed(result, fake)
        assert isinstance(typed, ir.Value)
        return typed

    def _typed(self, result: Any, fake: Any) -> Any:
        """Gives results the dtype and shape that PyTorch says they have."""
        if isinstance(result, tuple | list):
            return tuple(self._typed(r, f) for r, f in zip(result, fake, strict=False))
        if isinstance(result, ir.Value) and isinstance(fake, torch.Tensor):
            if fake.dtype not in DTYPES:
                raise UnsupportedATenOp(f"{self.low.node.target} returns {fake.dtype}")
            result = self.low.tensor(result, DTYPES[fake.dtype])
            if not (result.is_graph_input() or result.is_initializer()):
                result.shape = self.low.shape(fake)
        return result

    def _outputs(self) -> None:
        node = next(n for n in self.graph_module.graph.nodes if n.op == "output")
        returned = node.args[0]
        for item in returned if isinstance(returned, tuple | list) else (returned,):
            if not isinstance(item, fx.Node):
                self.result.outputs.append(("constant", item))
            elif item in self.placeholders and self.env.get(item) is self.original.get(item):
                self.result.outputs.append(("placeholder", self.placeholders.index(item)))
            else:
                kind = "tensor" if isinstance(item.meta["val"], torch.Tensor) else "integer"
                self.result.outputs.append((kind, self._output(self.env[item])))
        for node_, before in self.original.items():
            if self.env[node_] is not before:
                self.result.mutated.append((self.placeholders.index(node_), self._output(self.env[node_])))
        # Also those that nothing reads: eager PyTorch draws them too.
        self.result.model.graph.inputs.extend(value for value, _ in self.low.random)
        self.result.random = [random for _, random in self.low.random]

    def _output(self, value: Any) -> int:
        outputs = self.result.model.graph.outputs
        if not isinstance(value, ir.Value):
            value = self.low.op.const(value)
        if value.is_graph_output() or value.is_graph_input() or value.is_initializer():
            identity = self.low.op.Identity(value)
            identity.shape, identity.type = value.shape, value.type
            value = identity
        outputs.append(value)
        return len(outputs) - 1


def _is_empty(fake: Any) -> bool:
    """Whether results are tensors that are known to have no elements, and of known sizes."""
    if isinstance(fake, tuple | list):
        return any(part is not None for part in fake) and all(
            part is None or _is_empty(part) for part in fake
        )
    sizes = fake.shape if isinstance(fake, torch.Tensor) and fake.dtype in DTYPES else ()
    return all(isinstance(size, int) for size in sizes) and 0 in sizes


_NUMBERS = frozenset(f"{kind}{none}" for kind in ("int", "float", "bool") for none in ("", " | None"))


@functools.cache
def _parameters(function: LoweringFunction) -> tuple[tuple[str, ...], frozenset[str]]:
    """The names of a lowering's parameters for ATen arguments, and of those that are Python numbers."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return (
        tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD),
        frozenset(p.name for p in parameters if p.annotation in _NUMBERS),
    )


def _number(symbol: Any) -> int | float | bool:
    """The value of a symbolic number; PyTorch notes that the graph is for this one."""
    if isinstance(symbol, torch.SymInt):
        return int(symbol)
    return float(symbol) if isinstance(symbol, torch.SymFloat) else bool(symbol)


def _keeps(node: fx.Node) -> bool:
    """Whether dead code elimination must keep a node: it mutates an input, draws random numbers, or asserts."""
    name = str(node.target)
    return (
        node.op in ("placeholder", "output")
        or "copy_." in name
        or any(
            word in name
            for word in (
                "bernoulli",
                "rand",
                "normal",
                "uniform",
                "native_dropout",
                "exponential",
                "_assert_async",
            )
        )
    )
