"""Differentiates control flow: If, Loop and Scan.

The gradient of an If is an If with the same condition. The gradient of a Loop or Scan is a Loop over the same
iterations in reverse. Both recompute the branch or iteration instead of keeping intermediate results. The forward loop
only records its state before each iteration, as additional scan outputs, so the shape of the state must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._accumulate import add_up
from onnxtrain.autodiff._activity import is_differentiable_dtype
from onnxtrain.autodiff._driver import pull_back
from onnxtrain.autodiff._node import NodeView, where
from onnxtrain.autodiff._registry import Cotangents, vjp
from onnxtrain.autodiff.rules._row_reads import row_reads
from onnxtrain.emitter import Emitter, known_array, static_dims
from onnxtrain.errors import NoGradientRule
from onnxtrain.op_facts import RANDOM_OPS
from onnxtrain.passes import captured_values

_INT64_MIN = -(2**63)
Cts = Sequence[ir.Value | None]


@vjp("If", wrt=())
def if_(op: Emitter, n: NodeView, cts: Cts) -> Cotangents:
    """VJP of If with respect to captured values: recomputes the branch that is taken, and differentiates it."""
    captured = _captured(n)
    branches = {}
    for name in ("then_branch", "else_branch"):
        inner = op.subgraph({})
        outputs = inner.copy_of(n.attr(name), [])
        branch_cts = [
            None if ct is None else _with_branch_shape(inner, value, ct)
            for value, ct in zip(outputs, cts, strict=True)
        ]
        pairs = [(value, ct) for value, ct in zip(outputs, branch_cts, strict=True) if ct is not None]
        # If a branch's outputs cannot have the shapes of their cotangents, that branch is not the one that ran.
        possible = all(_may_have_equal_shapes(value, ct) for value, ct in pairs)
        gradients = _gradients(inner, pairs if possible else [], captured)
        _append_outputs(
            inner, [ct or inner.zeros_like(v) for v, ct in zip(captured, gradients, strict=True)], captured
        )
        branches[name] = ir.AttrGraph(name, inner.graph)
    results = op.emit("If", n.cond, _outputs=len(captured), **branches)
    return dict(zip(captured, results, strict=True))


@vjp("Loop", wrt=("v_initial",))
def loop(op: Emitter, n: NodeView, cts: Cts) -> Cotangents:
    """VJP of Loop with respect to the initial state and the outer values that the body reads."""
    body: ir.Graph = n.attr("body")
    count = len(n.inputs) - 2
    stacks = _record_states(op, n, body.inputs[2:])
    trips = op.Squeeze(op.dim((stacks or n.outputs)[0], 0), [0])

    def body_inputs(inner: Emitter, index: ir.Value) -> list[ir.Value]:
        # The condition was true in every iteration that ran.
        return [index, inner.const(np.array(True)), *(_slice_at(inner, stack, index) for stack in stacks)]

    carried = {k: op.zeros_like(n.outputs[k]) if ct is None else ct for k, ct in enumerate(cts[:count])}
    state = {2 + k: (1 + k, ct) for k, ct in carried.items() if _is_float(n, n.outputs[k])}
    emitted = {1 + count + k: _Slices(ct) for k, ct in enumerate(cts[count:]) if ct is not None}
    before, _, captured = _reverse_loop(op, n, trips, body_inputs, state, emitted, {})
    first: Any = [before.get(2 + k) for k in range(count)]
    return {"v_initial": first, **captured}


@vjp("Scan", wrt=("initial_state_and_scan_inputs",))
def scan(op: Emitter, n: NodeView, cts: Cts) -> Cotangents:
    """VJP of Scan with respect to the initial state, the scan inputs and the outer values that the body reads.

    The cotangent of a scan input is stacked from the cotangents of its slices.
    """
    body: ir.Graph = n.attr("body")
    read = int(n.attr("num_scan_inputs"))
    count = len(n.inputs) - read
    sources = _describe_slices(n, n.inputs[count:], "scan_input", body.inputs[count:])
    emits = _describe_slices(n, cts[count:], "scan_output", body.outputs[count:])
    trips = op.Squeeze(op.dim(sources[0].value, sources[0].axis), [0])
    for state_in, state_out, first in zip(body.inputs, body.outputs, n.inputs[:count], strict=False):
        # ONNX Runtime needs the rank of the recorded states, because they are scan outputs.
        if state_in.shape is None:
            ranked = state_out if state_out.shape is not None or first is None else first
            state_in.shape = ir.Shape([None] * n.rank(ranked))
    stacks = _record_states(op, n, body.inputs[:count])

    def body_inputs(inner: Emitter, index: ir.Value) -> list[ir.Value]:
        state = [_slice_at(inner, stack, index) for stack in stacks]
        return [*state, *(sources[k].at(inner, index, trips) for k in range(read))]

    carried = {k: op.zeros_like(n.outputs[k]) if ct is None else ct for k, ct in enumerate(cts[:count])}
    state = {k: (k, ct) for k, ct in carried.items() if _is_float(n, n.outputs[k])}
    emitted = {count + k: slices for k, slices in emits.items()}
    wanted = {count + k: slices for k, slices in sources.items() if n.needs(slices.value)}
    before, parts, captured = _reverse_loop(op, n, trips, body_inputs, state, emitted, wanted)
    inputs: Any = [before.get(k) for k in range(count)] + [parts.get(count + k) for k in range(read)]
    return {"initial_state_and_scan_inputs": inputs, **captured}


@dataclass(frozen=True)
class _Slices:
    """A stacked value; each iteration reads or writes one slice of it.

    Attributes:
        value: the stacked value.
        axis: axis along which the slices are stacked.
        backwards: True if the first iteration uses the last slice.
        rank: rank of `value`; 0 if it is not needed.
    """

    value: ir.Value
    axis: int = 0
    backwards: bool = False
    rank: int = 0

    def at(self, op: Emitter, index: ir.Value, trips: ir.Value) -> ir.Value:
        """Returns the slice of iteration `index`; `trips` is the number of iterations."""
        return _slice_at(
            op, self.value, op.Sub(op.Sub(trips, 1), index) if self.backwards else index, self.axis
        )

    def restore_order(self, op: Emitter, stack: ir.Value) -> ir.Value:
        """Restores the order and the axis of slices that the backward loop stacked on axis 0, last iteration first."""
        dims = static_dims(self.value)
        if dims is None or not all(dims):
            # A stack without slices doesn't even have the slices' rank.
            order = [self.axis, *(k for k in range(self.rank) if k != self.axis)]
            sizes = op.shape_of(self.value)
            stack = op.Reshape(stack, op.Gather(sizes, order) if self.axis else sizes, allowzero=1)
        if not self.backwards:
            stack = op.Slice(stack, [-1], [_INT64_MIN], [0], [-1])
        if self.axis:
            order = [*range(1, self.axis + 1), 0, *range(self.axis + 1, self.rank)]
            stack = op.Transpose(stack, perm=order)
        return stack


def _describe_slices(n: NodeView, values: Cts, kind: str, slices: Sequence[ir.Value]) -> dict[int, _Slices]:
    """Describes how a Scan's inputs, or the cotangents of its scan outputs, are sliced.

    Args:
        n: the Scan node.
        values: all scan inputs, or the cotangents of all scan outputs; None for a missing cotangent.
        kind: "scan_input" or "scan_output", the prefix of the node's attributes.
        slices: for each value, the body's input or output that holds one slice of it.

    Returns:
        The `_Slices` of each value that is not None, by its index in `values`.
    """
    axes, directions = (n.attr(f"{kind}_{what}") or [0] * len(slices) for what in ("axes", "directions"))
    result = {}
    for k, (value, slice_) in enumerate(zip(values, slices, strict=True)):
        if value is not None:
            # The default, axis 0, needs no transpose and therefore no rank.
            rank = 0
            if value.shape is None and slice_.shape is not None:
                rank = slice_.shape.rank() + 1
            elif axes[k]:
                rank = n.rank(value)
            result[k] = _Slices(value, axes[k] % rank if axes[k] else 0, bool(directions[k]), rank)
    return result


def _reverse_loop(
    op: Emitter,
    n: NodeView,
    trips: ir.Value,
    body_inputs: Callable[[Emitter, ir.Value], list[ir.Value]],
    state: dict[int, tuple[int, ir.Value]],
    emitted: dict[int, _Slices],
    wanted: dict[int, _Slices],
) -> tuple[dict[int, ir.Value], dict[int, ir.Value], dict[ir.Value, ir.Value | None]]:
    """Emits the backward Loop, which differentiates the iterations in reverse order.

    Args:
        op: emitter of the graph that contains the node.
        n: the node.
        trips: number of iterations, int64 [].
        body_inputs: emits the values that the body's inputs had in a given iteration.
        state: for each float state, by index among the body's inputs: the index of the body output that is the next
            state, and the cotangent of the final state.
        emitted: cotangents of scan outputs, by index among the body's outputs.
        wanted: scan inputs whose cotangents are needed, by index among the body's inputs.

    Returns:
        Three dictionaries of cotangents: of the initial states and of the scan inputs, both by index among the body's
        inputs, and of the outer values that the body reads, by value. None means zero.
    """
    captured = _captured(n)
    carried = [*(ct for _, ct in state.values()), *map(op.zeros_like, captured)]
    inner = op.subgraph(
        {"iteration": ir.DataType.INT64, "go_on": ir.DataType.BOOL}
        | {f"ct{k}": v.dtype for k, v in enumerate(carried)}
    )
    iteration, go_on, *cts = inner.graph.inputs
    iteration.shape = go_on.shape = ir.Shape(())
    for ct, value in zip(cts, carried, strict=True):
        ct.shape = value.shape
    # The backward loop counts up while the forward iterations are visited from last to first.
    index = inner.Sub(inner.Sub(trips, 1), iteration)
    inputs = body_inputs(inner, index)
    # Only nodes of the copied body are differentiated. The slices before them come from stacks that the body may read
    # as well; their cotangents are collected by the loop, instead of flowing into the stack in each iteration.
    before = len(inner.graph)
    outputs = inner.copy_of(n.attr("body"), inputs)
    iterated = list(inner.graph)[before:]
    # Rows of outer tensors are leaves: their cotangents are stacked, and scattered after the loop.
    reads = row_reads(inner, iterated, captured)
    skipped = {read.node for read in reads}
    iterated = [node for node in iterated if node not in skipped]
    known = [*(inputs[k] for k in state), *captured, *(inputs[k] for k in wanted)]
    leaves = [*known, *(read.output for read in reads)]
    pairs = [(outputs[after], ct) for (after, _), ct in zip(state.values(), cts, strict=False)]
    pairs += [(outputs[k], slices.at(inner, index, trips)) for k, slices in emitted.items()]
    gradients = _gradients(inner, pairs, leaves, iterated)
    rows = [(read, ct) for read, ct in zip(reads, gradients[len(known) :], strict=True) if ct is not None]
    # Every iteration reads the same outer values, so their cotangents are summed over the iterations. Values of which
    # only rows are read have no sum: passing it on would copy it in each iteration.
    summed = [k for k in range(len(state), len(state) + len(captured)) if gradients[k] is not None]
    unused = set(range(len(state), len(state) + len(captured))) - set(summed)
    for k in sorted(unused, reverse=True):
        del inner.graph.inputs[2 + k], carried[k]
    results, primals = [go_on], [go_on]
    for k, (leaf, gradient) in enumerate(zip(known, gradients, strict=False)):
        if k not in unused:
            gradient = gradient or inner.zeros_like(leaf)
            results.append(inner.Add(cts[k], gradient) if k in summed else gradient)
            primals.append(leaf)
    for read, ct in rows:
        stack = read.stack(inner, ct)
        results += stack
        primals += stack
    _append_outputs(inner, results, primals)
    body = ir.AttrGraph("body", inner.graph)
    # With a condition, although it is always true: trailing absent inputs of a node are dropped, and onnx fails on a
    # Loop with a single input.
    always = op.const(np.array(True))
    loop_outputs = op.emit("Loop", trips, always, *carried, body=body, _outputs=len(results) - 1)
    for value, primal in zip(loop_outputs, primals[1:], strict=True):
        value.type = primal.type
    outputs_left = iter(loop_outputs)
    of_state = {k: next(outputs_left) for k in state}
    totals = {captured[k - len(state)]: [next(outputs_left)] for k in summed}
    parts = {k: slices.restore_order(op, next(outputs_left)) for k, slices in wanted.items()}
    for read, _ in rows:
        scattered = read.scatter(op, next(outputs_left), next(outputs_left), trips)
        totals.setdefault(read.source, []).append(scattered)
    by_captured = {value: add_up(op, totals[value]) if value in totals else None for value in captured}
    return of_state, parts, by_captured


def _with_branch_shape(op: Emitter, value: ir.Value, ct: ir.Value) -> ir.Value:
    """Returns `ct` in the shape of `value`, the output of one branch of an If: the branches' shapes may differ."""
    # Shape inference may later derive the cotangent's sizes from the other branch, and onnx would then reject the nodes
    # of this branch. A Reshape, or an Identity if no shape is known, decouples the two.
    if value.shape is None and ct.shape is None:
        return op.Identity(ct)
    sizes = static_dims(value)
    settled = sizes is not None and None not in sizes and sizes == static_dims(ct)
    return ct if settled else op.reshape_like(ct, value)


