"""Decomposes com.microsoft activation ops, and the activations that ONNX Runtime fuses into the preceding op."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.autodiff._bodies import defbody
from onnxtrain.autodiff._node import NodeView
from onnxtrain.autodiff.rules.contrib._shared import MS, unsupported
from onnxtrain.emitter import Emitter

# For each activation that ONNX Runtime fuses: the attributes of the standard op that its parameters set.
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("HardSwish", "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"), ()),
    **dict.fromkeys(("Elu", "LeakyRelu", "ThresholdedRelu"), ("alpha",)),
    "HardSigmoid": ("alpha", "beta"),
    "Selu": ("alpha", "gamma"),
}


def activated(op: Emitter, n: NodeView, x: ir.Value, kind: str | bytes, numbers: Sequence[float]) -> ir.Value:
    """Applies a fused activation.

    Args:
        op: emitter.
        n: the fused node, for error messages.
        x: input of the activation.
        kind: name of the activation, e.g. "LeakyRelu"; empty for none.
        numbers: parameters of the activation, e.g. [0.1], in ONNX Runtime's order.

    Raises:
        NoGradientRule: the activation is not supported.
    """
    name = kind.decode() if isinstance(kind, bytes) else kind
    if not name:
        return x
    if name == "Clip":
        return op.Clip(x, *numbers)
    if name not in _ACTIVATIONS:
        raise unsupported(n, f"the activation {name}")
    return op.emit(name, x, **dict(zip(_ACTIVATIONS[name], numbers, strict=False)))


@defbody("Gelu", MS, "X", "Y")
def gelu(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes Gelu: X·Phi(X), where Phi is the standard normal CDF, computed with the error function."""
    return op.Gelu(n.X)


@defbody("BiasGelu", MS, "A B", "C")
def bias_gelu(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes BiasGelu: C = gelu(A + B), computed with the error function."""
    return op.Gelu(op.Add(n.A, n.B))


@defbody("FastGelu", MS, "X bias", "Y")
def fast_gelu(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes FastGelu: Y = gelu(X + bias), approximated with tanh."""
    return op.Gelu(n.X if n.bias is None else op.Add(n.X, n.bias), approximate="tanh")


@defbody("QuickGelu", MS, "X", "Y", alpha=1.702)
def quick_gelu(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes QuickGelu: Y = X·sigmoid(alpha·X)."""
    return op.Mul(n.X, op.Sigmoid(op.Mul(n.X, n.attr("alpha"))))


@defbody("BiasSplitGelu", MS, "X bias", "Y")
def bias_split_gelu(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes BiasSplitGelu: Y = left·gelu(right), where left and right are the halves of X + bias."""
    left, right = op.Split(op.Add(n.X, n.bias), axis=-1, num_outputs=2, _outputs=2)
    return op.Mul(left, op.Gelu(right))


@defbody("BiasSoftmax", MS, "data bias", "output", axis=1, is_inner_broadcast=None)
def bias_softmax(op: Emitter, n: NodeView) -> ir.Value:
    """Decomposes BiasSoftmax: softmax(data + bias), jointly over `axis` and all later axes."""
    # Like Softmax before opset 13; today's Softmax takes a single axis.
    total = op.Add(n.data, n.bias)
    rank, axis = n.rank(n.data), n.axis(n.data, n.attr("axis"))
    if axis == rank - 1:
        return op.Softmax(total, axis=-1)
    flat = op.Softmax(op.Flatten(total, axis=axis), axis=-1)
    return op.Reshape(flat, op.Shape(total), allowzero=1)
