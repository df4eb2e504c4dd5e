"""Presents a forward node to its gradient rule: inputs and outputs by schema name, attributes with defaults."""

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
    """Describes a node for error messages: "node 'conv1'", or "the node that computes 'y'" if it has no name."""
    return f"node {node.name!r}" if node.name else f"the node that computes {node.outputs[0].name!r}"


@dataclass(frozen=True)
class Signature:
    """Names of an op's inputs, outputs and attributes.

    Attributes:
        inputs: names of the inputs, e.g. ("X", "W", "B").
        outputs: names of the outputs, e.g. ("Y",).
        variadic_input: True if the last input is variadic.
        variadic_output: True if the last output is variadic.
        attributes: for an op without an ONNX schema, the default of each attribute, None for no default, e.g.
            {"metric": "sqeuclidean"}. None if the attributes are not declared: `NodeView.attr` then accepts any name.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    variadic_input: bool = False
    variadic_output: bool = False
    attributes: Mapping[str, Any] | None = None


class Outputs:
    """Access to the outputs of a node by schema name: `n.out.Y` is a value, or None if omitted."""

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
        # An omitted output has an empty name, or is missing at the end of the list.
        return outputs[index] if index < len(outputs) and outputs[index].name != "" else None


class NodeView:
    """View of a forward node with access to inputs by schema name: `n.X` is a value, or None if omitted.

    Args:
        node: the node.
        signature: names of the inputs and outputs.
        opset: version of the standard domain, e.g. 21.
        needed: the active values, used by :meth:`needs`.
        of: the differentiated values, used by :meth:`is_mixed`.

    Attributes:
        out: the outputs by name (`n.out.Y`).
        opset: version of the standard domain, e.g. 21.
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
        # `self._signature` would recurse infinitely while __init__ has not set it yet.
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
        """The forward node itself."""
        return self._node

    def is_mixed(self, output: ir.Value) -> bool:
        """True if the rule may mask the cotangent of this output with Mul, which is faster than Where.

        Mul turns a masked infinite cotangent into NaN. This is acceptable if every consumer of the output leads to an
        op that sums over many elements, such as MatMul: an infinite cotangent of that op's output makes the gradients
        upstream of the op infinite or NaN anyway.
        """
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
        """True if the cotangent of an input, given by schema name or as a value, is needed."""
        value = getattr(self, input_) if isinstance(input_, str) else input_
        return value is not None and value in self._needed

    def attr(self, name: str) -> Any:
        """Returns the value of an attribute, or its default from the schema; None if it has neither."""
        attribute = self._node.attributes.get(name)
        if attribute is not None:
            # A list, because rules concatenate and slice it together with their own lists.
            return list(attribute.value) if isinstance(attribute.value, tuple) else attribute.value
        declared = self._signature.attributes
        # Before the schema lookup, because ONNX Runtime also puts some of its own ops into the standard domain.
        if declared is not None:
            if name not in declared:
                raise RuleDefinitionError(f"{self.op_type} has no attribute {name!r}: {sorted(declared)}")
            return declared[name]
        # Without a schema, an absent attribute can't be told from a misspelled one.
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
        # onnx returns strings as bytes, onnx_ir as str.
        value = onnx.helper.get_attribute_value(default)
        return value.decode() if isinstance(value, bytes) else value

    def rank(self, value: ir.Value) -> int:
        """Returns the rank of a value.

        Raises:
            ShapeRequired: the rank is unknown.
        """
        if value.shape is None:
            producer = value.producer()
            origin = "" if producer is None else f", which {producer.op_type} computes,"
            raise ShapeRequired(
                f"{self._where()}: the rank of {value.name!r}{origin} must be known; declare its shape"
            )
        return value.shape.rank()

    def axis(self, value: ir.Value, axis: int) -> int:
        """Returns `axis` as a non-negative index, counting negative axes from the last axis of `value`."""
        return axis % self.rank(value) if axis < 0 else axis

    def static(self, value: ir.Value, axes: Sequence[int] | None = None) -> tuple[int, ...]:
        """Returns the sizes of the given axes (default: all axes), which must be static.

        Raises:
            ShapeRequired: a size is symbolic; the message names it.
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
        """Returns the array of a value that is constant in the graph; None for a value computed at run time."""
        # A trained initializer also has an array, but each step changes it.
        return None if value in self._needed else known_array(value)

    def _where(self) -> str:
        return f"differentiating {self.op_type} ({where(self._node)})"
