"""Losses that append their nodes to a graph, with the formulas of `torch.nn.functional`.

    >>> import onnx_ir as ir
    >>> from onnxtrain.losses import CrossEntropyLoss
    >>> loss = CrossEntropyLoss(label_smoothing=0.1)
    >>> scores = ir.Value(name="scores", shape=ir.Shape(["n", 10]), type=ir.TensorType(ir.DataType.FLOAT))
    >>> loss.targets(scores)
    [TargetSpec(name='labels', dtype=INT64, shape=('n',),
                class_labels=ClassLabels(count=10, ignore_index=-100, axis=1, scores=None, shift=0), groups=None,
                sequences=None)]

Losses of float16 and bfloat16 scores are computed in float32, so that sums over a batch neither overflow nor lose
precision. As in PyTorch, the result is cast to the dtype of the scores.
"""

from __future__ import annotations

# The first import: if onnx is missing, its error message says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain._dialects import advice
from onnxtrain._names import LOSSES as LOSS_NAMES
from onnxtrain.emitter import Emitter, find_value, static_dims
from onnxtrain.errors import GraphBuildError
from onnxtrain.op_facts import CASTS, VIEWS

from ._base import LABELS_KEY, MEAN_KEY, TARGET_KEY, WEIGHT_NAME, ClassLabels, Loss, Reduction, TargetSpec
from ._base import LabelSequences as LabelSequences  # in a `TargetSpec`
from ._binary import BCELoss, HingeEmbeddingLoss, KLDivLoss, MultiLabelSoftMarginLoss, SoftMarginLoss
from ._causal_lm import CausalLMLoss
from ._classes import CrossEntropyLoss, NLLLoss
from ._contrastive import CosineSimilarityLoss, InfoNCELoss, TripletLoss
from ._criterion import of_criterion
from ._ctc import CTCLoss
from ._distillation import (
    DistillationLoss as DistillationLoss,
)  # for `artifacts`; users set fields of a recipe
from ._elementwise import (
    BCEWithLogitsLoss,
    ElementwiseLoss,
    HuberLoss,
    L1Loss,
    MSELoss,
    SampleLoss,
    SmoothL1Loss,
)
from ._embeddings import EmbeddingLoss, Pooling, embedding_output, pool_tokens, unit_rows
from ._focal import FocalLoss
from ._function import Argument, FunctionLoss
from ._joint import JointLoss
from ._label_ops import LABEL_OPS
from ._margins import ArcFaceLoss, MultiLabelMarginLoss, MultiMarginLoss
from ._mean import loss_mean
from ._model_loss import ModelLoss, is_onnxscript
from ._pairs import (
    CosineEmbeddingLoss,
    GaussianNLLLoss,
    MarginRankingLoss,
    TripletMarginLoss,
    TripletMarginWithDistanceLoss,
)
from ._poisson import PoissonNLLLoss
from ._quantile import QuantileLoss
from ._scores import warn_of_probabilities
from ._target_scale import ScaledTargetLoss as ScaledTargetLoss  # for `artifacts`
from ._target_scale import TargetScale
from ._target_scale import restore_units as restore_units  # for `artifacts`
from ._torch_loss import TorchLoss, not_compiled
from ._tversky import TverskyLoss

__all__ = [
    "LABELS_KEY",
    "LOSSES",
    "MEAN_KEY",
    "TARGET_KEY",
    "WEIGHT_NAME",
    "ArcFaceLoss",
    "Argument",
    "BCELoss",
    "BCEWithLogitsLoss",
    "CTCLoss",
    "CausalLMLoss",
    "ClassLabels",
    "CosineEmbeddingLoss",
    "CosineSimilarityLoss",
    "CrossEntropyLoss",
    "ElementwiseLoss",
    "EmbeddingLoss",
    "FocalLoss",
    "FunctionLoss",
    "GaussianNLLLoss",
    "HingeEmbeddingLoss",
    "HuberLoss",
    "InfoNCELoss",
    "JointLoss",
    "KLDivLoss",
    "L1Loss",
    "Loss",
    "MSELoss",
    "MarginRankingLoss",
    "ModelLoss",
    "MultiLabelMarginLoss",
    "MultiLabelSoftMarginLoss",
    "MultiMarginLoss",
    "NLLLoss",
    "PoissonNLLLoss",
    "Pooling",
    "QuantileLoss",
    "Reduction",
    "SampleLoss",
    "SmoothL1Loss",
    "SoftMarginLoss",
    "TargetScale",
    "TargetSpec",
    "TorchLoss",
    "TripletLoss",
    "TripletMarginLoss",
    "TripletMarginWithDistanceLoss",
    "TverskyLoss",
    "attach_joint_loss",
    "attach_loss",
    "embedding_output",
    "loss_class",
    "loss_mean",
    "make_loss",
    "mark_labels",
    "mark_target",
    "pool_tokens",
    "unit_rows",
]

