"""Defines `Trainer`, the class by which Python code trains, evaluates and exports an ONNX model.

The class is the public door: it checks arguments and hands them to the objects that do the work. `_state` holds what is
trained, `_loop` and `_step` train it, `_run` runs the models, `_datasets` and `data` read what the user passes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.losses import loss_class
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.optimizer import check_learning_rate
from onnxtrain.runtime.state import CheckpointState
from onnxtrain.trainer._build import ModelSettings, build_run, loss_name, name_list, random_ops
from onnxtrain.trainer._callbacks import Callback, Events, callback_list
from onnxtrain.trainer._datasets import Data, Validation, fit_datasets, weigh, weighed_dataset
from onnxtrain.trainer._ema import check_decay
from onnxtrain.trainer._finder import LearningRateRange, find_range
from onnxtrain.trainer._history import History
from onnxtrain.trainer._loop import FitLoop
from onnxtrain.trainer._metrics import MetricSpec, make_metrics
from onnxtrain.trainer._model_card import write_model_card
from onnxtrain.trainer._position import CUSTOM, MOST_THREADS, Plan, Position, Settings
from onnxtrain.trainer._probabilities import probabilities
from onnxtrain.trainer._properties import TrainerProperties
from onnxtrain.trainer._report import make_report
from onnxtrain.trainer._schedule import ScheduleSpec, make_schedule
from onnxtrain.trainer._state import TrainingState, scheduler_settings
from onnxtrain.trainer._typed import check_integer
from onnxtrain.trainer._whole_metrics import check_positive, confusion_matrix
from onnxtrain.trainer._workspace import Workspace
from onnxtrain.trainer.data import (
    ClassWeightedSource,
    ClassWeights,
    Layout,
    Options,
    Pass,
    TransformFunction,
    open_source,
    warn_of_fixed_batch,
)

if TYPE_CHECKING:
    from onnxtrain.artifacts import LossSpec, OptimizerSpec
    from onnxtrain.lora import LoraConfig
    from onnxtrain.passes import ModelSource
    from onnxtrain.training.layer_modes import BatchNormMode
    from onnxtrain.training.training_graph import Activations, Precision, Profile


class Trainer(TrainerProperties):
    """Trains an ONNX model on numpy arrays, with stock ONNX Runtime.

    Args:
        model: path of an `.onnx` file, `ModelProto` or `onnx_ir.Model`; it is not changed.
        loss: a loss of `onnxtrain.losses` or its name ("cross_entropy", "mse", ...), a `LossType`, or an
            onnxblock block; None when the model's first output is the loss.
        optimizer: an optimizer of `onnxtrain.optimizers` or its name ("adamw", "sgd", ...), with PyTorch's defaults:
            "adamw" is `torch.optim.AdamW`, weight decay 0.01 and eps 1e-8.
        learning_rate: learning rate, e.g. 1e-3; with a schedule its highest value.
        requires_grad: names of the parameters to train, or patterns such as "fc.*"; one name may stand without a list.
            None trains all parameters that are not frozen.
        frozen_params: names or patterns of parameters that are not trained. A parameter that patterns of both
            arguments match is frozen; an exact name wins over a pattern.
        metrics: names ("accuracy", "f1", "auroc", "mae", "r2", "top5_accuracy", "perplexity", ...) or functions
            `(prediction, target) -> float` of the arrays of a whole data set; None chooses what suits the loss, `[]`
            means none.
        positive: number of the class that "f1", "precision", "recall" and "auroc" measure, e.g. 0. Default: class 1
            of two classes, the mean over classes if there are more.
        scheduler: a schedule of `onnxtrain.schedules` or its name ("linear" and "cosine" fall to zero at the end of
            a fit; "one_cycle", "step", "polynomial", ...), or a function `(step, total_steps) -> factor` of the
            learning rate.
        warmup_steps: warm up the learning rate linearly over this many optimizer steps, e.g. 100.
        warmup_ratio: warm up the learning rate over this fraction of all steps, e.g. 0.1; use instead of
            `warmup_steps`.
        total_steps: optimizer steps of one schedule over all calls of :meth:`fit`. Default: each call runs the
            schedule from start to end; see also `schedule_epochs` of :meth:`fit`.
        ema_decay: keep exponential moving averages of parameters and BatchNorm statistics with this decay, e.g. 0.999,
            and evaluate, predict with and export the averages; see :meth:`averaged`. Training itself does not change.
        clip_grad_norm: scale all gradients down together if their common L2 norm is larger, e.g. 1.0.
        clip_grad_value: clip each element of the gradients to plus or minus this value.
        batch_norm: "training" trains BatchNormalization and Dropout as such even if the model was exported
            for inference (an error if the exporter left none in the model), "inference" keeps the statistics
            fixed, "as_exported" keeps the modes of the model. For each layer by patterns, of which the first that
            matches decides: `{"backbone.*": "inference", "*": "training"}`.
        straight_through: pass gradients through rounding and quantisation unchanged (straight-through estimator).
        precision: "bf16" computes products and convolutions in bfloat16; see :func:`generate_artifacts`.
        activations: "float" multiplies by quantised weights (MatMulNBits) in floating point, "deployed" rounds
            activations to int8 where the file does; see :func:`generate_artifacts`.
        profile: "portable" trains models that also run, and drop the same elements, in browsers and on phones; see
            :func:`generate_artifacts`.
        recompute: recompute activations in the backward pass to take less memory; see :func:`generate_artifacts`.
        sparse_gradients: embeddings of which a step updates only the rows that its batch reads; see
            :func:`generate_artifacts`.
        loss_input_names: the output that the loss compares with the target, if the model has several outputs.
        lora: adapters to train beside the linear layers, and nothing else but what `requires_grad` names, e.g.
            `LoraConfig(r=8)`; see :mod:`onnxtrain.lora`.
        directory: directory of the run's files; the state is saved there after every epoch. Default: a
            temporary directory, which is removed at the end unless an interrupted run was saved there.
        overwrite: replace a run that is in the directory already, once the new models are built; otherwise it is an
            error.
        seed: shuffling, the validation split and Dropout derive from this number.
        device: "cpu", "cuda" or "cuda:<index>".
        threads: number of threads that compute each operation; None is onnxruntime's default, all cores. The last
            digits of results depend on the number, so it is saved with the run.

    Raises:
        OnnxTrainError: the model cannot be trained as asked for; the message says why.

    Example:
        >>> import numpy as np, onnx
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]>
        ...   line (float[n, 1] x) => (float[n, 1] y) <float[1, 1] w = {0.0}, float[1] b = {0.0}>
        ...   { y = Gemm(x, w, b) }''')
        >>> x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(-1, 1)
        >>> trainer = Trainer(model, loss="mse", learning_rate=0.1)
        >>> history = trainer.fit(x, 2 * x + 1, epochs=60, batch_size=16, verbose=False)
        >>> trainer.predict(np.array([[0.5]], np.float32)).round(2)
        array([[2.]], dtype=float32)
    """

    def __init__(
        self,
        model: ModelSource,
        loss: LossSpec,
        optimizer: OptimizerSpec = "adamw",
        learning_rate: float = 1e-3,
        *,
        requires_grad: Sequence[str] | str | None = None,
        frozen_params: Sequence[str] | str | None = None,
        metrics: Sequence[MetricSpec] | None = None,
        positive: int | None = None,
        scheduler: ScheduleSpec | None = None,
        warmup_steps: int = 0,
        warmup_ratio: float = 0.0,
        total_steps: int | None = None,
        ema_decay: float | None = None,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        batch_norm: BatchNormMode = "as_exported",
        straight_through: bool = False,
        precision: Precision = "fp32",
        activations: Activations = "float",
        profile: Profile = "default",
        recompute: bool = False,
        sparse_gradients: Sequence[str] | str | None = None,
        loss_input_names: Sequence[str] | str | None = None,
        lora: LoraConfig | None = None,
        directory: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        seed: int = 0,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        # The arguments that decide how the models are built, by name: an argument of the signature reaches them by
        # being a field of ModelSettings, without further mention here.
        arguments = locals()
        model_settings = ModelSettings(
            **{entry.name: arguments[entry.name] for entry in fields(ModelSettings)}
        )
        # Everything that can be wrong is checked before a file is written: a refused Trainer leaves no directory.
        schedule = make_schedule(scheduler, warmup_steps, warmup_ratio)
        metrics = [metrics] if isinstance(metrics, str) else metrics
        make_metrics(metrics or [])
        check_positive(positive)
        seed = check_integer(argument("seed"), seed, 0)
        position = Position(seed=seed, learning_rate=check_learning_rate(learning_rate))
        settings = Settings(
            loss=loss_name(loss),
            metrics=None if metrics is None else [m if isinstance(m, str) else CUSTOM for m in metrics],
            **scheduler_settings(scheduler),
            warmup_steps=int(warmup_steps),
            warmup_ratio=float(warmup_ratio),
            ema_decay=check_decay(ema_decay),
            total_steps=None if total_steps is None else check_integer(argument("total_steps"), total_steps),
            threads=_threads(threads),
            positive=None if positive is None else int(positive),
        )
        workspace = Workspace.for_new_run(directory, overwrite=overwrite)
        with workspace.locked():
            run = build_run(model, workspace.path, device, settings.threads, model_settings)
            # An earlier run is replaced only now: until the new models are built the old run can be resumed.
            workspace.remove_earlier()
            workspace.note()
        judged = name_list(loss_input_names)
        prediction = judged[0] if judged else next(iter(run.outputs), None)
        settings = replace(
            settings,
            prediction=prediction if prediction in run.outputs else None,
            random=random_ops(run.training_model),
        )
        self._state = TrainingState(run, workspace, position, settings, schedule, metrics)
        run.optimizer.set_learning_rate(position.learning_rate)

    @classmethod
    def resume(
        cls,
        path: str | os.PathLike[str],
        *,
        metrics: Sequence[MetricSpec] | None = None,
        scheduler: ScheduleSpec | None = None,
        device: str = "cpu",
        threads: int | None = None,
    ) -> Trainer:
        """Opens a run that :meth:`save` or an interrupted fit wrote, in the state it was in.

        The same call of :meth:`fit` then finishes an interrupted fit, bit for bit as if it had not been
        interrupted. If the model draws random numbers by other ops than Dropout, the result differs, and a warning
        says so.

        Args:
            path: directory of the run; the trainer goes on saving there. Artifacts of `generate_artifacts` work
                too, also with a prefix.
            metrics: metrics to go on with; needed if the run had functions as metrics, which are not saved.
            scheduler: needed if the run had a function as schedule.
            device: "cpu", "cuda" or "cuda:<index>".
            threads: number of threads per operation; None for the number that the run was begun with.

        Raises:
            CheckpointError: the directory does not hold a training run, or the run is damaged.
            InputError: functions that the run needs are missing, or other metrics are given in the middle of an
                epoch.
        """
        # `__init__` builds new models; a resumed run opens those of its directory.
        trainer = cls.__new__(cls)
        trainer._state = TrainingState.load(Path(path), metrics, scheduler, device, _threads(threads))
        return trainer

    def stop_training(self) -> None:
        """Ends the fit under way after the current epoch; for callbacks and other threads."""
        self._state.position.history.stopped = "early"

    def abandon_fit(self) -> None:
        """Forgets that a fit was interrupted: the next fit is a new one and may have other arguments.

        Raises:
            TrainingStateError: a fit is under way in another thread.
        """
        self._state.abandon()

    def fit(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        epochs: int = 1,
        batch_size: int | None = None,
        validation: Validation = None,
        callbacks: Iterable[Callback] | None = (),
        shuffle: bool = True,
        accumulate: int = 1,
        schedule_epochs: int | None = None,
        verbose: bool = True,
        sample_weight: Any = None,
        transform: TransformFunction | None = None,
        steps_per_epoch: int | None = None,
        drop_last: bool = False,
        class_weight: ClassWeights = None,
        stratify: bool = False,
        evaluate_every: int | None = None,
    ) -> History:
        """Trains, and returns the record of all epochs so far.

        Ctrl-C finishes the step, saves the state and returns with `history.stopped == "interrupted"`; the
        same call, also after :meth:`resume`, then does the rest. A second Ctrl-C raises KeyboardInterrupt
        at once.

        Args:
            inputs: samples along axis 0; for several inputs a list in the model's order or a dict by name.
                Floating-point data is cast to the model's type. Or a frame of pandas or polars; a data set that gives
                samples by index (PyTorch's, Hugging Face's); a DataLoader; an iterable of batches
                `(inputs, targets)`, `(inputs, targets, sample_weight)` or dicts by name; a function that returns one.
            targets: as many samples; integers for class labels. None if the model needs none, or the data brings them.
                Of a frame also names of columns.
            epochs: passes over the data, in addition to the epochs of earlier fits.
            batch_size: samples per batch, 32 by default; the last batch may be smaller. A model that was
                exported with a fixed batch takes that size, and the samples beyond the last full batch are left
                out of an epoch, with a warning; with shuffling other samples are left out in each epoch.
            validation: `(inputs, targets)` or `(inputs, targets, sample_weight)` to evaluate after each epoch, other
                data that brings its targets, or the fraction of the samples to split off at random, e.g. 0.1.
            callbacks: see :class:`Callback`.
            shuffle: take the samples in a new random order in each epoch.
            accumulate: batches per optimizer step; the gradient is that of the mean loss over all their samples.
            schedule_epochs: spread one schedule over several calls of `fit`: total epochs of these calls, counted from
                the trainer's first epoch, e.g. 10 for two fits of 5 epochs. Default: each call runs the schedule from
                start to end.
            verbose: show a progress bar (or a line per epoch if standard error is no terminal).
            sample_weight: a weight w for each sample: the loss is sum(w·l) / sum(w), over all batches of a step.
                Metrics count each sample once.
            transform: augmentation, a function `(inputs, targets) -> (inputs, targets)` of the arrays of a batch,
                called in training only; a third argument, or one named `rng`, is a numpy Generator.
            steps_per_epoch: optimizer steps that make an epoch; required for a stream that does not end.
            drop_last: leave out an incomplete last batch of each epoch.
            class_weight: weight of each class in the training loss, for data with one class label per sample: a dict
                by class, e.g. `{1: 10.0}` (1 for the others), one weight per class, or "balanced" for n / (k * n_c),
                where n_c of n samples are of the class c, one of k. Multiplies `sample_weight`. Validation and metrics
                do not weigh classes.
            stratify: split off the same fraction of each class for `validation=0.1`.
            evaluate_every: evaluate on the validation data after every so many optimizer steps, too, e.g. 500, and
                record it in `history.evaluations`; see :meth:`Callback.on_evaluation`.

        Raises:
            InputError: data or arguments do not fit; nothing has been trained.
            DivergenceError: the loss became NaN or infinite; the last good state has been restored and saved.
            TrainingStateError: a fit of this trainer is under way, in another thread or around this call.
        """
        epochs = check_integer(argument("epochs"), epochs)
        accumulate = check_integer(argument("accumulate"), accumulate)
        if steps_per_epoch is not None:
            steps_per_epoch = check_integer(argument("steps_per_epoch"), steps_per_epoch)
        if evaluate_every is not None:
            evaluate_every = check_integer(argument("evaluate_every"), evaluate_every)
            if validation is None:
                raise InputError(
                    f"{argument('evaluate_every', evaluate_every)} needs data to evaluate on: pass "
                    f"{argument('validation')}."
                )
        called_back = callback_list(callbacks)
        # Sources count batches, users count steps.
        limit = None if steps_per_epoch is None else steps_per_epoch * accumulate
        user_data = Data(
            inputs,
            targets,
            sample_weight,
            batch_size,
            validation,
            transform,
            bool(drop_last),
            limit,
            class_weight,
            bool(stratify),
        )
        state = self._state
        with state.fitting():
            data, held_out = fit_datasets(state, user_data)
            held_out_size = None
            if held_out is not None:
                held_out_size = validation if isinstance(validation, float) else held_out.samples or 0
            # The plan is made of numbers, not of the data: a resumed process gives other objects with the same
            # content.
            plan = Plan(
                samples=data.samples,
                batch_size=data.batch_size,
                accumulate=accumulate,
                shuffle=bool(shuffle),
                epochs=epochs,
                validation=held_out_size,
                schedule_epochs=schedule_epochs,
                steps_per_epoch=steps_per_epoch,
                drop_last=bool(drop_last),
                weighted=data.weighted,
                transform=transform is not None,
                class_weight=data.weights.tolist() if isinstance(data, ClassWeightedSource) else None,
                stratify=bool(stratify),
                evaluate_every=evaluate_every,
            )
            state.position.check(plan)
            state.check_schedule(plan, None if data.batches is None else -(-data.batches // accumulate))
            weigh(state, data, held_out, for_fit=True)
            state.validating, state.training_data = held_out is not None, data
            warn_of_fixed_batch(state.run.batch_size, data.samples)
            events = Events(called_back, self)
            try:
                FitLoop(state, data, held_out, plan, events, make_report(verbose)).run()
            except BaseException as error:
                # Loggers close their files for KeyboardInterrupt and SystemExit, too.
                events.call(Callback.on_exception, error)
                raise
            finally:
                # Data may be large; the trainer keeps none of it.
                state.training_data = None
        return self.history

    def check_data(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        batch_size: int | None = None,
        validation: Validation = None,
        sample_weight: Any = None,
        transform: TransformFunction | None = None,
        drop_last: bool = False,
        class_weight: ClassWeights = None,
        stratify: bool = False,
    ) -> None:
        """Raises the InputError that :meth:`fit` would raise for this data; changes nothing.

        Of a stream the first batch is checked. An iterator is not read, as it can be read once.
        """
        if isinstance(inputs, Iterator):
            return
        data = Data(
            inputs,
            targets,
            sample_weight,
            batch_size,
            validation,
            transform,
            drop_last,
            class_weight=class_weight,
            stratify=stratify,
        )
        fit_datasets(self._state, data)

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
        """Measures the loss over rising learning rates and suggests a rate to train with (Smith's range test).

        One step is taken with each rate, from `start` to `stop` in equal ratios, until the loss is four times its
        lowest value. The trainer is then put back to the state before the test: set `trainer.learning_rate` to the
        rate of your choice.

        Args:
            inputs: as for :meth:`fit`.
            targets: as for :meth:`fit`.
            start: lowest rate.
            stop: highest rate.
            steps: number of rates.
            batch_size: samples per step, as for :meth:`fit`.

        Raises:
            InputError: the data or the rates do not fit.
        """
        data = weighed_dataset(self._state, inputs, targets, None, Options(batch_size, training=True))
        return find_range(self._state, data, start, stop, steps)

    def evaluate(
        self, inputs: Any, targets: Any = None, *, batch_size: int | None = None, sample_weight: Any = None
    ) -> dict[str, float]:
        """Computes the loss and the metrics over a data set, in inference mode.

        The result does not depend on the batch size, also for a model with a fixed batch: it is that of the outputs of
        :meth:`predict`. Only a loss that is an onnxblock block or the model's own is averaged over batches, weighted
        by their sizes. Arguments and errors as in :meth:`fit`.

        Raises:
            InputError: the data does not fit, or does not fill the batches of a model with a fixed batch whose loss
                cannot be computed for some of its samples.
        """
        return self._state.evaluate(
            weighed_dataset(self._state, inputs, targets, sample_weight, Options(batch_size))
        )

    def predict(self, inputs: Any, *, batch_size: int | None = None) -> Array | dict[str, Array]:
        """Computes the model's output for each sample, in inference mode; several outputs as a dict by name.

        For a model with a fixed batch the last batch is padded, and the results of the padding are dropped. Targets
        that the data brings are ignored.

        Raises:
            InputError: the inputs do not fit, or an output has no axis for the samples.
        """
        layout = Layout.of(self.manifest, predicting=True)
        data = open_source(layout, inputs, options=Options(batch_size))
        with self.averaged():
            result = self._state.run.predict(data.read(Pass()))
        return result if len(result) > 1 else next(iter(result.values()))

    def predict_proba(self, inputs: Any, *, batch_size: int | None = None) -> Array:
        """Computes the probabilities that the scores of the loss stand for, in inference mode.

        For a cross-entropy they are the softmax of the scores over the classes, for `nll` their exponential, for
        losses of yes-or-no logits (`bce_with_logits`, `focal`, `tversky`) their sigmoid.

        Args:
            inputs: as for :meth:`predict`.
            batch_size: samples per batch, 32 by default.

        Returns:
            Probabilities in the shape and dtype of the scores, e.g. float32 [samples, classes].

        Raises:
            InputError: the inputs do not fit, or the loss has no probabilities, such as that of a regression.

        Example:
            >>> import numpy as np, onnx
            >>> model = onnx.parser.parse_model('''
            ...   <ir_version: 10, opset_import: ["": 21]>
            ...   net (float[n, 1] x) => (float[n, 2] y) <float[1, 2] w = {0., 2.}> { y = MatMul(x, w) }''')
            >>> Trainer(model, "cross_entropy").predict_proba(np.array([[0.0], [1.0]])).round(2)
            array([[0.5 , 0.5 ],
                   [0.12, 0.88]], dtype=float32)
        """
        outputs = self.predict(inputs, batch_size=batch_size)
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

    def confusion_matrix(self, inputs: Any, targets: Any = None, *, batch_size: int | None = None) -> Array:
        """Counts how often each class (rows) is predicted as each class (columns): integers [classes, classes].

        `sklearn.metrics.ConfusionMatrixDisplay(matrix).plot()` draws it.

        Raises:
            InputError: the data does not fit, or it is no classification with one right class.
        """
        state = self._state
        data = weighed_dataset(state, inputs, targets, None, Options(batch_size))
        with self.averaged():
            steps = state.run.evaluate(data.read(Pass()))
            # ONNX Runtime writes the outputs of the next batch to the same memory.
            parts = [tuple(array.copy() for array in state.judged(step)) for step in steps]
        prediction, target = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return confusion_matrix(state.task, prediction, target)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything that :meth:`resume` needs to a directory, which is made if missing.

        The models are copied there once, with the files of their external data. All files change together: if the
        process is killed, the directory holds the files it held before, or this run, complete.

        Raises:
            CheckpointError: a file cannot be written.
        """
        self._state.save(path)

    def save_parameters(self, path: str | os.PathLike[str]) -> None:
        """Writes parameters and statistics alone to a checkpoint file; of a run with `ema_decay` their averages."""
        with self.averaged():
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
        with self.averaged():
            self._state.run.export(
                path, outputs if outputs is None or isinstance(outputs, str) else list(outputs)
            )

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
            self,
            path,
            title,
            description=description,
            license=license,
            tags=tags,
            results=results,
            model=model,
        )


def _threads(threads: int | None) -> int | None:
    """Checks a number of threads; None is onnxruntime's default."""
    if threads is not None and check_integer(argument("threads"), threads) > MOST_THREADS:
        raise InputError(f"{argument('threads')} must be {MOST_THREADS} at most, received {threads!r}.")
    return None if threads is None else int(threads)
