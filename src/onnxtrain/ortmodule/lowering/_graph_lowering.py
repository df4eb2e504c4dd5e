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

from onnxtrain.fusion import AttentionPass, QkvAttentionPass, fuse_forward
from onnxtrain.ortmodule.capture._nodes import CHECKPOINT_REGION, depends_on_data
from onnxtrain.ortmodule.capture.graph._checkpoint import mark_region
from onnxtrain.ortmodule.lowering._partition import is_random
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
from onnxtrain.passes import CeilModePass, ReluAfterMaxPoolPass, ReluBeforeReshapePass, infer_shapes
from onnxtrain.passes.canonical.einsum_pairs import EinsumPairsPass
from onnxtrain.passes.canonical.merged_batches import MergedBatchesPass


def lower_graph(graph_module: fx.GraphModule) -> Lowered:
    """Lowers a functional ATen graph to ONNX.

    Raises:
        UnsupportedATenOp: an op has no lowering, or its lowering does not support the arguments.
    """
    lowered = GraphLowering(graph_module, "forward").run()
    model = lowered.model
    # This pass runs before shape inference, because onnx's shape inference miscounts windows in ceil mode.
    CeilModePass(keep_sizes=True)(model)
    _infer_missing_shapes(model)
    if EinsumPairsPass()(model).modified:
        _infer_missing_shapes(model)
    fuse_forward(model)
    ir.passes.Sequential(MergedBatchesPass(), AttentionPass(), QkvAttentionPass())(model)
    ir.passes.Sequential(ReluAfterMaxPoolPass(), ReluBeforeReshapePass())(model)
    return lowered


def _infer_missing_shapes(model: ir.Model) -> None:
    """Infers the shapes of values that have no shape from PyTorch. Shapes from PyTorch are kept."""
    # Without static shapes, gradients would be un-broadcast at run time. PyTorch's shapes relate symbolic sizes where
    # onnx's inference gives up.
    values = [value for node in model.graph for value in node.outputs]
    from_torch = {value: value.shape for value in values if value.shape is not None}
    if len(from_torch) < len(values):
        infer_shapes(model)
    for value, shape in from_torch.items():
        value.shape = shape