LOSSES: dict[str, type[Loss]] = {name: globals()[kind] for name, (kind, _) in LOSS_NAMES.items()}
"""Maps each name that :func:`make_loss` accepts to its loss class."""


def loss_class(name: str) -> type[Loss]:
    """Returns the loss class named `name`, e.g. "MSELoss", or the base class :class:`Loss` if there is none."""
    return next((kind for kind in LOSSES.values() if kind.__name__ == name), Loss)


# Reshapes and casts change shape or dtype of labels, but not their range.
_SAME_ELEMENTS = VIEWS | CASTS


def make_loss(spec: object) -> Loss:
    """Creates a loss from its name in :data:`LOSSES`, a function, a criterion of PyTorch, or an ONNX model.

    Args:
        spec: a name, for default settings; a :class:`Loss`, which is returned unchanged; a loss of `torch.nn`, from
            which the settings are taken; another function of PyTorch tensors (:class:`TorchLoss`); the path of a
            `.onnx` file, a model or an onnxscript function (:class:`ModelLoss`).

    Raises:
        GraphBuildError: there is no loss with that name, or the function or model cannot be a loss.

    Example:
        >>> make_loss("mse")
        MSELoss(reduction='mean')
    """
    if isinstance(spec, Loss):
        return spec
    if isinstance(spec, str) and spec in LOSSES:
        return LOSSES[spec]()
    if isinstance(spec, os.PathLike) or (isinstance(spec, str) and spec.endswith(".onnx")):
        return ModelLoss(spec)
    if isinstance(spec, onnx.ModelProto | ir.Model) or is_onnxscript(spec):
        return ModelLoss(spec)
    meant = advice("loss", spec, LOSSES)
    if isinstance(spec, type):
        raise GraphBuildError(
            f"choosing a loss: received the class {spec.__name__}; {meant or f'pass an object: {spec.__name__}()'}"
        )
    if callable(spec):
        spec = not_compiled(spec)
        return of_criterion(spec, {kind.__name__: kind for kind in LOSSES.values()}) or TorchLoss(spec)
    raise GraphBuildError(
        f"choosing a loss: received {spec!r}; {f'{meant}, or' if meant else 'give'} one of "
        f"{', '.join(sorted(LOSSES))}, a Loss object, a function of PyTorch tensors, or a .onnx file"
    )


def attach_loss(
    op: Emitter,
    loss: Loss,
    scores: str,
    target: str | None = None,
    *,
    new_target: str | None = None,
    origin: ir.Graph | None = None,
    sample_weight: bool = False,
) -> ir.Value:
    """Appends a loss to a graph, with new graph inputs for its targets.

    Args:
        op: emitter of the model's graph.
        loss: the loss to append, e.g. MSELoss().
        scores: name of the model output that is compared with the target, e.g. "logits".
        target: name of an existing value to use as the target (see :func:`mark_target`). Default: a new input.
        new_target: name of the new input. Default: "target" or, for class labels, "labels". If the name is in use, a
            number is appended.
        origin: the model's graph, if `op` emits to a separate graph that is merged into the model later.
        sample_weight: True to add an input with one weight per sample (see :meth:`Loss.build_weighted`).

    Returns:
        The loss, named `loss`, or `loss` and a number if that name is in use. Its metadata contains
        :meth:`Loss.mean_over`.

    Raises:
        GraphBuildError: a name does not exist in the graph, or the loss does not support the dtypes or shapes.
    """
    scored = _find(op.graph, scores, loss)
    # Looked up in the model, not in `op.graph`, because the ops that compute the scores are there.
    of_model = _find(origin or op.graph, scores, loss)
    specs = loss.targets(of_model)
    source: ir.Value | None
    if not specs:
        # A loss without a target, e.g. the distance to a teacher, does not read this value.
        value, source = scored, None
    elif target is not None:
        value = _find(op.graph, target, loss)
        # In another graph, the target is an input even if the model computes it, so its source is looked up in the
        # model.
        source = mark_target(_find(origin or op.graph, target, loss), specs[0])
    else:
        value = source = specs[0].as_input()
        value.name = op.unique_name(new_target or str(value.name))
        op.graph.inputs.append(value)
    weight = _add_weight(op, scored, loss) if sample_weight else None
    warn_of_probabilities(loss, of_model)
    mean = loss.mean_over(source.name if source else None)
    if weight is not None:
        result = loss.build_weighted(op, scored, value, weight)
    else:
        result = loss.build(op, scored, value)
    return _described(op, result, mean, weight)


