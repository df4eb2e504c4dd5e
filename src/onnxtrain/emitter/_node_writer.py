"""Appends nodes, calls to composite ops and constants to a graph."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, overload

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxtrain.emitter._names import Names, all_names, inputs_of_subgraph
from onnxtrain.emitter._schemas import output_dtype, schema_of
from onnxtrain.errors import GraphBuildError
from onnxtrain.passes.tidy.constants import mark_constant

Operand = ir.Value | npt.ArrayLike | None
"""An input of a node: a value, None for an omitted optional input, or a number or array that becomes a constant."""


@dataclass(frozen=True)
class AttributeRef:
    """Reference to an attribute of the enclosing function, for use as an attribute of a node in the function's body.

    Attributes:
        name: the function's attribute, e.g. "axis". Each call to the function sets its value.
        type: the attribute's type.
    """

    name: str
    type: ir.AttributeType


class Composite(Protocol):
    """A composite op: one model-local function per dtype (see `onnxtrain.functions`)."""

    def identifier(
        self, dtype: ir.DataType, functions: Mapping[ir.OperatorIdentifier, ir.Function]
    ) -> ir.OperatorIdentifier:
        """Returns the key of this op's function for `dtype` in `functions`, which need not contain it yet."""

    def function_for(self, dtype: ir.DataType, opset: int) -> ir.Function:
        """Returns a function that computes this op in `dtype`, using the standard ops of version `opset`."""


class Write(Protocol):
    """The type of `op.Name`, which appends a node and returns its output, or k outputs if called with `_outputs=k`."""

    @overload
    def __call__(self, *inputs: Operand, _outputs: int, **attributes: Any) -> tuple[ir.Value, ...]: ...

    @overload
    def __call__(self, *inputs: Operand, **attributes: Any) -> ir.Value: ...


