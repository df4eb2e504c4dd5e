"""Calibrates a classifier on validation data, and applies the calibration to its outputs and to exported models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import onnx_ir as ir

from onnxtrain._printable import get_logger
from onnxtrain._words import argument
from onnxtrain.emitter import Emitter
from onnxtrain.errors import InputError
from onnxtrain.losses import loss_class
from onnxtrain.passes.tidy.unique_names import fresh_name
from onnxtrain.runtime.calibration import PROPERTY, StoredCalibration
from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer._fit.state import TrainingState
from onnxtrain.trainer._metrics.calibration import (
    Sample,
    ThresholdMetric,
    best_cut,
    expected_calibration_error,
    fit_temperature,
    negative_log_likelihood,
)
from onnxtrain.trainer._metrics.whole_set import has_nan, true_scores

_log = get_logger()
_DOING = "Calibrating"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Result of :meth:`Trainer.calibrate`, measured on the validation data.

    Attributes:
        temperature: number by which the scores are divided, e.g. 1.7 for an overconfident model.
        nll_before: negative log-likelihood, the mean of -log p of the true classes, without calibration.
        nll: negative log-likelihood with the temperature.
        ece_before: expected calibration error without calibration: the mean difference between the confidence of
            predictions and their accuracy, over 15 bins.
        ece: expected calibration error with the temperature.
        threshold: probability above which a sample is positive, e.g. 0.31; None if no metric was passed.
        metric: metric for which the threshold is best, e.g. "f1"; None if no metric was passed.
        metric_before: value of the metric with the threshold 0.5.
        metric_value: value of the metric with `threshold`.
        samples: number of labels that were compared.
    """

    temperature: float
    nll_before: float
    nll: float
    ece_before: float
    ece: float
    threshold: float | None = None
    metric: str | None = None
    metric_before: float | None = None
    metric_value: float | None = None
    samples: int = 0


def calibrate(
    state: TrainingState, prediction: Array, target: Array, metric: ThresholdMetric | None
) -> Calibration:
    """Fits the calibration to scores and targets, and stores it in the run's state.

    Raises:
        InputError: the loss is not one of classes, the targets are not class labels, scores are not finite, or a
            threshold is asked for although there are not two classes.
    """
    stored, data, of_pairs = _prepared(state, prediction, target)
    temperature = float(np.float32(fit_temperature(data)))
    # Rounding to float32, the dtype of most models, must not make it worse.
    if negative_log_likelihood(data, temperature) > negative_log_likelihood(data):
        temperature = 1.0
    stored = replace(stored, temperature=temperature)
    found: dict[str, Any] = {}
    if metric is not None:
        divided = np.asarray(of_pairs / of_pairs.dtype.type(temperature))
        scores, truth, positive = _of_yes(state, divided, data.truth, metric)
        cut, value, before = best_cut(scores, truth, metric)
        stored = replace(stored, cut=cut, positive=positive, metric=metric)
        found = {
            "threshold": stored.threshold,
            "metric": metric,
            "metric_before": before,
            "metric_value": value,
        }
    state.run.state.properties[PROPERTY] = stored.to_json()
    return Calibration(
        temperature=temperature,
        nll_before=negative_log_likelihood(data),
        nll=negative_log_likelihood(data, temperature),
        ece_before=expected_calibration_error(data),
        ece=expected_calibration_error(data, temperature),
        samples=len(data.truth),
        **found,
    )


