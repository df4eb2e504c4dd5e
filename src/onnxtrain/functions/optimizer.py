"""Defines optimizer steps for one parameter.

Inputs named w, g, m, v, b and s are tensors of the parameter's shape: the parameter, its gradient, and its moments.
rows `[..., n, 1]` and columns `[..., 1, m]` are moments of a parameter `[..., n, m]`. All other inputs are scalars of
shape [].

No body reads an old value after its new value has been computed, so native kernels can update in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.passes.runtime_faults.long_sums import LongSumsPass

from ._composite import CompositeOp, composite
from ._specialized import SpecializedOp

# Hyperparameters are inputs rather than attributes, which ONNX stores in float32. They are computed in Python, in
# float64: 1 - float32(0.999) would be wrong in the fifth digit.
_ADAM_INPUTS = (
    *("w", "g", "m", "v", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "step_size", "eps"),
)


@composite("AdamStep", _ADAM_INPUTS, outputs=3)
def adam_step(
    op: Emitter, w: ir.Value, g: ir.Value, m: ir.Value, v: ir.Value, *scalars: ir.Value
) -> tuple[ir.Value, ...]:
    """Computes one step of Adam, with the bias correction folded into the scalars `step_size` and `eps`.

    m' = beta1·m + (1 - beta1)·g;  v' = beta2·v + (1 - beta2)·g²;  w' = w - step_size·m'/(sqrt(v') + eps).

    scalars: beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, eps.
    """
    m_new, v_new, change = _adam_change(op, g, m, v, *scalars)
    return op.Sub(w, change), m_new, v_new


@composite("AdamWStep", (*_ADAM_INPUTS, "decay"), outputs=3)
def adamw_step(
    op: Emitter, w: ir.Value, g: ir.Value, m: ir.Value, v: ir.Value, *scalars: ir.Value
) -> tuple[ir.Value, ...]:
    """Computes one step of AdamW: like `adam_step`, but with w' = decay·w - step_size·m'/(sqrt(v') + eps).

    scalars: the scalars of `adam_step`, then decay = 1 - learning_rate·weight_decay.
    """
    *others, decay = scalars
    m_new, v_new, change = _adam_change(op, g, m, v, *others)
    # decay is 1 - learning_rate * weight_decay, decoupled from the gradient (Loshchilov and Hutter, 2019).
    return op.Sub(op.Mul(w, decay), change), m_new, v_new


@composite("ClippedAdamStep", (*_ADAM_INPUTS, "factor"), outputs=3)
def clipped_adam_step(
    op: Emitter, w: ir.Value, g: ir.Value, m: ir.Value, v: ir.Value, *scalars: ir.Value
) -> tuple[ir.Value, ...]:
    """Computes one step of Adam with gradient clipping: `adam_step` with factor·g as the gradient.

    scalars: the scalars of `adam_step`, then factor.
    """
    m_new, v_new, change = _clipped_adam_change(op, g, m, v, *scalars)
    return op.Sub(w, change), m_new, v_new


@composite("ClippedAdamWStep", (*_ADAM_INPUTS, "decay", "factor"), outputs=3)
def clipped_adamw_step(
    op: Emitter, w: ir.Value, g: ir.Value, m: ir.Value, v: ir.Value, *scalars: ir.Value
) -> tuple[ir.Value, ...]:
    """Computes one step of AdamW with gradient clipping: `adamw_step` with factor·g as the gradient.

    scalars: the scalars of `adamw_step`, then factor.
    """
    *others, decay, factor = scalars
    m_new, v_new, change = _clipped_adam_change(op, g, m, v, *others, factor)
    return op.Sub(op.Mul(w, decay), change), m_new, v_new


def _clipped_adam_change(
    op: Emitter, g: ir.Value, m: ir.Value, v: ir.Value, *scalars: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, eps, factor = scalars
    # The factor is multiplied with scalars, so that it needs no op per element. It is not squared: its square
    # underflows float32 from 1e-19 on, where g² overflows.
    scaled = op.Mul(g, op.Mul(factor, op.Sqrt(one_minus_beta2)))
    m_new = op.Add(op.Mul(m, beta1), op.Mul(g, op.Mul(factor, one_minus_beta1)))
    v_new = op.Add(op.Mul(v, beta2), op.Mul(scaled, scaled))
    return m_new, v_new, op.Mul(op.Div(m_new, op.Add(op.Sqrt(v_new), eps)), step_size)


def _adam_change(
    op: Emitter, g: ir.Value, m: ir.Value, v: ir.Value, *scalars: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, eps = scalars
    m_new = op.Add(op.Mul(m, beta1), op.Mul(g, one_minus_beta1))
    v_new = _average_of_squares(op, v, g, beta2, one_minus_beta2)
    # Epsilon is added outside of the square root, as in PyTorch; bias correction is part of step_size and eps.
    return m_new, v_new, op.Mul(op.Div(m_new, op.Add(op.Sqrt(v_new), eps)), step_size)


@composite("SGDStep", ("w", "g", "learning_rate"))
def sgd_step(op: Emitter, w: ir.Value, g: ir.Value, learning_rate: ir.Value) -> ir.Value:
    """Computes w' = w - learning_rate·g."""
    return op.Sub(w, op.Mul(g, learning_rate))


@composite("MomentumStep", ("w", "g", "b", "learning_rate", "momentum"), outputs=2)
def momentum_step(
    op: Emitter, w: ir.Value, g: ir.Value, b: ir.Value, learning_rate: ir.Value, momentum: ir.Value
) -> tuple[ir.Value, ...]:
    """Computes b' = momentum·b + g;  w' = w - learning_rate·b'."""
    b_new = op.Add(op.Mul(b, momentum), g)
    # The learning rate is applied when the moment is used, as in PyTorch: changing it later doesn't affect past
    # gradients.
    return op.Sub(w, op.Mul(b_new, learning_rate)), b_new


@composite("NesterovStep", ("w", "g", "b", "learning_rate", "momentum"), outputs=2)
def nesterov_step(
    op: Emitter, w: ir.Value, g: ir.Value, b: ir.Value, learning_rate: ir.Value, momentum: ir.Value
) -> tuple[ir.Value, ...]:
    """Computes b' = momentum·b + g;  w' = w - learning_rate·(g + momentum·b')."""
    b_new = op.Add(op.Mul(b, momentum), g)
    return op.Sub(w, op.Mul(op.Add(g, op.Mul(b_new, momentum)), learning_rate)), b_new


@composite("AdagradStep", ("w", "g", "s", "learning_rate", "eps"), outputs=2)
def adagrad_step(
    op: Emitter, w: ir.Value, g: ir.Value, s: ir.Value, learning_rate: ir.Value, eps: ir.Value
) -> tuple[ir.Value, ...]:
    """Computes s' = s + g²;  w' = w - learning_rate·g/(sqrt(s') + eps)."""
    s_new = op.Add(s, op.Mul(g, g))
    return op.Sub(w, op.Mul(op.Div(g, op.Add(op.Sqrt(s_new), eps)), learning_rate)), s_new


def rmsprop_step(*, centered: bool, momentum: bool) -> CompositeOp:
    """Returns the composite op for one step of RMSprop, with or without centering and momentum.

    Inputs: w, g, v, m (if `centered`), b (if `momentum`), learning_rate, alpha, one_minus_alpha, eps, and the momentum
    factor (if `momentum`). Outputs: w', v', m' (if `centered`), b' (if `momentum`).

    v' = alpha·v + (1 - alpha)·g²;  m' = alpha·m + (1 - alpha)·g;  change = g/(sqrt(max(v' - m'², 0)) + eps);  b' =
    momentum·b + change;  w' = w - learning_rate·b'. If not `centered`, m' is 0. If not `momentum`, b' is `change`.
    """
    return _RMSPROP[centered, momentum]


def _define_rmsprop(centered: bool, momentum: bool) -> CompositeOp:
    moments = ["v", *(["m"] if centered else []), *(["b"] if momentum else [])]
    scalars = ["learning_rate", "alpha", "one_minus_alpha", "eps", *(["momentum"] if momentum else [])]
    name = f"{'Centered' if centered else ''}RMSprop{'Momentum' if momentum else ''}Step"

    @composite(name, ["w", "g", *moments, *scalars], outputs=1 + len(moments))
    def body(op: Emitter, w: ir.Value, g: ir.Value, *rest: ir.Value) -> tuple[ir.Value, ...]:
        value = dict(zip((*moments, *scalars), rest, strict=True))
        alpha, one_minus_alpha = value["alpha"], value["one_minus_alpha"]
        new = [_average_of_squares(op, value["v"], g, alpha, one_minus_alpha)]
        variance = new[0]
        if centered:
            mean = op.Add(op.Mul(value["m"], alpha), op.Mul(g, one_minus_alpha))
            new.append(mean)
            # Rounding can make the variance slightly negative, and its square root NaN. The zero is given the shape of
            # eps, which determines how fast ONNX Runtime combines it with a tensor.
            zero = op.Sub(value["eps"], value["eps"])
            # m'² is at most v', so it overflows only where v' is infinite: infinity minus the largest number is
            # infinity, as in PyTorch, which does not round m'².
            assert g.dtype is not None
            largest = op.Add(zero, float(np.finfo(g.dtype.numpy()).max))
            variance = op.Max(op.Sub(variance, op.Min(op.Mul(mean, mean), largest)), zero)
        change = op.Div(g, op.Add(op.Sqrt(variance), value["eps"]))
        if momentum:
            change = op.Add(op.Mul(value["b"], value["momentum"]), change)
            new.append(change)
        return (op.Sub(w, op.Mul(change, value["learning_rate"])), *new)

    return body


def _average_of_squares(
    op: Emitter, average: ir.Value, g: ir.Value, keep: ir.Value, add: ir.Value
) -> ir.Value:
    # Two factors, because 1 - beta2 is exact only in float64, from which `add` was rounded. `add` is applied first,
    # as in PyTorch: g² overflows float32 from g = 1.8e19 on, 0.001·g² from 5.8e20 on.
    return op.Add(op.Mul(average, keep), op.Mul(op.Mul(g, add), g))


_RMSPROP = {(c, m): _define_rmsprop(c, m) for c in (False, True) for m in (False, True)}


@composite("LionStep", ("w", "g", "m", "beta1", "beta2", "learning_rate", "decay"), outputs=2)
def lion_step(
    op: Emitter,
    w: ir.Value,
    g: ir.Value,
    m: ir.Value,
    beta1: ir.Value,
    beta2: ir.Value,
    learning_rate: ir.Value,
    decay: ir.Value,
) -> tuple[ir.Value, ...]:
    """Computes w' = decay·w - learning_rate·sign(beta1·m + (1 - beta1)·g);  m' = beta2·m + (1 - beta2)·g."""
    # Both averages as g + beta·(m - g), which share the difference.
    difference = op.Sub(m, g)
    direction = op.Sign(op.Add(g, op.Mul(difference, beta1)))
    return op.Sub(op.Mul(w, decay), op.Mul(direction, learning_rate)), op.Add(g, op.Mul(difference, beta2))


_ADAFACTOR_SCALARS = ("keep", "add", "rho", "decay", "count", "eps1", "eps1_squared", "eps2", "d")


@composite("AdafactorStep", ("w", "g", "v", *_ADAFACTOR_SCALARS), outputs=2)
def adafactor_step(
    op: Emitter, w: ir.Value, g: ir.Value, v: ir.Value, keep: ir.Value, add: ir.Value, *scalars: ir.Value
) -> tuple[ir.Value, ...]:
    """Computes one step of Adafactor for a parameter whose second moment is not factored, e.g. a vector.

    v' = keep·v + add·g². The new parameter w' is computed as in `adafactor_matrix_step`, with v' as the estimate of g².

    scalars: rho, decay, count, eps1, eps1_squared, eps2, d.
    """
    v_new = op.Add(op.Mul(v, keep), op.Mul(op.Mul(g, g), add))
    return _adafactor_change(op, w, g, v_new, *scalars), v_new


@composite("AdafactorMatrixStep", ("w", "g", "rows", "columns", *_ADAFACTOR_SCALARS), outputs=3)
def adafactor_matrix_step(
    op: Emitter,
    w: ir.Value,
    g: ir.Value,
    rows: ir.Value,
    columns: ir.Value,
    keep: ir.Value,
    add: ir.Value,
    *scalars: ir.Value,
) -> tuple[ir.Value, ...]:
    """Computes one step of Adafactor for a parameter with at least two axes, with a factored second moment.

    rows' = keep·rows + add·mean(g² over each row);  columns' = keep·columns + add·mean(g² over each column);  estimate
    of g² = rows'·columns'/max(mean(rows'), eps1);  u = g/sqrt(max(estimate, eps1²));  w' = decay·w - rho·max(eps2,
    rms(w))/max(1, rms(u)/d)·u. `rms` is the root mean square over the `count` elements of the parameter.

    scalars: rho, decay, count, eps1, eps1_squared, eps2, d, where decay = 1 - learning_rate·weight_decay.
    """
    square = op.Mul(g, g)
    new = [
        op.Add(op.Mul(old, keep), op.Mul(op.ReduceMean(square, [axis], keepdims=1), add))
        for old, axis in ((rows, -1), (columns, -2))
    ]
    eps1 = scalars[_ADAFACTOR_SCALARS.index("eps1") - 2]
    # Rows of zero gradients would give 0 / 0.
    mean = op.Max(op.ReduceMean(new[0], [-2], keepdims=1), eps1)
    estimate = op.Div(op.Mul(new[0], new[1]), mean)
    return (_adafactor_change(op, w, g, estimate, *scalars), *new)


def _adafactor_change(
    op: Emitter, w: ir.Value, g: ir.Value, estimate: ir.Value, *scalars: ir.Value
) -> ir.Value:
    rho, decay, count, _, eps1_squared, eps2, d = scalars

    def rms(x: ir.Value) -> ir.Value:
        return op.Sqrt(op.Div(op.ReduceSumSquare(x, keepdims=0), count))

    u = op.Div(g, op.Sqrt(op.Max(estimate, eps1_squared)))
    alpha = op.Div(op.Mul(rho, op.Max(rms(w), eps2)), op.Max(op.Div(rms(u), d), 1.0))
    return op.Sub(op.Mul(w, decay), op.Mul(u, alpha))


ELEMENTWISE_STEPS = frozenset(
    step.name
    for step in (
        *(
            adam_step,
            adamw_step,
            clipped_adam_step,
            clipped_adamw_step,
            sgd_step,
            momentum_step,
            nesterov_step,
        ),
        *(adagrad_step, *_RMSPROP.values(), lion_step),
    )
)
"""Op types, without the dtype, of the steps whose scalars may have the shape [1, ..., 1] instead of []."""


def steps(step: CompositeOp, count: int) -> SpecializedOp:
    """Returns the composite op that computes an elementwise step for `count` parameters at once.

    Its name is that of the step with an "s": `AdamWSteps`. The parameters may have different shapes.

    Inputs: the scalars of the step, then w, g and the moments of each parameter. Outputs: those of the step for each
    parameter.
    """
    tensors = step.outputs + 1
    scalars = step.inputs[tensors:]
    names = [*scalars, *(f"{name}{index}" for index in range(count) for name in step.inputs[:tensors])]

    def body(op: Emitter, *inputs: ir.Value) -> tuple[ir.Value, ...]:
        shared, rest = inputs[: len(scalars)], inputs[len(scalars) :]
        return tuple(
            output
            for first in range(0, len(rest), tensors)
            for output in step.emit(op, *rest[first : first + tensors], *shared)
        )

    return SpecializedOp(f"{step.name}s", dict.fromkeys(names), {}, step.outputs * count, str(count), body)


def sum_of_squares(shapes: Sequence[ir.Shape | None]) -> SpecializedOp:
    """Returns the composite op that adds up the squares of all elements of tensors with these shapes; a scalar.

    Used for the norm of all gradients.
    """

    def body(op: Emitter, *tensors: ir.Value) -> ir.Value:
        total = op.Sum(*(op.ReduceSumSquare(tensor, keepdims=0) for tensor in tensors))
        # Here, because only here the inputs have shapes.
        LongSumsPass()(ir.Model(op.graph, ir_version=10))
        return total

    return SpecializedOp(
        "SumOfSquares",
        {f"x{index}": shape for index, shape in enumerate(shapes)},
        {},
        1,
        "; ".join(map(str, shapes)),
        body,
    )
