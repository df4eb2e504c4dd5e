"""Defines `Trainer`, which trains, evaluates and exports an ONNX model, and `Callback`, the base class of callbacks.

`Trainer` checks arguments and hands them on: `_run` builds, opens and saves the models, `_fit` trains them, and `data`
reads what users pass.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain._words import argument
from onnxtrain.distributed._strategy import Strategy
from onnxtrain.errors import InputError
from onnxtrain.losses import loss_class
from onnxtrain.recipe import Recipe, filled_recipe
from onnxtrain.runtime.artifact_folder import keep_inside
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.lock import StateLock
from onnxtrain.runtime.manifest import Manifest
from onnxtrain.runtime.not_copyable import NotCopyable
from onnxtrain.runtime.optimizer import check_learning_rate
from onnxtrain.runtime.state import CheckpointState, Parameters
from onnxtrain.trainer._checks import check_integer
from onnxtrain.trainer._fit.datasets import (
    Data,
    Validation,
    advising_transform,
    enable_sample_weights,
    fit_datasets,
    weighted_dataset,
)
from onnxtrain.trainer._fit.events import Event, Events, StepGradients
from onnxtrain.trainer._fit.learning_rate_range import LearningRateRange, find_range
from onnxtrain.trainer._fit.moving_average import check_decay
from onnxtrain.trainer._fit.schedule import ScheduleSpec, make_schedule
from onnxtrain.trainer._fit.state import TrainingState, scheduler_settings
from onnxtrain.trainer._fit.step import Fit
from onnxtrain.trainer._metrics.metrics import Metric, MetricSpec, make_metrics
from onnxtrain.trainer._metrics.probabilities import probabilities
from onnxtrain.trainer._metrics.whole_set import check_positive, confusion_matrix
from onnxtrain.trainer._model_card import write_model_card
from onnxtrain.trainer._run.build import build_run, loss_name, random_ops
from onnxtrain.trainer._run.files import refuse_model_name
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._run.position import CUSTOM, Plan, Position, Settings, check_threads
from onnxtrain.trainer._run.run import Run
from onnxtrain.trainer._run.workspace import Workspace
from onnxtrain.trainer._show.make_report import make_report
from onnxtrain.trainer._workers import join_workers, run_fit
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
    from onnxtrain.lora import LoraConfig
    from onnxtrain.passes import ModelSource
    from onnxtrain.recipe import (
        Activations,
        BatchNormMode,
        DropoutRatios,
        LossSpec,
        OptimizerSpec,
        Precision,
        Profile,
    )


class Trainer(NotCopyable):
    """Trains an ONNX model on numpy arrays, with stock ONNX Runtime.

    Arguments that are fields of :class:`onnxtrain.Recipe` are described there.

    Args:
        model: path of an `.onnx` file, `ModelProto` or `onnx_ir.Model`; it is not modified.
        loss: the loss or its name, e.g. "cross_entropy"; see :class:`onnxtrain.Recipe`.
        optimizer: the optimizer or its name, e.g. "sgd", with PyTorch's defaults; see :class:`onnxtrain.Recipe`.
        learning_rate: learning rate, e.g. 1e-3; with a schedule, its highest value.
        requires_grad: see :class:`onnxtrain.Recipe`.
        frozen_params: see :class:`onnxtrain.Recipe`.
        metrics: names ("accuracy", "f1", "auroc", "mae", "r2", "top5_accuracy", "perplexity", ...) or functions
            `(prediction, target) -> float` of the arrays of a whole dataset; None chooses metrics that suit the loss,
            `[]` chooses none.
        positive: index of the class that "f1", "precision", "recall" and "auroc" measure, e.g. 0. Default: class 1 of
            two classes, or the mean over more classes.
        scheduler: a schedule of `onnxtrain.schedules` or its name ("linear" and "cosine" decay to zero at the end of a
            fit; "one_cycle", "step", "polynomial", ...), or a function `(step, total_steps) -> factor` of the learning
            rate.
        warmup_steps: warm up the learning rate linearly over this many optimizer steps, e.g. 100.
        warmup_ratio: warm up the learning rate over this fraction of all steps, e.g. 0.1, instead of `warmup_steps`.
        total_steps: optimizer steps of one schedule over all calls of :meth:`fit`. Default: each call runs the schedule
            from start to end; see also `schedule_epochs` of :meth:`fit`.
        ema_decay: keep exponential moving averages of parameters and BatchNorm statistics with this decay, e.g. 0.999,
            and use them to evaluate, predict and export; see :meth:`averaged`. Training itself is not affected.
        clip_grad_norm: see :class:`onnxtrain.Recipe`.
        clip_grad_value: see :class:`onnxtrain.Recipe`.
        batch_norm: see :class:`onnxtrain.Recipe`.
        dropout: see :class:`onnxtrain.Recipe`.
        straight_through: see :class:`onnxtrain.Recipe`.
        precision: see :class:`onnxtrain.Recipe`.
        activations: see :class:`onnxtrain.Recipe`.
        profile: see :class:`onnxtrain.Recipe`.
        recompute: see :class:`onnxtrain.Recipe`.
        sparse_gradients: see :class:`onnxtrain.Recipe`.
        loss_input_names: see :class:`onnxtrain.Recipe`.
        lora: see :class:`onnxtrain.Recipe`.
        directory: directory of the run's files; the state is saved there after every epoch. Other files in it are not
            changed. Default: a temporary directory, which is removed when the process ends, unless an interrupted run
            was saved there.
        overwrite: replace a run that the directory already contains, once the new models are built. In a directory
            without a run, files that have the name of a run's file ("checkpoint", "best", ...) are replaced when this
            run writes its own, but none is removed. Without `overwrite`, both are errors.
        seed: seed for shuffling, the validation split and Dropout.
        device: execution device: "cpu", "cuda" or "cuda:<index>".
        threads: number of threads per operation; None is ONNX Runtime's default, all cores. The last digits of results
            depend on the number, so it is saved with the run.
        strategy: "ddp" or options, to train together with other processes started by `torchrun`, :func:`launch
            <onnxtrain.distributed.launch>` or Ray; see :class:`onnxtrain.distributed.DataParallel`.
        recipe: how to train, instead of the arguments that are its fields. Whether models take sample weights is
            decided by :meth:`fit`.

    Raises:
        TypeError: a field of `recipe` is also passed as an argument.
        OnnxTrainError: the model cannot be trained as requested; the message says why.

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

    _instead = "Save it with trainer.save(path), and open a second one with Trainer.resume(path)."

    _state: TrainingState

    def __init__(
        self,
        model: ModelSource,
        loss: LossSpec = None,
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
        dropout: DropoutRatios = None,
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
        strategy: Strategy | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        # A fit with sample weights reads the model again, possibly in another working directory.
        if isinstance(model, str | os.PathLike):
            model = Path(model).absolute()
        recipe = filled_recipe(
            Trainer,
            recipe,
            {
                "loss": loss,
                "optimizer": optimizer,
                "clip_grad_norm": clip_grad_norm,
                "clip_grad_value": clip_grad_value,
                "requires_grad": requires_grad,
                "frozen_params": frozen_params,
                "batch_norm": batch_norm,
                "dropout": dropout,
                "straight_through": straight_through,
                "precision": precision,
                "recompute": recompute,
                "sparse_gradients": sparse_gradients,
                "activations": activations,
                "profile": profile,
                "loss_input_names": loss_input_names,
                "lora": lora,
            },
        )
        # All arguments are checked before a file is written, so that an error leaves no directory.
        schedule = make_schedule(scheduler, warmup_steps, warmup_ratio)
        metrics = [metrics] if isinstance(metrics, str) else metrics
        make_metrics(metrics or [])
        check_positive(positive)
        seed = check_integer(argument("seed"), seed, 0)
        position = Position(seed=seed, learning_rate=check_learning_rate(learning_rate))
        settings = Settings(
            loss=loss_name(recipe.loss),
            metrics=None if metrics is None else [m if isinstance(m, str) else CUSTOM for m in metrics],
            **scheduler_settings(scheduler),
            warmup_steps=int(warmup_steps),
            warmup_ratio=float(warmup_ratio),
            ema_decay=check_decay(ema_decay),
            total_steps=None if total_steps is None else check_integer(argument("total_steps"), total_steps),
            threads=check_threads(threads),
            positive=None if positive is None else int(positive),
        )

        def begin() -> tuple[Workspace, Run]:
            workspace = Workspace.for_new_run(directory, overwrite=overwrite)
            with workspace.locked():
                run = build_run(model, workspace.path, device, settings.threads, recipe)
                # Only now, because the old run must be resumable until the new models are built.
                workspace.remove_earlier()
                workspace.note()
            return workspace, run

        workers = join_workers(strategy)
        workspace, run = workers.open(begin, device, settings.threads)
        prediction = next(iter(recipe.loss_input_names or run.outputs), None)
        settings = replace(
            settings,
            prediction=prediction if prediction in run.outputs else None,
            random=random_ops(run.training_model, run.eval_model),
        )
        self._state = TrainingState(run, workspace, position, settings, schedule, metrics, workers)
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
        strategy: Strategy | None = None,
    ) -> Trainer:
        """Opens a run that :meth:`save` or an interrupted fit wrote, in the state in which it was.

        The same call of :meth:`fit` then finishes an interrupted fit, with results bit-equal to those of an
        uninterrupted one. Random numbers of other ops than Dropout, drawn in evaluation or in subgraphs, restart; a
        warning says so.

        Args:
            path: directory of the run, to which the trainer continues to save. May also contain artifacts of
                `generate_artifacts`, with or without a prefix.
            metrics: replaces the saved metrics; required if they include functions, which are not saved.
            scheduler: replaces the saved schedule; required if it is a function.
            device: execution device: "cpu", "cuda" or "cuda:<index>".
            threads: number of threads per operation; None for the saved number.
            strategy: "ddp" or options, to continue with any number of processes; see :class:`Trainer`.

        Raises:
            CheckpointError: the directory does not contain a training run, or the run is damaged.
            InputError: functions that the run needs are missing, or other metrics are passed in the middle of an epoch.
        """
        # `__init__` would build new models; a resumed run opens those in its directory.
        trainer = cls.__new__(cls)
        workers = join_workers(strategy)
        trainer._state = TrainingState.load(
            Path(path), metrics, scheduler, device, check_threads(threads), workers
        )
        return trainer

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
        validation_transform: TransformFunction | None = None,
        steps_per_epoch: int | None = None,
        drop_last: bool = False,
        class_weight: ClassWeights = None,
        stratify: bool = False,
        evaluate_every: int | None = None,
    ) -> History:
        """Trains the model; returns the record of all epochs so far.

        Ctrl-C finishes the step, saves the state and returns with `history.stopped == "interrupted"`; the same call,
        also after :meth:`resume`, then trains the rest. A second Ctrl-C raises KeyboardInterrupt immediately.

        Args:
            inputs: samples along axis 0; for several inputs, a list in the model's order or a dict by name.
                Floating-point data is cast to the model's dtype. Also a pandas or polars frame; a map-style dataset
                (PyTorch's, Hugging Face's); a DataLoader; an iterable of batches `(inputs, targets)`, `(inputs,
                targets, sample_weight)` or dicts by name; or a function that returns one.
            targets: targets of the samples; integers for class labels. None if the model needs none, or if the data
                includes them. For a frame, also names of columns.
            epochs: number of passes over the data, in addition to the epochs of earlier fits.
            batch_size: samples per batch, 32 by default; the last batch may be smaller. A model exported with a fixed
                batch size takes that size; the samples after the last complete batch are left out of an epoch, with a
                warning (with shuffling, other samples in each epoch).
            validation: `(inputs, targets)` or `(inputs, targets, sample_weight)` to evaluate after each epoch, other
                data that includes its targets, or the fraction of the samples to split off at random, e.g. 0.1.
            callbacks: callbacks, e.g. `[EarlyStopping()]`; see :class:`Callback`.
            shuffle: shuffle the samples in each epoch.
            accumulate: batches per optimizer step; the gradient is that of the mean loss over all of their samples.
            schedule_epochs: total number of epochs of several calls of `fit` that share one schedule, counted from the
                trainer's first epoch, e.g. 10 for two fits of 5 epochs. Default: each call runs the schedule from start
                to end.
            verbose: show a progress bar, or one line per epoch if standard error is not a terminal.
            sample_weight: a weight w for each sample: the loss is sum(w·l) / sum(w), over all batches of a step.
                Metrics count each sample once.
            transform: augmentation, a function `(inputs, targets) -> (inputs, targets)` of a batch's arrays, called
                only in training; a third argument, or one named `rng`, is a numpy Generator.
            validation_transform: like `transform`, for the batches of `validation`, e.g. to convert `uint8` images
                without augmenting them.
            steps_per_epoch: optimizer steps per epoch; required for an endless stream.
            drop_last: drop an incomplete last batch of each epoch.
            class_weight: weight of each class in the training loss, for data with one class label per sample: a dict by
                class index, e.g. `{1: 10.0}` (others have weight 1); one weight per class; or "balanced" for n / (k *
                n_c), where n_c of the n samples belong to class c, one of k classes. Multiplies `sample_weight`.
                Validation and metrics do not use class weights.
            stratify: split off the same fraction of each class if `validation` is a fraction.
            evaluate_every: also evaluate on the validation data after every this many optimizer steps, e.g. 500, and
                record the result in `history.evaluations`; see :meth:`Callback.on_evaluation`.

        Raises:
            InputError: data or arguments do not fit; nothing was trained.
            DivergenceError: the loss became NaN or infinite; the last good state was restored and saved.
            TrainingStateError: a fit of this trainer is running, in another thread or around this call.
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
        called_back = _callback_list(callbacks)
        # Sources count batches, users count steps.
        limit = None if steps_per_epoch is None else steps_per_epoch * accumulate
        user_data = Data(
            inputs,
            targets,
            sample_weight,
            batch_size=batch_size,
            validation=validation,
            transform=transform,
            validation_transform=validation_transform,
            drop_last=bool(drop_last),
            limit=limit,
            class_weight=class_weight,
            stratify=bool(stratify),
        )
        state = self._state
        with state.fitting():
            data, held_out = fit_datasets(state, user_data)
            held_out_size = None
            if held_out is not None:
                held_out_size = validation if isinstance(validation, float) else held_out.samples or 0
            # The plan describes the data by numbers, because a resumed process passes new objects with the same
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
                drop_last=user_data.drop_last,
                weighted=data.weighted,
                transform=transform is not None,
                class_weight=data.weights.tolist() if isinstance(data, ClassWeightedSource) else None,
                stratify=user_data.stratify,
                evaluate_every=evaluate_every,
            )
            state.position.check(plan)
            state.check_schedule(plan, None if data.batches is None else -(-data.batches // accumulate))
            enable_sample_weights(state, data, held_out, for_fit=True)
            state.validating, state.training_data = held_out is not None, data
            warn_of_fixed_batch(state.run.batch_size, data.samples)
            state.workers.check_fixed_batch(state.run.batch_size)
            events = _CallbackEvents(called_back, self)
            report = make_report(verbose and state.workers.leads)
            try:
                run_fit(Fit(state, data, held_out, plan, events, report))
            finally:
                # Data may be large, so the trainer keeps no reference.
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
        validation_transform: TransformFunction | None = None,
        drop_last: bool = False,
        class_weight: ClassWeights = None,
        stratify: bool = False,
    ) -> None:
        """Raises the InputError that :meth:`fit` would raise for this data; changes nothing.

        Only the first batch of a stream is checked. An iterator is not checked, because it can be read only once.
        """
        if isinstance(inputs, Iterator):
            return
        data = Data(
            inputs,
            targets,
            sample_weight,
            batch_size=batch_size,
            validation=validation,
            transform=transform,
            validation_transform=validation_transform,
            drop_last=bool(drop_last),
            class_weight=class_weight,
            stratify=bool(stratify),
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
        transform: TransformFunction | None = None,
    ) -> LearningRateRange:
        """Measures the loss over increasing learning rates, and suggests a learning rate (Smith's range test).

        Takes one step with each rate, from `start` to `stop` in geometric progression, until the loss is four times its
        lowest value. Then restores the trainer's state: set `trainer.learning_rate` to the rate of your choice.

        Args:
            inputs: see :meth:`fit`.
            targets: see :meth:`fit`.
            start: lowest learning rate.
            stop: highest learning rate.
            steps: number of learning rates.
            batch_size: samples per step; see :meth:`fit`.
            transform: augmentation; see :meth:`fit`.

        Raises:
            InputError: the data or the learning rates do not fit.
        """
        self._state.workers.require_one("Finding a learning rate")
        options = Options(batch_size, training=True)
        data = weighted_dataset(self._state, inputs, targets, None, options, transform)
        return find_range(self._state, data, start, stop, steps)

    def stop_training(self) -> None:
        """Ends the current fit after the current epoch. Callbacks and other threads may call it."""
        self._state.workers.stop(self._state.position.history)

    def abandon_fit(self) -> None:
        """Forgets an interrupted fit: the next fit is a new one, and may have other arguments.

        Raises:
            TrainingStateError: a fit is running in another thread.
        """
        self._state.abandon()

    def evaluate(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
        transform: TransformFunction | None = None,
    ) -> dict[str, float]:
        """Computes the loss and the metrics over a dataset, in inference mode.

        The result does not depend on the batch size, even for a model with a fixed batch size. Only a loss that is an
        onnxblock block or the model's own is averaged over batches, weighted by their sizes. Arguments and errors are
        those of :meth:`fit`; `transform` converts the batches, like `validation_transform`.

        Raises:
            InputError: the data does not fit; or it ends with an incomplete batch, whose loss a model with a fixed
                batch size cannot compute.
        """
        return self._state.evaluate(
            weighted_dataset(self._state, inputs, targets, sample_weight, Options(batch_size), transform)
        )

    def predict(
        self, inputs: Any, *, batch_size: int | None = None, transform: TransformFunction | None = None
    ) -> Array | dict[str, Array]:
        """Returns the model's output for each sample, computed in inference mode; several outputs as a dict by name.

        The last batch is padded if the model has a fixed batch size; results of the padding are dropped. Targets in the
        data are ignored.

        Args:
            inputs: see :meth:`fit`; targets are not needed.
            batch_size: samples per batch, 32 by default.
            transform: converts the batches, a function `(inputs, targets) -> (inputs, targets)` as in :meth:`fit`;
                targets are None.

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
        """Returns the predicted probabilities: the model's logits after the activation that the loss implies.

        The activation is softmax over the classes for cross-entropy, the exponential for `nll`, and the sigmoid for
        losses of binary logits (`bce_with_logits`, `focal`, `tversky`). The model runs in inference mode.

        Args:
            inputs: see :meth:`predict`.
            batch_size: samples per batch, 32 by default.
            transform: see :meth:`predict`.

        Returns:
            Probabilities in the shape and dtype of the logits, e.g. float32 [samples, classes].

        Raises:
            InputError: the inputs do not fit, or the loss defines no probabilities, e.g. a regression loss.

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
        # Targets that are probabilities do not reveal the class axis; with two axes, it is the second.
        told = labels is not None or (scores is not None and scores.ndim <= 2)
        result = None
        if scores is not None and (told or loss_class(self.loss_name).activation != "softmax"):
            result = probabilities(self.loss_name, scores, 1 if labels is None else labels.axis)
        if scores is None or result is None:
            raise InputError(
                f"Predicting probabilities: the loss ({self.loss_name or 'that of the model'}) does not define how to "
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
        """Returns how often each class (rows) is predicted as each class (columns): integers [classes, classes].

        Arguments are those of :meth:`evaluate`.

        To plot it, call `sklearn.metrics.ConfusionMatrixDisplay(matrix).plot()`.

        Raises:
            InputError: the data does not fit, or it is not a classification with one right class per sample.
        """
        state = self._state
        data = weighted_dataset(state, inputs, targets, None, Options(batch_size), transform)
        with self.averaged():
            steps = state.run.evaluate(data.read(Pass()))
            # Copied, because ONNX Runtime writes the next batch's outputs to the same memory.
            parts = [tuple(array.copy() for array in state.metric_arrays(step)) for step in steps]
        prediction, target = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return confusion_matrix(state.task, prediction, target)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything that :meth:`resume` needs to a directory, which is created if missing.

        Models are copied there once, with their external data. All files are replaced together: if the process is
        killed, the directory contains either the files it had before, or all files of this run. To write only the
        trained model, as an `.onnx` file, use :meth:`export`.

        Raises:
            InputError: `path` ends with `.onnx`, like the file of a model.
            CheckpointError: a file cannot be written, or the directory contains users' files with the names of a run's
                files, and no manifest of a run.
        """
        self._state.save(path)

    def save_parameters(self, path: str | os.PathLike[str]) -> None:
        """Writes only parameters and statistics to a checkpoint file; with `ema_decay`, their averages.

        Raises:
            InputError: `path` ends with `.onnx`, like the file of a model.
            CheckpointError: the file cannot be written.
        """
        refuse_model_name(path, "Trainer.save_parameters", "a checkpoint")
        with self.averaged(), self._state.workers.writing() as writes:
            if writes:
                keep_inside(path, self.directory)
                CheckpointState.save_checkpoint(self.state, path)

    def load_parameters(self, path: str | os.PathLike[str]) -> None:
        """Loads parameters and statistics from a checkpoint file of the same model; nothing else changes.

        Moving averages restart from the new parameters.

        Raises:
            CheckpointError: the file is missing, damaged, or from a different model.
        """
        with self._state.lock:
            self._state.run.load_parameters(path)
            # Otherwise the next step would average old and new parameters.
            self._state.position.averaged = 0

    def averaged(self) -> AbstractContextManager[None]:
        """Replaces :attr:`parameters` with the averages of `ema_decay` within a `with` block.

        :meth:`evaluate`, :meth:`predict`, :meth:`export`, :meth:`save_parameters`, validation and `restore_best` do
        this themselves. Without `ema_decay`, or before the first step, nothing changes. Other threads wait for the end
        of the block before they use the trainer.
        """
        return self._state.averaged()

    def export(self, path: str | os.PathLike[str], outputs: Sequence[str] | None = None) -> None:
        """Writes the trained model as an ordinary `.onnx` file for inference.

        The file has the inputs and outputs of the original model, without loss, targets and gradients;
        BatchNormalization and Dropout are in inference mode.

        Args:
            path: file to write.
            outputs: names of values to return instead of the original model's outputs.
        """
        names = outputs if outputs is None or isinstance(outputs, str) else list(outputs)
        with self.averaged(), self._state.workers.writing() as writes:
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
        """Writes a model card: a README.md with the model, dataset sizes, options, metrics and versions.

        Its metadata is in the format of the Hugging Face Hub, which shows the results next to the model.

        Args:
            path: file to write, or directory in which to write a README.md.
            title: name of the model, e.g. "digits".
            description: Markdown text about purpose, data and limits.
            license: license identifier, e.g. "apache-2.0"; None omits it.
            tags: tags in addition to "onnx" and "onnxtrain", e.g. ["image-classification"].
            results: metrics by dataset name, e.g. `{"the test set": trainer.evaluate(x, y)}`.
            model: name of the exported file, for the example in the card.

        Raises:
            OSError: the file cannot be written.
        """
        write_model_card(
            self._state,
            path,
            title,
            description=description,
            license=license,
            tags=tags,
            results=results,
            model=model,
        )

    @property
    def directory(self) -> Path:
        """Directory of the run's files."""
        return self._state.directory

    @property
    def state(self) -> CheckpointState:
        """Parameters, statistics and properties, for `onnxtrain.api`."""
        return self._state.run.state

    @property
    def lock(self) -> StateLock:
        """Lock that excludes other threads, and pauses a fit, while a thread holds it.

        Hold it (`with trainer.lock:`) to read several of :attr:`parameters`, which are live views, while another thread
        fits.
        """
        return self._state.lock

    @property
    def parameters(self) -> Parameters:
        """Parameters by name; `.data` is a live view."""
        return self._state.run.state.parameters

    @property
    def manifest(self) -> Manifest:
        """Inputs, targets and outputs of the training model, and its optimizer."""
        return self._state.run.manifest

    @property
    def history(self) -> History:
        """Record of all epochs so far."""
        return self._state.position.history

    @property
    def outputs(self) -> list[str]:
        """Names of the model's own outputs, which :meth:`predict` returns and :meth:`export` keeps."""
        return list(self._state.run.predicted)

    @property
    def resumes_fit(self) -> bool:
        """True if the next fit resumes an interrupted one."""
        return self._state.position.unfinished

    @property
    def last_fit(self) -> Plan | None:
        """Arguments of the last fit, including an interrupted one; None before the first fit."""
        return self._state.position.plan

    @property
    def resume_hint(self) -> str:
        """Sentence about resuming, shown after Ctrl-C; `{}` is replaced with the directory."""
        return self._state.resume_hint

    @resume_hint.setter
    def resume_hint(self, text: str) -> None:
        self._state.resume_hint = text

    @property
    def metrics(self) -> list[Metric]:
        """Metrics recorded in addition to the loss."""
        return self._state.metrics

    @property
    def positive(self) -> int | None:
        """Class measured by f1, precision, recall and auroc; None for the default of :class:`Trainer`."""
        return self._state.settings.positive

    @property
    def loss_name(self) -> str:
        """Class name of the loss, e.g. "CrossEntropyLoss"; empty for the model's own loss."""
        return self._state.settings.loss

    @property
    def prediction(self) -> str | None:
        """Name of the output that metrics compare with the target; None if there is none."""
        return self._state.settings.prediction

    @property
    def fit_start(self) -> int:
        """Number of finished epochs when the current or last fit began."""
        return self._state.position.fit_start

    @property
    def recorded_keys(self) -> list[str]:
        """Keys that the current fit records for each epoch, e.g. ["loss", "accuracy", "val_loss"]."""
        return self._state.recorded_keys

    @property
    def learning_rate(self) -> float:
        """Learning rate before the schedule's factor; a new value is used from the next step."""
        return self._state.position.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._state.position.learning_rate = check_learning_rate(value)

    @property
    def current_learning_rate(self) -> float:
        """Learning rate of the last step, including the schedule's factor."""
        return self._state.run.optimizer.get_learning_rate()

    @property
    def global_step(self) -> int:
        """Number of optimizer steps, over all fits."""
        return self._state.position.step


class Callback:
    """Base class of callbacks: override the methods that you need.

    A callback that decides from `trainer.history` rather than from its own attributes decides the same after the run
    has been resumed.
    """

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Called once, before the first step of a fit or of a resumed fit."""

    def on_gradients(self, trainer: Trainer, gradients: StepGradients) -> None:
        """Called when the gradients of a step are computed, before the optimizer clips and uses them.

        The trainer's lock is held during the call: do not wait for another thread that uses the trainer.
        """

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        """Called after each optimizer step, with the mean loss of its samples."""

    def on_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Called after each evaluation in the middle of an epoch (`evaluate_every` of :meth:`Trainer.fit`).

        `values` is the last entry of `trainer.history.evaluations`, e.g. {"step": 50, "epoch": 2, "val_loss": 0.4}.
        """

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Called after each epoch. `history.last` is its entry; `trainer.stop_training()` ends the fit."""

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """Called once at the end of a fit, also if the fit was stopped or interrupted."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Called instead of `on_fit_end` if the fit raises an exception, which is then re-raised."""

    def _saves_after_step(self, step: int) -> bool:
        """True if the callback saves the run after this step; the fit then checks the new parameters for NaN first."""
        return False

    def _sets_parameters_at_end(self) -> str | None:
        """Returns the callback's name for messages if it replaces the parameters at the end of the fit, else None."""
        return None


class _CallbackEvents(Events):
    """Passes the events of a fit to callbacks, in their order."""

    def __init__(self, callbacks: Sequence[Callback], trainer: Trainer) -> None:
        self._callbacks = callbacks
        self._trainer = trainer

    def handles(self, event: Event) -> bool:
        inherited = getattr(Callback, event)
        return any(getattr(type(callback), event) is not inherited for callback in self._callbacks)

    def saves(self, step: int) -> bool:
        return any(callback._saves_after_step(step) for callback in self._callbacks)

    def call(self, event: Event, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(self._trainer, *arguments)


def _callback_list(callbacks: Iterable[Callback] | None) -> list[Callback]:
    """Returns the callbacks of a fit as a list.

    Raises:
        InputError: an entry is not a callback, or several callbacks would set the parameters at the end of the fit.
    """
    if callbacks is None:
        return []
    # A list, because a generator can be iterated only once.
    listed = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    if not all(isinstance(entry, Callback) for entry in listed) or isinstance(callbacks, Callback):
        received = ", ".join(type(entry).__name__ for entry in listed)
        raise InputError(f"callbacks must be a list of callbacks, received {received}.")
    setters = [name for entry in listed if (name := entry._sets_parameters_at_end()) is not None]
    if len(setters) > 1:
        raise InputError(f"{' and '.join(setters)} both set the final parameters. Choose one.")
    return listed
