"""Defines Adam, AdamW and SparseAdam, which share moments, bias correction and composite ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain._words import argument
from onnxtrain.emitter import Emitter, Operand
from onnxtrain.functions.optimizer import adam_step, adamw_step, clipped_adam_step, clipped_adamw_step

from ._base import (
    Moment,
    Optimizer,
    add_l2,
    bias_correction,
    require_betas,
    require_not_negative,
)

_MOMENTS = (Moment("running mean of the gradient"), Moment("running mean of its square"))


@dataclass(frozen=True, kw_only=True)
class _AdamFamily(Optimizer):
    """The settings, moments and coefficients common to Adam, AdamW and SparseAdam."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        require_betas(self)
        require_not_negative(self, "eps")

    def moments(self, shape: tuple[int, ...]) -> Sequence[Moment]:
        return _MOMENTS

    def scaled(self, op: Emitter, scalars: Sequence[Operand], factor: ir.Value) -> Sequence[Operand] | None:
        # `_step` accepts another scalar for the factor.
        return *scalars, factor

    def _coefficients(self) -> tuple[float, float, float, float]:
        """Returns beta1, 1 - beta1, beta2 and 1 - beta2 in float64."""
        # Computed in Python: 1 - float32(0.999) would be wrong in the fifth digit.
        beta1, beta2 = self.betas
        return beta1, 1 - beta1, beta2, 1 - beta2

    def _step(
        self,
        op: Emitter,
        w: ir.Value,
        g: ir.Value,
        moments: Sequence[ir.Value],
        scalars: Sequence[Operand],
        *,
        decays: bool = False,
    ) -> tuple[ir.Value, ...]:
        """Emits one step as a single composite op: AdamW's if `decays` is True, else Adam's.

        If `scalars` ends with a factor for gradient clipping, the op also scales the gradient.

        Returns:
            The new parameter, and its new first and second moments.
        """
        # The step without decay has one multiplication per element less.
        plain, clipped = (adamw_step, clipped_adamw_step) if decays else (adam_step, clipped_adam_step)
        count = len(plain.inputs) - 2 - len(moments)
        step = plain if len(scalars) == count else clipped
        return op.call(step, w, g, *moments, *scalars, _outputs=3)

    def _corrected(
        self, op: Emitter, learning_rate: ir.Value, step: ir.Value, *, scale_eps: bool
    ) -> tuple[ir.Value, Operand]:
        """Folds Adam's bias correction into two scalars, so that it needs no operation per element.

        With c1 = 1 - beta1**step, c2 = 1 - beta2**step and step_size = lr·sqrt(c2)/c1, the update
        step_size·m/(sqrt(v) + eps·sqrt(c2)) equals lr·(m/c1)/(sqrt(v/c2) + eps).

        Returns:
            step_size, and the term to add to sqrt(v): eps·sqrt(c2) if `scale_eps` is True, else eps.
        """
        root2 = op.Sqrt(bias_correction(op, self.betas[1], step, learning_rate))
        correction1 = bias_correction(op, self.betas[0], step, learning_rate)
        step_size: ir.Value = op.Div(op.Mul(learning_rate, root2), correction1)
        return step_size, op.Mul(root2, self.eps) if scale_eps else self.eps


