"""Composite ops whose body depends on more than the dtype, such as the sizes of a kernel.

Of each body there is a function: `ConvolutionGradient0_float`, `ConvolutionGradient1_float`, ... The number only says
which body it is (overloads of one name would be the standard's way, and ONNX Runtime 1.20 takes the last of them
for all). Native kernels, which read attributes and shapes, are registered under as many numbers as a model needs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, MutableMapping

import onnx_ir as ir

from ._composite import DOMAIN, Body, CompositeOp

_KEY = "onnxtrain.body"
_NAME = re.compile(r"(.+?)\d+_b?float16")
_NARROW = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


class SpecializedOp(CompositeOp):
    """One body of a composite op.

    Args:
        name: op type without number and dtype.
        inputs: names of its inputs and their shapes; what is static in them the body may rely on.
        attributes: as of :class:`CompositeOp`; they tell a kernel what the body has built in.
        outputs: number of outputs.
        key: says what the body was built for; bodies of the same key are the same.
        body: as of :class:`CompositeOp`; it is given the attributes, and need not use them.
    """

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, ir.Shape | None],
        attributes: Mapping[str, ir.AttributeType],
        outputs: int,
        key: str,
        body: Body,
    ) -> None:
        super().__init__(name, list(inputs), attributes, outputs, (), body)
        self._shapes = dict(inputs)
        self._key = key

    def identifier(
        self, dtype: ir.DataType, functions: Mapping[ir.OperatorIdentifier, ir.Function]
    ) -> ir.OperatorIdentifier:
        """Returns the function of this body in `functions`, or the first number that is free there."""
        _, name, _ = super().identifier(dtype, functions)
        return _numbered(name, self._key, functions)

    def function_for(self, dtype: ir.DataType, opset: int) -> ir.Function:
        """Returns the function; its name has no number yet."""
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
    """Adds the function that computes in float32 what one of bfloat16 or float16 does; returns its name.

    Returns None where `function` is none of a :class:`SpecializedOp` in these dtypes.
    """
    key, name = function.metadata_props.get(_KEY), _NAME.fullmatch(function.name)
    if key is None or name is None or function.domain != DOMAIN:
        return None
    identifier = _numbered(f"{name[1]}_float", key, functions)
    if identifier not in functions:
        wide = function.clone()
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
    """Adds the function `name` that computes in float32 what one of a :class:`SpecializedOp` does, of rounded inputs.

    They are rounded to bfloat16. Returns what it is called by: `name` has no number yet.
    """
    identifier = _numbered(name, function.metadata_props[_KEY], functions)
    if identifier not in functions:
        rounded = function.clone()
        first = next(iter(rounded))
        for value in rounded.inputs:
            readers = tuple(value.uses())
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
    """Returns the name with the number of the function with this body, or with the first one that is free."""
    stem, _, suffix = name.rpartition("_")
    for number in itertools.count():
        identifier = (DOMAIN, f"{stem}{number}_{suffix}", "")
        there = functions.get(identifier)
        if there is None or there.metadata_props.get(_KEY) == key:
            return identifier
    raise AssertionError("unreachable")
