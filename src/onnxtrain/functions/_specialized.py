"""Composite ops whose body depends on more than the dtype, such as the sizes of a kernel.

Of each body there is a function: `ConvolutionGradient0_float`, `ConvolutionGradient1_float`, ... The number only says
which body it is (overloads of one name would be the standard's way, and ONNX Runtime 1.20 takes the last of them
for all). Native kernels are registered for the first numbers and read attributes and shapes; beyond them bodies run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import onnx_ir as ir

from ._composite import Body, CompositeOp

__all__ = ["SpecializedOp"]

_KEY = "onnxtrain.body"


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
        domain, name, overload = super().identifier(dtype, functions)
        stem, _, suffix = name.rpartition("_")
        for number in itertools.count():
            identifier = (domain, f"{stem}{number}_{suffix}", overload)
            there = functions.get(identifier)
            if there is None or there.metadata_props.get(_KEY) == self._key:
                return identifier
        raise AssertionError("unreachable")

    def function_for(self, dtype: ir.DataType, opset: int) -> ir.Function:
        """Returns the function; its name has no number yet."""
        function = super().function_for(dtype, opset)
        function.metadata_props[_KEY] = self._key
        return function

    def _input(self, name: str, dtype: ir.DataType) -> ir.Value:
        value = super()._input(name, dtype)
        value.shape = self._shapes[name]
        return value
