"""Writes activations of com.microsoft, and the activations that onnxruntime fuses behind a product, in standard ops."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff._bodies import defbody
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff.rules.contrib._shared import MS, refused
from onnxtrain.emitter import Emitter

# Of each activation that onnxruntime fuses behind a product: the attributes of the standard op that its numbers fill.
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("HardSwish", "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"), ()),
    **dict.fromkeys(("Elu", "LeakyRelu", "ThresholdedRelu"), ("alpha",)),
    "HardSigmoid": ("alpha", "beta"),
    "Selu": ("alpha", "gamma"),
}


def activated(op: Emitter, n: NodeView, x: ir.Value, kind: str | bytes, numbers: Sequence[float]) -> ir.Value:
    """Applies an activation, e.g. "LeakyRelu" with the numbers [0.1], in the order in which onnxruntime stores them."""
    name = kind.decode() if isinstance(kind, bytes) else kind
    if not name:
        return x
    if name == "Clip":
        return op.Clip(x, *numbers)
    if name not in _ACTIVATIONS:
        raise refused(n, f"the activation {name}")
    return op.emit(name, x, **dict(zip(_ACTIVATIONS[name], numbers, strict=False)))


@defbody("Gelu", MS, "X", "Y")
def gelu(op: Emitter, n: NodeView) -> ir.Value:
    """Y = X·Phi(X), with the normal distribution Phi, by the error function."""
    return op.Gelu(n.X)


@defbody("BiasGelu", MS, "A B", "C")
def bias_gelu(op: Emitter, n: NodeView) -> ir.Value:
    """C = gelu(A + B), by the error function."""
    return op.Gelu(op.Add(n.A, n.B))


@defbody("FastGelu", MS, "X bias", "Y")
def fast_gelu(op: Emitter, n: NodeView) -> ir.Value:
    """Y = gelu(X + bias), by tanh."""
    return op.Gelu(n.X if n.bias is None else op.Add(n.X, n.bias), approximate="tanh")


@defbody("QuickGelu", MS, "X", "Y", alpha=1.702)
def quick_gelu(op: Emitter, n: NodeView) -> ir.Value:
    """Y = X·sigmoid(alpha·X)."""
    return op.Mul(n.X, op.Sigmoid(op.Mul(n.X, n.attr("alpha"))))


@defbody("BiasSplitGelu", MS, "X bias", "Y")
def bias_split_gelu(op: Emitter, n: NodeView) -> ir.Value:
    """Y = left·gelu(right), by the error function, with the halves left and right of X + bias along the last axis."""
    left, right = op.Split(op.Add(n.X, n.bias), axis=-1, num_outputs=2, _outputs=2)
    return op.Mul(left, op.Gelu(right))


@defbody("BiasSoftmax", MS, "data bias", "output", axis=1, is_inner_broadcast=None)
def bias_softmax(op: Emitter, n: NodeView) -> ir.Value:
    """Output = softmax(data + bias), over all axes from `axis` on together."""
    # As Softmax before opset 13; the standard op of today takes one axis.
    total = op.Add(n.data, n.bias)
    rank, axis = n.rank(n.data), n.axis(n.data, n.attr("axis"))
    if axis == rank - 1:
        return op.Softmax(total, axis=-1)
    flat = op.Softmax(op.Flatten(total, axis=axis), axis=-1)
    return op.Reshape(flat, op.Shape(total), allowzero=1)
