"""Defines composite training ops: model-local functions of domain `onnxtrain` whose bodies are standard ops.

A stock runtime inlines the body. If a native kernel of the same domain and name is registered, ONNX Runtime uses the
kernel instead. If the kernel lacked the dtype, ONNX Runtime would raise an error rather than inline the body, so the
dtype is part of the name: `SoftmaxGradient_float`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter
from onnxtrain.errors import GraphBuildError

DOMAIN = "onnxtrain"

Body = Callable[..., "ir.Value | tuple[ir.Value, ...]"]
"""Emits the body: `(op, *inputs, **attributes)` -> one output, or a tuple of outputs."""


class CompositeOp:
    """A composite op: builds one model-local function per dtype, all from the same Python function.

    Attributes:
        name: op type without the dtype, e.g. `SoftmaxGradient`.
        inputs: names of the inputs, e.g. ("y", "ct").
        dtypes: dtypes of inputs whose dtype differs from the function's, e.g. {"indices": INT64}.
        attributes: types of the attributes, by name.
        outputs: number of outputs.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str],
        attributes: Mapping[str, ir.AttributeType],
        outputs: int,
        dtypes: Mapping[str, ir.DataType],
        body: Body,
    ) -> None:
        self.name = name
        self.inputs = tuple(inputs)
        self.dtypes = dict(dtypes)
        self.attributes = dict(attributes)
        self.outputs = outputs
        self._body = body
        self._cached = functools.cache(self._build)
        self.__doc__ = body.__doc__

    def __repr__(self) -> str:
        return f"{DOMAIN}::{self.name}"

    @property
    def function_names(self) -> tuple[str, ...]:
        """Names of the op's functions, one per dtype."""
        return tuple(self.names_by_dtype.values())

    @property
    def names_by_dtype(self) -> dict[ir.DataType, str]:
        """Names of the op's functions by dtype, e.g. `ReluGradient_float` for float32."""
        return {dtype: f"{self.name}_{suffix}" for dtype, suffix in _DTYPE_NAMES.items()}

    def identifier(
        self, dtype: ir.DataType, functions: Mapping[ir.OperatorIdentifier, ir.Function]
    ) -> ir.OperatorIdentifier:
        """Returns the key of this op's function for `dtype` in `functions`, which need not contain it yet."""
        return (DOMAIN, f"{self.name}_{_DTYPE_NAMES[dtype]}", "")

    def function_for(self, dtype: ir.DataType, opset: int) -> ir.Function:
        """Returns a function that computes this op in `dtype`, using the standard ops of version `opset`."""
        # A clone, because models modify their functions, e.g. when inlining them.
        return self._cached(dtype, opset).clone()

    def emit(self, op: Emitter, *inputs: ir.Value, **attributes: Any) -> tuple[ir.Value, ...]:
        """Emits the nodes of the body, and returns the outputs."""
        result = self._body(op, *inputs, **attributes)
        return result if isinstance(result, tuple) else (result,)

    def _build(self, dtype: ir.DataType, opset: int) -> ir.Function:
        inputs = [self._input(name, dtype) for name in self.inputs]
        graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": opset})
        op = Emitter(graph, in_function=True)
        references: dict[str, Any] = {
            name: AttributeRef(name, type_) for name, type_ in self.attributes.items()
        }
        outputs = self.emit(op, *inputs, **references)
        # Callers rely on this number of outputs; with fewer, some would be undefined.
        if len(outputs) != self.outputs:
            raise GraphBuildError(
                f"building {self}: its body returned {len(outputs)} outputs, not {self.outputs}"
            )
        graph.outputs.extend(outputs)
        for value in inputs:
            # The function serves calls of any shape; only the body of a SpecializedOp relies on shapes.
            value.shape = None
        # Without defaults: each call must set all attributes.
        declared = [ir.Attr(name, type_, None) for name, type_ in self.attributes.items()]
        return ir.Function(DOMAIN, f"{self.name}_{_DTYPE_NAMES[dtype]}", graph=graph, attributes=declared)

    def _input(self, name: str, dtype: ir.DataType) -> ir.Value:
        """Creates the value of input `name` for the body of the function for `dtype`."""
        return ir.Value(name=name, type=ir.TensorType(self.dtypes.get(name, dtype)))


# Dtype names as spelled in the kernel library.
_DTYPE_NAMES = {
    ir.DataType.FLOAT: "float",
    ir.DataType.DOUBLE: "double",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
}

COMPOSITES: dict[str, CompositeOp] = {}
"""All composite ops by name, e.g. COMPOSITES["SoftmaxGradient"]."""


def composite(
    name: str,
    inputs: Sequence[str],
    attributes: Mapping[str, ir.AttributeType] | None = None,
    outputs: int = 1,
    dtypes: Mapping[str, ir.DataType] | None = None,
) -> Callable[[Body], CompositeOp]:
    """Registers the decorated function `(op, *inputs, **attributes)` as the body of a composite op.

    The body receives attributes as references. Pass them on as attributes of standard ops, or convert them to tensors:
    integers with `op.ints(reference)`, floats with `op.number(reference, like=...)`.

    Args:
        name: op type without the dtype, e.g. "SoftmaxGradient".
        inputs: names of the inputs.
        attributes: types of the attributes, by name.
        outputs: number of outputs.
        dtypes: dtypes of inputs that differ from the common floating-point dtype of all other inputs and outputs.
    """

    def register(body: Body) -> CompositeOp:
        op = CompositeOp(name, inputs, attributes or {}, outputs, dtypes or {}, body)
        COMPOSITES[name] = op
        return op

    return register
