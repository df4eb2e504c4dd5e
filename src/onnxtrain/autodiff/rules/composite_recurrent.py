"""Registers the VJPs of the composite recurrent layers (LSTM, GRU). The VJPs are composite ops as well.

The forward op saves the gates of all time steps, so that the backward pass does not rerun the recurrence.
"""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff._registry import Cotangents
from onnxtrain.autodiff.rules._composite import composite_vjp
from onnxtrain.emitter import Emitter
from onnxtrain.functions import LAYERS, CompositeOp


def _lstm_layer(
    gradient: CompositeOp, weights: CompositeOp, op: Emitter, n: NodeView, cts: tuple[ir.Value | None, ...]
) -> Cotangents:
    """VJP of an LSTM in one direction.

    Args:
        gradient: composite op that computes the cotangents of the gates and of the initial states.
        weights: composite op that computes the cotangents of w, r and b.
        op: emitter.
        n: the forward node.
        cts: cotangents of the outputs.
    """
    # Composite ops have no optional inputs: an output without a cotangent gets zeros.
    output_cts = [op.zeros_like(v) if ct is None else ct for ct, v in zip(cts, n.outputs[:3], strict=True)]
    gates, *states = op.call(gradient, *output_cts, n.out.gates, n.out.cells, n.initial_c, n.r, _outputs=3)
    # Shape inference has not run on new nodes.
    gates.shape = n.out.gates.shape
    result = dict(zip(("initial_h", "initial_c"), states, strict=True))
    return result | _operands(op, n, weights, gates, gates)


def _gru_layer(
    gradient: CompositeOp, weights: CompositeOp, op: Emitter, n: NodeView, cts: tuple[ir.Value | None, ...]
) -> Cotangents:
    """VJP of a GRU in one direction.

    Args:
        gradient: composite op that computes the cotangents of the gates and of the initial states.
        weights: composite op that computes the cotangents of w, r and b.
        op: emitter.
        n: the forward node.
        cts: cotangents of the outputs.
    """
    output_cts = [op.zeros_like(v) if ct is None else ct for ct, v in zip(cts, n.outputs[:2], strict=True)]
    saved = (n.out.gates, n.out.inner, n.out.y, n.initial_h)
    *gates, state = op.call(gradient, *output_cts, *saved, n.r, _outputs=3)
    for ct in gates:
        ct.shape = n.out.gates.shape
    return {"initial_h": state} | _operands(op, n, weights, *gates)


def _operands(
    op: Emitter, n: NodeView, weights: CompositeOp, ct_input: ir.Value, ct_hidden: ir.Value
) -> dict[str, ir.Value]:
    """Returns the cotangents of x, w, r and b.

    Args:
        op: emitter.
        n: the forward node.
        weights: composite op that computes the cotangents of w, r and b.
        ct_input: cotangents of the gates' input projections, x · wᵀ.
        ct_hidden: cotangents of the gates' recurrent projections, h · rᵀ.
    """
    result = {}
    if n.needs("x"):
        result["x"] = op.MatMul(ct_input, op.Squeeze(n.w, [0]))
    if any(map(n.needs, "wrb")):
        # One composite op for all three, which are sums over the same time steps.
        ct_weights = op.call(weights, ct_input, ct_hidden, n.x, n.out.y, n.initial_h, _outputs=3)
        result |= dict(zip("wrb", ct_weights, strict=True))
    return result


def _register() -> None:
    """Registers a rule for each kind of layer (LSTM, GRU) and each dtype."""
    rules = {
        "LSTM": (_lstm_layer, ("y", "y_h", "y_c"), ("gates", "cells")),
        "GRU": (_gru_layer, ("y", "y_h"), ("gates", "inner")),
    }
    for (name, _), (layer, gradient, weights) in LAYERS.items():
        rule, outputs, saved = rules[name]
        composite_vjp(layer, (*outputs, *saved), outputs=outputs, saves=("y", *saved))(
            partial(rule, gradient, weights)
        )


_register()
