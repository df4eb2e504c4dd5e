"""Defines the base class of optimizers, their moments, and parameter groups with their own settings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import onnx_ir as ir

from onnxtrain._settings import integers_to_floats, require
from onnxtrain.emitter import Emitter, Operand

from ._clipping import GradientClipping


@dataclass(frozen=True)
class MomentSpec:
    """One tensor of a parameter's optimizer state, with its name in models and checkpoints.

    Attributes:
        name: suffix of the graph input and key in checkpoints, e.g. "momentum0".
        initial_value: value of every element before the first step, e.g. 0.0.
        meaning: a description, e.g. "running mean of the gradient".
        shape: dimensions, e.g. (784, 10); for most optimizers, the parameter's shape.
    """

    name: str
    initial_value: float
    meaning: str
    shape: tuple[int, ...] = ()


class Moment(NamedTuple):
    """One tensor of optimizer state, as declared by `Optimizer.moments`.

    Attributes:
        meaning: a description, e.g. "running mean of the gradient".
        initial_value: value of every element before the first step, e.g. 0.0.
        shape: dimensions, e.g. () or (3, 1); None for the parameter's shape.
    """

    meaning: str
    initial_value: float = 0.0
    shape: tuple[int, ...] | None = None


class StepInputs(NamedTuple):
    """Inputs of one parameter's update, in the dtype of the computation, e.g. float32 for a float16 parameter.

    Attributes:
        w: the parameter.
        g: the clipped gradient, with the same shape.
        moments: one per entry of :meth:`Optimizer.moments`.
    """

    w: ir.Value
    g: ir.Value
    moments: Sequence[ir.Value]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with their own settings.

    If a parameter is in several groups, each setting comes from the last of these groups that defines it.

    Attributes:
        parameters: names, or patterns of names such as "*.bias"; each must match at least one parameter.
        learning_rate_scale: factor by which the learning rate is multiplied, e.g. 0.1; None for 1.
        weight_decay: the group's weight decay, e.g. 0.0; None for the optimizer's weight decay.
        optimizer: the group's optimizer, e.g. Muon(), which must not have clipping or groups of its own; None for the
            enclosing optimizer.

    Example:
        >>> from onnxtrain.optimizers import AdamW
        >>> optimizer = AdamW(weight_decay=0.01, groups=(ParameterGroup("*.bias", weight_decay=0.0),))
    """

    parameters: str | Sequence[str]
    learning_rate_scale: float | None = None
    weight_decay: float | None = None
    optimizer: Optimizer | None = None

    def __post_init__(self) -> None:
        # A str is also a sequence: of names with one letter each.
        names = [self.parameters] if isinstance(self.parameters, str) else list(self.parameters)
        object.__setattr__(self, "parameters", tuple(names))
        require(self, "parameters", lambda names: names and all(isinstance(n, str) for n in names), "names")
        for field in ("learning_rate_scale", "weight_decay"):
            if getattr(self, field) is not None:
                require_not_negative(self, field)
        # The gradients of all groups are clipped together, so only the outermost optimizer may have clipping.
        require(
            self,
            "optimizer",
            lambda value: (
                value is None
                or (isinstance(value, Optimizer) and not value.groups and value.clip_grad is None)
            ),
            "an Optimizer without clip_grad and groups, or None",
        )


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """An optimizer: its settings, and the methods that emit its step as ONNX nodes.

    The learning rate is an input of the optimizer model, not a field, so that a schedule can change it at every step.

    Attributes:
        clip_grad: gradient clipping, e.g. ClipGradNorm(1.0), applied before weight decay is added.
        groups: parameters with their own settings, e.g. (ParameterGroup("*.bias", weight_decay=0.0),).
    """

    elementwise: ClassVar[bool] = True
    """True if each element is updated independently of the others."""

    clip_grad: GradientClipping | None = None
    groups: Sequence[ParameterGroup] = ()

    def __post_init__(self) -> None:
        # Subclasses call this method before their own checks, whose messages then show the converted number.
        integers_to_floats(self)
        require(
            self,
            "clip_grad",
            lambda clip: clip is None or isinstance(clip, GradientClipping),
            "ClipGradNorm(...), ClipGradValue(...) or None",
        )
        # A tuple, because settings are hashed: parameters with equal settings share their scalars.
        if isinstance(self.groups, Sequence):
            object.__setattr__(self, "groups", tuple(self.groups))
        require(
            self,
            "groups",
            lambda groups: all(isinstance(group, ParameterGroup) for group in groups),
            "a list of ParameterGroup(...)",
        )

    def state_spec(self, shape: tuple[int, ...] = ()) -> tuple[MomentSpec, ...]:
        """Returns the moments of a parameter with this shape, in the order of the optimizer model's inputs."""
        # Numbered, as in onnxruntime-training, so that a host can keep the state of any optimizer.
        return tuple(
            MomentSpec(f"momentum{index}", value, meaning, shape if moment_shape is None else moment_shape)
            for index, (meaning, value, moment_shape) in enumerate(self.moments(shape))
        )

    @abstractmethod
    def moments(self, shape: tuple[int, ...]) -> Sequence[Moment]:
        """Returns the moments of a parameter with this shape."""

    def refusal(self, shape: tuple[int, ...]) -> str | None:
        """Returns the reason why the optimizer does not support parameters of this shape; None if it does.

        The reason is appended to an error message.
        """
        return None

    def gradient_refusal(self, *, sparse: bool) -> str | None:
        """Returns the reason why the optimizer does not support a sparse (or dense) gradient; None if it does.

        The reason is part of an error message. With a sparse gradient, only the rows used in the batch are updated.
        This is equivalent to a dense update only if the optimizer is elementwise and leaves elements with a zero
        gradient unchanged.
        """
        return "its moments and weight decay also update rows without a gradient" if sparse else None

    @abstractmethod
    def scalars(self, op: Emitter, learning_rate: ir.Value, step: ir.Value) -> Sequence[Operand]:
        """Returns the scalars for :meth:`update` that are the same for all parameters, e.g. the corrected step size.

        Args:
            op: emitter of the optimizer model.
            learning_rate: float [], in the dtype of the computation.
            step: int64 [], 1 at the first step.
        """

    def shared_scalars(
        self, op: Emitter, scalars: Sequence[Operand], inputs: Sequence[StepInputs]
    ) -> Sequence[Operand]:
        """Returns the scalars for :meth:`update` that are shared by a set of parameters. The default is `scalars`.

        Called once per set of parameters with the same settings, learning rate and dtype. :class:`Prodigy` computes its
        step size here, from the state of all parameters in the set.

        Args:
            op: emitter of the optimizer model.
            scalars: the result of :meth:`scalars`.
            inputs: one entry per parameter of the set, in graph order.
        """
        return scalars

    def scaled(self, op: Emitter, scalars: Sequence[Operand], factor: ir.Value) -> Sequence[Operand] | None:
        """Folds a scale factor for the gradients into the scalars; returns None if the optimizer does not support this.

        With the returned scalars, `update(g)` must equal the update for `factor`·`g`. Clipping by norm then needs no
        multiplication per gradient element.

        Args:
            op: emitter of the optimizer model.
            scalars: the result of :meth:`scalars`.
            factor: scale of the gradients, [], in the dtype of the computation.
        """
        return None

    @abstractmethod
    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, moments: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> tuple[ir.Value, ...]:
        """Returns the new parameter and its new moments, in the dtype of `w`.

        Args:
            op: emitter of the optimizer model.
            w: the parameter, or its rows for a sparse gradient.
            g: the clipped gradient, with the same shape and dtype.
            moments: one per entry of :meth:`state_spec`, with the same dtype.
            scalars: the result of :meth:`shared_scalars`.
        """


