"""A random graph, and the ONNX models that are made of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx
from onnx import helper, numpy_helper

from autodiff.case import UNDER_TEST

Shapes = Literal["static", "symbolic", "unranked"]
Array = np.ndarray

OTHER = "the other dtype"
"""As the value of an attribute such as Cast's `to`: float32 in float64 models and the other way round."""


@dataclass(frozen=True)
class Leaf:
    """A value that nothing computes.

    Attributes:
        kind: a graph input, a trainable initializer, or a constant.
        dims: what the model declares of a graph input; None without a rank.
        wrt: whether it is differentiated.
    """

    name: str
    array: Array
    kind: Literal["input", "parameter", "constant"]
    dims: list[int | str] | None
    wrt: bool


@dataclass(frozen=True)
class Node:
    """A node; values of attributes may be `UNDER_TEST` or `OTHER`, arrays and bodies.

    Attributes:
        op: its op, after the domain and a point where that is not the standard one, e.g. "com.microsoft.Gelu".
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Any]

    @property
    def bodies(self) -> list[Body]:
        """The subgraphs."""
        return [value for value in self.attrs.values() if isinstance(value, Body)]

    def proto(self, dtype: type[np.floating[Any]], judge: bool, **names: str) -> onnx.NodeProto:
        """The node in a dtype."""
        domain, _, op = self.op.rpartition(".")
        attrs = attributes(self.attrs, dtype, judge)
        return helper.make_node(op, self.inputs, self.outputs, domain=domain, **names, **attrs)

    def reads(self) -> Iterator[str]:
        """Inputs, and what subgraphs read from outside of them."""
        yield from (name for name in self.inputs if name)
        for body in self.bodies:
            own = {name for name, _, _ in body.inputs}
            for node in body.nodes:
                yield from (name for name in node.reads() if name not in own)
                own.update(node.outputs)

    def all(self) -> Iterator[Node]:
        """The node and those of its subgraphs."""
        yield self
        for body in self.bodies:
            for node in body.nodes:
                yield from node.all()


Dims = list[int | str | None] | None


@dataclass(frozen=True)
class Body:
    """A subgraph: names, dtypes (float64 is the one under test) and declared sizes of what goes in and out."""

    inputs: list[tuple[str, np.dtype[Any], Dims]]
    nodes: list[Node]
    outputs: list[tuple[str, np.dtype[Any], Dims]]

    def proto(self, dtype: type[np.floating[Any]], judge: bool) -> onnx.GraphProto:
        """The graph in a dtype."""
        infos = [
            [
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype) if own == np.float64 else own), dims
                )
                for name, own, dims in values
            ]
            for values in (self.inputs, self.outputs)
        ]
        nodes = [node.proto(dtype, judge) for node in self.nodes]
        return helper.make_graph(nodes, "body", *infos)


@dataclass
class Graph:
    """A drawn graph: the scalar function `loss = sum_i <value_i, weight_i>` of the leaves."""

    opset: int
    dtype: type[np.floating[Any]]
    shapes: Shapes
    leaves: list[Leaf] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    drawn: int = 0
    result_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Tell whether a value has no elements."""
        return any(0 in shape for shape in self.result_shapes.values()) or any(
            leaf.array.size == 0 for leaf in self.leaves
        )

    @property
    def ops(self) -> list[str]:
        """Types of the nodes, those of subgraphs and the loss included."""
        return [inner.op for node in self.nodes for inner in node.all()]

    @property
    def drawn_ops(self) -> list[str]:
        """Types of the nodes before the loss."""
        return [inner.op for node in self.nodes[: self.drawn] for inner in node.all()]

    @property
    def wrt(self) -> list[Leaf]:
        """Leaves that the loss is differentiated by."""
        return [leaf for leaf in self.leaves if leaf.wrt]

    def feeds(self, dtype: type[np.floating[Any]]) -> dict[str, Array]:
        """Arrays of the graph inputs."""
        return {leaf.name: _as(leaf.array, dtype) for leaf in self.leaves if leaf.kind == "input"}

    def model(self, dtype: type[np.floating[Any]], *, judge: bool = False) -> onnx.ModelProto:
        """The model in a dtype; that of the judge computes in one dtype and takes parameters as inputs."""
        inputs, initializers = [], []
        for leaf in self.leaves:
            array = _as(leaf.array, dtype)
            if leaf.kind == "input" or (judge and leaf.wrt):
                code = helper.np_dtype_to_tensor_dtype(array.dtype)
                dims = list(array.shape) if judge else leaf.dims
                inputs.append(helper.make_tensor_value_info(leaf.name, code, dims))
            else:
                initializers.append(numpy_helper.from_array(array, leaf.name))
        nodes = [node.proto(dtype, judge, name=f"node{i}") for i, node in enumerate(self.nodes)]
        loss = helper.make_tensor_value_info("loss", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [])
        graph = helper.make_graph(nodes, "fuzz", inputs, [loss], initializers)
        ir_version = helper.OP_SET_ID_VERSION_MAP["ai.onnx", self.opset]
        return helper.make_model(
            graph, opset_imports=opset_imports(self.opset), ir_version=min(ir_version, 13)
        )


def opset_imports(opset: int) -> list[onnx.OperatorSetIdProto]:
    """The opset, and onnxruntime's own ops."""
    return [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]


def _as(array: Array, dtype: type[np.floating[Any]]) -> Array:
    return array.astype(dtype) if array.dtype == np.float64 else array


def attributes(attrs: dict[str, Any], dtype: type[np.floating[Any]], judge: bool) -> dict[str, Any]:
    """Attributes of a node in a dtype."""
    own = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    other = onnx.TensorProto.FLOAT if dtype is np.float64 else onnx.TensorProto.DOUBLE
    named = {UNDER_TEST: own, OTHER: own if judge else other}

    def value(v: Any) -> Any:
        if isinstance(v, Body):
            return v.proto(dtype, judge)
        if isinstance(v, np.ndarray):
            return numpy_helper.from_array(_as(v, dtype))
        return named[v] if isinstance(v, str) and v in named else v

    return {k: value(v) for k, v in attrs.items()}
