"""Evaluates any .onnx file: computes its outputs, and then the loss and the metrics of these outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.cli._classes import chosen_metrics
from onnxtrain.cli._command_options import EvaluateOptions
from onnxtrain.cli._data import TARGETS, Arrays, assign, load_data
from onnxtrain.cli._images import prepared_images, run_on_images
from onnxtrain.cli._loss import fit_targets, label_targets, make_chosen_loss
from onnxtrain.cli._predict_model import model_predictions
from onnxtrain.errors import InputError
from onnxtrain.images import ImageFolder
from onnxtrain.losses import FunctionLoss, JointLoss, Loss, make_loss
from onnxtrain.runtime.device import CPU
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.runtime.session import open_session
from onnxtrain.tables import Table, TableEncoder, class_names
from onnxtrain.trainer import Trainer


class Scored(NamedTuple):
    """The outputs of a model on a dataset, as the input of a trainer that only computes loss and metrics.

    Attributes:
        trainer: trainer of a model that returns its input.
        classes: names of the classes; None if they are unknown, or the targets are no classes.
        x, y: outputs of the model, and targets.
        has_loss: False if no loss was chosen, so that only the metrics mean something.
    """

    trainer: Trainer
    classes: list[Any] | None
    x: Any
    y: Any
    has_loss: bool


def score_model(options: EvaluateOptions) -> Scored:
    """Runs the model of `onnxtrain evaluate MODEL`, and prepares its outputs for evaluation.

    The model may be one that cannot be trained, because the loss is computed from its outputs alone.

    Raises:
        InputError: the data does not match the model, the loss does not match the output, or neither `--loss` nor the
            targets tell which metrics to compute.
    """
    if options.data.is_dir():
        return _score_images(options)

    def load(encoder: TableEncoder | None) -> Arrays | Table:
        data = load_data(options.data, options.text, None if encoder is None else encoder.dialect_)
        assert not isinstance(data, ImageFolder)
        return data

    outputs, encoder, data, _ = model_predictions(
        options.source, load, options.data, options.batch_size, note=False
    )
    name = _output(outputs, options)
    loss = _loss(options, outputs[name], data, encoder)
    classes = None if encoder is None else encoder.classes_
    metrics, _ = chosen_metrics(options.metric, None, classes)
    trainer, x = judge(_scored_outputs(outputs, options, loss), loss, metrics, options.loss_input)
    targets = label_targets(trainer)
    if isinstance(data, Table):
        assert encoder is not None
        arrays = encoder.arrays(data, (), targets)
    else:
        arrays = _target_arrays(data, targets, options)
    _, y = assign((), targets, arrays, options.data)
    return Scored(trainer, classes, x, fit_targets(trainer, y), options.loss is not None)


def _target_arrays(data: Arrays, targets: Sequence[InputSpec], options: EvaluateOptions) -> Arrays:
    """Returns the arrays of the targets by name. The arrays of the model's inputs have been used.

    Raises:
        InputError: an array is missing.
    """
    names = [spec.name for spec in targets if not spec.sample_weight]
    arrays = {name: data[name] for name in names if name in data}
    if len(names) == 1 and not arrays:
        found = next((name for name in TARGETS if name in data), None)
        arrays = {} if found is None else {names[0]: data[found]}
    if missing := [name for name in names if name not in arrays]:
        raise InputError(
            f"Evaluating '{options.source}': the data '{options.data}' has no array for the target "
            f"{', '.join(missing)}; it holds {', '.join(data) or 'nothing'}. "
            + ("Name the array of the target y." if len(names) == 1 else "Give the arrays these names.")
        )
    return arrays


def _score_images(options: EvaluateOptions) -> Scored:
    """Runs the model on a folder of images, whose subfolders are the targets.

    Raises:
        InputError: the subfolders are not the classes of the model, or the model's preprocessing is unknown.
    """
    folder = prepared_images(options.images, options.data)
    session = open_session(options.source, "model", CPU, None)
    outputs, source, metadata = run_on_images(session, options.source, folder, options.batch_size)
    name = _output(outputs, options)
    scores = outputs[name]
    # A binary classifier may have a single score.
    count = max(scores.shape[1], 2) if scores.ndim == 2 else None
    if metadata is not None and metadata.classes:
        classes = class_names(metadata.classes, count)
    else:
        classes = folder.classes if len(folder.classes) == count else None
    if classes is None:
        raise InputError(
            f"Evaluating '{options.source}': the output '{name}' has the shape {list(scores.shape)}, which does not "
            f"fit the {len(folder.classes)} subfolders of '{options.data}', and the file does not name its classes. "
            "Pass a folder with one subfolder per class of the model, or the directory of the run."
        )
    labels = folder.labels_for(classes)[source.kept]
    y = labels if scores.shape[1] > 1 else labels.astype(scores.dtype)[:, np.newaxis]
    loss = options.loss or ("cross_entropy" if scores.shape[1] > 1 else "bce_with_logits")
    metrics, _ = chosen_metrics(options.metric, None, classes)
    trainer, x = judge({name: scores}, make_chosen_loss(loss, options.loss_option), metrics)
    y = fit_targets(trainer, {trainer.manifest.targets[0].name: y})
    return Scored(trainer, classes, x, y, options.loss is not None)


def _output(outputs: Arrays, options: EvaluateOptions) -> str:
    """Returns the name of the first output that the loss reads: `--loss-input`, or the first one with numbers.

    Raises:
        InputError: no output is floating point, or `--loss-input` names something else.
    """
    numbers = [name for name, array in outputs.items() if array.dtype.kind == "f"]
    chosen = options.loss_input or numbers[:1]
    # Only the first one must be floating point.
    name = next((name for name in chosen if name not in outputs), next(iter(chosen), None))
    if name not in numbers:
        raise InputError(
            f"Evaluating '{options.source}': "
            + (f"--loss-input is '{name}'" if name is not None else "no output is floating point")
            + f"; its floating-point outputs are {', '.join(numbers) or 'none'}."
        )
    return name


def _loss(
    options: EvaluateOptions, scores: np.ndarray[Any, Any], data: Arrays | Table, encoder: TableEncoder | None
) -> Loss:
    """Returns the loss of `--loss`; without it, one whose metrics suit the targets.

    Raises:
        InputError: the targets suit several losses.
    """
    if isinstance(data, Table) and encoder is None:
        raise InputError(
            f"'{options.source}' does not say which column of '{options.data}' is the target. Pass an .npz file, a "
            "model that was exported from a run on a table, or the run."
        )
    if options.loss is not None:
        return make_chosen_loss(options.loss, options.loss_option)
    if options.loss_option:
        raise InputError("--loss-option is given without --loss.")
    several = scores.ndim >= 2 and scores.shape[1] > 1
    if isinstance(data, Table):
        assert encoder is not None
        if encoder.classes_ is None:
            return make_loss("mse")
        if several:
            return make_loss("cross_entropy")
    else:
        target = next((data[name] for name in TARGETS if name in data), None)
        kind = "" if target is None else target.dtype.kind
        if target is not None and kind in "iu" and several and target.ndim == scores.ndim - 1:
            return make_loss("cross_entropy")
        if target is not None and kind == "f" and target.shape == scores.shape:
            return make_loss("mse")
    raise InputError(
        f"Evaluating '{options.source}': outputs of shape {list(scores.shape)} and the targets in '{options.data}' "
        "suit several losses, or none. Name the one that the model was trained with: --loss NAME."
    )


def _scored_outputs(outputs: Arrays, options: EvaluateOptions, loss: Loss) -> Arrays:
    """Returns the outputs that a loss reads, by name: `--loss-input`; else all for a loss of several, or the first."""
    if options.loss_input:
        return {name: outputs[name] for name in options.loss_input}
    if isinstance(loss, FunctionLoss) or (isinstance(loss, JointLoss) and len(loss.takes) > 1):
        return {name: array for name, array in outputs.items() if array.dtype.kind in "fiub"}
    name = _output(outputs, options)
    return {name: outputs[name]}


def judge(
    outputs: Arrays,
    loss: Loss,
    metrics: list[str] | None = None,
    loss_inputs: Sequence[str] | None = None,
) -> tuple[Trainer, Arrays]:
    """Creates a trainer that only computes loss and metrics of the outputs; returns it and the outputs, its inputs.

    Args:
        outputs: outputs of a model by name.
        loss: the loss.
        metrics: names of metrics; None for those of the loss.
        loss_inputs: names of the outputs that the loss compares; None for the default.
    """
    # The loss reads the outputs by name, so the inputs have other names.
    inputs = {name: f"{name}_of_model" for name in outputs}
    while set(inputs.values()) & set(outputs):
        inputs = {name: f"{source}_" for name, source in inputs.items()}
    trainer = Trainer(
        _identity(outputs, inputs), loss, metrics=metrics, loss_input_names=list(loss_inputs or ()) or None
    )
    return trainer, {inputs[name]: array for name, array in outputs.items()}


def _identity(outputs: Arrays, inputs: Mapping[str, str]) -> ir.Model:
    """Creates a model that returns its inputs as outputs.

    A factor of 1 is its parameter, because a trainer needs one.

    Args:
        outputs: examples of the outputs by name; at least one is floating point.
        inputs: the name of the input for each output.
    """
    dtypes = {name: ir.DataType.from_numpy(array.dtype) for name, array in outputs.items()}
    factor = f"{'_'.join(inputs.values())}_factor"
    of_factor = next(dtype for dtype in dtypes.values() if dtype.is_floating_point())
    ones = np.ones(1, of_factor.numpy())
    one = ir.Value(
        name=factor,
        shape=ir.Shape([1]),
        type=ir.TensorType(of_factor),
        const_value=ir.tensor(ones, name=factor),
    )
    sources, nodes = [], []
    for name, array in outputs.items():
        shape, dtype = ir.Shape(["batch", *array.shape[1:]]), dtypes[name]
        source = ir.Value(name=inputs[name], shape=shape, type=ir.TensorType(dtype))
        node = ir.node("Mul", [source, one]) if dtype == of_factor else ir.node("Identity", [source])
        result = node.outputs[0]
        result.name, result.shape, result.type = name, shape.copy(), ir.TensorType(dtype)
        sources.append(source)
        nodes.append(node)
    results = [node.outputs[0] for node in nodes]
    graph = ir.Graph(
        sources, results, nodes=nodes, initializers=[one], opset_imports={"": 21}, name="identity"
    )
    return ir.Model(graph, ir_version=10)