class GraphLowering:
    """Lowers one ATen graph to one ONNX graph.

    Args:
        graph_module: the ATen graph.
        name: name of the ONNX graph, e.g. "forward".

    Attributes:
        graph_module: the ATen graph.
        result: the ONNX graph and its inputs and outputs, built and returned by `run`.
        low: the `Lowering`, the first argument of lowering functions.
        env: maps each ATen node lowered so far to an ONNX value, a `Complex`, a Python number, or a tuple of these.
        placeholders: the inputs of the ATen graph, in order.
        original: initial values of the placeholders in `env`, before the graph writes to them.
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
        """Removes dead code from the ATen graph, in place, and lowers it."""
        graph_module = self.graph_module
        self._check_mutations()
        # A dead node might have no lowering.
        graph_module.graph.eliminate_dead_code(is_impure_node=_is_impure)
        self._add_inputs()
        for node in graph_module.graph.nodes:
            if node.op == "call_function":
                # Nodes of a checkpointed region are marked for recomputation in the backward pass.
                count_before = self.result.model.graph.num_nodes()
                self.env[node] = self._lower_call(node)
                if (region := node.meta.get(CHECKPOINT_REGION)) is not None:
                    count = self.result.model.graph.num_nodes() - count_before
                    for onnx_node in itertools.islice(reversed(self.result.model.graph), count):
                        mark_region(onnx_node, region)
            elif node.op == "get_attr":
                self.env[node] = self._constant(node)
            elif node.op not in ("placeholder", "output"):
                raise UnsupportedATenOp(f"{node.op} {node.target} has no lowering to ONNX")
        self._add_outputs()
        return self.result

    def _check_mutations(self) -> None:
        """Raises UnsupportedATenOp for in-place ops, except copies into a placeholder."""
        # Dead code elimination would remove such a node, because nothing reads its result.
        for node in self.graph_module.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            if schema is None or not schema.is_mutable:
                continue
            if str(node.target) != "aten.copy_.default" or node.args[0] not in self.placeholders:
                raise UnsupportedATenOp(f"{node.target} writes to a tensor that is not an input")

    def _add_input(self, name: str, shape: ir.Shape, dtype: ir.DataType) -> ir.Value:
        """Adds an input to the ONNX graph. Returns its value."""
        value = ir.Value(name=self.low.op.unique_name(name), shape=shape, type=ir.TensorType(dtype))
        self.result.model.graph.inputs.append(value)
        return value

    def _add_inputs(self) -> None:
        """Adds the ONNX inputs, and stores the lowered value of each placeholder in `env` and `original`."""
        for index, node in enumerate(self.placeholders):
            fake = node.meta["val"]
            # Numbers are handled after the tensors, because most are sizes of a tensor.
            if not isinstance(fake, torch.Tensor):
                continue
            dtype = COMPONENTS.get(fake.dtype, fake.dtype)
            if dtype not in DTYPES or fake.layout != torch.strided:
                raise UnsupportedATenOp(f"input {node.name} ({fake.dtype}, {fake.layout}) has no ONNX type")
            # The ONNX input for a complex tensor is `torch.view_as_real` of it.
            parts = [2] if fake.is_complex() else []
            shape = ir.Shape([*self.low.shape(fake), *parts])
            value = self._add_input(f"input{index}", shape, DTYPES[dtype])
            self.result.inputs.append(index)
            if parts:
                self.result.complex.add(index)
            self.env[node] = self.original[node] = self._view_as_complex(value, fake) if parts else value
        for index, node in enumerate(self.placeholders):
            if node not in self.env and node.users:
                self.env[node] = self.original[node] = self._symbolic_number(index, node)

    def _view_as_complex(self, value: ir.Value, fake: torch.Tensor) -> Complex:
        """Splits the last axis of a complex input into the real and the imaginary part."""
        parts = [self.low.op.Gather(value, part, axis=-1) for part in (0, 1)]
        for part in parts:
            part.shape = self.low.shape(fake)
        return Complex(*parts)

    def _symbolic_number(self, index: int, node: fx.Node) -> Any:
        """Returns the lowered value of a placeholder that is a Python number or a symbolic number, not a tensor.

        An int is returned unchanged. A symbol is read from the shape of an input tensor that has an axis of this size.
        If there is no such tensor, or for a float, an ONNX input is added.

        Args:
            index: index of the placeholder.
            node: the placeholder.
        """
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
        return self._add_input(f"input{index}", ir.Shape([]), dtype)

    def _constant(self, node: fx.Node) -> ir.Value | Complex:
        """Returns the constant for a tensor attribute of the graph module, e.g. `torch.tensor(1.0)` in user code."""
        tensor = getattr(self.graph_module, str(node.target))
        if not isinstance(tensor, torch.Tensor):
            kind = "the body of a higher-order operator" if callable(tensor) else f"a {type(tensor).__name__}"
            raise UnsupportedATenOp(f"attribute {node.target} is {kind}")
        if tensor.is_complex():
            parts = torch.view_as_real(tensor.detach().cpu().resolve_conj()).unbind(-1)
            return Complex(*(self.low.op.const(part.numpy(), DTYPES[part.dtype]) for part in parts))
        # NumPy has no bfloat16.
        numbers = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        return self.low.op.const(numbers.detach().cpu().numpy(), DTYPES[tensor.dtype])

    def _lower_call(self, node: fx.Node) -> Any:
        """Lowers a `call_function` node. Returns its value."""
        low = self.low
        low.node = node
        low.op.scope = f"{node.name}/"
        # A functional graph has no aliases: `view_copy` and `view` are the same there.
        name = str(node.target).replace("_copy", "") if callable(node.target) else str(node.target)
        if name == "aten.copy_.default":
            # Nodes after this one read the new value of the placeholder.
            destination, source = node.args[0], self.env[node.args[1]]  # type: ignore[index]
            self.env[destination] = self._as_traced(source, node.meta["val"])  # type: ignore[index]
            return self.env[destination]  # type: ignore[index]
        function = _find_lowering(node, name)
        fake: Any = node.meta.get("val")
        # Many ONNX Runtime kernels fail for tensors without elements.
        if name.startswith("aten.") and name != "aten.detach.default" and _has_no_elements(fake):
            if isinstance(fake, tuple | list):
                return tuple(None if part is None else self._empty_result(node, part) for part in fake)
            return self._empty_result(node, fake)
        try:
            args, kwargs = self._arguments(function, node)
            result = function(low, *args, **kwargs)
        except UnsupportedATenOp:
            raise
        # A bug in a lowering must not make the user's call fail, because PyTorch can run the node.
        except Exception as error:
            raise UnsupportedATenOp(
                f"{node.target}: its lowering failed ({type(error).__name__}: {error}); please report it"
            ) from error
        return self._as_traced(result, fake)

    def _arguments(self, function: LoweringFunction, node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
        """Returns the positional and keyword arguments for the lowering function of a node.

        ATen nodes among the arguments are replaced with their lowered values, or with Python numbers if the function
        annotates the parameter as a number.
        """
        names, numbers = _parameters_of(function)

        def value(argument: Any, name: str) -> Any:
            if name in numbers:
                return fx.node.map_arg(argument, self._specialized)
            return fx.node.map_arg(argument, self.env.__getitem__)

        names += ("",) * (len(node.args) - len(names))
        args = [value(argument, name) for argument, name in zip(node.args, names, strict=False)]
        return args, {name: value(argument, name) for name, argument in node.kwargs.items()}

    def _specialized(self, node: fx.Node) -> Any:
        """Specializes a symbolic number: guards on its current value, and returns that value.

        Other lowered values are returned unchanged.

        Raises:
            UnsupportedATenOp: the number depends on the data.
        """
        symbol, lowered = node.meta.get("val"), self.env[node]
        if not isinstance(lowered, ir.Value) or isinstance(symbol, torch.Tensor):
            return lowered
        if depends_on_data(symbol):
            raise self.low.unsupported(
                f"the number {symbol}, which depends on the data, where ONNX requires a constant"
            )
        return self.low.specialized(symbol)

    def _empty_result(self, node: fx.Node, fake: torch.Tensor) -> ir.Value:
        """Returns a result that has no elements, without calling the node's lowering function.

        Floating-point arguments of the node get gradients of zero instead of None.

        Args:
            node: the ATen node.
            fake: the fake tensor of the result.
        """
        op, dtype = self.low.op, DTYPES[fake.dtype]
        # Adding a Floor of each floating-point argument, which has no elements either, makes the arguments' gradients
        # zero instead of None.
        result = op.const(np.zeros(tuple(fake.shape), np.int8), dtype)
        for source in node.all_input_nodes if dtype.is_floating_point() else ():
            value = self.env[source]
            if isinstance(value, ir.Value) and value.dtype is not None and value.dtype.is_floating_point():
                empty = op.Floor(op.Slice(op.Reshape(self.low.tensor(value, dtype), [-1]), [0], [0], [0]))
                result = op.Add(result, op.Reshape(empty, op.const(list(fake.shape)), allowzero=1))
        value = self._as_traced(result, fake)
        assert isinstance(value, ir.Value)
        return value

    def _as_traced(self, result: Any, fake: Any) -> Any:
        """Casts a result, or each result of a tuple, to the dtype that PyTorch traced, and sets the traced shape.

        Args:
            result: result of the lowering function.
            fake: the fake tensor, or the tuple of fake tensors, of the ATen node.

        Raises:
            UnsupportedATenOp: ONNX lacks the dtype.
        """
        if isinstance(result, tuple | list):
            return tuple(self._as_traced(r, f) for r, f in zip(result, fake, strict=False))
        if isinstance(result, Complex):
            return Complex(*(self._as_traced(part, fake.real) for part in (result.re, result.im)))
        if isinstance(result, ir.Value) and isinstance(fake, torch.Tensor):
            if fake.dtype not in DTYPES:
                raise UnsupportedATenOp(f"{self.low.node.target} returns {fake.dtype}, which ONNX lacks")
            result = self.low.tensor(result, DTYPES[fake.dtype])
            if not (result.is_graph_input() or result.is_initializer()):
                result.shape = self.low.shape(fake)
        return result

    def _add_outputs(self) -> None:
        """Adds the ONNX outputs (returned values, new values of placeholders, assertions) and the random inputs."""
        returned = self.graph_module.graph.find_nodes(op="output")[0].args[0]
        for item in returned if isinstance(returned, tuple | list) else (returned,):
            if not isinstance(item, fx.Node):
                self.result.outputs.append(("constant", item))
            elif item in self.placeholders and self.env.get(item) is self.original.get(item):
                self.result.outputs.append(("placeholder", self.placeholders.index(item)))
            else:
                fake = item.meta["val"]
                kind = "number"
                if isinstance(fake, torch.Tensor):
                    kind = "complex" if fake.is_complex() else "tensor"
                self.result.outputs.append((kind, self._add_output(self.env[item])))
        for node, before in self.original.items():
            if self.env[node] is not before:
                self.result.mutated.append((self.placeholders.index(node), self._add_output(self.env[node])))
        for value, message in self.low.assertions:
            self.result.assertions.append((self._add_output(value), message))
        # Unused random inputs are kept, because drawing them advances the generator, as in eager PyTorch.
        self.result.model.graph.inputs.extend(value for value, _ in self.low.random)
        self.result.random = [random for _, random in self.low.random]

    def _add_output(self, value: Any) -> int:
        """Adds a value to the outputs of the ONNX graph. Returns its index."""
        outputs = self.result.model.graph.outputs
        if isinstance(value, Complex):
            shape = value.re.shape
            value = self.low.op.Concat(
                *(self.low.op.Unsqueeze(x, [-1]) for x in (value.re, value.im)), axis=-1
            )
            value.shape = None if shape is None else ir.Shape([*shape, 2])
        if not isinstance(value, ir.Value):
            value = self.low.op.const(value)
        # An ONNX value can be an output only once, and must not be an input or initializer.
        if value.is_graph_output() or value.is_graph_input() or value.is_initializer():
            identity = self.low.op.Identity(value)
            identity.shape, identity.type = value.shape, value.type
            value = identity
        outputs.append(value)
        return len(outputs) - 1


def _find_lowering(node: fx.Node, name: str) -> LoweringFunction:
    """Returns the lowering function of a node.

    Args:
        node: a `call_function` node.
        name: name of the called function without `_copy`, e.g. "aten.view.default".

    Raises:
        UnsupportedATenOp: no lowering is registered for the called function.
    """
    python = getattr(node.target, "__name__", "")
    values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
    complex_ = any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)
    table = COMPLEX_LOWERINGS if complex_ and python != "getitem" else LOWERINGS
    # In order: the overload, the op with all overloads, a Python operator on symbolic numbers.
    for candidate in (name, name.rpartition(".")[0], python):
        if candidate in table:
            return table[candidate]
    case = " for complex numbers" if complex_ else ""
    raise UnsupportedATenOp(f"{node.target} has no lowering to ONNX{case}")


def _has_no_elements(fake: Any) -> bool:
    """True if a result, or each tensor of a tuple of results, has a static shape with an axis of size 0.

    False for dtypes that are not in `DTYPES`, e.g. complex64.
    """
    if isinstance(fake, tuple | list):
        return any(part is not None for part in fake) and all(
            part is None or _has_no_elements(part) for part in fake
        )
    sizes = fake.shape if isinstance(fake, torch.Tensor) and fake.dtype in DTYPES else ()
    return all(isinstance(size, int) for size in sizes) and 0 in sizes


_NUMBER_ANNOTATIONS = frozenset(
    f"{kind}{none}" for kind in ("int", "float", "bool", "list[int]") for none in ("", " | None")
)
"""Annotations of parameters that take Python numbers or lists of them."""


@functools.cache
def _parameters_of(function: LoweringFunction) -> tuple[tuple[str, ...], frozenset[str]]:
    """Inspects the signature of a lowering function, except for its first parameter.

    Returns:
        The names of the positional parameters, and the names of all parameters annotated as Python numbers or lists of
        integers.
    """
    # The first parameter is the `Lowering`.
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return (
        tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD),
        frozenset(p.name for p in parameters if p.annotation in _NUMBER_ANNOTATIONS),
    )


def _is_impure(node: fx.Node) -> bool:
    """True if dead code elimination must keep the node even if nothing reads it."""
    # Random ops are impure: they advance the generator, as in eager PyTorch.
    name = str(node.target)
    has_effect = any(word in name for word in ("copy_.", "_assert_async", "check_errors"))
    return node.op in ("placeholder", "output") or has_effect or is_random(node)
