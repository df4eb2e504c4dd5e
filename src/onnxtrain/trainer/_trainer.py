"""`Trainer`: from a model and data to a trained model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain._words import argument
from onnxtrain.errors import InputError
from onnxtrain.runtime.optimizer import check_learning_rate
from onnxtrain.trainer._build import build_run, loss_name, name_list, random_ops
from onnxtrain.trainer._callbacks import Callback, Events, callback_list
from onnxtrain.trainer._ema import check_decay
from onnxtrain.trainer._history import History
from onnxtrain.trainer._loop import FitLoop
from onnxtrain.trainer._metrics import MetricSpec, make_metrics
from onnxtrain.trainer._position import CUSTOM, MOST_THREADS, Plan, Position, Settings
from onnxtrain.trainer._report import make_report
from onnxtrain.trainer._results import TrainerResults
from onnxtrain.trainer._schedule import ScheduleSpec, make_schedule
from onnxtrain.trainer._state import Data, TrainingState, Validation, scheduler_settings
from onnxtrain.trainer._whole_metrics import check_positive
from onnxtrain.trainer._workspace import Workspace
from onnxtrain.trainer.data import Source, TransformFunction, warn_of_fixed_batch

if TYPE_CHECKING:
    from onnxtrain.artifacts import LossSpec, OptimizerSpec
    from onnxtrain.passes import ModelSource
    from onnxtrain.training.layer_modes import BatchNormMode
    from onnxtrain.training.training_graph import Precision


class Trainer(TrainerResults):
    """Trains an ONNX model on numpy arrays, with stock ONNX Runtime.

    Args:
        model: path of an `.onnx` file, `ModelProto` or `onnx_ir.Model`; it is not changed.
        loss: a loss of `onnxtrain.losses` or its name ("cross_entropy", "mse", ...), a `LossType`, or an
            onnxblock block; None when the model's first output is the loss.
        optimizer: an optimizer of `onnxtrain.optimizers` or its name ("adamw", "sgd", ...), with PyTorch's defaults:
            "adamw" is `torch.optim.AdamW`, weight decay 0.01 and eps 1e-8.
        learning_rate: the rate, or the highest one of a schedule.
        requires_grad: names of the parameters to train, or patterns such as "fc.*"; None trains all that are not
            frozen.
        frozen_params: names or patterns of parameters that stay as they are; here and above a single one may stand
            alone.
        metrics: names ("accuracy", "f1", "auroc", "mae", "r2", "top5_accuracy", "perplexity", ...) or functions
            `(prediction, target) -> float` of the arrays of a whole data set; None chooses what suits the loss, `[]`
            means none.
        positive: number of the class that "f1", "precision", "recall" and "auroc" are of, such as 0. Default: class 1
            where there are two, else the mean over classes.
        scheduler: a schedule of `onnxtrain.schedules` or its name ("linear" and "cosine" fall to zero at the end of
            a fit; "one_cycle", "step", "polynomial", ...), or a function `(step, total_steps) -> factor` of the
            learning rate.
        warmup_steps: optimizer steps over which the rate first rises to its full value.
        warmup_ratio: the same as a part of all steps.
        total_steps: optimizer steps of one schedule over all calls of :meth:`fit`, which then does not begin anew
            with each; see also its `schedule_epochs`.
        ema_decay: train as ever, but evaluate, predict with and export exponential moving averages of parameters and
            BatchNorm statistics, of which each step keeps this part, such as 0.999; see :meth:`averaged`.
        clip_grad_norm: scale all gradients down together when their common L2 norm is larger.
        clip_grad_value: clip each element of the gradients to plus or minus this value.
        batch_norm: "training" trains BatchNormalization and Dropout as such even if the model was exported
            for inference (an error where the exporter has left none of them), "inference" keeps the statistics
            fixed, "as_exported" does what the model says. For each layer by patterns, of which the first that matches
            decides: `{"backbone.*": "inference", "*": "training"}`.
        straight_through: whether gradients pass through rounding and quantisation as if these did nothing.
        precision: "bf16" trains with products and convolutions in bfloat16; see :func:`generate_artifacts`.
        recompute: whether to take less memory for some more time; see :func:`generate_artifacts`.
        sparse_gradients: embeddings of which only the rows that a batch reads are updated; see
            :func:`generate_artifacts`.
        loss_input_names: the output that is the prediction, where the model has several.
        directory: where the files of the run live; the state is saved there after every epoch. Default: a
            temporary directory, which is removed at the end unless an interrupted run was saved there.
        overwrite: replace a run that is in the directory already, once the new models are built; otherwise it is an
            error.
        seed: what shuffling, splitting and Dropout derive from.
        device: "cpu", "cuda" or "cuda:<index>".
        threads: how many threads each operation is computed with; None is onnxruntime's default, all cores. The last
            digits of results depend on it, so that it is saved with the run.

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
        recompute: bool = False,
        sparse_gradients: Sequence[str] | str | None = None,
        loss_input_names: Sequence[str] | str | None = None,
        directory: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        seed: int = 0,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        schedule = make_schedule(scheduler, warmup_steps, warmup_ratio)
        metrics = [metrics] if isinstance(metrics, str) else metrics
        make_metrics(metrics or [])
        check_positive(positive)
        inputs_of_loss = name_list(loss_input_names)
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise InputError(f"seed must be an integer >= 0, received {seed!r}.")
        position = Position(seed=int(seed), learning_rate=check_learning_rate(learning_rate))
        settings = Settings(
            loss=loss_name(loss),
            metrics=None if metrics is None else [m if isinstance(m, str) else CUSTOM for m in metrics],
            **scheduler_settings(scheduler),
            warmup_steps=warmup_steps,
            warmup_ratio=float(warmup_ratio),
            ema_decay=check_decay(ema_decay),
            total_steps=None if total_steps is None else _positive("total_steps", total_steps),
            threads=_threads(threads),
            positive=None if positive is None else int(positive),
        )
        workspace = Workspace.for_new_run(directory, overwrite=overwrite)
        with workspace.locked():
            run = build_run(
                model,
                workspace.path,
                device,
                settings.threads,
                loss=loss,
                optimizer=optimizer,
                requires_grad=name_list(requires_grad),
                frozen_params=name_list(frozen_params),
                clip_grad_norm=clip_grad_norm,
                clip_grad_value=clip_grad_value,
                batch_norm=batch_norm,
                straight_through=straight_through,
                precision=precision,
                recompute=recompute,
                sparse_gradients=name_list(sparse_gradients),
                loss_input_names=inputs_of_loss,
            )
            workspace.remove_earlier()
            workspace.note()
        prediction = inputs_of_loss[0] if inputs_of_loss else next(iter(run.outputs), None)
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
        """Returns the trainer that :meth:`save` wrote, or an interrupted fit, in the state it was in.

        The same call of :meth:`fit` then finishes an interrupted fit, bit for bit as if it had not been
        interrupted. (Where the model draws random numbers otherwise than by Dropout, a warning says that it is not
        so.)

        Args:
            path: the directory; it becomes the trainer's directory. Artifacts of `generate_artifacts` work
                too, also with a prefix.
            metrics: metrics to go on with; needed if the run had functions as metrics, which are not saved.
            scheduler: needed if the run had a function as schedule.
            device: where to train.
            threads: with how many threads; None for as many as it was begun with.

        Raises:
            CheckpointError: the directory does not hold a training run, or it is corrupt.
            InputError: functions that the run needs are missing, or other metrics are given in the middle of an
                epoch.
        """
        trainer = cls.__new__(cls)
        trainer._state = TrainingState.load(Path(path), metrics, scheduler, device, _threads(threads))
        return trainer

    def stop_training(self) -> None:
        """Ends the fit under way after the current epoch; for callbacks and other threads."""
        self._state.position.history.stopped = "early"

    def abandon_fit(self) -> None:
        """Makes the next fit a new one, which need not be what an interrupted one was.

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
    ) -> History:
        """Trains, and returns the record of all epochs so far.

        Ctrl-C finishes the step, saves the state and returns with `history.stopped == "interrupted"`; the
        same call, also after :meth:`resume`, then does what is left. A second Ctrl-C raises KeyboardInterrupt
        at once.

        Args:
            inputs: samples along axis 0; for several inputs a list in the model's order or a dict by name.
                Floating-point data is cast to the model's type. Or a frame of pandas or polars; a data set that gives
                samples by index (PyTorch's, Hugging Face's); a DataLoader; an iterable of batches
                `(inputs, targets)`, `(inputs, targets, sample_weight)` or dicts by name; a function that returns one.
            targets: as many samples; integers for class labels. None if the model needs none, or the data brings them.
                Of a frame also names of columns.
            epochs: passes over the data, further ones if the trainer has been fitted before.
            batch_size: samples per batch, 32 by default; the last batch may be smaller. A model that was
                exported with a fixed batch takes that, and the samples beyond the last full batch are left
                out of an epoch, with a warning; they are others in each epoch if shuffled.
            validation: `(inputs, targets)` to evaluate after each epoch, with weights as a third entry if there are
                some, other data that brings its targets, or the fraction of the samples to split off, at random.
            callbacks: see :class:`Callback`.
            shuffle: whether to take the samples in a new random order in each epoch.
            accumulate: batches per optimizer step; the gradient is that of the loss of all their samples
                together.
            schedule_epochs: how many epochs the schedule is of, counted from the trainer's first one, where several
                fits share one: two of 5 epochs with `schedule_epochs=10` are one of 10. Default: those of this fit.
            verbose: whether to show a progress bar (or a line per epoch where standard error is no terminal).
            sample_weight: a weight for each sample: the loss is sum(w·l) / sum(w), over all batches of a step. Metrics
                count each sample once.
            transform: augmentation, a function `(inputs, targets) -> (inputs, targets)` of the arrays of a batch,
                which is called in training only; a third argument, or one named `rng`, is a numpy Generator.
            steps_per_epoch: optimizer steps that make an epoch; needed where a stream does not end.
            drop_last: whether to leave out an incomplete last batch of each epoch.

        Raises:
            InputError: data or arguments do not fit; nothing has been trained.
            DivergenceError: the loss became NaN or infinite; the last good state has been restored and saved.
            TrainingStateError: a fit of this trainer is under way, in another thread or around this call.
        """
        epochs, accumulate = _positive("epochs", epochs), _positive("accumulate", accumulate)
        if steps_per_epoch is not None:
            steps_per_epoch = _positive("steps_per_epoch", steps_per_epoch)
        called = callback_list(callbacks)
        limit = None if steps_per_epoch is None else steps_per_epoch * int(accumulate)
        given = Data(
            inputs, targets, sample_weight, batch_size, validation, transform, bool(drop_last), limit
        )
        with self._state.fitting():
            data, held_out = self._state.datasets(given)
            of_validation = None
            if held_out is not None:
                of_validation = validation if isinstance(validation, float) else held_out.samples or 0
            plan = Plan(
                data.samples,
                data.batch_size,
                accumulate,
                bool(shuffle),
                epochs,
                of_validation,
                schedule_epochs,
                steps_per_epoch,
                bool(drop_last),
                weighted=data.weighted,
                transform=transform is not None,
            )
            self._carry_out(plan, data, held_out, Events(called, self), verbose)
        return self.history

    def _carry_out(
        self, plan: Plan, data: Source, held_out: Source | None, events: Events, verbose: bool
    ) -> None:
        """Trains as a plan says, on `data`, and evaluates on `held_out`."""
        state = self._state
        state.position.check(plan)
        state.check_schedule(plan, None if data.batches is None else -(-data.batches // plan.accumulate))
        state.weigh(data, held_out, for_fit=True)
        state.validating = held_out is not None
        warn_of_fixed_batch(state.run.batch_size, data.samples)
        try:
            FitLoop(state, data, held_out, plan, events, make_report(verbose)).run()
        except BaseException as error:
            events.exception(error)
            raise

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
    ) -> None:
        """Raises the InputError that :meth:`fit` would raise for this data; changes nothing.

        Of streams the first batch is looked at; of an iterator, which can be read once, nothing.
        """
        if isinstance(inputs, Iterator):
            return
        self._state.datasets(
            Data(inputs, targets, sample_weight, batch_size, validation, transform, drop_last)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything that :meth:`resume` needs to a directory, which is made if missing.

        The models are copied there once, with the files of their external data. All files change together: if the
        process is killed, the directory holds what it held before, or this run, complete.

        Raises:
            CheckpointError: a file cannot be written.
        """
        self._state.save(path)


def _threads(threads: int | None) -> int | None:
    """Returns a number of threads, None for the default; raises InputError unless it is one."""
    if threads is not None and _positive("threads", threads) > MOST_THREADS:
        raise InputError(f"threads must be {MOST_THREADS} at most, received {threads!r}.")
    return None if threads is None else int(threads)


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise InputError(f"{argument(name)} must be a positive integer, received {value!r}.")
    return int(value)