@dataclass(frozen=True, kw_only=True)
class AdamW(_AdamFamily):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), with the defaults of torch.optim.AdamW.

    With m' and v' the running means of g and g², c1 = 1 - beta1**step, c2 = 1 - beta2**step:

    - adam_mode 0, the default, like torch.optim.AdamW: w' = w·(1 - lr·weight_decay) - lr·(m'/c1)/(sqrt(v'/c2) + eps).
    - adam_mode 1, like Hugging Face's former AdamW and onnxruntime-training:
      u = w - lr·sqrt(c2)/c1·m'/(sqrt(v') + eps); w' = u - lr·weight_decay·u.

    The name "adamw" stands for `AdamW()`; `OptimType.AdamW` and `onnxblock.optim.AdamW()` stand for
    :meth:`of_onnxruntime_training`.

    Attributes:
        betas: decay rates of the running means m and v, e.g. (0.9, 0.999).
        eps: added to the denominator for numerical stability, e.g. 1e-8.
        weight_decay: coefficient of decoupled weight decay, e.g. 0.01.
        bias_correction: False to set c1 = c2 = 1.
        adam_mode: 0 decays the weights before Adam's step, as PyTorch does; 1 decays them after the step, as Hugging
            Face's former AdamW and onnxruntime-training do.
    """

    weight_decay: float = 0.01
    bias_correction: bool = True
    adam_mode: int = 0

    @classmethod
    def of_onnxruntime_training(cls) -> AdamW:
        """Returns AdamW with the defaults of onnxruntime-training: eps 1e-6, no weight decay, adam_mode 1."""
        return cls(eps=1e-6, weight_decay=0.0, adam_mode=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(self, "weight_decay")
        require(self, "adam_mode", lambda mode: mode in (0, 1), "0 (torch's form) or 1 (Hugging Face's form)")

    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        step_size, eps = learning_rate, self.eps  # type: tuple[ir.Value, Operand]
        if self.bias_correction:
            step_size, eps = self._corrected(op, learning_rate, step, scale_eps=self.adam_mode == 0)
        if not self.weight_decay:
            return *self._coefficients(), step_size, eps
        decay = op.Sub(1.0, op.Mul(learning_rate, self.weight_decay))
        # Hugging Face's form decays the parameter after the step, so that the decay shrinks the step as well.
        if self.adam_mode == 1:
            step_size = op.Mul(step_size, decay)
        return *self._coefficients(), step_size, eps, decay

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        return self._step(op, w, g, moments, scalars, decays=bool(self.weight_decay))


@dataclass(frozen=True, kw_only=True)
class Adam(_AdamFamily):
    """Adam (Kingma and Ba, 2015), like torch.optim.Adam: weight decay is an L2 penalty, added to the gradient.

    w' = w - lr·(m'/c1)/(sqrt(v'/c2) + eps), with m' and v' the running means of g + weight_decay·w and of its square,
    c1 = 1 - beta1**step, c2 = 1 - beta2**step.

    Attributes:
        betas: decay rates of the running means m and v, e.g. (0.9, 0.999).
        eps: added to the denominator for numerical stability, e.g. 1e-8.
        weight_decay: coefficient of the L2 penalty, e.g. 1e-4.
    """

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(self, "weight_decay")

    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        return *self._coefficients(), *self._corrected(op, learning_rate, step, scale_eps=True)

    def scaled(self, op: Emitter, scalars: Sequence[Operand], factor: ir.Value) -> Sequence[Operand] | None:
        # The penalty is added to the clipped gradient, and not clipped itself: a factor in the scalars would scale
        # both.
        return None if self.weight_decay else super().scaled(op, scalars, factor)

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        return self._step(op, w, add_l2(op, w, g, self.weight_decay), moments, scalars)


@dataclass(frozen=True, kw_only=True)
class SparseAdam(_AdamFamily):
    """Adam that updates only the embedding rows used in the batch, like torch.optim.SparseAdam.

    w' = w - lr·sqrt(c2)/c1·m'/(sqrt(v') + eps), with m' and v' the running means of g and g², c1 = 1 - beta1**step,
    c2 = 1 - beta2**step. `step` counts all steps; the moments of a row decay only in steps that use the row.

    All its parameters must be listed in `sparse_gradients` of :func:`onnxtrain.artifacts.generate_artifacts`. Usually,
    SparseAdam is the optimizer of one parameter group::

        AdamW(groups=[ParameterGroup("embedding.weight", optimizer=SparseAdam())])

    Attributes:
        betas: decay rates of the running means m and v, e.g. (0.9, 0.999).
        eps: added to the denominator for numerical stability, e.g. 1e-8.
    """

    def gradient_refusal(self, *, sparse: bool) -> str | None:
        # Like torch.optim.SparseAdam, which rejects dense gradients and suggests Adam.
        return (
            None
            if sparse
            else f"its gradient is not sparse. Name it in {argument('sparse_gradients')}, or use Adam"
        )

    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        # torch.optim.SparseAdam adds eps to the root before the bias correction, unlike Adam.
        return *self._coefficients(), *self._corrected(op, learning_rate, step, scale_eps=False)

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        return self._step(op, w, g, moments, scalars)
