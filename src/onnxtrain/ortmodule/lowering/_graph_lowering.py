"""Lowers a functional ATen graph to an ONNX graph, node by node, with the lowerings of `aten/`."""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from onnxtrain.fusion import fuse_forward
from onnxtrain.ortmodule.capture._nodes import CHECKPOINT_REGION, depends_on_data
from onnxtrain.ortmodule.capture.graph._checkpoint import mark_region
from onnxtrain.ortmodule.lowering._partition import draws
from onnxtrain.ortmodule.lowering._table import (
    COMPLEX_LOWERINGS,
    COMPONENTS,
    DTYPES,
    LOWERINGS,
    OPSET,
    Complex,
    Lowered,
    Lowering,
    LoweringFunction,
    UnsupportedATenOp,
)
from onnxtrain.passes import CeilModePass, ReluAfterMaxPoolPass, infer_shapes


def lower_graph(graph_module: fx.GraphModule) -> Lowered:
    """Lowers a functional ATen graph to ONNX.

    Raises:
        UnsupportedATenOp: an op has no lowering, or its lowering does not support its arguments.
    """
    lowered = GraphLowering(graph_module, "forward").run()
    model = lowered.model
    # onnx's shape inference miscounts windows in ceil mode, so this goes before it.
    CeilModePass(keep_sizes=True)(model)
    _infer_missing_shapes(model)
    fuse_forward(model)
    ReluAfterMaxPoolPass()(model)
    return lowered


def _infer_missing_shapes(model: ir.Model) -> None:
    """Infers the shapes of values for which PyTorch has none. All other values keep PyTorch's shapes."""
    # Without shapes, gradients would be un-broadcast at run time. PyTorch relates symbolic sizes where onnx's
    # inference gives up.
    values = [value for node in model.graph for value in node.outputs]
    from_torch = {value: value.shape for value in values if value.shape is not None}
    if len(from_torch) < len(values):
        infer_shapes(model)
    for value, shape in from_torch.items():
        value.shape = shape