class NodeWriter:
    """Appends nodes, calls to composite ops and constants to a graph.

    Args:
        graph: the graph to append to, or the graph of a function body.
        opset: version of the standard domain. Default: the version that the graph imports.
        functions: the model's function table, needed to call composite ops.
        in_function: True writes constants as Constant nodes, because function bodies have no initializers.
    """

    def __init__(
        self,
        graph: ir.Graph,
        *,
        opset: int | None = None,
        functions: dict[ir.OperatorIdentifier, ir.Function] | None = None,
        in_function: bool = False,
    ) -> None:
        self.graph = graph
        self.opset = opset if opset is not None else graph.opset_imports[""]
        self.scope = ""
        self.metadata: Mapping[str, Mapping[str, str]] = {}
        self._functions = functions
        self._imports = graph.opset_imports
        self._in_function = in_function
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._shapes: dict[ir.Value, ir.Value] = {}
        self._zeros: dict[ir.Value, ir.Value] = {}
        self._names = Names(all_names(graph))

    def __getattr__(self, op_type: str) -> Write:
        # ONNX op names begin with a capital letter. Any other name is a missing attribute, e.g. in `hasattr`.
        if not op_type[:1].isupper():
            raise AttributeError(f"{type(self).__name__} has no attribute {op_type!r}")

        def write(*inputs: Operand, **attributes: Any) -> Any:
            return self.emit(op_type, *inputs, **attributes)

        return write

    @overload
    def emit(
        self, op_type: str, *inputs: Operand, _outputs: int, **attributes: Any
    ) -> tuple[ir.Value, ...]: ...

    @overload
    def emit(self, op_type: str, *inputs: Operand, **attributes: Any) -> ir.Value: ...

    def emit(
        self, op_type: str, *inputs: Operand, _outputs: int | None = None, **attributes: Any
    ) -> ir.Value | tuple[ir.Value, ...]:
        """Appends one node of the standard domain.

        Returns:
            The output value, or a tuple of `_outputs` values if `_outputs` is given.
        """
        schema = schema_of(op_type, self.opset)
        # ONNX Runtime would report an unknown attribute only when it loads the model, far from the code that wrote it.
        if not attributes.keys() <= schema.attributes.keys():
            unknown = ", ".join(sorted(attributes.keys() - schema.attributes.keys()))
            raise GraphBuildError(
                f"writing a {op_type} node of opset {self.opset}: it has no attribute {unknown}; its attributes are "
                f"{', '.join(sorted(schema.attributes)) or 'none'}"
            )
        # ONNX doesn't promote dtypes: a Python float must get the dtype of the tensor that it is combined with.
        like = _first_float(inputs)
        values = [self._operand(v, like) for v in inputs]
        outputs = self._append("", op_type, values, _outputs or 1, attributes)
        # The last output may be variadic.
        formals = itertools.chain(schema.outputs, itertools.repeat(schema.outputs[-1]))
        # Dtypes are set here, while shapes are inferred later: rules read dtypes while they emit nodes.
        for output, formal in zip(outputs, formals, strict=False):
            dtype = output_dtype(formal, schema, values, attributes)
            output.type = ir.TensorType(dtype) if dtype is not None else None
        return outputs[0] if _outputs is None else outputs

    @overload
    def call(
        self, composite: Composite, *inputs: Operand, _outputs: int, **attributes: Any
    ) -> tuple[ir.Value, ...]: ...

    @overload
    def call(self, composite: Composite, *inputs: Operand, **attributes: Any) -> ir.Value: ...

    def call(
        self, composite: Composite, *inputs: Operand, _outputs: int | None = None, **attributes: Any
    ) -> ir.Value | tuple[ir.Value, ...]:
        """Appends a call to a composite op, and adds the op's function to the model if it is missing.

        The function has the dtype of the first floating-point input, and so have the outputs, except for those whose
        dtype the body sets otherwise, e.g. indices.

        Returns:
            The output value, or a tuple of `_outputs` values if `_outputs` is given.

        Raises:
            GraphBuildError: no input has a known floating-point dtype, or the emitter has no function table.
        """
        like = _first_float(inputs)
        if like is None or like.dtype is None:
            raise GraphBuildError(f"calling composite {composite}: no input has a known floating-point dtype")
        identifier = self.function(composite, like.dtype)
        values = [self._operand(v, like) for v in inputs]
        outputs = self._append(*identifier[:2], values, _outputs or 1, attributes)
        assert self._functions is not None
        for output, of_body in zip(outputs, self._functions[identifier].outputs, strict=False):
            output.type = ir.TensorType(of_body.dtype or like.dtype)
        return outputs[0] if _outputs is None else outputs

    def function(self, composite: Composite, dtype: ir.DataType) -> ir.OperatorIdentifier:
        """Adds a composite op's function for `dtype` to the model if it is missing; returns its identifier.

        Raises:
            GraphBuildError: the emitter has no function table.
        """
        if self._functions is None:
            raise GraphBuildError(f"calling composite {composite}: this emitter has no function table")
        identifier = composite.identifier(dtype, self._functions)
        if identifier not in self._functions:
            function = composite.function_for(dtype, self.opset)
            # A SpecializedOp's name ends in a number that depends on the functions that the model already has.
            function.name = identifier[1]
            self._functions[identifier] = function
        # A model must declare the domain of each function that it calls.
        self._imports.setdefault(identifier[0], 1)
        return identifier

    @property
    def can_call(self) -> bool:
        """True if this emitter has a function table, so that composite ops can be called."""
        return self._functions is not None

    def const(
        self, value: npt.ArrayLike, dtype: ir.DataType | None = None, *, like: ir.Value | None = None
    ) -> ir.Value:
        """Returns a constant; equal constants share one value.

        Args:
            value: number, list or array.
            dtype: element type. Default: the dtype of `like`. Without `like`: an array's own dtype, but float32 for
                float64 arrays; int64, bool or float32 for Python numbers.
            like: a value whose dtype the constant gets.
        """
        if dtype is None:
            dtype = like.dtype if like is not None else None
        array = _as_array(value)
        if dtype is None:
            kinds = {"i": ir.DataType.INT64, "u": ir.DataType.INT64, "b": ir.DataType.BOOL}
            # Arrays keep their dtype, except float64: NumPy's default for Python floats is rarely intended.
            array_dtype = None if array.dtype == np.float64 else ir.DataType.from_numpy(array.dtype)
            dtype = (
                array_dtype
                if isinstance(value, np.ndarray) and array_dtype
                else kinds.get(array.dtype.kind, ir.DataType.FLOAT)
            )
        # ascontiguousarray turns a scalar into a vector; the reshape restores the scalar.
        array = np.ascontiguousarray(array.astype(dtype.numpy())).reshape(array.shape)
        # Rules use the same few constants for every node of a graph.
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._new_constant(array, dtype)
        return self._constants[key]

    def ints(self, ref: AttributeRef) -> ir.Value:
        """Returns an integer or integer-list attribute of the enclosing function as an int64 tensor."""
        # A function attribute can only be referenced by a node's attribute; a Constant node turns it into a tensor.
        field = "value_int" if ref.type == ir.AttributeType.INT else "value_ints"
        output = self._append("", "Constant", [], 1, {field: ref})[0]
        output.type = ir.TensorType(ir.DataType.INT64)
        return output

    def number(self, ref: AttributeRef, like: ir.Value) -> ir.Value:
        """Returns a float attribute of the enclosing function as a scalar with the dtype of `like`."""
        output = self._append("", "Constant", [], 1, {"value_float": ref})[0]
        output.type = ir.TensorType(ir.DataType.FLOAT)
        if like.dtype in (None, ir.DataType.FLOAT):
            return output
        return self.Cast(output, to=like.dtype)

    def subgraph(self, inputs: Mapping[str, ir.DataType | None]) -> Self:
        """Returns an emitter for a new subgraph: a branch or body of a control-flow node.

        The subgraph may read values of this graph, and its names come from the same pool. Append its outputs, then pass
        the new emitter's `graph` to the control-flow node as an attribute.

        Args:
            inputs: names and dtypes of the subgraph's inputs.
        """
        values = [
            ir.Value(name=self.unique_name(self.scope + name), type=ir.TensorType(dtype) if dtype else None)
            for name, dtype in inputs.items()
        ]
        name = self.unique_name(self.scope + "body")
        return self.within(ir.Graph(values, [], nodes=[], opset_imports={"": self.opset}, name=name))

    def within(self, graph: ir.Graph) -> Self:
        """Returns an emitter for an existing branch or body. New names come from this emitter's pool."""
        inner = type(self)(graph, functions=self._functions, opset=self.opset)
        inner.scope, inner._names, inner.metadata = self.scope, self._names, self.metadata
        # The main graph declares the domains that its subgraphs use.
        inner._imports = self._imports
        return inner

    def copy_of(self, graph: ir.Graph, inputs: Sequence[ir.Value]) -> list[ir.Value]:
        """Appends copies of the nodes of a subgraph, and returns the copies of the subgraph's outputs.

        Copied values get new names. Values of enclosing graphs are not copied.

        Args:
            graph: the subgraph.
            inputs: values that replace the subgraph's inputs.
        """
        copy = graph.clone(allow_outer_scope_values=True)
        for old, new in zip(copy.inputs, inputs, strict=True):
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            new.type, new.shape = new.type or old.type, new.shape or old.shape
        outputs = list(copy.outputs)
        copy.outputs.clear()
        # The subgraph's initializers move to this graph, renamed to avoid collisions.
        for name, initializer in tuple(copy.initializers.items()):
            copy.initializers.pop(name)
            initializer.name = self.unique_name(name)
            self.graph.register_initializer(initializer)
        for node in copy.all_nodes():
            node.name = self.unique_name(f"{self.scope}{node.name or node.op_type}")
            inner = [
                value for attribute in node.attributes.values() for value in inputs_of_subgraph(attribute)
            ]
            for value in (*node.outputs, *inner):
                if value.name:
                    value.name = self.unique_name(f"{self.scope}{value.name}")
        nodes = list(copy)
        copy.remove(nodes)
        self.graph.extend(nodes)
        return outputs

    def add_functions(self, model: ir.Model) -> None:
        """Adds the functions of another model, and declares the domains of its ops, before its graph is copied here.

        Raises:
            GraphBuildError: the model has functions, and the emitter has no function table.
        """
        if model.functions and self._functions is None:
            raise GraphBuildError("copying a model with functions: this emitter has no function table")
        for identifier, function in model.functions.items():
            assert self._functions is not None
            self._functions.setdefault(identifier, function)
        for domain, version in model.graph.opset_imports.items():
            self._imports.setdefault(domain, version)

    @contextlib.contextmanager
    def placing(self, *, before: ir.Node | None = None, after: ir.Node | None = None) -> Iterator[None]:
        """Context manager that inserts the nodes emitted in its block before or after an existing node of the graph.

        ONNX requires nodes in topological order, but cached values, such as the results of :meth:`shape_of`, remain at
        the position where they were first emitted. To emit at several positions, start with the earliest one.

        Args:
            before: node before which to insert the new nodes.
            after: node after which to insert them. If `before` and `after` are None, they are appended to the graph.
        """
        last = self.graph[-1] if len(self.graph) else None
        yield
        # Scan backwards from the end, so that the cost doesn't grow with the size of the graph.
        appended = list(itertools.takewhile(lambda node: node is not last, reversed(self.graph)))[::-1]
        if before is not None:
            self.graph.remove(appended)
            self.graph.insert_before(before, appended)
        elif after is not None:
            self.graph.remove(appended)
            self.graph.insert_after(after, appended)

    def unique_name(self, preferred: str) -> str:
        """Returns the first free name among `preferred`, `preferred_1`, `preferred_2`, ... and reserves it."""
        return self._names.unique(preferred)

    def _operand(self, value: Operand, like: ir.Value | None) -> ir.Value | None:
        if value is None or isinstance(value, ir.Value):
            return value
        array = _as_array(value)
        return self.const(
            value, like=like if array.dtype.kind == "f" and not isinstance(value, np.ndarray) else None
        )

    def _append(
        self,
        domain: str,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: int,
        attributes: Mapping[str, Any],
    ) -> tuple[ir.Value, ...]:
        # Node names show a reader of the model, or of an ONNX Runtime error, where a node comes from.
        name = self.unique_name(f"{self.scope}{op_type}")
        values = [
            ir.Value(name=self.unique_name(name + ("_out" if i == 0 else f"_out{i}"))) for i in range(outputs)
        ]
        node = ir.Node(domain, op_type, inputs, _attributes(attributes), outputs=values, name=name)
        if not domain:
            node.metadata_props.update(self.metadata.get(op_type, {}))
        self.graph.append(node)
        return tuple(values)

    def _new_constant(self, array: np.ndarray, dtype: ir.DataType) -> ir.Value:
        tensor = ir.Tensor(array, dtype=dtype)
        if self._in_function:
            value = self._append("", "Constant", [], 1, {"value": tensor})[0]
            value.const_value = tensor
        else:
            value = ir.Value(name=self.unique_name("const"), const_value=tensor)
            # Without the mark, an initializer of floats would count as a trainable parameter.
            mark_constant(value)
            self.graph.register_initializer(value)
        value.type = ir.TensorType(dtype)
        value.shape = ir.Shape(array.shape)
        return value