def _prepared(
    state: TrainingState, prediction: Array, target: Array
) -> tuple[StoredCalibration, Sample, Array]:
    """Returns a calibration without temperature, the scores in float64, and the scores as the model returns them."""
    name = state.settings.prediction
    activation = loss_class(state.settings.loss).activation
    spec = state.task.target
    labels = spec.class_labels if spec is not None else None
    of_classes = activation == "sigmoid" or (activation is not None and labels is not None)
    if name is None or activation is None or activation == "softmax_last" or not of_classes:
        raise InputError(
            f"{_DOING}: the loss ({state.settings.loss or 'that of the model'}) does not define the probability of one "
            f"class per sample. Only models trained with {argument('loss', 'cross_entropy')}, 'nll', 'causal_lm' or a "
            "loss of logits for yes or no, such as 'bce_with_logits', can be calibrated."
        )
    scores, truth = true_scores("calibration", state.task, prediction, target)
    if not len(truth):
        raise InputError(f"{_DOING}: there are no labels in the data. Pass validation data with targets.")
    if has_nan(scores) or np.isinf(scores).any():
        raise InputError(
            f"{_DOING}: the model returns scores that are NaN or infinite. Train it again with a lower "
            f"{argument('learning_rate')}."
        )
    exact = scores.astype(np.float64)
    # Several yes-or-no questions per sample are calibrated together.
    data = Sample(exact, truth) if truth.ndim < scores.ndim else Sample(exact.reshape(-1), truth.reshape(-1))
    axis = 1 if labels is None else labels.axis
    return StoredCalibration(output=name, activation=activation, axis=axis), data, scores


def _of_yes(
    state: TrainingState, scores: Array, truth: Array, metric: ThresholdMetric
) -> tuple[Array, Array, int]:
    """Returns the score of "yes" of each sample, whether "yes" is true, and the class that "yes" stands for."""
    if metric not in get_args(ThresholdMetric):
        raise InputError(
            f"{_DOING}: {argument('threshold', metric)} is unknown; choose {', '.join(get_args(ThresholdMetric))}."
        )
    positive = 1 if state.task.positive is None else state.task.positive
    if scores.ndim == 2 and scores.shape[1] == 2 and truth.ndim == 1 and len(truth) == len(scores):
        return scores[:, positive] - scores[:, 1 - positive], (truth == positive).astype(np.int64), positive
    if scores.ndim != 1 or positive != 1:
        count = scores.shape[1] if scores.ndim == 2 else 1
        raise InputError(
            f"{_DOING}: a threshold decides between two classes, but the model has {count} scores per sample. Leave "
            f"{argument('threshold', metric)} out."
        )
    return scores, truth, 1


def stored_calibration(state: TrainingState) -> StoredCalibration | None:
    """Returns the calibration of a run; None if it was not calibrated."""
    properties = state.run.state.properties
    if PROPERTY not in properties:
        return None
    return StoredCalibration.from_json(str(properties[PROPERTY]), str(state.directory))


def forget_calibration(state: TrainingState) -> None:
    """Removes the calibration of a run, whose parameters are about to change."""
    if state.run.store.properties.pop(PROPERTY, None) is not None:
        _log.info("The calibration is removed, because the parameters change. Calibrate the model again.")


def calibrated_outputs(state: TrainingState, outputs: dict[str, Array]) -> dict[str, Array]:
    """Returns the outputs of a run with calibrated scores."""
    calibration = stored_calibration(state)
    if calibration is None or calibration.output not in outputs:
        return outputs
    name = calibration.output
    return outputs | {name: calibration.scaled(outputs[name])}


def calibrate_graph(model: ir.Model, calibration: StoredCalibration) -> None:
    """Divides an output of an exported model by the temperature, in place; other outputs are not changed."""
    graph = model.graph
    scores = next((value for value in graph.outputs if value.name == calibration.output), None)
    if scores is None or calibration.temperature == 1:
        return
    if scores.uses():
        _log.warning(
            "Exporting: only the output '%s' is divided by the temperature; other values that are computed from it, "
            "such as probabilities, are not.",
            calibration.output,
        )
    op = Emitter(graph)
    name, places = scores.name, [at for at, value in enumerate(graph.outputs) if value is scores]
    scores.name = fresh_name(model, f"{name}.uncalibrated")
    result = op.Div(scores, op.const(calibration.temperature, like=scores))
    if calibration.activation == "exp":
        result = op.LogSoftmax(result, axis=calibration.axis)
    result.name, result.shape, result.type = name, scores.shape, scores.type
    for at in places:
        graph.outputs[at] = result