def _may_have_equal_shapes(value: ir.Value, other: ir.Value) -> bool:
    """True unless the shapes of two values are known to differ."""
    one, two = static_dims(value), static_dims(other)
    if one is None or two is None:
        return True
    return len(one) == len(two) and all(
        a is None or b is None or a == b for a, b in zip(one, two, strict=True)
    )


def _captured(n: NodeView) -> list[ir.Value]:
    """Returns the active outer values that the node's subgraphs read."""
    return [value for value in dict.fromkeys(captured_values(n.node)) if n.needs(value)]


def _record_states(op: Emitter, n: NodeView, states: Iterable[ir.Value]) -> list[ir.Value]:
    """Adds scan outputs that record the state before each iteration of a loop; returns these outputs."""
    body: ir.Graph = n.attr("body")
    node, writer, results = n.node, op.within(body), []
    for state in tuple(states):
        _append_outputs(writer, [state], [state])
        node.resize_outputs(len(node.outputs) + 1)
        result = node.outputs[-1]
        result.name, result.type = op.unique_name(f"{op.scope}{state.name}_before"), state.type
        result.shape = None if state.shape is None else ir.Shape([None, *state.shape])
        results.append(result)
    # These attributes have one entry per scan output; the new outputs are stacked along axis 0, in forward order.
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            kept = node.attributes[name].as_ints()
            node.attributes.add(ir.AttrInt64s(name, [*kept, *(0 for _ in results)]))
    return results


