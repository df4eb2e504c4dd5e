"""Shows a forward node to its gradient rule: inputs and outputs by schema name, attributes with their defaults."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.emitter import known_array, schema_of, static_dims
from onnxtrain.errors import RuleDefinitionError, ShapeRequired

from ._mixing import is_mixed


def where(node: ir.Node) -> str:
    """Names a node for messages: "node 'conv1'", or without a name "the node that computes 'y'"."""
    return f"node {node.name!r}" if node.name else f"the node that computes {node.outputs[0].name!r}"


@dataclass(frozen=True)
class Signature:
    """Names of an op's inputs, outputs and attributes.

    Attributes:
        inputs: names of the inputs, e.g. ("X", "W", "B").
        outputs: names of the outputs, e.g. ("Y",).
        variadic_input: True if any number of arguments belong to the last input.
        variadic_output: the same for outputs.
        attributes: for an op without an ONNX schema, the default of each attribute, None for no default, e.g.
            {"metric": "sqeuclidean"}. None if the attributes are not declared: then `NodeView.attr` accepts any name.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    variadic_input: bool = False
    variadic_output: bool = False
    attributes: Mapping[str, Any] | None = None


class Outputs:
    """Gives the outputs of a node by their schema names, `n.out.Y`; None for an omitted optional output."""

    def __init__(self, node: ir.Node, signature: Signature) -> None:
        self._node = node
        self._signature = signature

    def __getattr__(self, name: str) -> Any:
        if name not in self._signature.outputs:
            raise RuleDefinitionError(
                f"{self._node.op_type} has no output {name!r}: {self._signature.outputs}"
            )
        index = self._signature.outputs.index(name)
        outputs = self._node.outputs
        # An omitted output has an empty name, or at the end no place at all.
        return outputs[index] if index < len(outputs) and outputs[index].name != "" else None


class NodeView:
    """A forward node, its inputs by their schema names: `n.X` is a value, or None when omitted.

    Args:
        node: the node.
        signature: names of its inputs and outputs.
        opset: version of the standard domain in force, e.g. 21.
        needed: the active values; :meth:`needs` looks an input up in them.
        of: the differentiated values; :meth:`is_mixed` needs them.

    Attributes:
        out: its outputs by name (`n.out.Y`).
        opset: as above.
    """

    def __init__(
        self,
        node: ir.Node,
        signature: Signature,
        opset: int,
        needed: Set[ir.Value],
        of: Collection[ir.Value] = (),
    ) -> None:
        self._node = node
        self._of = of
        self._signature = signature
        self._needed = needed
        self.opset = opset
        self.out = Outputs(node, signature)

    def __getattr__(self, name: str) -> Any:
        # `self._signature` would call this method again, without end, as long as __init__ has not set it.
        signature: Signature = self.__dict__["_signature"]
        if name not in signature.inputs:
            raise RuleDefinitionError(f"{self._node.op_type} has no input {name!r}: {signature.inputs}")
        index = signature.inputs.index(name)
        return self._node.inputs[index] if index < len(self._node.inputs) else None

    @property
    def op_type(self) -> str:
        """The op's name."""
        return self._node.op_type

    @property
    def node(self) -> ir.Node:
        """The node itself."""
        return self._node

    def is_mixed(self, output: ir.Value) -> bool:
        """Says if the mask of a cotangent of this output may be a product instead of a Where (see `_mixing`)."""
        return is_mixed(output, self._needed, self._of)

    @property
    def inputs(self) -> Sequence[ir.Value | None]:
        """All inputs in order."""
        return self._node.inputs

    @property
    def outputs(self) -> Sequence[ir.Value]:
        """All outputs in order."""
        return self._node.outputs

    def needs(self, input_: str | ir.Value | None) -> bool:
        """Says if the cotangent of an input, given by schema name or as a value, is wanted."""
        value = getattr(self, input_) if isinstance(input_, str) else input_
        return value is not None and value in self._needed

    def attr(self, name: str) -> Any:
        """Returns an attribute's value, the schema's default when absent, or None when it has none."""
        attribute = self._node.attributes.get(name)
        if attribute is not None:
            # Lists, because rules add and slice them together with lists of their own.
            return list(attribute.value) if isinstance(attribute.value, tuple) else attribute.value
        declared = self._signature.attributes
        # Asked before the schema: onnxruntime also writes ops of its own into the standard domain.
        if declared is not None:
            if name not in declared:
                raise RuleDefinitionError(f"{self.op_type} has no attribute {name!r}: {sorted(declared)}")
            return declared[name]
        # Without a schema nothing tells an absent attribute from a misspelt one.
        if self._node.domain not in ("", "ai.onnx"):
            return None
        schema = schema_of(self._node.op_type, self.opset)
        if name not in schema.attributes:
            raise RuleDefinitionError(
                f"{self.op_type} has no attribute {name!r}: {sorted(schema.attributes)}"
            )
        default = schema.attributes[name].default_value
        if not default.name:
            return None
        # onnx gives texts as bytes, onnx_ir as str.
        value = onnx.helper.get_attribute_value(default)
        return value.decode() if isinstance(value, bytes) else value

    def rank(self, value: ir.Value) -> int:
        """Returns the rank of a value.

        Raises:
            ShapeRequired: shape inference could not find the rank.
        """
        if value.shape is None:
            producer = value.producer()
            origin = "" if producer is None else f", which {producer.op_type} computes,"
            raise ShapeRequired(
                f"{self._where()}: the rank of {value.name!r}{origin} must be known; declare its shape"
            )
        return value.shape.rank()

    def axis(self, value: ir.Value, axis: int) -> int:
        """Returns a possibly negative axis as a non-negative one."""
        return axis % self.rank(value) if axis < 0 else axis

    def static(self, value: ir.Value, axes: Sequence[int] | None = None) -> tuple[int, ...]:
        """Returns the sizes of the given axes (default: all), which must be static.

        Raises:
            ShapeRequired: one of them is symbolic; the message names it.
        """
        rank = self.rank(value)
        dims = static_dims(value) or ()
        result = []
        for axis in axes if axes is not None else range(rank):
            size = dims[axis]
            if size is None:
                assert value.shape is not None
                raise ShapeRequired(
                    f"{self._where()}: dimension {axis} ({value.shape[axis]}) of {value.name!r} must be static; "
                    "export the model with a fixed size there"
                )
            result.append(size)
        return tuple(result)

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """Returns the array of a value that is known when the graph is built; None for a value of run time."""
        # An initializer that is trained has an array, too, but the next step changes it.
        return None if value in self._needed else known_array(value)

    def _where(self) -> str:
        return f"differentiating {self.op_type} ({where(self._node)})"
