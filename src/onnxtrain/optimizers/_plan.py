"""Plans each parameter's update: its optimizer, its learning rate scale and the names of its moments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.errors import GraphBuildError
from onnxtrain.selection import matched_names, some_names

from ._base import MomentSpec, Optimizer, ParameterGroup

# By their names in manifests.
_DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float64": ir.DataType.DOUBLE,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}


@dataclass(frozen=True)
class ParameterSpec:
    """A trained parameter.

    Attributes:
        name: name in the training model, e.g. "fc.weight".
        dtype: element type, or its name in manifests, e.g. "float32".
        shape: dimensions, e.g. (784, 10).
        sparse: True if the gradient is sparse: the rows used in the batch, and their indices.
    """

    name: str
    dtype: ir.DataType | str
    shape: tuple[int, ...]
    sparse: bool = False

    @property
    def data_type(self) -> ir.DataType:
        """The element type.

        Raises:
            GraphBuildError: parameters of this type cannot be trained.
        """
        dtype = _DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        if dtype not in _DTYPES.values() or dtype is None:
            raise GraphBuildError(
                f"building the optimizer model: parameter {self.name!r} is {self.dtype}; "
                f"freeze it, or convert it to one of {', '.join(_DTYPES)}"
            )
        return dtype


def moment_dtype(dtype: ir.DataType) -> ir.DataType:
    """Returns the dtype of the moments and of the computation for parameters of `dtype`: at least float32."""
    # In bfloat16, a running mean would not change, because 0.001·(g² - v) is lost by rounding. In float16, squares
    # below 3e-8 are 0.
    return ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


@dataclass(frozen=True)
class Update:
    """The update of one parameter.

    Attributes:
        parameter: name, dtype and shape.
        optimizer: the parameter's optimizer, with the settings of its groups applied; it has no `groups` and no
            `clip_grad`.
        learning_rate_scale: factor by which the learning rate is multiplied, e.g. 0.1.
        moments: the optimizer state. Moments with the same name, e.g. "momentum1", have the same initial value in the
            whole model.
    """

    parameter: ParameterSpec
    optimizer: Optimizer
    learning_rate_scale: float
    moments: tuple[MomentSpec, ...]


def plan_updates(optimizer: Optimizer, parameters: Sequence[ParameterSpec]) -> list[Update]:
    """Plans the update of each parameter, in order.

    Raises:
        GraphBuildError: a group matches no parameter, or has a setting that the optimizer lacks; a parameter has a
            shape or a gradient that its optimizer does not support.
    """
    settings = parameter_settings(optimizer, [parameter.name for parameter in parameters])
    names_of_values: dict[str, float] = {}
    updates = []
    for parameter in parameters:
        own_optimizer, scale = settings[parameter.name]
        refusal = own_optimizer.refusal(parameter.shape)
        if refusal is not None:
            raise GraphBuildError(
                f"building the optimizer model: {parameter.name!r} has shape {list(parameter.shape)}; {refusal}"
            )
        _check_gradient(own_optimizer, parameter)
        moments = own_optimizer.state_spec(parameter.shape)
        # The manifest has one initial value per name, so moments with a different initial value get higher numbers.
        start = next(n for n in range(len(names_of_values) + 1) if _agrees(moments, n, names_of_values))
        moments = tuple(
            dataclasses.replace(moment, name=f"momentum{start + index}")
            for index, moment in enumerate(moments)
        )
        names_of_values |= {moment.name: moment.initial_value for moment in moments}
        updates.append(Update(parameter, own_optimizer, scale, moments))
    return updates


def parameter_settings(optimizer: Optimizer, names: Sequence[str]) -> dict[str, tuple[Optimizer, float]]:
    """Returns the optimizer of each parameter, with the settings of its groups applied, and its learning rate scale.

    Args:
        optimizer: the optimizer with its groups.
        names: names of the trained parameters.

    Raises:
        GraphBuildError: a group matches no parameter, or has a setting that the optimizer lacks.
    """
    members = _group_members(optimizer.groups, names)
    return {name: _settings_of(optimizer, name, members) for name in names}


def _check_gradient(optimizer: Optimizer, parameter: ParameterSpec) -> None:
    """Raises GraphBuildError if the optimizer does not support the sparse or dense gradient of a parameter."""
    refusal, name = optimizer.gradient_refusal(sparse=parameter.sparse), parameter.name
    if refusal is None:
        return
    remedy = (
        f", and the gradient of {name!r} is sparse. Make SparseAdam the optimizer of its group, "
        f"ParameterGroup({name!r}, optimizer=SparseAdam()), or leave it out of {argument('sparse_gradients')}"
    )
    raise GraphBuildError(
        f"building the optimizer model: {type(optimizer).__name__} cannot update {name!r}: {refusal}"
        + (remedy if parameter.sparse else "")
    )


def _agrees(moments: Sequence[MomentSpec], start: int, names_of_values: dict[str, float]) -> bool:
    """True if `moments` can be named "momentum<start>", "momentum<start + 1>", ... without a conflict.

    There is a conflict if one of these names is already in use with a different initial value. `names_of_values` maps
    the names in use to their initial values.
    """
    return all(
        names_of_values.get(f"momentum{start + index}", moment.initial_value) == moment.initial_value
        for index, moment in enumerate(moments)
    )


def _settings_of(optimizer: Optimizer, name: str, members: Sequence[set[str]]) -> tuple[Optimizer, float]:
    """Returns a parameter's optimizer, with the settings of its groups applied, and its learning rate scale.

    The optimizer has neither `groups` nor `clip_grad`, so that parameters with the same settings have equal optimizers.

    Args:
        optimizer: the optimizer with its groups.
        name: name of the parameter.
        members: for each group, the names of its parameters.

    Raises:
        GraphBuildError: a group sets a weight decay for the parameter, but its optimizer has none.
    """
    own_optimizer, decay, scale = optimizer, None, 1.0
    # In order, so that the last group with a setting wins.
    for group, names in zip(optimizer.groups, members, strict=True):
        if name in names:
            own_optimizer = group.optimizer or own_optimizer
            decay = decay if group.weight_decay is None else group.weight_decay
            scale = scale if group.learning_rate_scale is None else float(group.learning_rate_scale)
    # Optimizers without weight decay, such as SparseAdam, do not have the field.
    changes = {} if decay is None else {"weight_decay": decay}
    if decay is not None and not hasattr(own_optimizer, "weight_decay"):
        raise GraphBuildError(
            f"building the optimizer model: a group gives {name!r} a weight_decay, which "
            f"{type(own_optimizer).__name__} does not support; leave it out of the group"
        )
    # Without clipping and groups, so that parameters with the same settings compare equal and share their scalars.
    return dataclasses.replace(own_optimizer, clip_grad=None, groups=(), **changes), scale


def _group_members(groups: Sequence[ParameterGroup], names: Sequence[str]) -> list[set[str]]:
    """Returns, for each group, the names of its parameters.

    Raises:
        GraphBuildError: a pattern of a group matches no name.
    """

    def refusal(pattern: str) -> GraphBuildError:
        return GraphBuildError(
            f"building the optimizer model: no trained parameter matches {pattern!r} of a group; the "
            f"trained parameters are {some_names(names)}"
        )

    return [matched_names(group.parameters, names, refusal) for group in groups]
