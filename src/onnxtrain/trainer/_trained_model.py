"""Uses what was trained: the part of :class:`Trainer` that evaluates, predicts, saves and exports."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from onnxtrain.errors import InputError
from onnxtrain.losses import loss_class
from onnxtrain.runtime.artifact_folder import keep_inside
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.state import CheckpointState
from onnxtrain.trainer._fit.datasets import advising_transform, weighed_dataset
from onnxtrain.trainer._metrics.probabilities import probabilities
from onnxtrain.trainer._metrics.whole_set import confusion_matrix
from onnxtrain.trainer._model_card import write_model_card
from onnxtrain.trainer._properties import TrainerProperties
from onnxtrain.trainer._run.files import refuse_model_name
from onnxtrain.trainer.data import Layout, Options, Pass, TransformFunction, open_source

if TYPE_CHECKING:
    from onnxtrain.trainer._trainer import Trainer


class TrainedModel(TrainerProperties):
    """Methods of :class:`Trainer` that use the parameters as they are."""

    def evaluate(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
        transform: TransformFunction | None = None,
    ) -> dict[str, float]:
        """Computes the loss and the metrics over a data set, in inference mode.

        The result does not depend on the batch size, also for a model with a fixed batch: it is that of the outputs of
        :meth:`predict`. Only a loss that is an onnxblock block or the model's own is averaged over batches, weighted
        by their sizes. Arguments and errors as in :meth:`fit`; `transform` converts the batches, as
        `validation_transform` does there.

        Raises:
            InputError: the data does not fit, or does not fill the batches of a model with a fixed batch whose loss
                cannot be computed for some of its samples.
        """
        return self._state.evaluate(
            weighed_dataset(self._state, inputs, targets, sample_weight, Options(batch_size), transform)
        )

    def predict(
        self, inputs: Any, *, batch_size: int | None = None, transform: TransformFunction | None = None
    ) -> Array | dict[str, Array]:
        """Computes the model's output for each sample, in inference mode; several outputs as a dict by name.

        For a model with a fixed batch the last batch is padded, and the results of the padding are dropped. Targets
        that the data brings are ignored.

        Args:
            inputs: as for :meth:`fit`, without targets.
            batch_size: samples per batch, 32 by default.
            transform: converts the batches, a function `(inputs, targets) -> (inputs, targets)` as in :meth:`fit`; its
                targets are None here.

        Raises:
            InputError: the inputs do not fit, or an output has no axis for the samples.
        """
        layout = Layout.of(self.manifest, predicting=True)
        with advising_transform(self._state, transform):
            data = open_source(layout, inputs, options=Options(batch_size), transform=transform)
        with self.averaged():
            result = self._state.run.predict(data.read(Pass()))
        return result if len(result) > 1 else next(iter(result.values()))

    def predict_proba(
        self, inputs: Any, *, batch_size: int | None = None, transform: TransformFunction | None = None
    ) -> Array:
        """Computes the probabilities that the scores of the loss stand for, in inference mode.

        For a cross-entropy they are the softmax of the scores over the classes, for `nll` their exponential, for
        losses of yes-or-no logits (`bce_with_logits`, `focal`, `tversky`) their sigmoid.

        Args:
            inputs: as for :meth:`predict`.
            batch_size: samples per batch, 32 by default.
            transform: as for :meth:`predict`.

        Returns:
            Probabilities in the shape and dtype of the scores, e.g. float32 [samples, classes].

        Raises:
            InputError: the inputs do not fit, or the loss has no probabilities, such as that of a regression.

        Example:
            >>> import numpy as np, onnx
            >>> from onnxtrain import Trainer
            >>> model = onnx.parser.parse_model('''
            ...   <ir_version: 10, opset_import: ["": 21]>
            ...   net (float[n, 1] x) => (float[n, 2] y) <float[1, 2] w = {0., 2.}> { y = MatMul(x, w) }''')
            >>> Trainer(model, "cross_entropy").predict_proba(np.array([[0.0], [1.0]])).round(2)
            array([[0.5 , 0.5 ],
                   [0.12, 0.88]], dtype=float32)
        """
        outputs = self.predict(inputs, batch_size=batch_size, transform=transform)
        scores = outputs.get(self.prediction or "") if isinstance(outputs, dict) else outputs
        labels = self.manifest.targets[0].class_labels if self.manifest.targets else None
        # Targets that are probabilities do not tell the axis of the classes; of two axes it is the second.
        told = labels is not None or (scores is not None and scores.ndim <= 2)
        result = None
        if scores is not None and (told or loss_class(self.loss_name).activation != "softmax"):
            result = probabilities(self.loss_name, scores, 1 if labels is None else labels.axis)
        if scores is None or result is None:
            raise InputError(
                f"Predicting probabilities: the loss ({self.loss_name or 'that of the model'}) does not tell how to "
                "compute them from the outputs of the model. Use predict."
            )
        return result.astype(scores.dtype)

    def confusion_matrix(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        batch_size: int | None = None,
        transform: TransformFunction | None = None,
    ) -> Array:
        """Counts how often each class (rows) is predicted as each class (columns): integers [classes, classes].

        Arguments as in :meth:`evaluate`.

        `sklearn.metrics.ConfusionMatrixDisplay(matrix).plot()` draws it.

        Raises:
            InputError: the data does not fit, or it is no classification with one right class.
        """
        state = self._state
        data = weighed_dataset(state, inputs, targets, None, Options(batch_size), transform)
        with self.averaged():
            steps = state.run.evaluate(data.read(Pass()))
            # ONNX Runtime writes the outputs of the next batch to the same memory.
            parts = [tuple(array.copy() for array in state.judged(step)) for step in steps]
        prediction, target = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return confusion_matrix(state.task, prediction, target)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything that :meth:`resume` needs to a directory, which is made if missing.

        The models are copied there once, with the files of their external data. All files change together: if the
        process is killed, the directory holds the files it held before, or this run, complete. For the trained model
        alone, as an `.onnx` file, use :meth:`export`.

        Raises:
            InputError: `path` ends in `.onnx`, as the file of a model does.
            CheckpointError: a file cannot be written, or the directory holds files of the user that have the names of a
                run's files, and no manifest of a run.
        """
        self._state.save(path)

    def save_parameters(self, path: str | os.PathLike[str]) -> None:
        """Writes parameters and statistics alone to a checkpoint file; of a run with `ema_decay` their averages.

        Raises:
            InputError: `path` ends in `.onnx`, as the file of a model does.
            CheckpointError: the file cannot be written.
        """
        refuse_model_name(path, "Trainer.save_parameters", "a checkpoint")
        with self.averaged(), self._state.writing() as writes:
            if writes:
                keep_inside(path, self.directory)
                CheckpointState.save_checkpoint(self.state, path)

    def load_parameters(self, path: str | os.PathLike[str]) -> None:
        """Reads parameters and statistics from a checkpoint file of the same model; nothing else changes.

        Moving averages begin anew with the new parameters.

        Raises:
            CheckpointError: the file is missing, damaged, or of another model.
        """
        with self._state.lock:
            self._state.run.load_parameters(path)
            # The next step would otherwise mix averages of the old parameters with the new ones.
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

        The file has the inputs and outputs of the original model; BatchNormalization and Dropout are in inference
        mode, and loss, targets and gradients are gone.

        Args:
            path: file to write.
            outputs: names of other values to return; by default the original model's outputs.
        """
        names = outputs if outputs is None or isinstance(outputs, str) else list(outputs)
        with self.averaged(), self._state.writing() as writes:
            if writes:
                keep_inside(path, self.directory)
                self._state.run.export(path, names)

    def model_card(
        self,
        path: str | os.PathLike[str],
        title: str,
        *,
        description: str = "",
        license: str | None = None,
        tags: Sequence[str] = (),
        results: Mapping[str, Mapping[str, float]] | None = None,
        model: str = "model.onnx",
    ) -> None:
        """Writes a model card: a README.md with the model, sizes of the data, options, metrics and versions.

        Its metadata is that of the Hugging Face Hub, which shows the results beside the model.

        Args:
            path: file to write, or directory of the README.md.
            title: name of the model, e.g. "digits".
            description: text about purpose, data and limits; Markdown.
            license: identifier of a licence, e.g. "apache-2.0"; None leaves it out.
            tags: further tags besides "onnx" and "onnxtrain", e.g. ["image-classification"].
            results: values by name of the data, e.g. `{"the test set": trainer.evaluate(x, y)}`.
            model: name of the exported file, for the example in the card.

        Raises:
            OSError: the file cannot be written.
        """
        write_model_card(
            cast("Trainer", self),
            path,
            title,
            description=description,
            license=license,
            tags=tags,
            results=results,
            model=model,
        )