class GraphLowering:
    """Lowers one graph.

    Args:
        graph_module: the ATen graph.
        name: name of the ONNX graph, e.g. "forward".

    Attributes:
        graph_module: the ATen graph.
        result: the ONNX graph so far, with its inputs and outputs.
        low: first argument of the lowering functions.
        env: per lowered node, its ONNX value, a `Complex`, a Python number, or a tuple of these.
        placeholders: the inputs of the ATen graph, in order.
        original: `env` of the placeholders before the graph writes to any of them.
    """

    def __init__(self, graph_module: fx.GraphModule, name: str) -> None:
        self.graph_module = graph_module
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
        model = ir.Model(graph, ir_version=10, producer_name="onnxtrain")
        self.result = Lowered(model)
        self.low = Lowering(graph, model)
        self.env = self.low.env
        self.placeholders = self.low.placeholders = graph_module.graph.find_nodes(op="placeholder")
        self.original: dict[fx.Node, Any] = {}

    def run(self) -> Lowered:
        graph_module = self.graph_module
        self._refuse_mutations()
        # Dead nodes would be lowered, and could be refused, for nothing.
        graph_module.graph.eliminate_dead_code(is_impure_node=_keeps)
        self._inputs()
        for node in graph_module.graph.nodes:
            if node.op == "call_function":
                # The nodes of a checkpointed region are marked: the backward graph computes them again.
                count_before = self.result.model.graph.num_nodes()
                self.env[node] = self._call(node)
                if (region := node.meta.get(CHECKPOINT_REGION)) is not None:
                    count = self.result.model.graph.num_nodes() - count_before
                    for onnx_node in itertools.islice(reversed(self.result.model.graph), count):
                        mark_region(onnx_node, region)
            elif node.op == "get_attr":
                self.env[node] = self._attribute(node)
            elif node.op not in ("placeholder", "output"):
                raise UnsupportedATenOp(f"{node.op} {node.target} has no lowering to ONNX")
        self._outputs()
        return self.result

    def _refuse_mutations(self) -> None:
        """Raises UnsupportedATenOp for in-place writes, except copies to a graph input."""
        # Nothing reads the result of such a node: it would be dropped as dead code.
        for node in self.graph_module.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if schema is None or not schema.is_mutable:
                continue
            if str(node.target) != "aten.copy_.default" or node.args[0] not in self.placeholders:
                raise UnsupportedATenOp(f"{node.target} writes to a tensor that is no input")

    def _input(self, name: str, shape: ir.Shape, dtype: ir.DataType) -> ir.Value:
        """Adds an input to the ONNX graph."""
        value = ir.Value(name=self.low.op.unique_name(name), shape=shape, type=ir.TensorType(dtype))
        self.result.model.graph.inputs.append(value)
        return value

    def _inputs(self) -> None:
        for index, node in enumerate(self.placeholders):
            fake = node.meta["val"]
            # Numbers come after the tensors, whose shapes tell most of them.
            if not isinstance(fake, torch.Tensor):
                continue
            dtype = COMPONENTS.get(fake.dtype, fake.dtype)
            # ONNX has dense tensors only.
            if dtype not in DTYPES or fake.layout != torch.strided:
                raise UnsupportedATenOp(f"input {node.name} ({fake.dtype}, {fake.layout}) has no ONNX type")
            # A complex input is `torch.view_as_real` of the tensor.
            pair = [2] if fake.is_complex() else []
            shape = ir.Shape([*self.low.shape(fake), *pair])
            value = self._input(f"input{index}", shape, DTYPES[dtype])
            self.result.inputs.append(index)
            if pair:
                self.result.complex.add(index)
            self.env[node] = self.original[node] = self._parts(value, fake) if pair else value
        for index, node in enumerate(self.placeholders):
            if node not in self.env and node.users:
                self.env[node] = self.original[node] = self._symbol(index, node)

    def _parts(self, value: ir.Value, fake: torch.Tensor) -> Complex:
        """Returns the real and imaginary parts of a complex input."""
        parts = [self.low.op.Gather(value, part, axis=-1) for part in (0, 1)]
        for part in parts:
            part.shape = self.low.shape(fake)
        return Complex(*parts)

    def _symbol(self, index: int, node: fx.Node) -> Any:
        """Returns a symbolic integer: the size of an input's axis if one equals it, else an input of its own."""
        symbol = node.meta["val"]
        if isinstance(symbol, int):
            return symbol
        for other in self.placeholders:
            fake = other.meta["val"]
            if isinstance(fake, torch.Tensor):
                for axis, size in enumerate(fake.shape):
                    if not isinstance(size, int) and str(size) == str(symbol):
                        owner = self.env[other]
                        tensor = owner.re if isinstance(owner, Complex) else owner
                        return self.low.op.Reshape(
                            self.low.op.dim(tensor, axis), self.low.op.const(np.array([], np.int64))
                        )
        self.result.inputs.append(index)
        dtype = ir.DataType.DOUBLE if isinstance(symbol, torch.SymFloat | float) else ir.DataType.INT64
        return self._input(f"input{index}", ir.Shape([]), dtype)

    def _attribute(self, node: fx.Node) -> ir.Value | Complex:
        """Returns a tensor attribute of the graph module, e.g. a constant of the module's code."""
        tensor = getattr(self.graph_module, str(node.target))
        if not isinstance(tensor, torch.Tensor):
            kind = "what a higher-order operator runs" if callable(tensor) else f"a {type(tensor).__name__}"
            raise UnsupportedATenOp(f"attribute {node.target} is {kind}")
        if tensor.is_complex():
            parts = torch.view_as_real(tensor.detach().cpu().resolve_conj()).unbind(-1)
            return Complex(*(self.low.op.const(part.numpy(), DTYPES[part.dtype]) for part in parts))
        return self.low.op.const(tensor.detach().cpu().numpy(), DTYPES[tensor.dtype])

    def _call(self, node: fx.Node) -> Any:
        """Lowers a node that calls a function. Returns the node's value."""
        low = self.low
        low.node = node
        low.op.scope = f"{node.name}/"
        # The copying variants of views (`view_copy`) compute the same; a functional graph has no aliases.
        name = str(node.target).replace("_copy", "") if callable(node.target) else str(node.target)
        if name == "aten.copy_.default":
            # From here on reads of the placeholder see the new value.
            destination, source = node.args[0], self.env[node.args[1]]  # type: ignore[index]
            self.env[destination] = self._typed(source, node.meta["val"])  # type: ignore[index]
            return self.env[destination]  # type: ignore[index]
        function = _function(node, name)
        fake: Any = node.meta.get("val")
        # Many kernels of ONNX Runtime fail for tensors without elements.
        if name.startswith("aten.") and name != "aten.detach.default" and _is_empty(fake):
            if isinstance(fake, tuple | list):
                return tuple(None if part is None else self._empty(node, part) for part in fake)
            return self._empty(node, fake)
        try:
            args, kwargs = self._arguments(function, node)
            result = function(low, *args, **kwargs)
        except UnsupportedATenOp:
            raise
        # A bug in a lowering must not end the call: PyTorch can run the node.
        except Exception as error:
            raise UnsupportedATenOp(
                f"{node.target}: its lowering failed ({type(error).__name__}: {error}); please report it"
            ) from error
        return self._typed(result, fake)

    def _arguments(self, function: LoweringFunction, node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments of a node's lowering: numbers where it wants numbers, else the lowered values."""
        names, numbers = _parameters(function)

        def value(argument: Any, name: str) -> Any:
            if name in numbers:
                return fx.node.map_arg(argument, self._number)
            return fx.node.map_arg(argument, self.env.__getitem__)

        names += ("",) * (len(node.args) - len(names))
        args = [value(argument, name) for argument, name in zip(node.args, names, strict=False)]
        return args, {name: value(argument, name) for name, argument in node.kwargs.items()}

    def _number(self, node: fx.Node) -> Any:
        """Returns the value of a symbolic number, and guards it: another value compiles another graph."""
        symbol, lowered = node.meta.get("val"), self.env[node]
        if not isinstance(lowered, ir.Value) or isinstance(symbol, torch.Tensor):
            return lowered
        if depends_on_data(symbol):
            raise self.low.unsupported(
                f"the number {symbol}, which depends on the data, where ONNX wants a constant"
            )
        return self.low.known(symbol)

    def _empty(self, node: fx.Node, fake: torch.Tensor) -> ir.Value:
        """Returns a tensor with no elements, as the result of the node."""
        op, dtype = self.low.op, DTYPES[fake.dtype]
        # The result depends on the floating-point arguments by a Floor, so that their gradients are zero, not None.
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
        """Casts results to the dtypes of PyTorch's fake ones, and sets their shapes."""
        if isinstance(result, tuple | list):
            return tuple(self._typed(r, f) for r, f in zip(result, fake, strict=False))
        if isinstance(result, Complex):
            return Complex(*(self._typed(part, fake.real) for part in (result.re, result.im)))
        if isinstance(result, ir.Value) and isinstance(fake, torch.Tensor):
            if fake.dtype not in DTYPES:
                raise UnsupportedATenOp(f"{self.low.node.target} returns {fake.dtype}")
            result = self.low.tensor(result, DTYPES[fake.dtype])
            if not (result.is_graph_input() or result.is_initializer()):
                result.shape = self.low.shape(fake)
        return result

    def _outputs(self) -> None:
        returned = self.graph_module.graph.find_nodes(op="output")[0].args[0]
        for item in returned if isinstance(returned, tuple | list) else (returned,):
            if not isinstance(item, fx.Node):
                self.result.outputs.append(("constant", item))
            elif item in self.placeholders and self.env.get(item) is self.original.get(item):
                self.result.outputs.append(("placeholder", self.placeholders.index(item)))
            else:
                fake = item.meta["val"]
                kind = "integer"
                if isinstance(fake, torch.Tensor):
                    kind = "complex" if fake.is_complex() else "tensor"
                self.result.outputs.append((kind, self._output(self.env[item])))
        for node, before in self.original.items():
            if self.env[node] is not before:
                self.result.mutated.append((self.placeholders.index(node), self._output(self.env[node])))
        for value, message in self.low.assertions:
            self.result.assertions.append((self._output(value), message))
        # Random inputs that nothing reads are kept: eager PyTorch draws them too, and every later draw depends on it.
        self.result.model.graph.inputs.extend(value for value, _ in self.low.random)
        self.result.random = [random for _, random in self.low.random]

    def _output(self, value: Any) -> int:
        """Adds a value to the outputs of the ONNX graph, and returns its index among them."""
        outputs = self.result.model.graph.outputs
        if isinstance(value, Complex):
            shape = value.re.shape
            value = self.low.op.Concat(
                *(self.low.op.Unsqueeze(x, [-1]) for x in (value.re, value.im)), axis=-1
            )
            value.shape = None if shape is None else ir.Shape([*shape, 2])
        if not isinstance(value, ir.Value):
            value = self.low.op.const(value)
        # Each output of an ONNX graph needs a value of its own.
        if value.is_graph_output() or value.is_graph_input() or value.is_initializer():
            identity = self.low.op.Identity(value)
            identity.shape, identity.type = value.shape, value.type
            value = identity
        outputs.append(value)
        return len(outputs) - 1


def _function(node: fx.Node, name: str) -> LoweringFunction:
    """Returns the lowering of a node, whose op is called `name` without `_copy`."""
    python = getattr(node.target, "__name__", "")
    values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
    complex_ = any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)
    table = COMPLEX_LOWERINGS if complex_ and python != "getitem" else LOWERINGS
    # The overload, all overloads, a Python operator on symbolic numbers.
    for candidate in (name, name.rpartition(".")[0], python):
        if candidate in table:
            return table[candidate]
    of_what = " of complex numbers" if complex_ else ""
    raise UnsupportedATenOp(f"{node.target} has no lowering to ONNX{of_what}")


