"""Lowers LSTM, GRU and RNN layers to one ONNX node each.

PyTorch's tracing decomposes a layer into time steps. `WHOLE_LAYERS` traces `torch.lstm`, `torch.gru` and `torch.rnn_*`
as one call of the custom op `onnxtrain::recurrent_layer` per layer instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import prod
from typing import Any

import onnx_ir as ir
import torch
from torch.utils.flop_counter import register_flop_formula

from onnxtrain.ortmodule._torch import disable_current_modes
from onnxtrain.ortmodule.lowering._table import Lowering, lower

_LIBRARY = torch.library.Library("onnxtrain", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "recurrent_layer(Tensor x, Tensor[] states, Tensor[] weights, str mode, bool bias, bool bidirectional) -> Tensor[]"
)

_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2), "rnn_tanh": (0,), "rnn_relu": (0,)}
"""Maps each mode to the indices of ONNX's gates in PyTorch's order.

LSTM: ONNX has i o f c, PyTorch i f g o. GRU: ONNX has z r h, PyTorch r z n.
"""


@torch.library.register_fake("onnxtrain::recurrent_layer")  # type: ignore[untyped-decorator]
def _fake_layer(
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    mode: str,
    bias: bool,
    bidirectional: bool,
) -> list[torch.Tensor]:
    """Returns fake tensors for the outputs of a recurrent layer.

    These are the hidden states, [time, batch, directions * hidden], and the final states.
    """
    hidden = states[0].shape[-1] * (2 if bidirectional else 1)
    return [x.new_empty((x.shape[0], x.shape[1], hidden)), *(torch.empty_like(state) for state in states)]


@register_flop_formula(torch.ops.onnxtrain.recurrent_layer)
def _flops(x: Sequence[int], states: Any, weights: Sequence[Sequence[int]], *args: Any, **named: Any) -> int:
    """Returns the number of floating-point operations of a recurrent layer, given the shapes of its arguments.

    Each weight is multiplied once per row and time step.
    """
    return 2 * x[0] * x[1] * sum(prod(weight) for weight in weights if len(weight) == 2)


def _by_layers(function: Callable[..., Any], *args: Any) -> Any:
    """Runs `torch.lstm` or a similar function as one call of the op `recurrent_layer` per layer.

    Calls `function` itself for packed sequences and for LSTMs with projections, which the op does not support.

    Args:
        function: `torch.lstm`, `torch.gru`, `torch.rnn_tanh` or `torch.rnn_relu`.
        args: the arguments of the function.

    Returns:
        The output and the final states, as the function returns them.

    Raises:
        RuntimeError: the input has no time steps; eager PyTorch raises the same error.
    """
    mode = function.__name__
    if len(args) != 9 or not isinstance(args[2], list | tuple):
        # A packed sequence.
        return function(*args)
    x, initial, weights, bias, num_layers, dropout, train, bidirectional, batch_first = args
    states = list(initial) if mode == "lstm" else [initial]
    dtypes = _result_dtypes(function, x, states, weights, bias)
    x, *others = _promoted(x, *states, *weights)
    states, weights = others[: len(states)], others[len(states) :]
    if mode == "lstm" and states[0].shape[-1] != states[1].shape[-1]:
        # Hidden and cell states of different sizes mean projections, which ONNX's LSTM lacks.
        return function(*args)
    directions = 2 if bidirectional else 1
    tensors = directions * (4 if bias else 2)
    if batch_first:
        x = x.transpose(0, 1)
    if x.shape[0] == 0:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    finals = []
    for layer in range(num_layers):
        initial_states = [state.narrow(0, layer * directions, directions) for state in states]
        layer_weights = list(weights[layer * tensors : (layer + 1) * tensors])
        x, *final = torch.ops.onnxtrain.recurrent_layer(
            x, states if num_layers == 1 else initial_states, layer_weights, mode, bias, bidirectional
        )
        finals.append(final)
        if dropout and train and layer + 1 < num_layers:
            x = torch.nn.functional.dropout(x, dropout, training=True)
    final_states = [state[0] if num_layers == 1 else torch.cat(state) for state in zip(*finals, strict=True)]
    results = (x.transpose(0, 1) if batch_first else x, *final_states)
    return tuple(result.to(dtype) for result, dtype in zip(results, dtypes, strict=True))


def _result_dtypes(
    function: Callable[..., Any],
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    bias: bool,
) -> list[torch.dtype]:
    """Returns the dtypes of the output and the final states of `function`, e.g. `torch.lstm`, in eager PyTorch."""
    # Under autocast, some results are bfloat16 and others float32. Fake tensors (PyTorch 2.13) have the wrong dtype,
    # float32, for an LSTM whose input requires a gradient. So eager PyTorch runs a layer with sizes of 1 to find out.
    if not torch.is_autocast_enabled(x.device.type):
        return [x.dtype] * (1 + len(states))

    def zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    gates = len(_GATES[function.__name__])
    with disable_current_modes(), torch.no_grad():
        initial = [zeros(state, 1, 1, 1) for state in states]
        layer_weights = [
            zeros(weight, gates, *[1] * (weight.dim() - 1)) for weight in weights[: 4 if bias else 2]
        ]
        results = function(
            zeros(x, 1, 1, 1),
            initial if len(initial) > 1 else initial[0],
            layer_weights,
            bias,
            1,
            0.0,
            False,
            False,
            False,
        )
    return [result.dtype for result in results]


def _promoted(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Casts the tensors to their common dtype, because ONNX's recurrent ops require a single dtype.

    Under autocast, the input, states and weights may have different dtypes.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1:
        return list(tensors)
    common = reduce(torch.promote_types, dtypes)
    return [tensor.to(common) for tensor in tensors]


WHOLE_LAYERS: dict[Any, Callable[..., Any]] = {
    function: partial(_by_layers, function)
    for function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
}
"""Replacements for recurrent layers when a Dynamo graph is traced."""


@lower("onnxtrain.recurrent_layer.default")
def recurrent_layer(
    low: Lowering,
    x: ir.Value,
    states: list[ir.Value],
    weights: list[ir.Value],
    mode: str,
    bias: bool,
    bidirectional: bool,
) -> tuple[ir.Value, ...]:
    """Lowers `onnxtrain::recurrent_layer`, one layer of an LSTM, GRU or RNN, to one ONNX node.

    Args:
        low: the lowering.
        x: the input, [time, batch, input].
        states: the initial states, each [directions, batch, hidden]: hidden and cell state for an LSTM, else the hidden
            state.
        weights: for each direction `weight_ih`, `weight_hh` and, if `bias`, `bias_ih` and `bias_hh`, in PyTorch's gate
            order.
        mode: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        bias: True if the layer has biases.
        bidirectional: True if the layer is bidirectional.

    Returns:
        The hidden states of all time steps, [time, batch, directions * hidden], and the final states.
    """
    op, directions = low.op, 2 if bidirectional else 1
    hidden = low.node.args[1][0].meta["val"].shape[-1]  # type: ignore[index, union-attr]
    parts = [_reorder_gates(low, weight, mode, hidden) for weight in weights]
    per_direction = 4 if bias else 2
    w, r = (_stack(low, parts[kind::per_direction]) for kind in (0, 1))
    b = None
    if bias:
        b = _stack(
            low, [op.Concat(*parts[i + 2 : i + 4], axis=0) for i in range(0, len(parts), per_direction)]
        )
    attributes: dict[str, Any] = {
        "hidden_size": hidden,
        "direction": "bidirectional" if bidirectional else "forward",
    }
    if mode == "lstm":
        y, *final = op.LSTM(x, w, r, b, None, *states, **attributes, _outputs=3)
    elif mode == "gru":
        # PyTorch applies the reset gate after the recurrent matrix product, ONNX by default before it.
        y, *final = op.GRU(x, w, r, b, None, *states, **attributes, linear_before_reset=1, _outputs=2)
    else:
        activations = ["Tanh" if mode == "rnn_tanh" else "Relu"] * directions
        y, *final = op.RNN(x, w, r, b, None, *states, **attributes, activations=activations, _outputs=2)
    # ONNX: [time, directions, batch, hidden]. PyTorch: [time, batch, directions * hidden].
    time, batch, _ = low.shape(low.fake(0))
    y.shape = ir.Shape([time, directions, batch, hidden])
    if not bidirectional:
        return op.Squeeze(y, [1]), *final
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, directions * hidden]), *final


def _reorder_gates(low: Lowering, weight: ir.Value, mode: str, hidden: int) -> ir.Value:
    """Reorders the gates of a weight or bias, [gates * hidden, ...], from PyTorch's to ONNX's order."""
    order = _GATES[mode]
    if len(order) == 1:
        return weight
    dims = list(weight.shape or ())
    gates = low.op.Split(weight, [hidden] * len(order), axis=0, _outputs=len(order))
    for gate in gates:
        gate.shape = ir.Shape([hidden, *dims[1:]])
    result: ir.Value = low.op.Concat(*(gates[i] for i in order), axis=0)
    result.shape = ir.Shape(dims)
    return result


def _stack(low: Lowering, parts: list[ir.Value]) -> ir.Value:
    """Stacks the values of the forward and the backward direction along a new first axis."""
    rows = [low.op.Unsqueeze(part, [0]) for part in parts]
    result: ir.Value = rows[0] if len(rows) == 1 else low.op.Concat(*rows, axis=0)
    shape = parts[0].shape
    if shape is not None:
        result.shape = ir.Shape([len(rows), *shape])
    return result
