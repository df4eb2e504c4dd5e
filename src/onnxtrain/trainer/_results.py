"""What a trainer is asked for before and after training: how good it is, what it predicts, the trained model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from onnxtrain.runtime.dtypes import Array
from onnxtrain.trainer._finder import LearningRateRange, find_range
from onnxtrain.trainer._view import TrainerView
from onnxtrain.trainer._whole_metrics import confusion_matrix
from onnxtrain.trainer.data import Options, Pass


class TrainerResults(TrainerView):
    """The methods of a trainer that leave what it has trained as it is, and those that write or read it alone."""

    def find_learning_rate(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        start: float = 1e-7,
        stop: float = 10.0,
        steps: int = 100,
        batch_size: int | None = None,
    ) -> LearningRateRange:
        """Returns the loss over rising learning rates, and a rate to train with: Smith's range test.

        A step is taken with each rate, from `start` to `stop` in equal ratios, until the loss is four times its lowest
        value. Then the trainer is exactly what it was before: set `trainer.learning_rate` to what you choose.

        Args:
            inputs: as for :meth:`fit`.
            targets: as for :meth:`fit`.
            start: the lowest rate.
            stop: the highest one.
            steps: how many are tried.
            batch_size: samples per step, as for :meth:`fit`.

        Raises:
            InputError: the data or the rates do not fit.
        """
        data = self._state.source(inputs, targets, None, Options(batch_size, training=True))
        self._state.weigh(data)
        return find_range(self._state, data, start, stop, steps)

    def evaluate(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
    ) -> dict[str, float]:
        """Returns the loss and the metrics over a data set, in inference mode.

        They are those of what :meth:`predict` returns, whatever the batch size, also where the model's batch is
        fixed. Only a loss that is an onnxblock block or the model's own is averaged by batch, weighted by size.
        Arguments and errors as in :meth:`fit`.

        Raises:
            InputError: the data does not fit, or does not fill the batches of a model with a fixed batch whose loss
                cannot be told apart by samples.
        """
        data = self._state.source(inputs, targets, sample_weight, Options(batch_size))
        self._state.weigh(data)
        return self._state.evaluate(data)

    def predict(self, inputs: Any, *, batch_size: int | None = None) -> Array | dict[str, Array]:
        """Returns the model's output for each sample, in inference mode; several outputs as a dict.

        A model with a fixed batch is run on a padded last batch, and the padding's results are dropped. Of data that
        brings targets these are left out.

        Raises:
            InputError: the inputs do not fit, or an output has no axis for the samples.
        """
        data = self._state.inputs(inputs, batch_size)
        with self.averaged():
            result = self._state.run.predict(data.read(Pass()))
        return result if len(result) > 1 else next(iter(result.values()))

    def confusion_matrix(self, inputs: Any, targets: Any = None, *, batch_size: int | None = None) -> Array:
        """Returns how often each class (rows) is predicted as each (columns): integers [classes, classes].

        `sklearn.metrics.ConfusionMatrixDisplay(matrix).plot()` draws it.

        Raises:
            InputError: the data does not fit, or it is no classification with one right class.
        """
        state = self._state
        data = state.source(inputs, targets, None, Options(batch_size))
        state.weigh(data)
        with self.averaged():
            steps = state.run.evaluate(data.read(Pass()))
            parts = [tuple(array.copy() for array in state.judged(step)) for step in steps]
        prediction, target = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return confusion_matrix(state.task, prediction, target)

    def save_parameters(self, path: str | os.PathLike[str]) -> None:
        """Writes parameters and statistics alone to a checkpoint file; of a run with `ema_decay` their averages."""
        with self.averaged():
            self._state.run.save_checkpoint(path, optimizer=False)

    def load_parameters(self, path: str | os.PathLike[str]) -> None:
        """Reads parameters and statistics from a checkpoint file of the same model; nothing else changes.

        Moving averages begin anew with them.

        Raises:
            CheckpointError: the file is missing, corrupt, or of another model.
        """
        with self._state.lock:
            self._state.run.load_parameters(path)
            self._state.position.averaged = 0

    def averaged(self) -> AbstractContextManager[None]:
        """Makes :attr:`parameters` the averages of `ema_decay` inside of a `with` statement.

        :meth:`evaluate`, :meth:`predict`, :meth:`export`, :meth:`save_parameters`, validation and `restore_best` do so
        themselves. Without `ema_decay`, or before the first step, nothing changes. Other threads wait for the end of
        the block before they use the trainer.
        """
        return self._state.averaged()

    def export(self, path: str | os.PathLike[str], outputs: Sequence[str] | None = None) -> None:
        """Writes the trained model as an ordinary `.onnx` file for inference.

        It has the inputs and outputs of the original model; BatchNormalization and Dropout are in inference
        mode, and nothing of the training (loss, targets, gradients) is left in it.

        Args:
            path: the file to write.
            outputs: names of other values to return; by default the original model's outputs.
        """
        with self.averaged():
            self._state.run.export(
                path, outputs if outputs is None or isinstance(outputs, str) else list(outputs)
            )