def attach_joint_loss(
    op: Emitter,
    loss: JointLoss,
    names: Sequence[str],
    *,
    named: bool,
    new_targets: Mapping[str, str] | None = None,
    origin: ir.Graph | None = None,
    sample_weight: bool = False,
) -> ir.Value:
    """Appends a loss of several outputs or with several targets to a graph, with new graph inputs for its targets.

    Args:
        op: emitter of the model's graph.
        loss: the loss to append, e.g. TripletMarginLoss().
        names: names of values of the model: all of its outputs; or, if `named`, those that the user chose, first the
            outputs that the loss takes, then existing values to use as its first targets.
        named: True if the user chose the values.
        new_targets: names of new inputs by the names of targets; default: the names of the targets. If a name is in
            use, a number is appended.
        origin: as for :func:`attach_loss`.
        sample_weight: as for :func:`attach_loss`.

    Returns:
        The loss, as for :func:`attach_loss`.

    Raises:
        GraphBuildError: a name does not exist in the graph, or the loss does not support the number, dtypes or shapes
            of the values.
    """
    of_model = {name: _find(origin or op.graph, name, loss) for name in names}
    scores, given = loss.chosen(list(of_model.values()), named=named)
    specs = loss.joint_targets(scores)
    if len(given) > len(specs):
        raise GraphBuildError(
            f"attaching {type(loss).__name__}: received {', '.join(names)}, but it has {len(specs)} targets; leave "
            f"{', '.join(str(value.name) for value in given[len(specs) :])} out"
        )
    targets = []
    for spec, existing in zip_longest(specs, given):
        if existing is not None:
            mark_target(existing, spec)
            targets.append(_find(op.graph, str(existing.name), loss))
            continue
        value = spec.as_input()
        value.name = op.unique_name((new_targets or {}).get(spec.name, spec.name))
        op.graph.inputs.append(value)
        targets.append(value)
    _name_lengths(specs, targets)
    scored = [_find(op.graph, str(value.name), loss) for value in scores]
    weight = _add_weight(op, scored[0], loss) if sample_weight else None
    warn_of_probabilities(loss, scores[0])
    return _described(op, loss.build_joint(op, scored, targets, weight), loss.mean_over(None), weight)


def _name_lengths(specs: Sequence[TargetSpec], targets: Sequence[ir.Value]) -> None:
    """Writes the final name of the lengths into the metadata of targets with sequences of labels."""
    names = {spec.name: str(value.name) for spec, value in zip(specs, targets, strict=True)}
    for spec, value in zip(specs, targets, strict=True):
        if spec.sequences is not None and TARGET_KEY in value.metadata_props:
            sequences = replace(spec.sequences, lengths=names[spec.sequences.lengths])
            value.metadata_props[TARGET_KEY] = replace(spec, sequences=sequences).described


def _described(
    op: Emitter, result: ir.Value, mean: dict[str, Any] | None, weight: ir.Value | None
) -> ir.Value:
    """Names a loss, and describes in its metadata what it is averaged over; returns the loss."""
    # None means a sum, which is added up over batches regardless of sample weights.
    if mean is not None and weight is not None:
        mean = mean | {"sample_weight": weight.name}
    result.name = op.unique_name("loss")
    # A model may scale this loss or add others before it is trained; `loss_mean` then starts from this metadata.
    result.metadata_props[MEAN_KEY] = json.dumps(mean)
    return result


