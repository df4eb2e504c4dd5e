"""Adds nodes to a random graph.

Every node is computed in float64 as soon as it is drawn, so that whoever draws the next one knows the run-time shapes
and values that it gets, whatever the model declares.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import onnx
from onnx import helper

from autodiff.fuzz.draw import Draw, Rejected
from autodiff.fuzz.graph import Array, Graph, Leaf, Node, opset_imports
from autodiff.reference import ReferenceEvaluator

LARGEST = 40.0
"""Values beyond are not drawn: differences of the loss would lose too many digits."""


class Builder:
    """Adds leaves and nodes to a graph, and knows all values.

    Attributes:
        values: array of every value; float64 where it has the dtype under test.
        unused: results that no loss is made of.
        rank: ranks of new leaves are near this one.
        nodes_here: the nodes of the graph, or of the subgraph that this one draws.
        depth: how many subgraphs it is in.
        prefix: of the names in this subgraph.
    """

    def __init__(self, d: Draw, graph: Graph, *, rank: int, empty: bool) -> None:
        self.d = d
        self.graph = graph
        self.rank = rank
        self.empty = empty
        self.values: dict[str, Array] = {}
        self.unused: set[str] = set()
        self.nodes_here = graph.nodes
        self.depth = 0
        self._rng = d.rng()
        self.prefix = ""
        self._outer: Builder | None = None

    def within(self, name: str) -> Builder:
        """Returns a builder of a subgraph of the next node; the subgraph may read all that is here."""
        inner = Builder(self.d, self.graph, rank=self.rank, empty=self.empty)
        inner.values, inner.unused = dict(self.values), set(self.unused)
        inner.nodes_here, inner.depth = [], self.depth + 1
        inner.prefix, inner._outer = f"{self.prefix}{len(self.nodes_here)}{name}_", self
        return inner

    def save(self) -> Callable[[], None]:
        """Returns what takes away all that is added from now on."""
        values, leaves, nodes = dict(self.values), list(self.graph.leaves), list(self.nodes_here)

        def restore() -> None:
            self.values = values
            self.graph.leaves[:] = leaves
            self.nodes_here[:] = nodes

        return restore

    # What is there.

    def shape(self, name: str) -> tuple[int, ...]:
        """The run-time shape of a value."""
        return self.values[name].shape

    def computed(self) -> list[str]:
        """Differentiable values that nodes may read."""
        leaves = {leaf.name for leaf in self.graph.leaves if not leaf.wrt}
        return [
            name
            for name, array in self.values.items()
            if array.dtype == np.float64 and name not in leaves | self.unused
        ]

    def supports(self, op: str, attribute: str) -> bool:
        """Tell whether the op has the attribute at this opset."""
        return attribute in onnx.defs.get_schema(op, self.graph.opset).attributes

    # Leaves.

    def sizes(self, rank: int, *, least: int = 0, most: int = 3) -> list[int]:
        """Sizes of `rank` axes; zeros are rare, so that most graphs have something to differentiate."""
        options = [0] * (self.empty and least == 0) + [s for s in (1, 2, 2, 3, 3, 4, 5) if least <= s <= most]
        return [self.d.choice(options) for _ in range(rank)]

    def leaf(
        self,
        shape: Sequence[int],
        low: float = -2.0,
        high: float = 2.0,
        *,
        wrt: bool = True,
        kind: Literal["input", "parameter", "constant"] | None = None,
    ) -> str:
        """Returns a new floating-point leaf."""
        kind = kind or ("parameter" if wrt and self.d.chance(35) else "input")
        array = self._rng.uniform(low, high, tuple(shape)).astype(np.float32).astype(np.float64)
        return self._new_leaf("x", array, kind, wrt)

    def data(self, array: Any, *, fixed: bool | None = None) -> str:
        """Returns a leaf of given numbers: a constant, or a run-time input unless `fixed`."""
        fixed = self.d.chance(65) if fixed is None else fixed
        if fixed and self.depth and self.d.chance(50):
            return self._constant(np.asarray(array))
        return self._new_leaf("c", np.asarray(array), "constant" if fixed else "input", False)

    def _constant(self, array: Array) -> str:
        name = f"{self.prefix}k{len(self.nodes_here)}"
        self.nodes_here.append(Node("Constant", (), (name,), {"value": array}))
        self.values[name] = array
        self.unused.add(name)
        return name

    def _new_leaf(self, prefix: str, array: Array, kind: Any, wrt: bool) -> str:
        name = f"{prefix}{len(self.graph.leaves)}"
        dims = self.declared(name, array.shape) if kind == "input" else list(array.shape)
        self.graph.leaves.append(Leaf(name, array, kind, dims, wrt))
        reader: Builder | None = self
        while reader is not None:
            reader.values[name] = array
            reader = reader._outer
        return name

    def declared(self, name: str, shape: Sequence[int]) -> list[int | str] | None:
        """Return the dimensions that a model declares for a value; None for no shape."""
        if self.graph.shapes == "unranked":
            return None if self.d.chance(80) else list(shape)
        if self.graph.shapes == "static":
            return list(shape)
        # A size of its own, one that all axes of this size share, or static.
        return [
            self.d.choice([f"{name}_{axis}", f"{name}_{axis}", f"n{size}", size])
            for axis, size in enumerate(shape)
        ]

    def tensor(
        self,
        ranks: Sequence[int] | None = None,
        *,
        fits: Callable[[Array], bool] = lambda array: True,
        shape: Callable[[], Sequence[int]] | None = None,
    ) -> str:
        """Returns a value of one of the ranks that `fits`: most often one that is there, else a new leaf.

        Args:
            ranks: allowed; all by default.
            fits: what else the value must be; new leaves are of `shape`.
            shape: sizes of a new leaf.
        """
        found = [
            n
            for n in self.computed()
            if (ranks is None or self.values[n].ndim in ranks) and fits(self.values[n])
        ]
        if found and self.d.chance(80):
            return found[-1] if self.d.chance(60) else self.d.choice(found)
        if shape is not None:
            return self.leaf(shape())
        near = [r for r in (ranks if ranks is not None else range(5)) if abs(r - self.rank) <= 1]
        return self.leaf(self.sizes(self.d.choice(near or list(ranks or [self.rank]))))

    def like(self, shape: Sequence[int]) -> str:
        """Returns a value of exactly that shape."""
        return self.tensor([len(shape)], fits=lambda a: a.shape == tuple(shape), shape=lambda: shape)

    def broadcastable(self, shape: Sequence[int], *, within: bool = False) -> str:
        """Returns a value that broadcasts with the shape; with `within`, to it."""

        def fits(array: Array) -> bool:
            try:
                result = np.broadcast_shapes(tuple(shape), array.shape)
            except ValueError:
                return False
            return result == tuple(shape) or not within

        def new() -> list[int]:
            own = [1 if self.d.chance(25) else s for s in list(shape)[self.d.integer(0, len(shape)) :]]
            if not within and len(own) == len(shape) and len(shape) < 4 and self.d.chance(20):
                own = [*self.sizes(1), *own]
            if not within:
                own = [self.d.integer(2, 3) if s == 1 and self.d.chance(30) else s for s in own]
            return own if fits(np.empty(own)) else list(shape)

        return self.tensor(fits=fits, shape=new)

    def squashed(self, name: str, low: float, high: float) -> str:
        """Returns the value, or what maps it smoothly to between `low` and `high` where it is not there."""
        array = self.values[name]
        if array.size == 0 or (array.min() >= low and array.max() <= high):
            return name
        unit = self.node("Sigmoid", [name])
        scaled = self.node("Mul", [unit, self.data(np.array(0.9 * (high - low)), fixed=True)])
        return self.node("Add", [scaled, self.data(np.array(low + 0.05 * (high - low)), fixed=True)])

    # Nodes.

    def node(self, op: str, inputs: Sequence[str], outputs: int = 1, **attrs: Any) -> str:
        """Adds a node and returns its first output.

        Raises:
            Rejected: it cannot be computed, or is too large.
        """
        return self.nodes(op, inputs, outputs, **attrs)[0]

    def nodes(
        self, op: str, inputs: Sequence[str], outputs: int, *, trailing: bool = False, **attrs: Any
    ) -> tuple[str, ...]:
        """Adds a node and returns its outputs; with `trailing`, absent inputs at the end stay."""
        inputs = list(inputs)
        while inputs and not inputs[-1] and not trailing:
            inputs.pop()
        count = len(self.nodes_here)
        names = tuple(f"{self.prefix}v{count}_{i}" for i in range(outputs))
        node = Node(op, tuple(inputs), names, {k: v for k, v in attrs.items() if v is not None})
        results = self._compute(node)
        for name, array in zip(names, results, strict=True):
            self.values[name] = array
        self.nodes_here.append(node)
        return names

    def _compute(self, node: Node) -> list[Array]:
        infos = [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(self.values[name].dtype), self.shape(name)
            )
            for name in dict.fromkeys(node.reads())
        ]
        proto = node.proto(np.float64, judge=True)
        outputs = [onnx.ValueInfoProto(name=name) for name in node.outputs]
        model = helper.make_model(
            helper.make_graph([proto], "one", infos, outputs),
            opset_imports=opset_imports(self.graph.opset),
        )
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results = ReferenceEvaluator(model).run(None, {i.name: self.values[i.name] for i in infos})
        except Exception as error:
            raise Rejected(f"{node.op}: {error}") from error
        arrays = [np.asarray(result) for result in results]
        for array in arrays:
            if array.dtype.kind == "f":
                finite = array[np.isfinite(array)]
                inputs_empty = any(self.values[info.name].size == 0 for info in infos)
                if (finite.size < array.size and not inputs_empty) or np.abs(finite).max(initial=0) > LARGEST:
                    raise Rejected(f"{node.op}: {array}")
        return [array.astype(np.float64) if array.dtype == np.float32 else array for array in arrays]

    def finish(self) -> None:
        """Adds the loss of everything that nothing reads.

        Raises:
            Rejected: no differentiable value is left.
        """
        read = {name for node in self.graph.nodes for name in node.reads()}
        active = self._active()
        loose = [name for name in active if name not in read | self.unused]
        if not loose or not self.graph.wrt:
            raise Rejected("nothing to differentiate")
        self.graph.drawn = len(self.graph.nodes)
        terms = []
        for name in loose:
            value = self.node("Sin", [name]) if self.d.chance(30) else name
            weight = self.leaf(self.shape(name), 0.5, 1.5, wrt=False, kind="input")
            terms.append(self.node("ReduceSum", [self.node("Mul", [value, weight])], keepdims=0))
        count = len(self.graph.nodes)
        self.node("Sum", terms)
        last = self.graph.nodes[count]
        self.graph.nodes[count] = Node("Sum", last.inputs, ("loss",), {})
        self.values["loss"] = self.values.pop(last.outputs[0])
        self.graph.result_shapes = {
            o: self.shape(o) for n in self.graph.nodes for o in n.outputs if o not in self.unused
        }

    def _active(self) -> list[str]:
        """Values that depend on a differentiable leaf."""
        active = {leaf.name for leaf in self.graph.wrt}
        result = []
        for node in self.graph.nodes:
            if any(name in active for name in node.reads()):
                floats = [o for o in node.outputs if o in self.values and self.values[o].dtype == np.float64]
                active.update(floats)
                result += floats
        return result