def require_not_negative(owner: object, *fields: str) -> None:
    """Raises GraphBuildError unless these fields of an optimizer are non-negative."""
    for field in fields:
        require(owner, field, lambda value: 0 <= value < float("inf"), "a non-negative number")


def require_betas(owner: object) -> None:
    """Raises GraphBuildError unless `owner.betas` are two decay rates in [0, 1)."""
    require(
        owner,
        "betas",
        lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        "two numbers in [0, 1)",
    )


def sparse_refusal(owner: object, *fields: str) -> str | None:
    """Returns why an optimizer does not support sparse gradients, or None if all of these fields are zero.

    >>> from onnxtrain.optimizers import SGD
    >>> sparse_refusal(SGD(weight_decay=0.1), "momentum", "weight_decay")
    'weight_decay would move rows without a gradient too'
    """
    moving = [field for field in fields if getattr(owner, field)]
    return f"{' and '.join(moving)} would move rows without a gradient too" if moving else None


def add_l2(op: Emitter, w: ir.Value, g: ir.Value, weight_decay: float) -> ir.Value:
    """Returns g + weight_decay·w, the gradient of the loss with an L2 penalty."""
    # No node without decay: ONNX Runtime would compute a product with 0 and a sum for every element.
    return op.Add(g, op.Mul(w, weight_decay)) if weight_decay else g


def bias_correction(op: Emitter, beta: float, step: ir.Value, like: ir.Value) -> ir.Value:
    """Returns 1 - beta**step in the dtype of `like`."""
    # As -2t/(1 - t) with t = tanh(step·log(beta)/2): subtracting a power from one would lose five of float32's seven
    # digits for beta = 0.9999, and the smaller web builds of ONNX Runtime lack float64 kernels. For beta = 0, where the
    # logarithm does not exist, 1 - 0**step is 1.
    if beta == 0:
        return op.const(1.0, like=like)
    count = op.Cast(step, to=like.dtype)
    tanh = op.Tanh(op.Mul(count, op.const(math.log(beta) / 2, like=like)))
    return op.Div(op.Mul(tanh, -2.0), op.Sub(1.0, tanh))
