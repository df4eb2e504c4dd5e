"""Describes the calibration of a classifier, in the metadata of its file and in the checkpoint of its run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.json_text import parse_json

PROPERTY = "onnxtrain.calibration"
"""Key in the metadata of exported models and in the properties of checkpoints."""


@dataclass(frozen=True, kw_only=True)
class StoredCalibration:
    """Result of `Trainer.calibrate`: the temperature and the decision threshold.

    Attributes:
        output: name of the output with the scores.
        activation: function that turns scores into probabilities.
        axis: class axis of the scores.
        temperature: number by which the scores are divided.
        cut: a sample is positive if its calibrated score is greater than this one; for two scores, the difference to
            that of the other class. None for no threshold of its own.
        positive: index of the class that the threshold decides about, 0 or 1.
        metric: metric for which `cut` is best; None without `cut`.
    """

    output: str
    activation: Literal["softmax", "sigmoid", "exp"]
    axis: int = 1
    temperature: float = 1.0
    cut: float | None = None
    positive: int = 1
    metric: str | None = None

    @property
    def threshold(self) -> float | None:
        """Probability above which a sample is positive; None for 0.5."""
        return None if self.cut is None else 1 / (1 + math.exp(-self.cut))

    def scaled(self, scores: Array) -> Array:
        """Returns scores divided by the temperature, in their dtype, as the exported model computes them."""
        if self.temperature == 1:
            return scores
        divided = np.asarray(scores / scores.dtype.type(self.temperature))
        if self.activation != "exp":
            return divided
        # Divided log-probabilities have to be normalized again.
        exact = divided.astype(np.float64)
        highest = exact.max(axis=self.axis, keepdims=True)
        total = np.log(np.exp(exact - highest).sum(axis=self.axis, keepdims=True))
        return np.asarray((exact - highest - total).astype(scores.dtype))

    def decided(self, scores: Array) -> Array | None:
        """Returns the class of each sample, int64 [samples], by the threshold; None without one.

        Args:
            scores: calibrated scores, [samples], [samples, 1] or [samples, 2].
        """
        if self.cut is None:
            return None
        if scores.ndim == 2 and scores.shape[1] == 2:
            yes = scores[:, self.positive] - scores[:, 1 - self.positive] > scores.dtype.type(self.cut)
        elif scores.ndim == 1 or (scores.ndim == 2 and scores.shape[1] == 1):
            yes = scores.reshape(-1) > scores.dtype.type(self.cut)
        else:
            return None
        return np.where(yes, self.positive, 1 - self.positive).astype(np.int64)

    def to_json(self) -> str:
        """Returns the description as JSON, with the threshold as a probability for other programs."""
        return json.dumps({**asdict(self), "threshold": self.threshold})

    @classmethod
    def from_json(cls, text: str, source: str) -> StoredCalibration:
        """Restores a description from JSON; `source` names the file or run in the error message.

        Raises:
            InputError: the text does not describe a calibration.
        """
        try:
            content = parse_json(text)
            if not isinstance(content, dict):
                raise ValueError("it is not a JSON object")
            fields = {name: value for name, value in content.items() if name != "threshold"}
            found = cls(**fields)
            numbers = [found.temperature] + ([] if found.cut is None else [found.cut])
            if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
                raise ValueError("its numbers are not finite")
            valid = (
                isinstance(found.output, str)
                and found.activation in ("softmax", "sigmoid", "exp")
                and type(found.axis) is int
                and found.positive in (0, 1)
                and found.temperature > 0
            )
            if not valid:
                raise ValueError("a value is out of range")
        except (ValueError, TypeError) as error:
            raise InputError(
                f"The calibration in '{source}' is damaged: {error}. Calibrate the run again."
            ) from error
        return found
