"""Defines composite ops whose body depends on more than the dtype, e.g. on the kernel size of a convolution.

There is one function per body: `ConvolutionGradient0_float`, `ConvolutionGradient1_float`, ... The number only
distinguishes bodies. Overloads of one name would be ONNX's own solution, but ONNX Runtime 1.20 uses the last overload
for all of them. Native kernels, which read attributes and shapes instead, are registered under as many numbers as a
model needs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, MutableMapping

import onnx_ir as ir

from ._composite import DOMAIN, Body, CompositeOp

# Metadata entry of a function that holds the key of its body: name and number alone don't identify a body.
_KEY = "onnxtrain.body"
_NAME = re.compile(r"(.+?)\d+_b?float16")
_NARROW = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


class SpecializedOp(CompositeOp):
    """A composite op whose body may depend on static sizes and attribute values, e.g. on a convolution's kernel size.

    Ops of one name with different bodies get functions whose names are numbered, e.g. `ConvolutionGradient0_float` and
    `ConvolutionGradient1_float`.

    Args:
        name: op type without number and dtype, e.g. `ConvolutionGradient`.
        inputs: shapes of the inputs, by name; None for an unknown shape. The body may rely on static sizes.
        attributes: types of the attributes, by name. Native kernels read the attributes; the body has their values
            hard-coded.
        outputs: number of outputs.
        key: describes the case for which the body was built. Ops with equal keys have equal bodies.
        body: emits the nodes: `(op, *inputs, **attributes)` -> one output, or a tuple of outputs. It may ignore the
            attributes.
        dtypes: dtypes of inputs whose dtype differs from the function's, by name.
    """

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, ir.Shape | None],
        attributes: Mapping[str, ir.AttributeType],
        outputs: int,
        key: str,
        body: Body,
        dtypes: Mapping[str, ir.DataType] | None = None,
    ) -> None:
        super().__init__(name, list(inputs), attributes, outputs, dtypes or {}, body)
        self._shapes = dict(inputs)
        self._key = key

    def identifier(
        self, dtype: ir.DataType, functions: Mapping[ir.OperatorIdentifier, ir.Function]
    ) -> ir.OperatorIdentifier:
        """Returns the identifier of this op's function for `dtype`, whose name is numbered: ConvolutionGradient0_float.

        If `functions` already contains a function with this name and an equal key, the op shares it. Otherwise, the
        name gets the first unused number, and the caller adds the function.
        """
        _, name, _ = super().identifier(dtype, functions)
        return _numbered(name, self._key, functions)

    def function_for(self, dtype: ir.DataType, opset: int) -> ir.Function:
        """Returns a function that computes this op in `dtype`, using the standard ops of version `opset`.

        The name has no number yet, e.g. `ConvolutionGradient_float`. The caller renames the function to
        :meth:`identifier`.
        """
        function = super().function_for(dtype, opset)
        function.metadata_props[_KEY] = self._key
        return function

    def _input(self, name: str, dtype: ir.DataType) -> ir.Value:
        value = super()._input(name, dtype)
        value.shape = self._shapes[name]
        return value


def widened(
    function: ir.Function, functions: MutableMapping[ir.OperatorIdentifier, ir.Function]
) -> ir.OperatorIdentifier | None:
    """Adds a float32 version of a bfloat16 or float16 function, for runtimes whose kernels compute in float32.

    Args:
        function: function of a :class:`SpecializedOp`; it is not modified.
        functions: the model's function table. An equal function in it is reused.

    Returns:
        The identifier of the float32 function, or None if `function` does not belong to a :class:`SpecializedOp` in
        bfloat16 or float16.
    """
    key, name = function.metadata_props.get(_KEY), _NAME.fullmatch(function.name)
    if key is None or name is None or function.domain != DOMAIN:
        return None
    identifier = _numbered(f"{name[1]}_float", key, functions)
    # Calls with equal bodies share one function.
    if identifier not in functions:
        wide = function.clone()
        # Constants and casts in the body refer to the narrow dtype.
        for node in wide:
            for attribute in tuple(node.attributes.values()):
                if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _NARROW:
                    tensor = ir.tensor(attribute.as_tensor().numpy().astype("float32"))
                    node.attributes.add(ir.AttrTensor(attribute.name, tensor))
                elif attribute.name == "to" and attribute.as_int() in _NARROW:
                    node.attributes.add(ir.AttrInt64("to", int(ir.DataType.FLOAT)))
        for value in (*wide.inputs, *(output for node in wide for output in node.outputs)):
            if value.dtype in _NARROW:
                value.type = ir.TensorType(ir.DataType.FLOAT)
        wide.name = identifier[1]
        functions[identifier] = wide
    return identifier


def of_rounded(
    function: ir.Function, name: str, functions: MutableMapping[ir.OperatorIdentifier, ir.Function]
) -> ir.OperatorIdentifier:
    """Adds a version of a float32 function that rounds its inputs to bfloat16.

    Args:
        function: a float32 function of a :class:`SpecializedOp`.
        name: name of the new function, without its number, e.g. "ConvolutionBfloat16Gradient_float".
        functions: the model's function table.

    Returns:
        The new function's identifier.
    """
    identifier = _numbered(name, function.metadata_props[_KEY], functions)
    if identifier not in functions:
        rounded = function.clone()
        first = next(iter(rounded))
        # The casts are part of the body, so that a stock runtime rounds as the kernel does.
        for value in rounded.inputs:
            readers = tuple(value.uses())
            # Inputs that only provide a shape may have no readers in the body.
            if not readers:
                continue
            narrow = ir.node("Cast", [value], {"to": int(ir.DataType.BFLOAT16)})
            wide = ir.node("Cast", narrow.outputs, {"to": int(ir.DataType.FLOAT)})
            rounded.insert_before(first, [narrow, wide])
            for node, index in readers:
                node.replace_input_with(index, wide.outputs[0])
        rounded.name = identifier[1]
        functions[identifier] = rounded
    return identifier


def _numbered(
    name: str, key: str, functions: Mapping[ir.OperatorIdentifier, ir.Function]
) -> ir.OperatorIdentifier:
    """Returns the identifier for `name` with a number before the dtype, e.g. "ConvolutionGradient0_float".

    If a function in `functions` has an equal key, its number is reused; otherwise, the number is the first unused one.
    """
    stem, _, suffix = name.rpartition("_")
    for number in itertools.count():
        identifier = (DOMAIN, f"{stem}{number}_{suffix}", "")
        function = functions.get(identifier)
        if function is None or function.metadata_props.get(_KEY) == key:
            return identifier
    raise AssertionError("unreachable")
