"""Defines blocks for single ONNX ops, from which other blocks are composed, and for layers.

Numeric arguments of a block, such as exponents and bounds, become constants of the model, not parameters. They have the
dtype of the block's input. The weights of :class:`Linear` and of the normalizations are parameters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError
from onnxtrain.losses import TARGET_KEY
from onnxtrain.onnxblock import _graft
from onnxtrain.onnxblock._block import Block
from onnxtrain.onnxblock._norms import LayerNorm, LayerNormNoBias, RINorm, RMSNorm

__all__ = [
    "Abs",
    "Add",
    "Block",
    "Cast",
    "Clip",
    "Constant",
    "Div",
    "InputLike",
    "LabelEncoder",
    "LayerNorm",
    "LayerNormNoBias",
    "Linear",
    "Log",
    "Mul",
    "Neg",
    "PassThrough",
    "Pow",
    "RINorm",
    "RMSNorm",
    "ReduceAllL2",
    "ReduceMean",
    "ReduceSum",
    "SequenceConstruct",
    "Sigmoid",
    "Sub",
]

# Version of the domain ai.onnx.ml that is imported for LabelEncoder if the base model imports none. It contains version
# 2 of LabelEncoder, the first with lists of keys and values.
_ML_OPSET = 3


class _BinaryOp(Block):
    """Base class for blocks that apply an ONNX op to two inputs; the name of a subclass is the op type, e.g. "Add"."""

    def build(self, input_name1: str, input_name2: str) -> str:
        """Applies the op to two values, with broadcasting; returns the name of the output."""
        return self._append(lambda op, a, b: op.emit(type(self).__name__, a, b), input_name1, input_name2)


class Add(_BinaryOp):
    """a + b."""


class Sub(_BinaryOp):
    """a - b."""


class Mul(_BinaryOp):
    """a · b."""


class Div(_BinaryOp):
    """a / b."""


class _UnaryOp(Block):
    """Base class for blocks that apply an ONNX op to one input; the name of a subclass is the op type, e.g. "Abs"."""

    def build(self, input_name: str) -> str:
        """Applies the op to a value; returns the name of the output."""
        return self._append(lambda op, x: op.emit(type(self).__name__, x), input_name)


class Abs(_UnaryOp):
    """|x|."""


class Log(_UnaryOp):
    """The natural logarithm."""


class Neg(_UnaryOp):
    """-x."""


class Sigmoid(_UnaryOp):
    """1 / (1 + exp(-x))."""


@dataclass(eq=False, repr=False)
class _Reduction(Block):
    """Base class for blocks that reduce over all axes; the name of a subclass is the op type, e.g. "ReduceMean".

    Args:
        keepdims: True to keep all axes, with size 1; False to return a scalar.
    """

    keepdims: bool = True

    def build(self, input_name: str) -> str:
        """Applies the reduction to a value; returns the name of the output."""
        return self._append(
            lambda op, x: op.emit(type(self).__name__, x, keepdims=int(self.keepdims)), input_name
        )


class ReduceMean(_Reduction):
    """The mean of all elements."""


class ReduceSum(_Reduction):
    """The sum of all elements."""


@dataclass(eq=False, repr=False)
class Pow(Block):
    """x raised to a constant power.

    Args:
        exponent: the power, e.g. 2.0.
    """

    exponent: float

    def build(self, pow_input_name: str) -> str:
        """Applies the op to a value; returns the name of the output."""
        return self._append(lambda op, x: op.Pow(x, float(self.exponent)), pow_input_name)


@dataclass(eq=False, repr=False)
class Clip(Block):
    """x clamped to [clip_min, clip_max].

    Args:
        clip_min: lower bound, e.g. 0.0; None for no bound.
        clip_max: upper bound, e.g. 1.0; None for no bound.
    """

    clip_min: float | None = None
    clip_max: float | None = None

    def build(self, clip_input_name: str) -> str:
        """Applies the op to a value; returns the name of the output."""

        def write(op: Emitter, x: ir.Value) -> ir.Value:
            # Clip requires bounds with the input's dtype.
            bounds = [None if b is None else op.const(b, like=x) for b in (self.clip_min, self.clip_max)]
            return op.Clip(x, *bounds)

        return self._append(write, clip_input_name)


@dataclass(eq=False, repr=False)
class Constant(Block):
    """A float32 constant of shape [1].

    Args:
        value_float: its value, e.g. 0.4.
    """

    value_float: float

    def build(self) -> str:
        """Adds the constant; returns its name."""
        # Marked as a constant; it would be trained otherwise.
        tensor = onnx.numpy_helper.from_array(np.array([self.value_float], np.float32), "constant")
        return _graft.declare(self.base, tensor, constant=True)


class SequenceConstruct(Block):
    """An ONNX sequence of the inputs."""

    def build(self, *sequence_input_names: str) -> str:
        """Builds a sequence of one or more values with the same dtype; returns its name."""
        return self._append(lambda op, *xs: op.SequenceConstruct(*xs), *sequence_input_names)


class ReduceAllL2(Block):
    """The L2 norm over all elements of all inputs, a scalar."""

    def build(self, *reduce_node_input_names: str) -> str:
        """Computes the joint norm of one or more tensors; returns its name."""

        def write(op: Emitter, *xs: ir.Value) -> ir.Value:
            if not xs:
                raise GraphBuildError(f"{self._doing}: received no inputs; name at least one tensor")
            # ReduceL2 supports only one tensor.
            squares = [op.ReduceSumSquare(x, keepdims=0) for x in xs]
            return op.Sqrt(op.Sum(*squares))

        return self._append(write, *reduce_node_input_names)


class PassThrough(Block):
    """A no-op block that returns its arguments, as in onnxruntime-training."""

    def build(self, *input_names: str) -> tuple[str, ...]:
        """Returns `input_names`."""
        return input_names


@dataclass(eq=False, repr=False)
class InputLike(Block):
    """A new graph input with the dtype and shape of another value; the training model treats it as a target.

    Args:
        like: name of the other value, e.g. "y".
    """

    like: str

    def build(self, input_name: str | None = None) -> str:
        """Adds the input and returns its name: `input_name` if given, else an unused name."""
        value = self._describe(self.like)
        if value.type is None:
            raise GraphBuildError(
                f"{self._doing}: the dtype of {self.like!r} is unknown, so no input of the same type can "
                "be created; declare the dtype in the model's value_info"
            )
        name = input_name or _graft.unique_name(self.base, "input")
        # The mark makes it a target, like those added by losses, without restrictions on its values.
        value = ir.Value(
            name=name, type=value.type, shape=value.shape, metadata_props={TARGET_KEY: json.dumps({})}
        )
        return _graft.add_input(self.base, value, self._doing)


class LabelEncoder(Block):
    """Maps keys to values with the op ai.onnx.ml.LabelEncoder.

    Pass exactly one list of keys and one list of values, with equal lengths. An element that is not among the keys is
    mapped to the default of the values' type.

    Args:
        default_float: default for `values_floats`.
        default_int64: default for `values_int64s`.
        default_string: default for `values_strings`.
        keys_floats: keys for a float input.
        keys_int64s: keys for an integer input, e.g. [3, 5].
        keys_strings: keys for a string input, e.g. ["cat", "dog"].
        values_floats: values with dtype float.
        values_int64s: values with dtype int64, e.g. [0, 1].
        values_strings: values that are strings.
    """

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: Sequence[float] | None = None,
        keys_int64s: Sequence[int] | None = None,
        keys_strings: Sequence[str] | None = None,
        values_floats: Sequence[float] | None = None,
        values_int64s: Sequence[int] | None = None,
        values_strings: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        keys = {"keys_floats": keys_floats, "keys_int64s": keys_int64s, "keys_strings": keys_strings}
        values = {
            "values_floats": values_floats,
            "values_int64s": values_int64s,
            "values_strings": values_strings,
        }
        lists = {name: list(entries) for name, entries in (keys | values).items() if entries is not None}
        lengths = {name: len(entries) for name, entries in lists.items()}
        # True for keys and False for values: there must be one of each.
        kinds = [name in keys for name in lists]
        if sorted(kinds) != [False, True] or len(set(lengths.values())) != 1:
            raise GraphBuildError(
                f"making LabelEncoder: received lists of lengths {lengths}; give one list of keys and one of "
                "values, of equal length"
            )
        self._attributes: dict[str, Any] = {
            "default_float": default_float,
            "default_int64": default_int64,
            "default_string": default_string,
            **lists,
        }

    def build(self, label_encoder_input_name: str) -> str:
        """Applies the op to a value; returns the name of the output."""
        # Emitters only support the standard domain and onnxtrain's.
        return _graft.add_node(
            self._accessor,
            self._doing,
            "LabelEncoder",
            [label_encoder_input_name],
            domain="ai.onnx.ml",
            version=_ML_OPSET,
            **self._attributes,
        )


@dataclass(eq=False, repr=False)
class Cast(Block):
    """x converted to the dtype `to`.

    Args:
        to: a data type of `onnx.TensorProto`, e.g. `onnx.TensorProto.FLOAT`.
    """

    to: int

    def build(self, cast_input_name: str) -> str:
        """Applies the op to a value; returns the name of the output."""
        return self._append(lambda op, x: op.Cast(x, to=ir.DataType(self.to)), cast_input_name)


class Linear(Block):
    """alpha · x·W + beta · b, with new parameters W [in_features, out_features] and b [out_features].

    Both are drawn from the standard normal distribution with numpy's global generator, W first; `np.random.seed` makes
    them reproducible.

    Args:
        in_features: size of the last axis of x [n, in_features], e.g. 16.
        out_features: size of the last axis of the output, e.g. 3.
        bias: False to omit b.
        alpha: factor of x·W.
        beta: factor of b.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, alpha: float = 1.0, beta: float = 1.0
    ) -> None:
        super().__init__()
        self._shape: tuple[int, ...] = (in_features, out_features)
        self._bias = bias
        self._factors = {"alpha": float(alpha), "beta": float(beta)}

    def build(self, linear_input_name: str) -> str:
        """Applies the layer to a value [n, in_features]; returns the name of its output."""
        # float32 if the dtype is unknown, e.g. after an op of ONNX Runtime.
        dtype = self._describe(linear_input_name).dtype or ir.DataType.FLOAT
        if not dtype.is_floating_point():
            raise GraphBuildError(f"{self._doing}: its input is {dtype}; pass a floating-point value")
        shapes = {"linear.weight": self._shape} | ({"linear.bias": self._shape[1:]} if self._bias else {})
        # The global generator, because scripts for onnxruntime-training seed it.
        normal = np.random.standard_normal
        names = [
            _graft.add_parameter(self.base, name, normal(shape), dtype) for name, shape in shapes.items()
        ]
        return self._append(
            lambda op, x, *parameters: op.Gemm(x, *parameters, **self._factors), linear_input_name, *names
        )
