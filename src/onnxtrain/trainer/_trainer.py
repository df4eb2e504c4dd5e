"""Defines `Trainer`, which trains, evaluates and exports an ONNX model, and `Callback`, the base class of callbacks.

`Trainer` checks arguments and delegates: `_run` builds, opens and saves the models, `_fit` trains them, and `data`
reads the users' data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import onnx_ir as ir

from onnxtrain._dialects import explains_arguments, missing_attribute
from onnxtrain._printable import printable
from onnxtrain._words import argument
from onnxtrain.artifacts import loss_for
from onnxtrain.distributed._strategy import Strategy
from onnxtrain.errors import InputError
from onnxtrain.losses import loss_class
from onnxtrain.recipe import DISTILL_WEIGHT, TEMPERATURE, Recipe, filled_recipe
from onnxtrain.runtime.artifact_folder import keep_inside
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.lock import StateLock
from onnxtrain.runtime.manifest import Manifest
from onnxtrain.runtime.not_copyable import NotCopyable
from onnxtrain.runtime.optimizer import check_learning_rate
from onnxtrain.runtime.state import CheckpointState, Parameters
from onnxtrain.surgery._perceptron import HiddenActivation, perceptron
from onnxtrain.trainer._checks import check_integer, check_switch
from onnxtrain.trainer._fit.calibration import (
    Calibration,
    calibrate,
    calibrated_outputs,
    forget_calibration,
)
from onnxtrain.trainer._fit.datasets import (
    Data,
    Validation,
    enable_sample_weights,
    fit_datasets,
    prediction_source,
    weighted_dataset,
)
from onnxtrain.trainer._fit.events import Event, Events, StepGradients
from onnxtrain.trainer._fit.exported import export
from onnxtrain.trainer._fit.images import (
    bound_images,
    image_arguments,
    image_origin,
    remember_images,
)
from onnxtrain.trainer._fit.learning_rate_range import START, STEPS, STOP, LearningRateRange, find_range
from onnxtrain.trainer._fit.mistakes import plot_mistakes
from onnxtrain.trainer._fit.moving_average import check_decay
from onnxtrain.trainer._fit.schedule import ScheduleSpec, make_schedule
from onnxtrain.trainer._fit.state import TrainingState, scheduler_settings
from onnxtrain.trainer._fit.step import Fit
from onnxtrain.trainer._fit.texts import embed, text_arrays, text_metrics, text_properties, text_recipe
from onnxtrain.trainer._fit.verify import verify_export
from onnxtrain.trainer._metrics.calibration import ThresholdMetric
from onnxtrain.trainer._metrics.metrics import Metric, Metrics, listed, make_metrics
from onnxtrain.trainer._metrics.probabilities import probabilities
from onnxtrain.trainer._metrics.whole_set import check_positive, confusion_matrix
from onnxtrain.trainer._model_card import write_model_card
from onnxtrain.trainer._run.build import build_run, loss_name, random_ops
from onnxtrain.trainer._run.files import refuse_model_name
from onnxtrain.trainer._run.history import History
from onnxtrain.trainer._run.position import CUSTOM, PROPERTY, Plan, Position, Settings, check_threads
from onnxtrain.trainer._run.rates import learning_rate_scales
from onnxtrain.trainer._run.run import Run
from onnxtrain.trainer._run.workspace import Workspace
from onnxtrain.trainer._show.make_report import make_report
from onnxtrain.trainer._workers import join_workers, run_fit
from onnxtrain.trainer.data import (
    ClassWeightedSource,
    ClassWeights,
    Options,
    Pass,
    TransformFunction,
    check_limit,
    limited,
    warn_of_fixed_batch,
)
from onnxtrain.trainer.data._texts import as_pairs, is_texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    from onnxtrain.texts import TextTokenizer


class Trainer(NotCopyable):
    """Trains an ONNX model on numpy arrays, with stock ONNX Runtime.

    Arguments that are fields of :class:`onnxtrain.Recipe` are documented there.

    Args:
        model: path of an `.onnx` file, `ModelProto` or `onnx_ir.Model`; it is not modified.
        loss: the loss or its name, e.g. "cross_entropy", a function of PyTorch tensors, or a `.onnx` file; see
            :class:`onnxtrain.Recipe`.
        optimizer: the optimizer or its name, e.g. "sgd", with PyTorch's defaults; see :class:`onnxtrain.Recipe`.
        learning_rate: learning rate, e.g. 1e-3; with a schedule, its highest value.
        requires_grad: see :class:`onnxtrain.Recipe`.
        frozen_params: see :class:`onnxtrain.Recipe`.
        metrics: names ("accuracy", "f1", "auroc", "mae", "r2", "top5_accuracy", "perplexity", ...) or functions
            `(prediction, target) -> float`, called with the arrays of a whole dataset; arguments with the names of
            outputs and targets receive these. Of a model with several outputs: a dict by output, e.g. `{"kind":
            "accuracy", "value": ["mae", my_function]}`, recorded as "kind_accuracy"; targets belong to outputs in
            order. None chooses metrics that suit the loss, `[]` chooses none.
        positive: index of the class that "f1", "precision", "recall" and "auroc" measure, e.g. 0. Default: class 1 if
            there are two classes; the mean over all classes if there are more.
        scheduler: a schedule from `onnxtrain.schedules` or its name ("linear" and "cosine" decay to zero at the end of
            a fit; "one_cycle", "step", "polynomial", ...), or a function `(step, total_steps) -> factor`, where the
            factor multiplies the learning rate.
        warmup_steps: warm up the learning rate linearly over this many optimizer steps, e.g. 100.
        warmup_ratio: warm up the learning rate over this fraction of all steps, e.g. 0.1, instead of `warmup_steps`.
        total_steps: length of the schedule in optimizer steps, over all calls of :meth:`fit`. Default: each call runs
            the schedule from start to end; see also `schedule_epochs` of :meth:`fit`.
        ema_decay: keep exponential moving averages of parameters and BatchNorm statistics with this decay, e.g. 0.999,
            and use them to evaluate, predict and export; see :meth:`averaged`. Training itself is not affected.
        clip_grad_norm: see :class:`onnxtrain.Recipe`.
        clip_grad_value: see :class:`onnxtrain.Recipe`.
        layer_decay: see :class:`onnxtrain.Recipe`.
        learning_rate_scale: see :class:`onnxtrain.Recipe`.
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
        teacher: see :class:`onnxtrain.Recipe`.
        distill_weight: see :class:`onnxtrain.Recipe`.
        temperature: see :class:`onnxtrain.Recipe`.
        teacher_output: see :class:`onnxtrain.Recipe`.
        tokenizer: tokenizer of a model that embeds texts, for the losses "info_nce", "triplet" and "cosine_similarity":
            the path of a `tokenizer.json` file, or a :class:`onnxtrain.texts.TextTokenizer`. Default: the file beside
            the model.
        max_length: number of tokens at which texts are truncated, e.g. 128. Default: the limit in the files beside the
            model.
        directory: directory for the run's files; the settings are saved there immediately, the state after every
            epoch. Other files in it are not changed. Default: a temporary directory, which is removed when the process
            ends, unless an interrupted run was saved there.
        overwrite: allow the run to replace existing files in `directory`. An earlier run is replaced once the new
            models are built. If the directory contains no run, files with the same names as the new run's files
            ("checkpoint", "best", ...) are overwritten, and no file is deleted. Without `overwrite`, an existing run or
            such a file is an error.
        seed: seed for shuffling, the validation split and Dropout.
        device: execution device: "cpu", "cuda" or "cuda:<index>".
        threads: number of threads per op; None for ONNX Runtime's default, all cores. It is saved with the run, because
            the last digits of results depend on it.
        strategy: "ddp" or options, to train together with other processes started by `torchrun`, :func:`launch
            <onnxtrain.distributed.launch>` or Ray; see :class:`onnxtrain.distributed.DataParallel`.
        recipe: the training settings as one object, instead of the arguments that are its fields. Its `sample_weight`
            field is ignored: the trainer adds an input for sample weights to the models once data with weights is used,
            e.g. in :meth:`fit`.

    Raises:
        TypeError: a field of `recipe` is also passed as an argument.
        OnnxTrainError: the model cannot be trained as requested; the message explains why.

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

    # Further properties of the first checkpoint, which subclasses set.
    _first_properties: ClassVar[Mapping[str, str]] = {}

    _state: TrainingState

    @explains_arguments
    def __init__(
        self,
        model: ModelSource,
        loss: LossSpec = None,
        optimizer: OptimizerSpec = "adamw",
        learning_rate: float = 1e-3,
        *,
        requires_grad: Sequence[str] | str | None = None,
        frozen_params: Sequence[str] | str | None = None,
        metrics: Metrics | None = None,
        positive: int | None = None,
        scheduler: ScheduleSpec | None = None,
        warmup_steps: int = 0,
        warmup_ratio: float = 0.0,
        total_steps: int | None = None,
        ema_decay: float | None = None,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        layer_decay: float | None = None,
        learning_rate_scale: Mapping[str, float] | None = None,
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
        teacher: ModelSource | None = None,
        distill_weight: float = DISTILL_WEIGHT,
        temperature: float = TEMPERATURE,
        teacher_output: str | None = None,
        tokenizer: str | os.PathLike[str] | TextTokenizer | None = None,
        max_length: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        seed: int = 0,
        device: str = "cpu",
        threads: int | None = None,
        strategy: Strategy | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        source = None
        # A fit with sample weights reads the model again, possibly in another working directory.
        if isinstance(model, str | os.PathLike):
            model = source = Path(model).absolute()
        recipe = filled_recipe(
            Trainer,
            recipe,
            {
                "loss": loss,
                "optimizer": optimizer,
                "clip_grad_norm": clip_grad_norm,
                "clip_grad_value": clip_grad_value,
                "layer_decay": layer_decay,
                "learning_rate_scale": learning_rate_scale,
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
                "teacher": teacher,
                "distill_weight": distill_weight,
                "temperature": temperature,
                "teacher_output": teacher_output,
            },
        )
        if isinstance(recipe.teacher, str | os.PathLike):
            recipe = replace(recipe, teacher=Path(recipe.teacher).absolute())
        # A function or file becomes a loss once: a fit with sample weights builds its models again.
        recipe = replace(recipe, loss=loss_for(recipe.loss))
        # All arguments are checked before a file is written, so that an error leaves no directory.
        schedule = make_schedule(scheduler, warmup_steps, warmup_ratio)
        metrics = None if metrics is None else listed(metrics)
        make_metrics(metrics or [])
        check_positive(positive)
        seed = check_integer(argument("seed"), seed, 0)
        overwrite = check_switch(argument("overwrite"), overwrite)
        position = Position(seed=seed, learning_rate=check_learning_rate(learning_rate))
        passed = Settings(
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

        recipe = text_recipe(recipe, model, source)
        of_texts = text_properties(recipe, source, tokenizer, max_length)

        # Not `self`: the run keeps the function, and a cycle would delay the removal of a temporary directory.
        first_properties = self._first_properties

        def describe(models: Sequence[ir.Model], outputs: Sequence[str]) -> dict[str, str]:
            prediction = next(iter(recipe.loss_input_names or outputs), None)
            settings = replace(
                passed,
                prediction=prediction if prediction in outputs else None,
                random=random_ops(models),
            )
            return {**first_properties, **of_texts, PROPERTY: position.to_json(settings)}

        def begin() -> tuple[Workspace, Run]:
            workspace = Workspace.for_new_run(directory, overwrite=overwrite)
            with workspace.locked():
                run = build_run(model, workspace.path, device, passed.threads, recipe, describe)
                # Only now, because the old run must be resumable until the new models are built.
                workspace.remove_earlier()
                workspace.note()
            return workspace, run

        workers = join_workers(strategy)
        workspace, run = workers.open(begin, device, passed.threads)
        # Read back, so that this trainer has exactly the settings of one that resumes the run.
        _, settings, _ = Position.from_json(str(run.state.properties[PROPERTY]), f"'{run.directory}'")
        self._state = TrainingState(run, workspace, position, settings, schedule, metrics, workers)
        self._state.image_origin = image_origin(model)
        run.optimizer.set_learning_rate(position.learning_rate)

    def __repr__(self) -> str:
        """Returns the inputs and outputs, the loss, the optimizer, the number of trained parameters and the progress.

        >>> import onnx
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]>
        ...   line (float[n, 1] x) => (float[n, 1] y) <float[1, 1] w = {0.0}, float[1] b = {0.0}>
        ...   { y = Gemm(x, w, b) }''')
        >>> Trainer(model, loss="mse", requires_grad="w")
        Trainer(x float32[n, 1] -> y, loss=MSELoss, optimizer=AdamW, learning_rate=0.001,
                trains 1 parameters, step 0, epoch 0)
        """
        manifest, position = self.manifest, self._state.position
        inputs = ", ".join(
            f"{spec.name} {spec.dtype.name}[{', '.join(map(str, spec.shape or ('...',)))}]"
            for spec in manifest.inputs
        )
        total, trained = (
            sum(math.prod(spec.shape) for spec in specs)
            for specs in (manifest.parameters, manifest.trainable)
        )
        optimizer = manifest.optimizer.type if manifest.optimizer is not None else "none"
        parts = [
            f"{inputs} -> {', '.join(self.outputs) or 'only a loss'}",
            f"loss={self.loss_name or 'of the model'}",
            f"optimizer={optimizer}",
            f"learning_rate={position.learning_rate:g}",
            f"trains {trained:,} parameters"
            if trained == total
            else f"trains {trained:,} of {total:,} parameters",
            f"step {position.step:,}",
            f"epoch {position.epoch:,}",
        ]
        # Names come from the file, which anyone may have written.
        return printable(f"Trainer({', '.join(parts)})")

    # Only for names that Python does not find. Hidden from type checkers, which would accept any attribute otherwise.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError; for a method of another library, such as `train`, it names the one to call."""
            raise AttributeError(missing_attribute("Trainer", name), name=name, obj=self)

    @classmethod
    @explains_arguments
    def resume(
        cls,
        path: str | os.PathLike[str],
        *,
        metrics: Metrics | None = None,
        scheduler: ScheduleSpec | None = None,
        device: str = "cpu",
        threads: int | None = None,
        strategy: Strategy | None = None,
    ) -> Trainer:
        """Restores a trainer from a run that was saved by :meth:`save` or by an interrupted fit.

        To finish an interrupted fit, call :meth:`fit` again with the same arguments; the results are bit-equal to the
        results of an uninterrupted fit. Exception: ops other than Dropout that draw random numbers in evaluation or in
        subgraphs restart their sequences; a warning is logged if the model has any.

        Args:
            path: directory of the run; the trainer continues to save to it. Alternatively, a directory with artifacts
                written by `generate_artifacts`, with or without a prefix: they contain no settings, so the seed is 0,
                the learning rate that of the checkpoint's optimizer state or 1e-3, and there is no schedule.
            metrics: metrics that replace the saved metrics; required if the run's metrics include functions, which are
                not saved.
            scheduler: schedule that replaces the saved schedule; required if the run's schedule is a function.
            device: execution device: "cpu", "cuda" or "cuda:<index>".
            threads: number of threads per op; None for the saved number.
            strategy: "ddp" or options, to continue with any number of processes; see :class:`Trainer`.

        Raises:
            CheckpointError: the directory does not contain a training run, or the run is damaged or lacks its settings.
            InputError: `metrics` or `scheduler` is required but missing, or the run was interrupted in the middle of an
                epoch and `metrics` differs from the saved metrics.
        """
        # `__init__` would build new models; a resumed run opens those in its directory.
        trainer = cls.__new__(cls)
        workers = join_workers(strategy)
        trainer._state = TrainingState.load(
            Path(path), metrics, scheduler, device, check_threads(threads), workers
        )
        return trainer

    @classmethod
    def mlp(
        cls,
        inputs: int,
        outputs: int,
        hidden: Sequence[int] = (128, 64),
        *,
        loss: LossSpec = None,
        activation: HiddenActivation = "relu",
        dropout: float = 0.0,
        **settings: Any,
    ) -> Self:
        """Creates a trainer of a new network, a multilayer perceptron, for rows of numbers.

        Its linear layers are initialized as PyTorch's `nn.Linear`, from `seed`. Input and output are float32, and are
        named "x" and "scores".

        Args:
            inputs: number of numbers in a row, e.g. 10.
            outputs: number of classes, or of numbers to predict, e.g. 3.
            hidden: sizes of the hidden layers; () for a linear model.
            loss: the loss or its name, e.g. "cross_entropy"; required unless `recipe` has one.
            activation: activation of the hidden layers: "relu", "leaky_relu", "elu", "gelu", "silu" or "tanh".
            dropout: fraction of the activations that Dropout drops in training, e.g. 0.1.
            settings: other arguments of :class:`Trainer`, e.g. `learning_rate=0.003`.

        Raises:
            InputError: there is no loss, a size is not positive, or `activation` or `dropout` is invalid.

        Example:
            >>> import numpy as np
            >>> trainer = Trainer.mlp(4, 3, (16,), loss="cross_entropy")
            >>> trainer.predict(np.zeros((2, 4), np.float32)).shape
            (2, 3)
        """
        recipe = settings.get("recipe")
        if loss is None and (recipe is None or recipe.loss is None):
            raise InputError(
                f"Building a network: it has no loss of its own. Pass {argument('loss', 'cross_entropy')} for classes "
                f"or {argument('loss', 'mse')} for numbers."
            )
        seed = check_integer(argument("seed"), settings.get("seed", 0), 0)
        model = perceptron(
            inputs, hidden, outputs, np.dtype(np.float32), seed, activation=activation, dropout=dropout
        )
        # The Dropout of a file is inactive in training, unless the recipe sets its ratio.
        if dropout:
            settings |= (
                {"dropout": dropout} if recipe is None else {"recipe": replace(recipe, dropout=dropout)}
            )
        return cls(model, loss, **settings)

    @explains_arguments
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
        limit_batches: int | float | None = None,
        drop_last: bool = False,
        class_weight: ClassWeights = None,
        stratify: bool = False,
        evaluate_every: int | None = None,
    ) -> History:
        """Trains the model; returns the history of all epochs so far.

        Ctrl-C finishes the current step, saves the state and returns with `history.stopped == "interrupted"`. To train
        the rest, repeat the call, in the same process or after :meth:`resume`. A second Ctrl-C raises KeyboardInterrupt
        immediately.

        Args:
            inputs: samples along axis 0; for several inputs, a list in the model's order or a dict by name.
                Floating-point data is cast to the model's dtype. Other accepted types: a pandas or polars frame; a
                map-style dataset (PyTorch's, Hugging Face's); an :class:`ImageFolder <onnxtrain.images.ImageFolder>` or
                the path of a folder with one subfolder of images per class; a DataLoader; an iterable of batches
                `(inputs, targets)`, `(inputs, targets, sample_weight)` or dicts by name; or a function that returns
                such an iterable. For the losses over texts: :class:`onnxtrain.texts.TextPairs`, tuples
                `(anchor, positive)`, `(anchor, positive, negative)` or `(text, text, score)`, the path of a .csv, .tsv
                or .jsonl file, a frame with columns of texts, or a list of anchors, whose positives are the targets.
            targets: targets of the samples; integers for class labels. None if the model needs none, or if the data
                includes them. For a frame, column names are accepted as well.
            epochs: number of passes over the data, in addition to the epochs of earlier fits. A call that resumes an
                interrupted fit may change the number, which still counts from the start of that fit: after 4 epochs of
                10, `epochs=6` trains 2 more. A schedule then continues as if the fit had begun with this number.
            batch_size: samples per batch, 32 by default; the last batch may be smaller. A model exported with a fixed
                batch size uses that size and skips the incomplete last batch of each epoch, with a warning (shuffling
                varies which samples are skipped).
            validation: `(inputs, targets)` or `(inputs, targets, sample_weight)` to evaluate after each epoch, other
                data that includes its targets, such as a folder of images, or the fraction of the samples to split off
                at random, e.g. 0.1.
            callbacks: callbacks, e.g. `[EarlyStopping()]`; see :class:`Callback`.
            shuffle: shuffle the samples in each epoch.
            accumulate: number of batches per optimizer step (gradient accumulation); a step uses the gradient of the
                mean loss over all samples of these batches.
            schedule_epochs: length of the schedule in epochs if several calls of `fit` share it, counted from the
                trainer's first epoch, e.g. 10 for two fits of 5 epochs. Default: each call runs the schedule from start
                to end.
            verbose: show a progress bar, or one line per epoch if standard error is not a terminal.
            sample_weight: a weight w for each sample: the loss is sum(w·l) / sum(w), over all batches of a step.
                Metrics count each sample once.
            transform: augmentation or conversion: a function `(inputs, targets) -> (inputs, targets)` that is applied
                to the arrays of each training batch. A third required parameter, or one named `rng` or `generator`, is
                passed a numpy Generator. If the results do not depend on random numbers, as when `uint8` images are
                divided by 255, the function is also applied to data for validation, :meth:`evaluate` and
                :meth:`predict` that the model does not accept without it.
            validation_transform: like `transform`, for the batches of `validation`, e.g. to convert `uint8` images
                without augmenting them.
            steps_per_epoch: optimizer steps per epoch; required for an endless stream. It doesn't limit validation, and
                must not exceed the data; an epoch of a stream continues where the previous one stopped.
            limit_batches: for a trial run, train and validate on only this many batches per epoch, e.g. 2, or on this
                fraction of the batches, e.g. 0.05. Data with fewer batches is used as a whole.
            drop_last: drop an incomplete last batch of each epoch.
            class_weight: weight of each class in the training loss, for data with one class label per sample: a dict by
                class index, e.g. `{1: 10.0}` (others have weight 1); one weight per class; or "balanced" for n / (k *
                n_c), where n is the number of samples, n_c the number of samples of class c, and k the number of
                classes that occur. Multiplies `sample_weight`. Validation and metrics do not use class weights.
            stratify: split off the same fraction of each class if `validation` is a fraction.
            evaluate_every: number of optimizer steps, e.g. 500, between additional evaluations on the validation data.
                Their results are recorded in `history.evaluations`; see :meth:`Callback.on_evaluation`.

        Raises:
            InputError: an argument is invalid, or the data does not match the model; nothing was trained.
            DivergenceError: the loss became NaN or infinite; the last good state was restored and saved.
            TrainingStateError: a fit of this trainer is already running, in another thread or because `fit` was called
                from a callback; or `fit` was called inside a `with trainer.averaged():` block.
        """
        inputs, validation = image_arguments(inputs, validation, reads_texts=self.manifest.groups is not None)
        epochs = check_integer(argument("epochs"), epochs)
        shuffle, drop_last = (
            check_switch(argument(name), value)
            for name, value in (("shuffle", shuffle), ("drop_last", drop_last))
        )
        stratify = check_switch(argument("stratify"), stratify)
        # Keras has numbers of lines to show: 0, 1 and 2.
        verbose = check_switch(argument("verbose"), verbose > 0 if isinstance(verbose, int) else verbose)
        accumulate = check_integer(argument("accumulate"), accumulate)
        if steps_per_epoch is not None:
            steps_per_epoch = check_integer(argument("steps_per_epoch"), steps_per_epoch)
        limit_batches = check_limit(limit_batches)
        if limit_batches is not None and steps_per_epoch is not None:
            raise InputError(
                f"{argument('steps_per_epoch')} and {argument('limit_batches')} both set the length of an epoch; pass "
                "only one of them."
            )
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
            drop_last=drop_last,
            limit=limit,
            class_weight=class_weight,
            stratify=stratify,
        )
        state = self._state
        with state.fitting():
            data, held_out = fit_datasets(state, user_data)
            images = bound_images(data)
            held_out_size = None
            if held_out is not None:
                held_out_size = validation if isinstance(validation, float) else held_out.samples or 0
            # The plan describes the data by numbers, because a resumed process passes new objects with the same
            # content.
            plan = Plan(
                samples=data.samples,
                batch_size=data.batch_size,
                accumulate=accumulate,
                shuffle=shuffle,
                epochs=epochs,
                validation=held_out_size,
                schedule_epochs=schedule_epochs,
                steps_per_epoch=steps_per_epoch,
                limit_batches=limit_batches,
                drop_last=user_data.drop_last,
                weighted=data.weighted,
                transform=transform is not None,
                class_weight=data.weights.tolist() if isinstance(data, ClassWeightedSource) else None,
                stratify=user_data.stratify,
                evaluate_every=evaluate_every,
                images=None if images is None else images.pipeline.describe(),
            )
            if limit_batches is not None:
                data = limited(data, limit_batches)
                held_out = None if held_out is None else limited(held_out, limit_batches)
            state.position.check(plan)
            state.check_schedule(plan, None if data.batches is None else -(-data.batches // accumulate))
            enable_sample_weights(state, data, held_out, for_fit=True)
            state.validating, state.training_data = held_out is not None, data
            warn_of_fixed_batch(state.run.batch_size, data.samples)
            state.workers.check_fixed_batch(state.run.batch_size)
            remember_images(state, images)
            forget_calibration(state)
            state.transform = transform
            frozen_until = self._frozen_until(called_back)
            events = _CallbackEvents(called_back, self)
            report = make_report(verbose and state.workers.leads)
            try:
                run_fit(Fit(state, data, held_out, plan, events, report, frozen_until))
            finally:
                # Data may be large, so the trainer keeps no reference.
                state.training_data = None
        return self.history

    def _frozen_until(self, callbacks: Sequence[Callback]) -> dict[str, int]:
        """Returns the parameters and statistics that callbacks freeze, with the number of epochs until they train."""
        until: dict[str, int] = {}
        # In reverse, so that the first callback decides.
        for callback in reversed(callbacks):
            until |= callback._frozen_until(self)
        return until

    @explains_arguments
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
        """Checks data as :meth:`fit` would, without training: raises InputError if it does not match the model.

        Only the first batch of a stream is checked. An iterator is not checked, because it can be read only once.
        """
        if isinstance(inputs, Iterator):
            return
        inputs, validation = image_arguments(inputs, validation, reads_texts=self.manifest.groups is not None)
        data = Data(
            inputs,
            targets,
            sample_weight,
            batch_size=batch_size,
            validation=validation,
            transform=transform,
            validation_transform=validation_transform,
            drop_last=check_switch(argument("drop_last"), drop_last),
            class_weight=class_weight,
            stratify=check_switch(argument("stratify"), stratify),
        )
        fit_datasets(self._state, data)

    @explains_arguments
    def find_learning_rate(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        start: float = START,
        stop: float = STOP,
        steps: int = STEPS,
        batch_size: int | None = None,
        transform: TransformFunction | None = None,
    ) -> LearningRateRange:
        """Runs a learning rate range test (Smith 2017): measures the loss at increasing rates, and suggests a rate.

        Takes one step at each rate, from `start` to `stop` in geometric progression, and stops early when the loss
        exceeds four times its lowest value. Afterwards, the trainer's state is restored; to use the suggestion, assign
        it to `trainer.learning_rate`.

        Args:
            inputs: see :meth:`fit`.
            targets: see :meth:`fit`.
            start: lowest learning rate.
            stop: highest learning rate.
            steps: number of learning rates.
            batch_size: samples per step; see :meth:`fit`.
            transform: augmentation; see :meth:`fit`.

        Raises:
            InputError: the data does not match the model, `0 < start < stop` is violated, or `steps` is less than 2.
        """
        self._state.workers.require_one("Finding a learning rate")
        options = Options(batch_size, training=True)
        data = weighted_dataset(self._state, inputs, targets, None, options, transform)
        return find_range(self._state, data, start, stop, steps)

    def stop_training(self) -> None:
        """Ends the current fit after the current epoch. Callbacks and other threads may call it."""
        self._state.workers.stop(self._state.position.history)

    def abandon_fit(self) -> None:
        """Discards an interrupted fit: the next call of :meth:`fit` starts a new fit, and may have different arguments.

        Raises:
            TrainingStateError: a fit is running in another thread.
        """
        self._state.abandon()

    @explains_arguments
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

        The result does not depend on the batch size, even for a model with a fixed batch size. Exception: a loss that
        is an onnxblock block, computed by the model itself, or "info_nce" is averaged over batches, weighted by batch
        size. For pairs of texts, the result includes retrieval metrics ("recall@1", "mrr", "ndcg@10", ...; see
        :func:`onnxtrain.texts.retrieval_metrics`) or, with scores, the correlation of similarities with scores.
        For the arguments, see :meth:`fit`; `transform` corresponds to `validation_transform` there.

        Raises:
            InputError: the data does not match the model; or the last batch is incomplete, the model has a fixed batch
                size, and its loss cannot be computed separately from the model.
        """
        pairs = None if self.manifest.groups is None else as_pairs(inputs, targets, sample_weight)
        if pairs is not None:
            inputs, targets, sample_weight = pairs, None, None
        values = self._state.evaluate(
            weighted_dataset(self._state, inputs, targets, sample_weight, Options(batch_size), transform)
        )
        return values if pairs is None else values | text_metrics(self._state, pairs, batch_size)

    @explains_arguments
    def predict(
        self, inputs: Any, *, batch_size: int | None = None, transform: TransformFunction | None = None
    ) -> Array | dict[str, Array]:
        """Runs the model in inference mode; returns its output for each sample, or a dict of outputs by name.

        If the model has a fixed batch size, the last batch is padded, and the outputs for the padding are dropped.
        Targets in the data are ignored.

        Args:
            inputs: see :meth:`fit`; targets are not needed. For images, also a list of paths of files. A list of texts,
                for a model that was trained on texts, returns one embedding per text, float32 [texts, dim], pooled as
                in training.
            batch_size: samples per batch, 32 by default.
            transform: function `(inputs, targets) -> (inputs, targets)` that converts each batch, as in :meth:`fit`;
                called with None for the targets.

        Returns:
            The output, e.g. float32 [samples, classes]. For a model with several outputs, a dict of all outputs by
            name.

        Raises:
            InputError: the inputs do not match the model, or an output has no sample axis.
        """
        if self.manifest.groups is not None and transform is None and is_texts(inputs):
            return embed(self._state, list(inputs), batch_size)
        data = prediction_source(self._state, inputs, Options(batch_size), transform)
        with self.averaged():
            result = calibrated_outputs(self._state, self._state.run.predict(data.read(Pass())))
        return result if len(result) > 1 else next(iter(result.values()))

    @explains_arguments
    def predict_proba(
        self, inputs: Any, *, batch_size: int | None = None, transform: TransformFunction | None = None
    ) -> Array:
        """Predicts probabilities: applies the loss's activation to the model's logits.

        The activation is softmax over the classes for cross-entropy, the exponential for `nll`, and the sigmoid for
        losses of binary logits (`bce_with_logits`, `focal`, `tversky`). The model runs in inference mode.

        Args:
            inputs: see :meth:`predict`.
            batch_size: samples per batch, 32 by default.
            transform: see :meth:`predict`.

        Returns:
            Probabilities in the shape and dtype of the logits, e.g. float32 [samples, classes].

        Raises:
            InputError: the inputs do not match the model; or the loss has no activation, e.g. a regression loss; or it
                is unknown which axis of the logits is the class axis.

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

    @explains_arguments
    def confusion_matrix(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        batch_size: int | None = None,
        transform: TransformFunction | None = None,
    ) -> Array:
        """Computes the confusion matrix, int64 [classes, classes]: rows are true classes, columns predicted classes.

        A model with a single logit per sample predicts class 1 if the logit is positive. For the arguments, see
        :meth:`evaluate`. To plot the matrix, call `sklearn.metrics.ConfusionMatrixDisplay(matrix).plot()`.

        Raises:
            InputError: the data does not match the model, or the targets are not one class per sample, e.g. multilabel
                targets.
        """
        return confusion_matrix(
            self._state.task, *self._compared(inputs, targets, batch_size=batch_size, transform=transform)
        )

    def _compared(
        self, inputs: Any, targets: Any, *, batch_size: int | None, transform: TransformFunction | None
    ) -> tuple[Array, Array]:
        """Returns the predictions for a dataset, without calibration, and the targets."""
        state = self._state
        data = weighted_dataset(state, inputs, targets, None, Options(batch_size), transform)
        with self.averaged():
            steps = state.run.evaluate(data.read(Pass()))
            # Copied, because ONNX Runtime writes the next batch's outputs to the same memory.
            parts = [tuple(array.copy() for array in state.metric_arrays(step)) for step in steps]
        prediction, target = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return prediction, target

    @explains_arguments
    def calibrate(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        threshold: ThresholdMetric | None = None,
        batch_size: int | None = None,
        transform: TransformFunction | None = None,
    ) -> Calibration:
        """Calibrates a classifier on validation data: fits a temperature, and finds the best decision threshold.

        The scores (logits) are divided by the temperature with the least negative log-likelihood (Guo et al. 2017).
        Afterwards, probabilities say how often predictions are right; the order of the classes does not change.
        :meth:`predict`, :meth:`predict_proba` and :meth:`export` use the calibration, and so does a run that was saved
        and resumed. :meth:`evaluate` and training don't. The next :meth:`fit` removes it.

        Args:
            inputs: data that the model was not trained on; see :meth:`fit`. A pair `(inputs, targets)`, as for
                `validation` of :meth:`fit`, is accepted as well.
            targets: see :meth:`fit`.
            threshold: metric, "f1", "accuracy" or "mcc", for which to find the best threshold of a model with two
                classes. It is stored in exported models, from which `onnxtrain predict` reads it. The positive class is
                class 1, or `positive` of :class:`Trainer`.
            batch_size: samples per batch, 32 by default.
            transform: see :meth:`evaluate`.

        Returns:
            Temperature, threshold, and how good the probabilities were before and are now.

        Raises:
            InputError: the data does not match the model; the loss is not one of classes, or it is one of
                probabilities; or `threshold` is passed for a model that does not have two classes.

        Example:
            >>> import numpy as np, onnx
            >>> model = onnx.parser.parse_model('''
            ...   <ir_version: 10, opset_import: ["": 21]>
            ...   net (float[n, 1] x) => (float[n, 2] y) <float[1, 2] w = {0., 4.}> { y = MatMul(x, w) }''')
            >>> trainer = Trainer(model, "cross_entropy")
            >>> x, y = np.array([[1.0], [1.0], [1.0], [-1.0]]), np.array([1, 1, 0, 0])
            >>> found = trainer.calibrate(x, y)
            >>> round(found.temperature, 2), round(found.nll_before, 2), round(found.nll, 2)
            (3.64, 1.02, 0.56)
        """
        if targets is None and isinstance(inputs, tuple) and len(inputs) == 2:
            inputs, targets = inputs
        prediction, target = self._compared(inputs, targets, batch_size=batch_size, transform=transform)
        with self._state.lock:
            return calibrate(self._state, prediction, target, threshold)

    def plot_mistakes(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        count: int = 16,
        classes: Sequence[str] | None = None,
        batch_size: int | None = None,
        transform: TransformFunction | None = None,
    ) -> Figure:
        """Plots the images that a classifier is most wrong about, with their true and predicted classes.

        The worst mistakes come first: those with the least probability of the true class. Images of a folder are shown
        as they are; of arrays, the inputs of the model, scaled from their least to their greatest value. Notebooks
        display the figure, and `figure.savefig("mistakes.png")` writes it.

        Args:
            inputs: a folder of images, or arrays of images; see :meth:`fit`.
            targets: see :meth:`fit`.
            count: number of images to show.
            classes: names of the classes. Default: those of the folder that the run was trained on, or their indices.
            batch_size: samples per batch, 32 by default.
            transform: see :meth:`evaluate`.

        Raises:
            InputError: the data does not match the model, the targets are not one class per sample, or the inputs are
                not images.
            MissingPackageError: matplotlib is not installed.
        """
        count = check_integer("count", count)
        state = self._state
        data = weighted_dataset(state, inputs, targets, None, Options(batch_size), transform)
        images = bound_images(data)
        names = classes if classes is not None or images is None else images.classes
        return plot_mistakes(state, data, count, names)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the run to a directory from which :meth:`resume` restores it; creates the directory if missing.

        The first save to a directory copies the models, including external data. Saving is atomic: if the process is
        killed, the directory contains either all the old files or all the new ones. To write only the trained model, as
        an `.onnx` file, use :meth:`export`.

        Raises:
            InputError: `path` ends in `.onnx`, which is reserved for models; a run is a directory.
            CheckpointError: a file cannot be written; another trainer is using the directory, or has saved to it since
                this trainer last read or saved it; or the directory contains no run, but has files that the save would
                overwrite.
        """
        self._state.save(path)

    def save_parameters(self, path: str | os.PathLike[str]) -> None:
        """Saves the parameters and BatchNorm statistics to a checkpoint file, without the optimizer state.

        With `ema_decay`, saves the moving averages of both. To continue training later, save the run with :meth:`save`.

        Raises:
            InputError: `path` ends in `.onnx`, which is reserved for models; to write a model, use :meth:`export`.
            CheckpointError: the file cannot be written.
        """
        refuse_model_name(path, "Trainer.save_parameters", "a checkpoint")
        with self.averaged(), self._state.workers.writing() as writes:
            if writes:
                keep_inside(path, self.directory)
                CheckpointState.save_checkpoint(self.state, path)

    def load_parameters(self, path: str | os.PathLike[str]) -> None:
        """Loads parameters and statistics from a checkpoint file of the same model.

        With `ema_decay`, the moving averages restart from the new parameters. Nothing else changes.

        Raises:
            CheckpointError: the file is missing or damaged, or belongs to a different model.
        """
        with self._state.lock:
            self._state.run.load_parameters(path)
            forget_calibration(self._state)
            # Otherwise the next step would average old and new parameters.
            self._state.position.averaged = 0

    def averaged(self) -> AbstractContextManager[None]:
        """Context manager that temporarily replaces parameters and BatchNorm statistics with their moving averages.

        :meth:`evaluate`, :meth:`predict`, :meth:`export`, :meth:`save_parameters`, validation and `restore_best` always
        use the averages, with or without this context manager. It is a no-op without `ema_decay`, and before the
        first step. Other threads that use the trainer wait until the block ends.
        """
        return self._state.averaged()

    @explains_arguments
    def export(
        self,
        path: str | os.PathLike[str],
        outputs: Sequence[str] | None = None,
        *,
        include_preprocessing: bool = False,
    ) -> None:
        """Writes the trained model as an ordinary `.onnx` file for inference.

        The file has the inputs and outputs of the original model, without loss, targets and gradients;
        BatchNormalization and Dropout are in inference mode.

        Args:
            path: file to write.
            outputs: names of values to export as outputs, instead of the original model's outputs.
            include_preprocessing: True to write the preprocessing of images into the file, for a run that was trained
                on a folder of images. The input is then uint8 [batch, height, width, channels]: decoded images of any
                size, in RGB. The file resizes, crops and normalizes them as in training; Pillow 13 may resize
                along the other axis first, so that rounded pixel values differ by 1.

        Raises:
            InputError: a name in `outputs` is unknown; or the preprocessing is unknown, or cannot be written into the
                file.
            ModelError: the file cannot be written.
        """
        include = check_switch(argument("include_preprocessing"), include_preprocessing)
        names = outputs if outputs is None or isinstance(outputs, str) else list(outputs)
        with self.averaged(), self._state.workers.writing() as writes:
            if writes:
                keep_inside(path, self.directory)
                export(self._state, path, names, include_preprocessing=include)

    @explains_arguments
    def verify_export(
        self,
        path: str | os.PathLike[str],
        inputs: Any,
        *,
        batch_size: int | None = None,
        transform: TransformFunction | None = None,
    ) -> dict[str, float]:
        """Runs an exported file on a batch, and compares its outputs with those of :meth:`predict`.

        Args:
            path: file that :meth:`export` wrote.
            inputs: see :meth:`predict`; only the first batch is used.
            batch_size: samples in the batch, 32 by default.
            transform: see :meth:`predict`.

        Returns:
            Largest absolute difference of each output, e.g. {"logits": 1.2e-07}.

        Raises:
            InputError: the inputs do not match the model, or the file takes inputs that the data lacks.
            ModelError: the outputs differ by more than rounding (0.1 % of the largest value), or the file is damaged.
        """
        state = self._state
        if self.manifest.groups is not None and transform is None and is_texts(inputs):
            arrays = text_arrays(state, list(inputs)[: batch_size or 32])
        else:
            data = prediction_source(state, inputs, Options(batch_size), transform)
            arrays = next(iter(data.read(Pass())))
        return verify_export(state, Path(path), arrays)

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
        """Writes a model card: a README.md that lists the model's inputs, dataset sizes, options, metrics and versions.

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
        """Parameters, statistics and properties, as used by the functions and classes of `onnxtrain.api`."""
        return self._state.run.state

    @property
    def lock(self) -> StateLock:
        """Lock on the trainer's state; while a thread holds it, other threads wait, and a running fit pauses.

        Hold it (`with trainer.lock:`) to read several :attr:`parameters`, which are live views, consistently while
        another thread runs :meth:`fit`.
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
        """Arguments of the current or last fit, even if it was interrupted; None before the first fit."""
        return self._state.position.plan

    @property
    def resume_hint(self) -> str:
        """Message shown after Ctrl-C, which explains how to resume; `{}` is replaced with the directory."""
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
        """Index of the class that f1, precision, recall and auroc measure; None if not passed to :class:`Trainer`."""
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
        """Base learning rate, without the schedule's factor. Setting it takes effect in the next step."""
        return self._state.position.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._state.position.learning_rate = check_learning_rate(value)

    @property
    def current_learning_rate(self) -> float:
        """Learning rate of the last step, including the schedule's factor."""
        return self._state.run.optimizer.get_learning_rate()

    @property
    def learning_rate_scales(self) -> dict[str, float]:
        """Factor of :attr:`learning_rate` for each trained parameter, e.g. {"conv.weight": 0.75, "head.weight": 1.0}.

        See `layer_decay` and `learning_rate_scale` of :class:`onnxtrain.Recipe`.
        """
        return learning_rate_scales(self.manifest)

    @property
    def global_step(self) -> int:
        """Number of optimizer steps, over all fits."""
        return self._state.position.step


class Callback:
    """Base class for callbacks: override the methods that you need.

    A callback's attributes are not saved with the run. To make the same decisions in a resumed run, read what you need
    from `trainer.history`, e.g. the best loss so far, instead of storing it in an attribute.
    """

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Called once, before the first step of a fit or of a resumed fit."""

    def on_gradients(self, trainer: Trainer, gradients: StepGradients) -> None:
        """Called in each step after the gradients are computed and before they are clipped and used by the optimizer.

        The trainer's lock is held during the call: do not wait for another thread that uses the trainer.
        """

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        """Called after each optimizer step; `loss` is the mean loss of the step's samples."""

    def on_evaluation(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Called after each evaluation in the middle of an epoch (`evaluate_every` of :meth:`Trainer.fit`).

        `values` is the last entry of `trainer.history.evaluations`, e.g. {"step": 50, "epoch": 2, "val_loss": 0.4}.
        """

    def on_epoch_end(self, trainer: Trainer, history: History) -> None:
        """Called after each epoch. `history.last` is the epoch's entry; `trainer.stop_training()` ends the fit."""

    def on_fit_end(self, trainer: Trainer, history: History) -> None:
        """Called once at the end of a fit, even if the fit was stopped or interrupted."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Called instead of `on_fit_end` if the fit raises an exception, which is then re-raised.

        A loss that is NaN or infinite raises a `DivergenceError` before `on_step_end` is called.
        """

    def _saves_after_step(self, step: int) -> bool:
        """True if the callback saves the run after this step; the fit then checks the new parameters for NaN first."""
        return False

    def _frozen_until(self, trainer: Trainer) -> Mapping[str, int]:
        """Returns the parameters and statistics to freeze, each with the number of epochs after which it is trained."""
        return {}

    def _sets_parameters_at_end(self) -> str | None:
        """Returns the callback's name for error messages if it sets the parameters after a fit, otherwise None."""
        return None


class _CallbackEvents(Events):
    """Dispatches the events of a fit to callbacks, in order."""

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
