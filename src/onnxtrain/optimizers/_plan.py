"""How each parameter is updated: by which optimizer, at which rate, with which moments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.errors import GraphBuildError
from onnxtrain.selection import matched_names, some_names

from ._base import MomentSpec, Optimizer, ParameterGroup

_DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float64": ir.DataType.DOUBLE,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter to be trained.

    Attributes:
        name: its name in the training model.
        dtype: its element type, or the name of it that manifests use, such as "float32".
        shape: its dimensions.
        sparse: whether its gradient is that of the rows that were read, with their indices.
    """

    name: str
    dtype: ir.DataType | str
    shape: tuple[int, ...]
    sparse: bool = False

    @property
    def data_type(self) -> ir.DataType:
        """The element type.

        Raises:
            GraphBuildError: it cannot be trained.
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
    return ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


@dataclass(frozen=True)
class Update:
    """How one parameter is updated.

    Attributes:
        parameter: the parameter.
        optimizer: with the settings of its groups.
        learning_rate_scale: factor of the learning rate.
        moments: its state, under names that have one initial value in all of the model.
    """

    parameter: ParameterSpec
    optimizer: Optimizer
    learning_rate_scale: float
    moments: tuple[MomentSpec, ...]


def plan_updates(optimizer: Optimizer, parameters: Sequence[ParameterSpec]) -> list[Update]:
    """Returns how each of the parameters is updated, in their order.

    Raises:
        GraphBuildError: a group names no parameter, or gives a setting that the optimizer has not; a parameter has
            a shape or a gradient that its optimizer cannot use.
    """
    members = _members(optimizer.groups, [parameter.name for parameter in parameters])
    names_of_values: dict[str, float] = {}
    updates = []
    for parameter in parameters:
        own, scale = _settings(optimizer, parameter.name, members)
        refusal = own.refusal(parameter.shape)
        if refusal is not None:
            raise GraphBuildError(
                f"building the optimizer model: {parameter.name!r} has shape {list(parameter.shape)}; {refusal}"
            )
        _check_gradient(own, parameter)
        moments = own.state_spec(parameter.shape)
        start = next(n for n in range(len(names_of_values) + 1) if _fits(moments, n, names_of_values))
        moments = tuple(
            dataclasses.replace(moment, name=f"momentum{start + index}")
            for index, moment in enumerate(moments)
        )
        names_of_values |= {moment.name: moment.initial_value for moment in moments}
        updates.append(Update(parameter, own, scale, moments))
    return updates


def _check_gradient(optimizer: Optimizer, parameter: ParameterSpec) -> None:
    refusal, name = optimizer.gradient_refusal(sparse=parameter.sparse), parameter.name
    if refusal is None:
        return
    remedy = (
        f", and the gradient of {name!r} is sparse. Make SparseAdam the optimizer of its group, "
        f"ParameterGroup({name!r}, optimizer=SparseAdam()), or leave it out of sparse_gradients"
    )
    raise GraphBuildError(
        f"building the optimizer model: {type(optimizer).__name__} cannot update {name!r}: {refusal}"
        + (remedy if parameter.sparse else "")
    )


def _fits(moments: Sequence[MomentSpec], start: int, names_of_values: dict[str, float]) -> bool:
    """Whether moments numbered from `start` on have the initial values that these numbers have already."""
    return all(
        names_of_values.get(f"momentum{start + index}", moment.initial_value) == moment.initial_value
        for index, moment in enumerate(moments)
    )


def _settings(optimizer: Optimizer, name: str, members: Sequence[set[str]]) -> tuple[Optimizer, float]:
    """Returns the optimizer of a parameter, without groups and clipping, and the factor of its learning rate."""
    own, decay, scale = optimizer, None, 1.0
    for group, names in zip(optimizer.groups, members, strict=True):
        if name in names:
            own = group.optimizer or own
            decay = decay if group.weight_decay is None else group.weight_decay
            scale = scale if group.learning_rate_scale is None else group.learning_rate_scale
    changes = {} if decay is None else {"weight_decay": decay}
    if decay is not None and not hasattr(own, "weight_decay"):
        raise GraphBuildError(
            f"building the optimizer model: a group gives {name!r} a weight_decay, which {type(own).__name__} has not"
        )
    return dataclasses.replace(own, clip_grad=None, groups=(), **changes), scale


def _members(groups: Sequence[ParameterGroup], names: Sequence[str]) -> list[set[str]]:
    """Returns the names of the parameters of each group."""

    def refusal(pattern: str) -> GraphBuildError:
        return GraphBuildError(
            f"building the optimizer model: no trained parameter matches {pattern!r} of a group; they are "
            f"{some_names(names)}"
        )

    return [matched_names(group.parameters, names, refusal) for group in groups]
