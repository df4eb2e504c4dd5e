"""One row of the table of gradient tests: an op with its inputs, attributes and torch twin."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

UNDER_TEST = "dtype under test"
"""As the value of an attribute such as Cast's `to`: the dtype that the case is run in."""


@dataclass(frozen=True)
class F:
    """A floating-point input, sampled uniformly from [low, high]; differentiated unless `wrt=False`."""

    shape: tuple[int, ...]
    low: float
    high: float
    wrt: bool
    distinct: bool

    def __init__(
        self, *shape: int, low: float = -2.0, high: float = 2.0, wrt: bool = True, distinct: bool = False
    ) -> None:
        for name, value in (
            ("shape", shape),
            ("low", low),
            ("high", high),
            ("wrt", wrt),
            ("distinct", distinct),
        ):
            object.__setattr__(self, name, value)

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        if self.distinct:  # well separated values: finite differences do not cross a kink of max, min, sort
            count = int(np.prod(self.shape))
            return rng.permutation(np.linspace(self.low, self.high, count)).reshape(self.shape)
        return rng.uniform(self.low, self.high, self.shape)


@dataclass(frozen=True)
class C:
    """A constant of the model; float64 arrays take the dtype under test."""

    value: Any


@dataclass(frozen=True)
class R:
    """A run-time input that is not differentiated; float64 arrays take the dtype under test."""

    value: Any


@dataclass(frozen=True)
class Case:
    """A gradient test of one node.

    Attributes:
        op: op type; `inputs` its arguments in order, None for an omitted one.
        twin: the same computation on torch tensors, one argument per input; returns a tensor, or a tuple with one
            entry per output of the node (None for outputs without gradient).
        outputs: number of outputs of the node that take part; `extra_outputs` further ones that it has.
        symbolic: input index -> axes that become symbolic in the symbolic-shape variant; default: all axes of all
            floating-point inputs.
        evaluator: what computes in float64: onnx's reference evaluator, or, where that is wrong about the op (say
            how beside it), ONNX Runtime; none where that lacks a float64 kernel too, which leaves the comparison
            of its float32 gradients with torch's float64 ones.
    """

    op: str
    inputs: tuple[F | C | R | None, ...]
    twin: Callable[..., Any]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    extra_outputs: int = 0
    opset: int = 21
    name: str = ""
    symbolic: Mapping[int, tuple[int, ...]] | None = None
    evaluator: Literal["reference", "onnxruntime", "none"] = "reference"

    @property
    def id(self) -> str:
        parts = [self.name] if self.name else []
        if not self.name:
            parts += ["x".join(map(str, i.shape)) or "scalar" for i in self.inputs if isinstance(i, F)]
            parts += [f"{key}={value}".replace(" ", "") for key, value in self.attrs.items()]
        return "-".join([self.op, *parts])

    def arrays(self, dtype: np.dtype) -> list[np.ndarray | None]:
        """Sampled inputs; the same numbers for every dtype."""
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        return [self._array(item, rng, dtype) for item in self.inputs]

    @staticmethod
    def _array(item: F | C | R | None, rng: np.random.Generator, dtype: np.dtype) -> np.ndarray | None:
        if item is None:
            return None
        if isinstance(item, F):
            return item.sample(rng).astype(dtype)
        array = np.asarray(item.value)
        return array.astype(dtype) if array.dtype == np.float64 else array

    def model(self, dtype: np.dtype, *, symbolic: bool = False) -> onnx.ModelProto:
        """The scalar function sum_i <output_i, w_i>: inputs x0, x1, ... and weights w0, w1, ..., output `loss`."""
        arrays = self.arrays(dtype)
        elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        graph_inputs, initializers, names = [], [], []
        for index, (item, array) in enumerate(zip(self.inputs, arrays, strict=True)):
            names.append("" if item is None else f"x{index}")
            if item is None:
                continue
            if isinstance(item, C):
                initializers.append(numpy_helper.from_array(array, f"x{index}"))
                continue
            dims: list[int | str] = list(array.shape)
            if symbolic:
                default = tuple(range(array.ndim)) if isinstance(item, F) else ()
                axes = default if self.symbolic is None else self.symbolic.get(index, ())
                dims = [f"d{index}_{axis}" if axis in axes else size for axis, size in enumerate(dims)]
            code = helper.np_dtype_to_tensor_dtype(array.dtype)
            graph_inputs.append(helper.make_tensor_value_info(f"x{index}", code, dims))
        outputs = [f"y{i}" for i in range(self.outputs)]
        attrs = {key: elem if value is UNDER_TEST else value for key, value in self.attrs.items()}
        required = onnx.defs.get_schema(self.op, self.opset).min_output
        unused = [f"unused{i}" for i in range(self.outputs, max(required, self.outputs + self.extra_outputs))]
        nodes = [helper.make_node(self.op, names, outputs + unused, name="node", **attrs)]
        terms, shapes = [], self.output_shapes()
        for index, name in enumerate(outputs):
            dims = [f"o{index}_{axis}" if symbolic else size for axis, size in enumerate(shapes[index])]
            graph_inputs.append(helper.make_tensor_value_info(f"w{index}", elem, dims))
            nodes += [
                helper.make_node("Mul", [name, f"w{index}"], [f"p{index}"]),
                helper.make_node("ReduceSum", [f"p{index}"], [f"s{index}"], keepdims=0),
            ]
            terms.append(f"s{index}")
        nodes.append(helper.make_node("Sum", terms, ["loss"]))
        loss = helper.make_tensor_value_info("loss", elem, [])
        graph = helper.make_graph(nodes, "case", graph_inputs, [loss], initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)

    def output_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the outputs that take part, by the twin."""
        arrays = self.arrays(np.dtype(np.float64))
        result = self.twin(*(None if a is None else torch.from_numpy(np.array(a)) for a in arrays))
        return [tuple(out.shape) for out in (result if isinstance(result, tuple) else (result,))]

    @property
    def wrt(self) -> list[int]:
        """Indices of the inputs to differentiate with respect to."""
        return [index for index, item in enumerate(self.inputs) if isinstance(item, F) and item.wrt]


def runtime_inputs(case: Case, arrays: list[np.ndarray | None]) -> dict[str, np.ndarray]:
    """The arrays to feed, by graph input name, without the weights of the outputs."""
    return {
        f"x{index}": array
        for index, (item, array) in enumerate(zip(case.inputs, arrays, strict=True))
        if isinstance(item, F | R) and array is not None
    }