def _slice_at(op: Emitter, stack: ir.Value, index: ir.Value, axis: int = 0) -> ir.Value:
    """Returns the slice of `stack` at `index` along `axis`."""
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
    """Differentiates a branch or body: returns the cotangent of each leaf; None means zero.

    Args:
        op: emitter of the subgraph.
        pairs: values of the subgraph with their cotangents; None means zero.
        leaves: values with respect to which the subgraph is differentiated.
        nodes: nodes to differentiate. Default: all nodes of the subgraph.

    Raises:
        NoGradientRule: the subgraph draws random numbers.
    """
    # The recomputed branch would draw different random numbers from the forward pass.
    for node in op.graph.all_nodes():
        if _is_random(node):
            raise NoGradientRule(
                f"differentiating a branch or loop with {node.op_type} ({where(node)}): its gradient would "
                "draw different random numbers. Draw the random numbers outside of the branch or loop"
            )
    seeds: dict[ir.Value, ir.Value] = {}
    for value, ct in pairs:
        if ct is not None and is_differentiable_dtype(value):
            # A body may return the same value as state and as scan output: its cotangents accumulate.
            seeds[value] = op.Add(seeds[value], ct) if value in seeds else ct
    return pull_back(op, seeds, leaves, nodes) if seeds else [None] * len(leaves)


