"""Defines recurrent layers that save their gates for the backward pass, and the gradients of these layers.

The LSTM is from Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997).

Each op is one direction of a layer: `LSTM` reads its sequences from the first time step to the last, `LSTMReverse` from
the last to the first. Weights and states have ONNX's shapes, with 1 direction.

The backward pass has two parts. The recurrent part computes the cotangents of the gates of all time steps: of x Wᵀ + Wb
and of h Rᵀ + Rb, which are equal for the LSTM. The cotangents of W, R, B and x follow from these by matrix products and
sums over all time steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnxtrain.emitter import AttributeRef, Emitter

from ._composite import CompositeOp, composite

Values = Sequence[ir.Value]
Step = Callable[[Emitter, Values, Values], tuple[Values, ir.Value]]
"""(emitter of the body, states before a time step, values of the step) -> (states after the step, its output)."""

_LSTM_INPUTS = ["x", "w", "r", "b", "initial_h", "initial_c"]
_LSTM_GRADIENT_INPUTS = ["ct_y", "ct_h", "ct_c", "gates", "cells", "initial_c", "r"]
_GRU_INPUTS = ["x", "w", "r", "b", "initial_h"]
_GRU_GRADIENT_INPUTS = ["ct_y", "ct_h", "gates", "inner", "y", "initial_h", "r"]
_WEIGHT_INPUTS = ["ct_input", "ct_hidden", "x", "y", "initial_h"]
_HIDDEN = {"hidden_size": ir.AttributeType.INT}


def _lstm(op: Emitter, inputs: Values, *, hidden_size: AttributeRef, reverse: bool) -> tuple[ir.Value, ...]:
    """Computes ONNX's LSTM with its default activations, and returns `gates` and `cells` for the backward pass.

    The inputs are x, w, r, b, initial_h and initial_c. The LSTM reads its sequences from the last time step to the
    first if `reverse`.

    gates: i, o, f and c after their activations, `[time, batch, 4 * hidden]`; cells: cell state after each time step,
    `[time, batch, hidden]`.
    """
    x, w, r, b, initial_h, initial_c = inputs
    direction = "reverse" if reverse else "forward"
    y, y_h, y_c = op.LSTM(
        x, w, r, b, None, initial_h, initial_c, hidden_size=hidden_size, direction=direction, _outputs=3
    )
    # ONNX's LSTM returns only the hidden states. From these, the gates of all time steps are recomputed at once, with
    # large matrix products instead of a small one per step.
    wb, rb = op.Split(op.Squeeze(b, [0]), num_outputs=2, _outputs=2)
    before = _previous_states(op, op.Squeeze(initial_h, [0]), op.Squeeze(y, [1]), reverse)
    sums = op.Add(op.Add(_project(op, x, w), _project(op, before, r)), op.Add(wb, rb))
    logistic, new = op.Split(sums, op.Mul(op.ints(hidden_size), [3, 1]), axis=-1, _outputs=2)
    gates = op.Concat(op.Sigmoid(logistic), op.Tanh(new), axis=-1)
    i, _, f, g = _split(op, gates, 4)

    def step(body: Emitter, states: Values, values: Values) -> tuple[Values, ir.Value]:
        # The cell state is the only recurrence: f * cell + i * g.
        cell = body.Add(body.Mul(values[0], states[0]), values[1])
        return [cell], cell

    _, cells = _scan(op, [op.Squeeze(initial_c, [0])], [f, op.Mul(i, g)], step, reverse)
    return y, y_h, y_c, gates, cells


def _lstm_gradient(op: Emitter, inputs: Values, *, reverse: bool) -> tuple[ir.Value, ...]:
    """VJP of LSTM: cotangents of the gates' pre-activations, `[time, batch, 4 * hidden]`, and of the initial states.

    The inputs ct_y, ct_h and ct_c are the cotangents of y and of the final states.
    """
    ct_y, ct_h, ct_c, gates, cells, initial_c, r = inputs
    i, o, f, g = _split(op, gates, 4)
    tanh_c = op.Tanh(cells)
    # Everything that does not depend on the recurrence is computed for all time steps at once, so that the Scan
    # contains only one matrix product per step.
    to_c = op.Mul(o, op.Sub(1.0, op.Mul(tanh_c, tanh_c)))
    to_i = op.Mul(g, _sigmoid_slope(op, i))
    to_o = op.Mul(tanh_c, _sigmoid_slope(op, o))
    to_f = op.Mul(_previous_states(op, op.Squeeze(initial_c, [0]), cells, reverse), _sigmoid_slope(op, f))
    to_g = op.Mul(i, op.Sub(1.0, op.Mul(g, g)))
    to_gates = op.Concat(to_i, to_o, to_f, to_g, axis=-1)
    # Outside of the Scan, which would repeat the Squeeze in each step.
    weight = op.Squeeze(r, [0])

    def step(body: Emitter, states: Values, values: Values) -> tuple[Values, ir.Value]:
        (ct_h, ct_c), (ct_y, to_c, to_gates, f) = states, values
        ct_h = body.Add(ct_h, ct_y)
        ct_c = body.Add(ct_c, body.Mul(ct_h, to_c))
        # In ONNX's order i, o, f, c: o acts on h, the other gates on the cell state.
        ct = body.Mul(body.Concat(ct_c, ct_h, ct_c, ct_c, axis=-1), to_gates)
        return [body.MatMul(ct, weight), body.Mul(ct_c, f)], ct

    states = [op.Squeeze(ct_h, [0]), op.Squeeze(ct_c, [0])]
    values = [op.Squeeze(ct_y, [1]), to_c, to_gates, f]
    (ct_h0, ct_c0), ct_gates = _scan(op, states, values, step, not reverse)
    return ct_gates, op.Unsqueeze(ct_h0, [0]), op.Unsqueeze(ct_c0, [0])


def _gru(op: Emitter, inputs: Values, *, hidden_size: AttributeRef, reverse: bool) -> tuple[ir.Value, ...]:
    """Computes ONNX's GRU with linear_before_reset=1, and returns `gates` and `inner` for the backward pass.

    The inputs are x, w, r, b and initial_h. The GRU reads its sequences from the last time step to the first if
    `reverse`.

    gates: z, r and h after their activations, `[time, batch, 3 * hidden]`; inner: the recurrent term of the
    pre-activation of h, before its multiplication by r, `[time, batch, hidden]`.
    """
    x, w, r, b, initial_h = inputs
    y, y_h = op.GRU(
        *(x, w, r, b, None, initial_h),
        hidden_size=hidden_size,
        direction="reverse" if reverse else "forward",
        linear_before_reset=1,
        _outputs=2,
    )
    wb, rb = op.Split(op.Squeeze(b, [0]), num_outputs=2, _outputs=2)
    before = _previous_states(op, op.Squeeze(initial_h, [0]), op.Squeeze(y, [1]), reverse)
    sizes = op.Mul(op.ints(hidden_size), [2, 1])
    from_x, new = op.Split(op.Add(_project(op, x, w), wb), sizes, axis=-1, _outputs=2)
    from_h, inner = op.Split(op.Add(_project(op, before, r), rb), sizes, axis=-1, _outputs=2)
    logistic = op.Sigmoid(op.Add(from_x, from_h))
    _, reset = _split(op, logistic, 2)
    new = op.Tanh(op.Add(new, op.Mul(reset, inner)))
    return y, y_h, op.Concat(logistic, new, axis=-1), inner


def _gru_gradient(op: Emitter, inputs: Values, *, reverse: bool) -> tuple[ir.Value, ...]:
    """VJP of GRU: cotangents of the input and recurrent parts of the pre-activations, and of the initial state.

    Both parts are `[time, batch, 3 * hidden]`.
    """
    ct_y, ct_h, gates, inner, y, initial_h, r = inputs
    before = _previous_states(op, op.Squeeze(initial_h, [0]), op.Squeeze(y, [1]), reverse)
    z, reset, h = _split(op, gates, 3)
    to_z = op.Mul(op.Sub(before, h), _sigmoid_slope(op, z))
    to_h = op.Mul(op.Sub(1.0, z), op.Sub(1.0, op.Mul(h, h)))
    to_r = op.Mul(to_h, op.Mul(inner, _sigmoid_slope(op, reset)))
    to_hidden = op.Concat(to_z, to_r, op.Mul(to_h, reset), axis=-1)
    weight = op.Squeeze(r, [0])

    def step(body: Emitter, states: Values, values: Values) -> tuple[Values, ir.Value]:
        (ct,), (ct_y, to_hidden, z) = states, values
        ct = body.Add(ct, ct_y)
        through = body.MatMul(body.Mul(body.Concat(ct, ct, ct, axis=-1), to_hidden), weight)
        return [body.Add(body.Mul(ct, z), through)], ct

    values = [op.Squeeze(ct_y, [1]), to_hidden, z]
    (ct_h0,), ct = _scan(op, [op.Squeeze(ct_h, [0])], values, step, not reverse)
    cts = op.Concat(ct, ct, ct, axis=-1)
    ct_input = op.Mul(cts, op.Concat(to_z, to_r, to_h, axis=-1))
    return ct_input, op.Mul(cts, to_hidden), op.Unsqueeze(ct_h0, [0])


def _weight_gradient(op: Emitter, inputs: Values, *, reverse: bool) -> tuple[ir.Value, ...]:
    """Returns the cotangents of W, R and B.

    The inputs are the cotangents of the pre-activations' input and recurrent parts, `[time, batch, gates]`, then x, y
    and the initial hidden state.
    """
    ct_input, ct_hidden, x, y, initial_h = inputs
    before = _previous_states(op, op.Squeeze(initial_h, [0]), op.Squeeze(y, [1]), reverse)
    products, sums = [], []
    for ct, by in ((ct_input, x), (ct_hidden, before)):
        # [time * batch, gates]: one matrix product sums over all time steps and samples.
        rows = op.Flatten(ct, axis=2)
        product = op.MatMul(op.Transpose(rows, perm=[1, 0]), op.Flatten(by, axis=2))
        products.append(op.Unsqueeze(product, [0]))
        # Summing rows with a matrix product is faster on ONNX Runtime than ReduceSum.
        ones = op.Expand(op.const(1.0, like=ct), op.Concat([1], op.Shape(rows, end=1), axis=0))
        sums.append(op.MatMul(ones, rows))
    return *products, op.Concat(*sums, axis=-1)


def _scan(
    op: Emitter, states: Values, values: Values, step: Step, reverse: bool
) -> tuple[tuple[ir.Value, ...], ir.Value]:
    """Runs `step` over time, or backwards in time if `reverse`; returns the final states and the stacked outputs.

    Args:
        op: emitter of the function body.
        states: initial states, `[batch, hidden]`.
        values: values that `step` reads, stacked along time.
        step: emits one step, given the states before the step and the values of that step.
        reverse: True to start at the last time step.
    """
    names = [*(f"state{k}" for k in range(len(states))), *(f"value{k}" for k in range(len(values)))]
    body = op.subgraph(dict.fromkeys(names, states[0].dtype))
    inputs = list(body.graph.inputs)
    after, output = step(body, inputs[: len(states)], inputs[len(states) :])
    # ONNX Runtime (1.32) needs ranks here, and gives nondeterministic results if a value is two outputs of a Scan.
    for value in (*after, output):
        result = body.Identity(value)
        result.shape = ir.Shape([None, None])
        body.graph.outputs.append(result)
    results = op.Scan(
        *states,
        *values,
        body=ir.AttrGraph("body", body.graph),
        num_scan_inputs=len(values),
        scan_input_directions=[int(reverse)] * len(values),
        scan_output_directions=[int(reverse)],
        _outputs=len(states) + 1,
    )
    for result in results:
        result.type = states[0].type
    return results[:-1], results[-1]


def _previous_states(op: Emitter, first: ir.Value, states: ir.Value, reverse: bool) -> ir.Value:
    """Returns the state before each time step, given the initial state and the states after all time steps.

    `first` is the initial state, `[batch, hidden]`. `states` and the result are in time order, `[time, batch, hidden]`.
    """
    # In a reversed layer, the previous step is the next one in time.
    first = op.Unsqueeze(first, [0])
    if reverse:
        return op.Concat(op.Slice(states, [1], [2**63 - 1], [0]), first, axis=0)
    return op.Concat(first, op.Slice(states, [0], [-1], [0]), axis=0)


def _project(op: Emitter, x: ir.Value, weight: ir.Value) -> ir.Value:
    """Returns x Wᵀ for a weight with a leading axis of size 1."""
    return op.MatMul(x, op.Transpose(op.Squeeze(weight, [0]), perm=[1, 0]))


def _split(op: Emitter, value: ir.Value, parts: int) -> tuple[ir.Value, ...]:
    return op.Split(value, axis=-1, num_outputs=parts, _outputs=parts)


def _sigmoid_slope(op: Emitter, y: ir.Value) -> ir.Value:
    """Returns the derivative of the logistic function in terms of its value y."""
    return op.Mul(y, op.Sub(1.0, y))


def _directions(
    name: str,
    inputs: Sequence[str],
    outputs: int,
    body: Callable[..., tuple[ir.Value, ...]],
    attributes: Mapping[str, ir.AttributeType] | None = None,
) -> tuple[CompositeOp, CompositeOp]:
    """Defines both versions of a recurrent composite op: forward in time, and reversed.

    Args:
        name: name with a placeholder for the direction, e.g. "LSTM{}Gradient".
        inputs: names of the inputs.
        outputs: number of outputs.
        body: `(op, inputs, *, reverse, **attributes)` -> outputs.
        attributes: types of the attributes, by name.
    """

    def define(reverse: bool) -> CompositeOp:
        @composite(name.format("Reverse" if reverse else ""), inputs, attributes, outputs=outputs)
        def direction(op: Emitter, *values: ir.Value, **references: AttributeRef) -> tuple[ir.Value, ...]:
            return body(op, values, reverse=reverse, **references)

        return direction

    return define(False), define(True)


lstm, lstm_reverse = _directions("LSTM{}", _LSTM_INPUTS, 5, _lstm, _HIDDEN)
lstm_gradient, lstm_reverse_gradient = _directions("LSTM{}Gradient", _LSTM_GRADIENT_INPUTS, 3, _lstm_gradient)
gru, gru_reverse = _directions("GRU{}", _GRU_INPUTS, 4, _gru, _HIDDEN)
gru_gradient, gru_reverse_gradient = _directions("GRU{}Gradient", _GRU_GRADIENT_INPUTS, 3, _gru_gradient)
recurrent_weight_gradient, recurrent_weight_reverse_gradient = _directions(
    "RecurrentWeight{}Gradient", _WEIGHT_INPUTS, 3, _weight_gradient
)


LAYERS: dict[tuple[str, bool], tuple[CompositeOp, CompositeOp, CompositeOp]] = {
    ("LSTM", False): (lstm, lstm_gradient, recurrent_weight_gradient),
    ("LSTM", True): (lstm_reverse, lstm_reverse_gradient, recurrent_weight_reverse_gradient),
    ("GRU", False): (gru, gru_gradient, recurrent_weight_gradient),
    ("GRU", True): (gru_reverse, gru_reverse_gradient, recurrent_weight_reverse_gradient),
}
"""A layer's forward op, gradient and weight gradient, by ONNX op and whether it is reversed, e.g. ("GRU", True)."""
