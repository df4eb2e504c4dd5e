"""Differentiates the recurrent ops RNN, GRU and LSTM.

The forward output Y contains all hidden states, so the gates of all time steps are recomputed at once, outside any
loop. Only the recurrences run in a Scan: the LSTM's cell states forwards, and the cotangents of the states backwards.
The backward Scan returns the cotangents of the gates' pre-activations. From these, one MatMul over all time steps
computes the cotangents of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents, vjp
from onnxtrain.emitter import Emitter
from onnxtrain.errors import NoGradientRule

_INT64_MIN = int(np.iinfo(np.int64).min)
_OPERANDS = ("X", "W", "R", "B", "initial_h", "initial_c", "P")

States = Sequence[ir.Value]
Step = Callable[[Emitter, States, States], tuple[ir.Value, States]]
"""Backward step of a recurrence.

(emitter of the body, cotangents of the states after a time step, values of that step) -> (cotangent of the
pre-activations, cotangents of the states before the step).
"""


@dataclass
class _Direction:
    """One direction of a layer, with sequences in the order in which this direction reads them.

    Attributes:
        x: inputs [time, batch, input].
        h_prev: hidden state before each time step [time, batch, hidden].
        w: input weights [gates * hidden, input].
        r: recurrent weights [gates * hidden, hidden].
        wb: input bias [gates * hidden], or None.
        rb: recurrent bias [gates * hidden], or None.
        ct_y: cotangent of the hidden state after each time step [time, batch, hidden].
        ct_states: cotangents of the final states [batch, hidden]: the hidden state, and for an LSTM the cell state.
        c0: initial cell state of an LSTM, else None.
        peepholes: weights of the cell state in the gates i, o and f, [hidden] each, or None.
    """

    x: ir.Value
    h_prev: ir.Value
    w: ir.Value
    r: ir.Value
    wb: ir.Value | None
    rb: ir.Value | None
    ct_y: ir.Value
    ct_states: list[ir.Value]
    c0: ir.Value | None
    peepholes: States | None


@dataclass
class _Gradients:
    """Cotangents of one direction of a layer.

    Attributes:
        gates: cotangent of x W^T + wb, the input part of the pre-activations [time, batch, gates * hidden].
        recurrent: for each block of rows of R, a pair from which the cotangents of R and rb are computed: the cotangent
            of A R^T + rb, the recurrent part of the pre-activations [time, batch, rows], and A, e.g. the previous
            hidden states [time, batch, hidden].
        states: cotangents of the initial states [batch, hidden].
        peepholes: cotangent of the peephole weights [3 * hidden], or None.
    """

    gates: ir.Value
    recurrent: list[tuple[ir.Value, ir.Value]]
    states: States
    peepholes: ir.Value | None = None


@vjp("RNN", wrt=("X", "W", "R", "B", "initial_h"), outputs=("Y", "Y_h"), saves=("Y",))
def rnn(op: Emitter, n: NodeView, cts: tuple[ir.Value | None, ...]) -> Cotangents:
    """VJP of RNN: H = f(X W^T + H_prev R^T + b) with f = Tanh or Relu."""
    activation = _activations(n, ["Tanh"], ["Relu"])[0]

    def gradients(layer: _Direction, hidden: ir.Value) -> _Gradients:
        slope = op.Sub(1.0, op.Mul(hidden, hidden))
        # relu'(0) = 0, as in Relu's rule.
        if activation == "Relu":
            slope = op.Where(op.Greater(hidden, 0.0), op.const(1.0, like=hidden), 0.0)

        def step(body: Emitter, states: States, values: States) -> tuple[ir.Value, States]:
            ct = body.Mul(states[0], values[0])
            return ct, [body.MatMul(ct, layer.r)]

        gates, states = _scan_back(op, n, layer, [slope], step)
        return _Gradients(gates, [(gates, layer.h_prev)], states)

    return _layer(op, n, cts, gradients)


@vjp("GRU", wrt=("X", "W", "R", "B", "initial_h"), outputs=("Y", "Y_h"), saves=("Y",))
def gru(op: Emitter, n: NodeView, cts: tuple[ir.Value | None, ...]) -> Cotangents:
    """VJP of GRU: H = (1 - z) h + z H_prev with h = Tanh(x_h + (r H_prev) R_h^T + rb_h).

    With linear_before_reset, h = Tanh(x_h + r (H_prev R_h^T + rb_h)).
    """
    # These formulas are specific to the default activations, which are the ones that exporters emit.
    _activations(n, ["Sigmoid", "Tanh"])
    reset_last = bool(n.attr("linear_before_reset"))

    def gradients(layer: _Direction, hidden: ir.Value) -> _Gradients:
        previous, (r_z, r_r, r_h) = layer.h_prev, op.Split(layer.r, num_outputs=3, _outputs=3)
        x_z, x_r, x_h = _split(op, _affine(op, layer.x, layer.w, layer.wb), 3)
        rb_z, rb_r, rb_h = (None,) * 3 if layer.rb is None else op.Split(layer.rb, num_outputs=3, _outputs=3)
        z = op.Sigmoid(op.Add(x_z, _affine(op, previous, r_z, rb_z)))
        r = op.Sigmoid(op.Add(x_r, _affine(op, previous, r_r, rb_r)))
        reset = previous if reset_last else op.Mul(r, previous)
        inner = _affine(op, reset, r_h, rb_h)
        h = op.Tanh(op.Add(x_h, op.Mul(r, inner) if reset_last else inner))
        # Derivatives of H with respect to the pre-activations, for all time steps at once: the Scan only multiplies by
        # them.
        to_z = op.Mul(op.Sub(previous, h), _sigmoid_slope(op, z))
        to_h = op.Mul(op.Sub(1.0, z), op.Sub(1.0, op.Mul(h, h)))
        to_r = op.Mul(inner if reset_last else previous, _sigmoid_slope(op, r))

        def step(body: Emitter, states: States, values: States) -> tuple[ir.Value, States]:
            ct, (to_z, to_h, to_r, z, r) = states[0], values
            ct_z, ct_h = body.Mul(ct, to_z), body.Mul(ct, to_h)
            ct_reset = body.MatMul(body.Mul(ct_h, r) if reset_last else ct_h, r_h)
            ct_r = body.Mul(ct_h if reset_last else ct_reset, to_r)
            through = body.Add(body.MatMul(ct_z, r_z), body.MatMul(ct_r, r_r))
            through = body.Add(through, ct_reset if reset_last else body.Mul(ct_reset, r))
            return body.Concat(ct_z, ct_r, ct_h, axis=-1), [body.Add(body.Mul(ct, z), through)]

        gates, states = _scan_back(op, n, layer, [to_z, to_h, to_r, z, r], step)
        ct_z, ct_r, ct_h = _split(op, gates, 3)
        ct_inner = op.Mul(ct_h, r) if reset_last else ct_h
        return _Gradients(gates, [(ct_z, previous), (ct_r, previous), (ct_inner, reset)], states)

    return _layer(op, n, cts, gradients)


@vjp(
    "LSTM",
    wrt=("X", "W", "R", "B", "initial_h", "initial_c", "P"),
    outputs=("Y", "Y_h", "Y_c"),
    saves=("Y",),
)
def lstm(op: Emitter, n: NodeView, cts: tuple[ir.Value | None, ...]) -> Cotangents:
    """VJP of LSTM: C = f C_prev + i g, H = o Tanh(C), with the gates i, o and f (Sigmoid) and g (Tanh).

    With peepholes, the pre-activations of i and f also contain P_i C_prev and P_f C_prev, and the pre-activation of o
    contains P_o C.
    """
    _activations(n, ["Sigmoid", "Tanh", "Tanh"])
    if n.attr("input_forget"):
        raise _unsupported(n, "input_forget")

    def gradients(layer: _Direction, hidden: ir.Value) -> _Gradients:
        before = _affine(op, layer.x, layer.w, layer.wb)
        before = op.Add(before, _affine(op, layer.h_prev, layer.r, layer.rb))
        i, o, f, g, c_prev, c = _lstm_gates(op, layer, *_split(op, before, 4))
        tanh_c = op.Tanh(c)
        to_c = op.Mul(o, op.Sub(1.0, op.Mul(tanh_c, tanh_c)))
        to_i = op.Mul(g, _sigmoid_slope(op, i))
        to_o = op.Mul(tanh_c, _sigmoid_slope(op, o))
        to_f = op.Mul(c_prev, _sigmoid_slope(op, f))
        to_g = op.Mul(i, op.Sub(1.0, op.Mul(g, g)))
        to_gates = op.Concat(to_i, to_o, to_f, to_g, axis=-1)
        keep = f
        # With peepholes, the cell state also reaches H and the next cell state through the gates.
        if layer.peepholes is not None:
            p_i, p_o, p_f = layer.peepholes
            to_c = op.Add(to_c, op.Mul(to_o, p_o))
            keep = op.Sum(f, op.Mul(to_i, p_i), op.Mul(to_f, p_f))

        def step(body: Emitter, states: States, values: States) -> tuple[ir.Value, States]:
            (ct_h, ct_c), (to_c, to_gates, keep) = states, values
            ct_c = body.Add(ct_c, body.Mul(ct_h, to_c))
            gates = body.Mul(body.Concat(ct_c, ct_h, ct_c, ct_c, axis=-1), to_gates)
            return gates, [body.MatMul(gates, layer.r), body.Mul(ct_c, keep)]

        # Everything that does not depend on cotangents is computed beforehand, for all time steps at once.
        gates, states = _scan_back(op, n, layer, [to_c, to_gates, keep], step)
        peepholes = None
        if n.needs("P"):
            ct_i, ct_o, ct_f, _ = _split(op, gates, 4)
            terms = op.Concat(op.Mul(ct_i, c_prev), op.Mul(ct_o, c), op.Mul(ct_f, c_prev), axis=-1)
            peepholes = op.ReduceSum(terms, [0, 1], keepdims=0)
        return _Gradients(gates, [(gates, layer.h_prev)], states, peepholes)

    return _layer(op, n, cts, gradients)


def _layer(
    op: Emitter,
    n: NodeView,
    cts: tuple[ir.Value | None, ...],
    gradients: Callable[[_Direction, ir.Value], _Gradients],
) -> Cotangents:
    """Differentiates each direction of a layer, and joins the directions' cotangents by input name.

    Args:
        op: emitter.
        n: the node.
        cts: cotangents of the outputs.
        gradients: emits the cotangents of one direction, given the direction and its hidden states.

    Raises:
        NoGradientRule: the node clips its gates.
    """
    # A clipped gate has zero derivative beyond the bounds, which these formulas ignore.
    if n.attr("clip") is not None:
        raise _unsupported(n, "clip")
    backward = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[n.attr("direction")]
    parts: dict[str, list[ir.Value]] = {name: [] for name in _OPERANDS}
    for index, reverse in enumerate(backward):
        layer, hidden = _direction(op, n, cts, index, reverse)
        grads = gradients(layer, hidden)
        flat = op.Flatten(grads.gates, axis=2)
        if n.needs("X"):
            ct_x = op.MatMul(grads.gates, layer.w)
            parts["X"].append(_flip(op, n, ct_x) if reverse else ct_x)
        if n.needs("W"):
            parts["W"].append(op.MatMul(op.Transpose(flat, perm=[1, 0]), op.Flatten(layer.x, axis=2)))
        if n.needs("R"):
            rows = [
                op.MatMul(op.Transpose(op.Flatten(ct, axis=2), perm=[1, 0]), op.Flatten(by, axis=2))
                for ct, by in grads.recurrent
            ]
            parts["R"].append(op.Concat(*rows, axis=0))
        if n.needs("B"):
            sums = [
                op.ReduceSum(v, [0, 1], keepdims=0) for v in (grads.gates, *(ct for ct, _ in grads.recurrent))
            ]
            parts["B"].append(op.Concat(*sums, axis=0))
        for name, state in zip(("initial_h", "initial_c"), grads.states, strict=False):
            parts[name].append(state)
        if grads.peepholes is not None:
            parts["P"].append(grads.peepholes)
    result = {
        name: _stack_directions(op, values)
        for name, values in parts.items()
        if name != "X" and values and n.needs(name)
    }
    if n.needs("X"):
        result["X"] = op.Sum(*parts["X"]) if len(backward) > 1 else parts["X"][0]
    return result


def _direction(
    op: Emitter, n: NodeView, cts: tuple[ir.Value | None, ...], index: int, reverse: bool
) -> tuple[_Direction, ir.Value]:
    """Returns one direction of the node, and its hidden states [time, batch, hidden].

    Args:
        op: emitter.
        n: the node.
        cts: cotangents of the outputs.
        index: index of the direction along the direction axis of weights and states.
        reverse: True if the direction reads its sequences from the last time step to the first.
    """
    zeros = op.Expand(op.const(0, like=n.X), op.Concat(op.dim(n.X, 1), op.dim(n.R, 2), axis=0))

    def of_direction(value: ir.Value, axis: int = 0) -> ir.Value:
        return op.Gather(value, op.const(index), axis=axis)

    def state(value: ir.Value | None) -> ir.Value:
        return zeros if value is None else of_direction(value)

    # If `saves` added Y to the forward node, Y has no dtype yet; Cast sets it.
    x, hidden = n.X, op.Cast(of_direction(n.out.Y, 1), to=n.X.dtype)
    # If only the final states are used, the Scan still needs a cotangent for every time step.
    ct_y = op.Expand(op.const(0, like=n.X), op.Shape(hidden)) if cts[0] is None else of_direction(cts[0], 1)
    if reverse:
        x, hidden, ct_y = (_flip(op, n, value) for value in (x, hidden, ct_y))
    wb, rb = (None, None) if n.B is None else op.Split(of_direction(n.B), num_outputs=2, _outputs=2)
    peepholes = n.P if n.op_type == "LSTM" else None
    layer = _Direction(
        x=x,
        h_prev=_previous_states(op, state(n.initial_h), hidden),
        w=of_direction(n.W),
        r=of_direction(n.R),
        wb=wb,
        rb=rb,
        ct_y=ct_y,
        ct_states=[state(ct) for ct in cts[1:]],
        c0=state(n.initial_c) if n.op_type == "LSTM" else None,
        peepholes=None if peepholes is None else op.Split(of_direction(peepholes), num_outputs=3, _outputs=3),
    )
    return layer, hidden


def _lstm_gates(
    op: Emitter, layer: _Direction, i: ir.Value, o: ir.Value, f: ir.Value, g: ir.Value
) -> tuple[ir.Value, ...]:
    """Computes the gates and cell states of all time steps from the pre-activations.

    Returns:
        The gates i, o, f and g, and the cell states before and after each time step.
    """
    g = op.Tanh(g)
    if layer.peepholes is None:
        i, o, f = op.Sigmoid(i), op.Sigmoid(o), op.Sigmoid(f)
        new = op.Mul(i, g)
        cells = _cells(op, layer, [f, new], lambda body, c, f, new: body.Add(body.Mul(f, c), new))
        return i, o, f, g, *cells
    p_i, p_o, p_f = layer.peepholes

    # With peepholes, the gates depend on the cell state: they are computed in the Scan, and again from its cell states.
    def step(body: Emitter, c: ir.Value, i: ir.Value, f: ir.Value, g: ir.Value) -> ir.Value:
        i, f = (body.Sigmoid(body.Add(gate, body.Mul(c, p))) for gate, p in ((i, p_i), (f, p_f)))
        return body.Add(body.Mul(f, c), body.Mul(i, g))

    before, after = _cells(op, layer, [i, f, g], step)
    seen = ((i, before, p_i), (o, after, p_o), (f, before, p_f))
    return *(op.Sigmoid(op.Add(gate, op.Mul(c, p))) for gate, c, p in seen), g, before, after


def _cells(
    op: Emitter, layer: _Direction, values: States, step: Callable[..., ir.Value]
) -> tuple[ir.Value, ir.Value]:
    """Emits a Scan that computes the cell states before and after each time step.

    Args:
        op: emitter.
        layer: the direction.
        values: values of all time steps that `step` reads, [time, batch, hidden].
        step: emits the next cell state, given the emitter of the body, the cell state and the values of a time step.
    """
    assert layer.c0 is not None
    assert layer.x.dtype is not None
    names = [f"value{k}" for k in range(len(values))]
    body = op.subgraph(dict.fromkeys(("cell", *names), layer.x.dtype))
    after = step(body, *body.graph.inputs)
    # Identity, because the cell state is both the next state and a scan output, and no value may be two outputs.
    attr = _scan_body(body, [after, body.Identity(after)])
    _, cells = op.Scan(layer.c0, *values, body=attr, num_scan_inputs=len(values), _outputs=2)
    return _previous_states(op, layer.c0, cells), cells


def _scan_back(
    op: Emitter, n: NodeView, layer: _Direction, values: Sequence[ir.Value], step: Step
) -> tuple[ir.Value, States]:
    """Emits a Scan that runs `step` backwards in time.

    Args:
        op: emitter.
        n: the node.
        layer: the direction.
        values: values of all time steps that `step` reads, [time, batch, ...].
        step: emits one backward step.

    Returns:
        The cotangents of the pre-activations [time, batch, gates * hidden], and of the initial states.
    """
    dtype = layer.x.dtype
    assert dtype is not None
    sequences = [layer.ct_y, *values]
    # The mask as floats: all inputs of this Scan's body are declared with the same dtype.
    if n.sequence_lens is not None:
        sequences.append(op.Cast(_sequence_mask(op, n), to=dtype))
    count = len(layer.ct_states)
    names = [*(f"state{i}" for i in range(count)), *(f"value{i}" for i in range(len(sequences)))]
    body = op.subgraph(dict.fromkeys(names, dtype))
    states, steps = list(body.graph.inputs[:count]), list(body.graph.inputs[count:])
    active = body.Greater(steps.pop(), 0.5) if n.sequence_lens is not None else None
    gates, before = step(body, [body.Add(states[0], steps[0]), *states[1:]], steps[1:])
    # After a sequence has ended, the cotangents of its states pass unchanged to the time step at which it ended.
    if active is not None:
        gates = body.Where(active, gates, 0.0)
        before = [body.Where(active, new, old) for new, old in zip(before, states, strict=True)]
    attr = _scan_body(body, [*before, gates])
    flipped = [op.Slice(v, [-1], [_INT64_MIN], [0], [-1]) for v in sequences]
    outputs = op.Scan(*layer.ct_states, *flipped, body=attr, num_scan_inputs=len(flipped), _outputs=count + 1)
    for output in outputs:
        output.type = ir.TensorType(dtype)
    return op.Slice(outputs[-1], [-1], [_INT64_MIN], [0], [-1]), outputs[:-1]


def _scan_body(body: Emitter, outputs: States) -> ir.Attr:
    """Appends outputs, each [batch, ...], to the body of a Scan; returns the body as an attribute."""
    # ONNX Runtime requires their ranks.
    for output in outputs:
        output.shape = output.shape or ir.Shape([None, None])
    body.graph.outputs.extend(outputs)
    return ir.AttrGraph("body", body.graph)


def _sequence_mask(op: Emitter, n: NodeView) -> ir.Value:
    """Returns a mask, bool [time, batch, 1], that is true for time steps within the length of their sequence."""
    time = op.Unsqueeze(op.Range(0, op.Squeeze(op.dim(n.X, 0), [0]), 1), [1, 2])
    lengths = op.Unsqueeze(op.Cast(n.sequence_lens, to=ir.DataType.INT64), [0, 2])
    return op.Less(time, lengths)


def _flip(op: Emitter, n: NodeView, value: ir.Value) -> ir.Value:
    """Reverses the time axis; with sequence_lens, reverses each sequence only within its length."""
    if n.sequence_lens is None:
        return op.Slice(value, [-1], [_INT64_MIN], [0], [-1])
    lengths = op.Cast(n.sequence_lens, to=ir.DataType.INT64)
    return op.ReverseSequence(value, lengths, time_axis=0, batch_axis=1)


def _previous_states(op: Emitter, first: ir.Value, states: ir.Value) -> ir.Value:
    """Returns the state before each time step, given the initial state and the states after each step."""
    return op.Concat(op.Unsqueeze(first, [0]), op.Slice(states, [0], [-1], [0]), axis=0)


def _affine(op: Emitter, x: ir.Value, w: ir.Value, b: ir.Value | None) -> ir.Value:
    """Returns x wᵀ + b."""
    product = op.MatMul(x, op.Transpose(w, perm=[1, 0]))
    return product if b is None else op.Add(product, b)


def _sigmoid_slope(op: Emitter, y: ir.Value) -> ir.Value:
    """Returns the derivative of the sigmoid in terms of its output: y (1 - y)."""
    return op.Mul(y, op.Sub(1.0, y))


def _split(op: Emitter, value: ir.Value, parts: int) -> tuple[ir.Value, ...]:
    """Splits the last axis into equal parts, one per gate."""
    return op.Split(value, axis=-1, num_outputs=parts, _outputs=parts)


def _stack_directions(op: Emitter, values: list[ir.Value]) -> ir.Value:
    """Stacks the values of all directions along a new axis 0."""
    return op.Concat(*(op.Unsqueeze(value, [0]) for value in values), axis=0)


def _activations(n: NodeView, *allowed: list[str]) -> list[str]:
    """Returns the activations of one direction.

    Raises:
        NoGradientRule: the activations are not among `allowed`, or differ between directions.
    """
    declared = n.attr("activations") or allowed[0]
    names = [(name.decode() if isinstance(name, bytes) else str(name)).capitalize() for name in declared]
    first = names[: len(allowed[0])]
    if first not in allowed or any(
        names[i : i + len(first)] != first for i in range(0, len(names), len(first))
    ):
        raise _unsupported(n, f"activations {names}")
    return first


def _unsupported(n: NodeView, what: str) -> NoGradientRule:
    """Returns the error for an unsupported setting of a layer, e.g. "clip"."""
    return NoGradientRule(
        f"differentiating {n.op_type} (node {n.node.name!r}): {what} has no gradient rule; "
        "freeze all parameters before it, or export the layer without it"
    )
