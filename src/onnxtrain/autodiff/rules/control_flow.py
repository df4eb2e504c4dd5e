"""Control flow: If, Loop and Scan.

The gradient of an If is an If of the same condition, that of a Loop or a Scan a Loop over the same iterations, the last
one first. Each computes its branch or iteration again, from what it has read: a loop is given further scan outputs, its
state before each iteration, which must therefore keep its shape. Nothing else is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._activity import captured_values, is_differentiable_dtype
from onnxtrain.autodiff._driver import pull_back
from onnxtrain.autodiff._node import NodeView, where
from onnxtrain.autodiff._registry import Cotangents, vjp
from onnxtrain.emitter import Emitter, static_dims
from onnxtrain.errors import NoGradientRule
from onnxtrain.op_facts import RANDOM_OPS

_INT64_MIN = -(2**63)
Cts = Sequence[ir.Value | None]


@vjp("If", wrt=())
def if_(op: Emitter, n: NodeView, cts: Cts) -> Cotangents:
    """The branch that is taken is computed again, and its cotangents."""
    captured = _captured(n)
    branches = {}
    for name in ("then_branch", "else_branch"):
        inner = op.subgraph({})
        outputs = inner.copy_of(n.attr(name), [])
        own = [
            None if ct is None else _of_branch(inner, value, ct)
            for value, ct in zip(outputs, cts, strict=True)
        ]
        pairs = [(value, ct) for value, ct in zip(outputs, own, strict=True) if ct is not None]
        # A branch whose results have other shapes than what was computed from them is not the one that was taken.
        possible = all(_may_agree(value, ct) for value, ct in pairs)
        gradients = _gradients(inner, pairs if possible else [], captured)
        _return(
            inner, [ct or inner.zeros_like(v) for v, ct in zip(captured, gradients, strict=True)], captured
        )
        branches[name] = ir.AttrGraph(name, inner.graph)
    results = op.emit("If", n.cond, _outputs=len(captured), **branches)
    return dict(zip(captured, results, strict=True))


@vjp("Loop", wrt=("v_initial",))
def loop(op: Emitter, n: NodeView, cts: Cts) -> Cotangents:
    """Cotangents of the state, and of what the body reads of enclosing graphs."""
    body: ir.Graph = n.attr("body")
    count = len(n.inputs) - 2
    stacks = _recorded(op, n, body.inputs[2:])
    trips = op.Squeeze(op.dim((stacks or n.outputs)[0], 0), [0])

    def given(inner: Emitter, index: ir.Value) -> list[ir.Value]:
        return [index, inner.const(np.array(True)), *(_at(inner, stack, index) for stack in stacks)]

    carried = {k: op.zeros_like(n.outputs[k]) if ct is None else ct for k, ct in enumerate(cts[:count])}
    state = {2 + k: (1 + k, ct) for k, ct in carried.items() if _is_float(n, n.outputs[k])}
    emitted = {1 + count + k: _Slices(ct) for k, ct in enumerate(cts[count:]) if ct is not None}
    before, _, captured = _walk_back(op, n, trips, given, state, emitted, {})
    first: Any = [before.get(2 + k) for k in range(count)]
    return {"v_initial": first, **captured}


@vjp("Scan", wrt=("initial_state_and_scan_inputs",))
def scan(op: Emitter, n: NodeView, cts: Cts) -> Cotangents:
    """As of a Loop; a scan input has the cotangents of its slices."""
    body: ir.Graph = n.attr("body")
    read = int(n.attr("num_scan_inputs"))
    count = len(n.inputs) - read
    sources = _sliced(n, n.inputs[count:], "scan_input", body.inputs[count:])
    emits = _sliced(n, cts[count:], "scan_output", body.outputs[count:])
    trips = op.Squeeze(op.dim(sources[0].value, sources[0].axis), [0])
    for own, after, first in zip(body.inputs, body.outputs, n.inputs[:count], strict=False):
        if own.shape is None:  # ONNX Runtime needs the rank
            known = after if after.shape is not None or first is None else first
            own.shape = ir.Shape([None] * n.rank(known))
    stacks = _recorded(op, n, body.inputs[:count])

    def given(inner: Emitter, index: ir.Value) -> list[ir.Value]:
        state = [_at(inner, stack, index) for stack in stacks]
        return [*state, *(sources[k].at(inner, index, trips) for k in range(read))]

    carried = {k: op.zeros_like(n.outputs[k]) if ct is None else ct for k, ct in enumerate(cts[:count])}
    state = {k: (k, ct) for k, ct in carried.items() if _is_float(n, n.outputs[k])}
    emitted = {count + k: slices for k, slices in emits.items()}
    wanted = {count + k: slices for k, slices in sources.items() if n.needs(slices.value)}
    before, parts, captured = _walk_back(op, n, trips, given, state, emitted, wanted)
    inputs: Any = [before.get(k) for k in range(count)] + [parts.get(count + k) for k in range(read)]
    return {"initial_state_and_scan_inputs": inputs, **captured}


@dataclass(frozen=True)
class _Slices:
    """A value of which each iteration has a slice along an axis; backwards if the first iteration has the last."""

    value: ir.Value
    axis: int = 0
    backwards: bool = False
    rank: int = 0

    def at(self, op: Emitter, index: ir.Value, trips: ir.Value) -> ir.Value:
        """Returns the slice of an iteration."""
        return _at(op, self.value, op.Sub(op.Sub(trips, 1), index) if self.backwards else index, self.axis)

    def from_last_to_first(self, op: Emitter, stack: ir.Value) -> ir.Value:
        """Returns the value whose slices are stacked along axis 0, those of the last iteration first."""
        dims = static_dims(self.value)
        if dims is None or not all(dims):
            # A stack of no slices has not even their rank.
            order = [self.axis, *(k for k in range(self.rank) if k != self.axis)]
            sizes = op.shape_of(self.value)
            stack = op.Reshape(stack, op.Gather(sizes, order) if self.axis else sizes, allowzero=1)
        if not self.backwards:
            stack = op.Slice(stack, [-1], [_INT64_MIN], [0], [-1])
        if self.axis:
            order = [*range(1, self.axis + 1), 0, *range(self.axis + 1, self.rank)]
            stack = op.Transpose(stack, perm=order)
        return stack


def _sliced(n: NodeView, values: Cts, kind: str, slices: Sequence[ir.Value]) -> dict[int, _Slices]:
    """The scan inputs, or the cotangents of the scan outputs, by their index, without those that there are not."""
    axes, directions = (n.attr(f"{kind}_{what}") or [0] * len(slices) for what in ("axes", "directions"))
    result = {}
    for k, (value, slice_) in enumerate(zip(values, slices, strict=True)):
        if value is not None:
            rank = 0  # does not matter along the first axis
            if value.shape is None and slice_.shape is not None:
                rank = slice_.shape.rank() + 1
            elif axes[k]:
                rank = n.rank(value)
            result[k] = _Slices(value, axes[k] % rank if axes[k] else 0, bool(directions[k]), rank)
    return result


def _walk_back(
    op: Emitter,
    n: NodeView,
    trips: ir.Value,
    given: Callable[[Emitter, ir.Value], list[ir.Value]],
    state: dict[int, tuple[int, ir.Value]],
    emitted: dict[int, _Slices],
    wanted: dict[int, _Slices],
) -> tuple[dict[int, ir.Value], dict[int, ir.Value], dict[ir.Value, ir.Value]]:
    """Writes the Loop over the iterations, the last one first.

    Args:
        op: writes beside the node.
        n: the node.
        trips: number of iterations, int64 [].
        given: what the body had for its inputs in an iteration.
        state: by index of the body's inputs, the output that is the next state, and the cotangent of the last state.
        emitted: by index of the body's outputs, the cotangents of scan outputs.
        wanted: by index of the body's inputs, the scan inputs whose cotangents are wanted.

    Returns:
        Cotangents of the first state and of the scan inputs, by index of the body's inputs, and of what the body reads
        of enclosing graphs.
    """
    captured = _captured(n)
    carried = [*(ct for _, ct in state.values()), *map(op.zeros_like, captured)]
    inner = op.subgraph(
        {"iteration": ir.DataType.INT64, "go_on": ir.DataType.BOOL}
        | {f"ct{k}": v.dtype for k, v in enumerate(carried)}
    )
    iteration, go_on, *cts = inner.graph.inputs
    iteration.shape = go_on.shape = ir.Shape(())
    for own, value in zip(cts, carried, strict=True):
        own.shape = value.shape
    index = inner.Sub(inner.Sub(trips, 1), iteration)
    inputs = given(inner, index)
    # What was given is constant in the iteration, even if it is a slice of a value that the body reads as well.
    before = len(inner.graph)
    outputs = inner.copy_of(n.attr("body"), inputs)
    iterated = list(inner.graph)[before:]
    leaves = [*(inputs[k] for k in state), *captured, *(inputs[k] for k in wanted)]
    pairs = [(outputs[after], ct) for (after, _), ct in zip(state.values(), cts, strict=False)]
    pairs += [(outputs[k], slices.at(inner, index, trips)) for k, slices in emitted.items()]
    gradients = _gradients(inner, pairs, leaves, iterated)
    sums = range(len(state), len(state) + len(captured))
    results = [
        (inner.Add(cts[k], ct) if ct else cts[k]) if k in sums else (ct or inner.zeros_like(leaf))
        for k, (leaf, ct) in enumerate(zip(leaves, gradients, strict=True))
    ]
    _return(inner, [go_on, *results], [go_on, *leaves])
    body = ir.AttrGraph("body", inner.graph)
    # A condition that is there: nodes lose absent inputs at their end, and onnx fails on a Loop with one input.
    found = op.emit("Loop", trips, op.const(np.array(True)), *carried, body=body, _outputs=len(results))
    for value, leaf in zip(found, leaves, strict=True):
        value.type = leaf.type
    parts = {
        k: slices.from_last_to_first(op, stack)
        for (k, slices), stack in zip(wanted.items(), found[sums.stop :], strict=True)
    }
    by_captured = dict(zip(captured, found[sums.start : sums.stop], strict=True))
    return dict(zip(state, found, strict=False)), parts, by_captured


def _of_branch(op: Emitter, value: ir.Value, ct: ir.Value) -> ir.Value:
    """Returns the cotangent of a branch's result, of the shape that the result has in this branch.

    Shape inference may find later that the other branch is the one that is taken, and gives other sizes: the cotangent
    of those would not fit here.
    """
    if value.shape is None and ct.shape is None:
        return op.Identity(ct)  # a value of its own, whose rank is that of this branch
    sizes = static_dims(value)
    settled = sizes is not None and None not in sizes and sizes == static_dims(ct)
    return ct if settled else op.reshape_like(ct, value)


def _may_agree(value: ir.Value, other: ir.Value) -> bool:
    """Whether two values may have the same shape, as far as these are known."""
    one, two = static_dims(value), static_dims(other)
    if one is None or two is None:
        return True
    return len(one) == len(two) and all(
        a is None or b is None or a == b for a, b in zip(one, two, strict=True)
    )


def _captured(n: NodeView) -> list[ir.Value]:
    """The values of enclosing graphs, which the subgraphs read, whose cotangents are wanted."""
    return [value for value in dict.fromkeys(captured_values(n.node)) if n.needs(value)]


def _recorded(op: Emitter, n: NodeView, states: Iterable[ir.Value]) -> list[ir.Value]:
    """Makes the state before each iteration further scan outputs of a loop; returns them."""
    body: ir.Graph = n.attr("body")
    node, writer, results = n.node, op.within(body), []
    for state in tuple(states):
        _return(writer, [state], [state])
        node.resize_outputs(len(node.outputs) + 1)
        result = node.outputs[-1]
        result.name, result.type = op.unique_name(f"{op.scope}{state.name}_before"), state.type
        result.shape = None if state.shape is None else ir.Shape([None, *state.shape])
        results.append(result)
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            kept = node.attributes[name].as_ints()
            node.attributes.add(ir.AttrInt64s(name, [*kept, *(0 for _ in results)]))
    return results


def _at(op: Emitter, stack: ir.Value, index: ir.Value, axis: int = 0) -> ir.Value:
    """Returns one slice along an axis."""
    result = op.Gather(stack, index, axis=axis)
    if stack.shape is not None:
        result.shape = ir.Shape([dim for k, dim in enumerate(stack.shape) if k != axis])
    return result


def _gradients(
    op: Emitter,
    pairs: Iterable[tuple[ir.Value, ir.Value | None]],
    leaves: Sequence[ir.Value],
    nodes: Sequence[ir.Node] | None = None,
) -> list[ir.Value | None]:
    """Cotangents of the leaves, given pairs of a value and its cotangent, through all nodes of the graph or these."""
    for node in op.graph.all_nodes():
        if _draws(node):
            raise NoGradientRule(
                f"differentiating a branch or loop with {node.op_type} ({where(node)}): its gradient would draw other "
                "numbers. Draw them outside of it"
            )
    seeds: dict[ir.Value, ir.Value] = {}
    for value, ct in pairs:
        if ct is not None and is_differentiable_dtype(value):
            seeds[value] = op.Add(seeds[value], ct) if value in seeds else ct
    return pull_back(op, seeds, leaves, nodes) if seeds else [None] * len(leaves)


def _draws(node: ir.Node) -> bool:
    """Whether an op draws random numbers; a Dropout does not unless it is told to train."""
    if node.domain != "" or node.op_type not in RANDOM_OPS:
        return False
    if node.op_type != "Dropout":
        return True
    training = node.inputs[2] if len(node.inputs) > 2 else None
    told = None if training is None else ir.convenience.get_const_tensor(training)
    return training is not None and (told is None or bool(told.numpy().any()))


def _return(op: Emitter, values: Sequence[ir.Value], like: Sequence[ir.Value]) -> None:
    """Makes values outputs of a subgraph, each as a result of its own there, with these dtypes and shapes."""
    for value, primal in zip(values, like, strict=True):
        result = op.Identity(value)
        result.type, result.shape = primal.type, primal.shape
        op.graph.outputs.append(result)


def _is_float(n: NodeView, value: ir.Value) -> bool:
    if value.dtype is None:
        raise NoGradientRule(
            f"differentiating {n.op_type} ({where(n.node)}): the dtype of its state {value.name!r} is not known; "
            "declare it"
        )
    return value.dtype.is_floating_point()