def _is_random(node: ir.Node) -> bool:
    """True if a node draws random numbers; Dropout does, unless it is known to be in inference mode."""
    if node.domain != "" or node.op_type not in RANDOM_OPS:
        return False
    if node.op_type != "Dropout":
        return True
    training = node.inputs[2] if len(node.inputs) > 2 else None
    mode = known_array(training)
    return training is not None and (mode is None or bool(mode.any()))


def _append_outputs(op: Emitter, values: Sequence[ir.Value], like: Sequence[ir.Value]) -> None:
    """Appends values to the outputs of a subgraph, with the dtypes and shapes of `like`."""
    # Each through an Identity: a subgraph must compute its own outputs, and no value may be two outputs.
    for value, primal in zip(values, like, strict=True):
        result = op.Identity(value)
        result.type, result.shape = primal.type, primal.shape
        op.graph.outputs.append(result)


def _is_float(n: NodeView, value: ir.Value) -> bool:
    """True if the dtype of `value`, a state of a Loop or Scan, is floating point.

    Raises:
        NoGradientRule: the dtype is unknown.
    """
    if value.dtype is None:
        raise NoGradientRule(
            f"differentiating {n.op_type} ({where(n.node)}): the dtype of its state {value.name!r} is unknown; "
            "declare it"
        )
    return value.dtype.is_floating_point()