def _first_float(inputs: Sequence[Operand]) -> ir.Value | None:
    """Returns the first floating-point value among operands, or None."""
    return next(
        (v for v in inputs if isinstance(v, ir.Value) and v.dtype and v.dtype.is_floating_point()), None
    )


def _as_array(value: npt.ArrayLike) -> np.ndarray:
    """Returns a constant as a NumPy array; an empty list becomes int64."""
    # An empty list here means no axes or no sizes, but NumPy would make it float64.
    return np.zeros(0, dtype=np.int64) if isinstance(value, list) and not value else np.asarray(value)


def _attributes(attributes: Mapping[str, Any]) -> list[ir.Attr]:
    result = []
    for name, value in attributes.items():
        if value is None:
            continue
        if isinstance(value, ir.Attr):
            result.append(value if value.name == name else ir.Attr(name, value.type, value.value))
        elif isinstance(value, AttributeRef):
            result.append(ir.RefAttr(name, value.name, value.type))
        elif isinstance(value, ir.DataType):
            result.append(ir.AttrInt64(name, int(value)))
        else:
            result.append(ir.convenience.convert_attribute(name, value, _attribute_type(value)))
    return result


def _attribute_type(value: object) -> ir.AttributeType | None:
    """Returns the type of an attribute with this value; None if onnx_ir has to find the type.

    onnx_ir (1.1) asks for protocols first, which takes 50 microseconds for a tensor or a list.
    """
    if isinstance(value, ir.Tensor):
        return ir.AttributeType.TENSOR
    if isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
        return ir.AttributeType.INTS
    return None