def _is_empty(fake: Any) -> bool:
    """Tells whether results are tensors of known sizes without elements."""
    if isinstance(fake, tuple | list):
        return any(part is not None for part in fake) and all(
            part is None or _is_empty(part) for part in fake
        )
    sizes = fake.shape if isinstance(fake, torch.Tensor) and fake.dtype in DTYPES else ()
    return all(isinstance(size, int) for size in sizes) and 0 in sizes


_NUMBERS = frozenset(
    f"{kind}{none}" for kind in ("int", "float", "bool", "list[int]") for none in ("", " | None")
)
"""Annotations of the parameters that take (lists of) Python numbers."""


@functools.cache
def _parameters(function: LoweringFunction) -> tuple[tuple[str, ...], frozenset[str]]:
    """Returns the names of a lowering's parameters for ATen arguments, and of those that take (lists of) numbers."""
    # The first parameter is the `Lowering`.
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return (
        tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD),
        frozenset(p.name for p in parameters if p.annotation in _NUMBERS),
    )


def _keeps(node: fx.Node) -> bool:
    """Tells whether dead code elimination must keep a node that nothing reads."""
    # A node stays if it mutates an input, checks something, or draws random numbers: eager PyTorch draws them too, and
    # every later draw depends on it.
    name = str(node.target)
    acts = any(word in name for word in ("copy_.", "_assert_async", "check_errors"))
    return node.op in ("placeholder", "output") or acts or draws(node)
