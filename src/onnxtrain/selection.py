"""Which initializers of a model are trained, which are frozen, and which are BatchNorm statistics."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.errors import GraphBuildError, NothingToTrain
from onnxtrain.passes import TorchSignature, is_float_parameter, is_training_batch_norm

__all__ = ["Selection", "batch_norms", "float_initializers", "is_float", "select_parameters"]

# Inputs that configure an op: nobody means to train the bounds of a ReLU6 or the scale factors of an
# upsampling.
_SETTINGS = {
    "Clip": (1, 2),
    "Dropout": (1,),
    "OneHot": (2,),
    "Pad": (2,),
    "Resize": (1, 2),
}

# Names that the PyTorch exporters make up; of scalars, they are constants such as the exponent of x ** 2.
_GENERATED_NAME = re.compile(r"(val|const|onnx::\w+|_?inlfunc\w*|scalar_tensor\w*)_\d+|/.*")
# Values that the exporters have computed from parameters, and what keeps each from doing so.
_COMPUTED_NAMES = (
    (re.compile(r"val_\d+|.*\.val_\d+"), "optimize=False"),
    (re.compile(r"onnx::\w+_\d+"), "do_constant_folding=False"),
)


@dataclass(frozen=True)
class Selection:
    """Names of initializers by their role, each in graph order.

    Attributes:
        trainable: trained parameters.
        frozen: parameters that are inputs of the training model, but not trained.
        statistics: running statistics of BatchNormalization nodes in training mode.
    """

    trainable: list[str]
    frozen: list[str]
    statistics: list[str]

    @property
    def parameters(self) -> set[str]:
        """The parameters, trainable and frozen."""
        return {*self.trainable, *self.frozen}


def select_parameters(
    model: ir.Model, requires_grad: Iterable[str] | None, frozen: Iterable[str] | None
) -> Selection:
    """Sorts the initializers of a model into trainable ones, frozen ones and BatchNorm statistics.

    Raises:
        GraphBuildError: a name is unknown, not floating point, or in both lists.
        NothingToTrain: nothing is left to train.
    """
    floats = dict(float_initializers(model))
    running = _statistics_in_training(model)
    statistics = [name for name in floats if name in running]
    frozen_names = list(frozen or ())
    requested = list(requires_grad) if requires_grad is not None else None
    _check_names(model, requested or [], frozen_names, set(statistics))
    if requested is None:
        fixed = {*frozen_names, *statistics, *_statistics_in_inference(model)}
        signature = TorchSignature(model)
        trainable = [
            name
            for name, value in floats.items()
            if name not in fixed and not _is_setting(value) and _is_parameter(value, signature)
        ]
    else:
        trainable = [name for name in model.graph.initializers if name in set(requested)]
    if not trainable:
        raise NothingToTrain(
            "building the training graph: no parameter is left to train; the model has "
            f"{len(floats)} floating-point initializers, of which {len(frozen_names)} are frozen. "
            "Name the parameters to train in requires_grad, or freeze fewer."
        )
    kept = [name for name in model.graph.initializers if name in set(frozen_names) - set(statistics)]
    return Selection(trainable, kept, statistics)


def _check_names(model: ir.Model, requested: list[str], frozen: list[str], statistics: set[str]) -> None:
    both = sorted(set(requested) & set(frozen))
    if both:
        raise GraphBuildError(
            f"selecting parameters: {', '.join(both)} cannot be frozen and require gradient computation at "
            "the same time; name each in one of the two lists"
        )
    for role, names in (("requires_grad", requested), ("frozen_params", frozen)):
        for name in names:
            value = model.graph.initializers.get(name)
            if value is None:
                known = ", ".join([name for name, _ in float_initializers(model)][:20])
                raise GraphBuildError(
                    f"selecting parameters: {role} names {name!r}; the parameters are {known}{_hint(model)}"
                )
            if role == "requires_grad" and not is_float(value):
                raise GraphBuildError(
                    f"selecting parameters: {name!r} is {value.dtype}; only floats can be trained"
                )
            if role == "requires_grad" and name in statistics:
                raise GraphBuildError(
                    f"selecting parameters: {name!r} is a running statistic of a BatchNormalization in "
                    "training mode; it is updated by every training step and has no gradient"
                )


def _hint(model: ir.Model) -> str:
    """What to say of names that PyTorch's exporters make up."""
    for pattern, option in _COMPUTED_NAMES:
        computed = next((name for name, _ in float_initializers(model) if pattern.fullmatch(name)), None)
        if computed is not None:
            return (
                f". torch.onnx.export puts values that it has computed, such as {computed!r}, in the place of "
                f"parameters: export with {option}"
            )
    return ""


def is_float(value: ir.Value) -> bool:
    """Returns whether a value is known to be floating point."""
    return value.dtype is not None and value.dtype.is_floating_point()


def _is_parameter(value: ir.Value, signature: TorchSignature) -> bool:
    """Whether a value is a parameter: as the file says or, where it does not, unless it looks like a constant."""
    told = signature.is_parameter(value)
    if told is not None:
        return told
    size = value.const_value.size if value.const_value is not None else None
    return not ((size == 1 or signature) and _GENERATED_NAME.fullmatch(value.name or ""))


def _is_setting(value: ir.Value) -> bool:
    """Whether a value is read, and only as a setting of ops."""
    uses = value.uses()
    return bool(uses) and all(
        use.node.domain == "" and use.idx in _SETTINGS.get(use.node.op_type, ()) for use in uses
    )


def float_initializers(model: ir.Model) -> list[tuple[str, ir.Value]]:
    """Returns the floating-point initializers that may be parameters, by name and in order."""
    return [(name, value) for name, value in model.graph.initializers.items() if is_float_parameter(value)]


def batch_norms(model: ir.Model) -> list[tuple[ir.Node, bool]]:
    """Returns all BatchNormalization nodes in order, and whether each is in training mode."""
    nodes = [node for node in model.graph if node.op_type == "BatchNormalization" and node.domain == ""]
    return [(node, is_training_batch_norm(node)) for node in nodes]


def _statistics_in_training(model: ir.Model) -> set[str]:
    return {str(v.name) for node, training in batch_norms(model) if training for v in node.inputs[3:5] if v}


def _statistics_in_inference(model: ir.Model) -> set[str]:
    return {
        str(v.name) for node, training in batch_norms(model) if not training for v in node.inputs[3:5] if v
    }
