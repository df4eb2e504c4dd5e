"""Defines Muon, which orthogonalizes the momentum of a matrix before the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import onnx_ir as ir

from onnxtrain._settings import require
from onnxtrain.emitter import Emitter, Operand, static_dims

from ._base import Moment, Optimizer, require_not_negative


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Muon (Jordan et al., 2024) for matrices, like torch.optim.Muon: the momentum is orthogonalized.

    m' = momentum·m + (1 - momentum)·g, and u = momentum·m' + (1 - momentum)·g if nesterov, else u = m'. O(u) is
    computed by `ns_steps` Newton-Schulz iterations x ← a·x + (b·xxᵀ + c·(xxᵀ)²)·x, starting from x = u/max(||u||, eps);
    a matrix with more rows than columns is transposed before and after. w' = (1 - lr·weight_decay)·w - lr·r·O(u), with
    r = sqrt(max(1, rows/columns)), or 0.2·sqrt(max(rows, columns)) to match the magnitude of AdamW's updates. PyTorch
    computes O in bfloat16; here it has the dtype of m.

    Embeddings, heads, biases and norms need a different optimizer::

        AdamW(groups=[ParameterGroup("layers.*.weight", optimizer=Muon(), learning_rate_scale=20)])

    Attributes:
        elementwise: False, because an update is a product of matrices.
        momentum: decay rate of the momentum m, e.g. 0.95.
        nesterov: True for Nesterov momentum.
        weight_decay: coefficient of decoupled weight decay, e.g. 0.1.
        ns_coefficients: a, b and c, e.g. (3.4445, -4.775, 2.0315).
        ns_steps: number of Newton-Schulz iterations, e.g. 5.
        eps: lower bound of the norm by which u is divided, e.g. 1e-7.
        adjust_lr_fn: how r is computed: "original" for r = sqrt(max(1, rows/columns)), "match_rms_adamw" for
            r = 0.2·sqrt(max(rows, columns)).
    """

    elementwise: ClassVar[bool] = False

    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    ns_steps: int = 5
    eps: float = 1e-7
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "momentum", lambda value: 0 <= value < 1, "a number in [0, 1)")
        require_not_negative(self, "weight_decay", "eps")
        require(
            self,
            "ns_coefficients",
            lambda numbers: len(numbers) == 3 and all(abs(number) < math.inf for number in numbers),
            "three numbers",
        )
        # The upper bound is that of torch.optim.Muon; each step adds nodes to the model.
        require(
            self, "ns_steps", lambda steps: isinstance(steps, int) and 1 <= steps < 100, "an int from 1 to 99"
        )
        require(
            self,
            "adjust_lr_fn",
            lambda name: name in ("original", "match_rms_adamw"),
            "'original' or 'match_rms_adamw'",
        )

    def moments(self, shape: tuple[int, ...]) -> Sequence[Moment]:
        return [Moment("running mean of the gradient")]

    def refusal(self, shape: tuple[int, ...]) -> str | None:
        # Like torch.optim.Muon, which supports only 2D parameters.
        if len(shape) == 2:
            return None
        return (
            "Muon updates matrices only. Make it the optimizer of a group of them: "
            "AdamW(groups=[ParameterGroup([...], optimizer=Muon())])"
        )

    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        return learning_rate, op.Sub(1.0, op.Mul(learning_rate, self.weight_decay))

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        learning_rate, decay = scalars
        rows, columns = static_dims(w) or (None, None)
        assert rows is not None
        assert columns is not None
        # PyTorch's `lerp`: unlike in SGD, the gradient is multiplied by 1 - momentum.
        renewed = op.Mul(g, 1 - self.momentum)
        momentum = op.Add(op.Mul(moments[0], self.momentum), renewed)
        direction = op.Add(op.Mul(momentum, self.momentum), renewed) if self.nesterov else momentum
        # The products x·xᵀ are square, with as many rows as x, so the matrix is transposed if it has more rows than
        # columns.
        if rows > columns:
            orthogonal = op.Transpose(self._orthogonal(op, op.Transpose(direction, perm=[1, 0])), perm=[1, 0])
        else:
            orthogonal = self._orthogonal(op, direction)
        if self.adjust_lr_fn == "original":
            ratio = math.sqrt(max(1, rows / max(columns, 1)))
        else:
            ratio = 0.2 * math.sqrt(max(rows, columns))
        change = op.Mul(orthogonal, op.Mul(learning_rate, ratio))
        return op.Sub(op.Mul(w, decay), change), momentum

    def _orthogonal(self, op: Emitter, x: ir.Value) -> ir.Value:
        """Approximately orthogonalizes a matrix `[n, m]`, n <= m, with Newton-Schulz iterations."""
        # The iteration requires singular values of at most 1, and the Euclidean norm is at least the largest of them.
        a, b, c = self.ns_coefficients
        x = op.Div(x, op.Max(op.Sqrt(op.ReduceSumSquare(x, keepdims=0)), self.eps))
        for _ in range(self.ns_steps):
            gram = op.MatMul(x, op.Transpose(x, perm=[1, 0]))
            polynomial = op.Add(op.Mul(gram, b), op.Mul(op.MatMul(gram, gram), c))
            # Not with Gemm, whose attributes alpha and beta are float32 even in a float64 model.
            x = op.Add(op.Mul(x, a), op.MatMul(polynomial, x))
        return x