def _add_weight(op: Emitter, scores: ir.Value, loss: Loss) -> ir.Value:
    """Adds the graph input `sample_weight`, with one weight per sample, and returns it.

    The input has shape [N], and dtype float64 if the scores are float64, else float32. If the name is in use, a number
    is appended.

    Raises:
        GraphBuildError: the scores have no batch axis.
    """
    if not static_dims(scores):
        raise GraphBuildError(
            f"attaching {type(loss).__name__}: the scores {scores.name!r} of shape {scores.shape} have no "
            "batch axis, which sample weights need; choose scores of shape [N, ...], or leave the weights "
            "out"
        )
    assert scores.shape is not None
    first = scores.shape[0]
    size = first if isinstance(first, int) else first.value
    # A float16 or bfloat16 loss is computed in float32, where the weights multiply its terms.
    dtype = ir.DataType.DOUBLE if scores.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    weight = TargetSpec(WEIGHT_NAME, dtype, (size,)).as_input()
    weight.name = op.unique_name(WEIGHT_NAME)
    weight.metadata_props[TARGET_KEY] = json.dumps({"sample_weight": True})
    op.graph.inputs.append(weight)
    return weight


def mark_target(target: ir.Value, spec: TargetSpec) -> ir.Value | None:
    """Marks the graph input that provides a target, so that the runtime can check its labels before a run.

    The target may be the input itself, or computed from the input by Cast, Reshape and similar ops. An input that the
    model also reads for another purpose remains a user input. Marks of other losses are not overwritten.

    Args:
        target: the value that a loss uses as its target.
        spec: specification of the target, as returned by the loss's `targets`.

    Returns:
        The marked input, or None if the model computes the target.
    """
    source, readers = _follow_back(target)
    # A computed target has no labels that could be checked before the run.
    if not source.is_graph_input():
        return None
    _mark(source, spec, LABELS_KEY if readers else TARGET_KEY)
    return source


def mark_labels(graph: ir.Graph) -> None:
    """Marks the label inputs of loss ops that the model already contains, so that the runtime checks their labels.

    The inputs remain user inputs, because the model was exported with them.
    """
    # In the kernels of these ops, a negative label counts classes from the end, so without a check a wrong one would
    # silently be trained on.
    for node in graph:
        if node.domain != "" or node.op_type not in LABEL_OPS:
            continue
        scores, target = node.inputs[:2]
        assert scores is not None
        assert target is not None
        source, _ = _follow_back(target)
        # If a Cast converts a floating-point input to labels, the runtime has no integers to check.
        if source.is_graph_input() and source.dtype is not None and source.dtype.is_integer():
            # The class axis of ONNX's two losses is 1, whatever the rank.
            count = (static_dims(scores) or (None, None))[1]
            labels = ClassLabels(count, node.attributes.get_int("ignore_index", None))
            _mark(source, TargetSpec(str(source.name), source.dtype, (), labels), LABELS_KEY)


def _follow_back(value: ir.Value) -> tuple[ir.Value, int]:
    """Traces a target back through casts and reshapes to its source, e.g. a graph input.

    Returns:
        The source, and the number of other nodes that read the source, the target or a value between them.
    """
    readers = len(value.uses())
    producer = value.producer()
    while producer is not None and producer.op_type in _SAME_ELEMENTS and producer.inputs[0] is not None:
        value = producer.inputs[0]
        readers += len(value.uses()) - 1
        producer = value.producer()
    return value, readers


def _mark(source: ir.Value, spec: TargetSpec, key: str) -> None:
    """Stores a target's specification in the metadata of its input.

    Args:
        source: the graph input.
        spec: the specification. A stored specification with class labels is not replaced.
        key: TARGET_KEY, or LABELS_KEY if the model reads the input, too.
    """
    marks = source.metadata_props
    # An input remains a target if one loss uses it as such, even if the model reads it for another loss.
    key = TARGET_KEY if TARGET_KEY in marks else key
    # "{}" marks a target without class labels; the labels of a second loss on the same input add what to check.
    if marks.get(key, "{}") == "{}":
        marks[key] = spec.described


def _find(graph: ir.Graph, name: str, loss: Loss) -> ir.Value:
    """Returns the value with this name; raises GraphBuildError if there is none."""
    value = find_value(graph, name)
    if value is not None:
        return value
    raise GraphBuildError(
        f"attaching {type(loss).__name__}: {name!r} is not a value of the graph; its outputs are "
        f"{', '.join(str(value.name) for value in graph.outputs)}"
    )
