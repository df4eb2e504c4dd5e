"""What a trainer trains and where it stands: one object that `Trainer` shows and the training loop moves along."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from onnxtrain._words import argument
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.atomic import FileSet
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.lock import StateLock
from onnxtrain.trainer._ema import AVERAGE, MovingAverage
from onnxtrain.trainer._metrics import Averages, Metric, MetricSpec, default_metrics, make_metrics
from onnxtrain.trainer._position import CUSTOM, PROPERTY, Plan, Position, Settings
from onnxtrain.trainer._predictions import read_predictions, remove_other_predictions, write_predictions
from onnxtrain.trainer._run import Run, Step
from onnxtrain.trainer._schedule import Curve, ScheduleSpec, describe_schedule, make_schedule, named_schedule
from onnxtrain.trainer._sharing import FitGuard
from onnxtrain.trainer._snapshot import Snapshot
from onnxtrain.trainer._whole_metrics import Task
from onnxtrain.trainer._workspace import Workspace
from onnxtrain.trainer.data import (
    Layout,
    Options,
    Pass,
    Source,
    TransformFunction,
    open_source,
    split,
)

Validation = Any
"""`(inputs, targets)`, `(inputs, targets, sample_weight)`, a fraction, or what :meth:`Trainer.fit` takes as data."""

BEST = "best"
"""File of the trainer's directory with the parameters of the best epoch."""

_log = logging.getLogger("onnxtrain")


class Data(NamedTuple):
    """What a fit is given: see :meth:`Trainer.fit`."""

    inputs: Any
    targets: Any = None
    weights: Any = None
    batch_size: int | None = None
    validation: Validation = None
    transform: TransformFunction | None = None
    drop_last: bool = False
    limit: int | None = None


def scheduler_settings(spec: ScheduleSpec | None) -> dict[str, Any]:
    """Returns what :class:`Settings` keep of a schedule."""
    name, parameters = describe_schedule(spec) or (CUSTOM, {})
    return {"scheduler": name, "scheduler_parameters": parameters}


def _saved_schedule(directory: Path, settings: Settings, given: ScheduleSpec | None) -> Curve:
    """Returns the schedule that was saved, or a given one, with the warm-up that was saved.

    Raises:
        CheckpointError: What was saved is no schedule.
    """
    warmup = settings.warmup_steps, settings.warmup_ratio
    if given is not None:
        return make_schedule(given, *warmup)
    try:
        name = settings.scheduler
        return make_schedule(name and named_schedule(name, settings.scheduler_parameters), *warmup)
    except InputError as error:
        raise CheckpointError(
            f"Resuming from '{directory}': its schedule cannot be made again ({error}) It may have been written by a "
            "newer onnxtrain; upgrade."
        ) from error


class TrainingState:
    """A run, the position in it, and how it is measured.

    Attributes:
        run: the models and tensors.
        workspace: the directory.
        position: where training stands.
        settings: what the trainer was asked to do.
        schedule: factor of the learning rate.
        average: moving averages of what is trained, None for none.
        task: what predictions and targets mean.
        metrics: what is recorded beside the loss.
        validating: whether the fit under way validates.
        guard: knows whether a fit is under way.
        resume_hint: what is said of going on after Ctrl-C; `{}` stands for the directory.
    """

    def __init__(
        self,
        run: Run,
        workspace: Workspace,
        position: Position,
        settings: Settings,
        schedule: Curve,
        metrics: Sequence[MetricSpec] | None,
    ) -> None:
        self.run = run
        self.workspace = workspace
        self.position = position
        self.settings = settings
        self.schedule = schedule
        self.average = None
        if settings.ema_decay is not None:
            self.average = MovingAverage(run.store, settings.ema_decay)
        self.validating = False
        self.guard = FitGuard(run.lock)
        self.resume_hint = "Trainer.resume('{}') and the same fit go on."
        measurable = bool(run.manifest.targets) and settings.prediction is not None
        target = run.manifest.targets[0] if run.manifest.targets else None
        self.task = Task(target, settings.loss, settings.positive)
        self.task.check()
        if metrics is None:
            metrics = default_metrics(self.task.target, settings.loss) if measurable else []
        self.metrics: list[Metric] = make_metrics(metrics, self.task)
        if not measurable and any(metric.looks_at_predictions for metric in self.metrics):
            raise InputError(
                "metrics need a target, and a prediction among the model's outputs; pass metrics=[]."
            )
        if run.manifest.loss_mean is None and any(metric.name == "perplexity" for metric in self.metrics):
            raise InputError("The perplexity is the exponential of a mean loss, and this loss is a sum.")

    @classmethod
    def load(
        cls,
        directory: Path,
        metrics: Sequence[MetricSpec] | None,
        scheduler: ScheduleSpec | None,
        device: str,
        threads: int | None,
    ) -> TrainingState:
        """Returns the state that :meth:`save` wrote; see :meth:`Trainer.resume`."""
        run = Run(directory, device, threads)
        predictions = False
        if PROPERTY in run.state.properties:
            text = str(run.state.properties[PROPERTY])
            position, settings, predictions = Position.from_json(text, f"'{directory}'")
            if threads is not None:
                settings = replace(settings, threads=threads)
            if settings.prediction is not None and settings.prediction not in run.outputs:
                raise CheckpointError(
                    f"Resuming from '{directory}': its metrics look at '{settings.prediction[:60]}', which the models "
                    f"do not return (outputs: {', '.join(run.outputs)}). The checkpoint is of another run, or corrupt."
                )
        else:  # artifacts that no trainer has touched
            rate = run.store.optimizer.learning_rate if run.store.optimizer is not None else 1e-3
            position = Position(seed=0, learning_rate=rate)
            settings = Settings(prediction=next(iter(run.outputs), None))
        for name, given, saved in (
            ("metrics", metrics, settings.metrics or ()),
            ("scheduler", scheduler, (settings.scheduler,)),
        ):
            if given is None and CUSTOM in saved:
                raise InputError(
                    f"Resuming from '{directory}': its {name} included a function, which is not saved. Pass "
                    f"{name}=... again."
                )
        if scheduler is not None:
            settings = replace(settings, **scheduler_settings(scheduler))
        schedule = _saved_schedule(directory, settings, scheduler)
        chosen = settings.metrics if metrics is None else metrics
        state = cls(run, Workspace(directory), position, settings, schedule, chosen)
        state._check_metrics(predictions)
        if predictions:
            read_predictions(directory, position)
        if state.average is not None and position.averaged:
            state.average.read(directory / AVERAGE)
        state._tell_of_random_ops()
        state.workspace.note()
        return state

    def _check_metrics(self, predictions: bool) -> None:
        """Raises InputError where the sums of an unfinished epoch are those of other metrics."""
        sums = set(self.position.averages.sums) - {"loss"}
        wanted = {metric.name for metric in self.metrics if metric.measure is not None}
        whole = any(metric.function is not None for metric in self.metrics)
        if self.position.batch and (sums != wanted or (predictions and not whole)):
            raise InputError(
                f"Resuming from '{self.directory}': it was interrupted in the middle of an epoch with other metrics "
                f"than {', '.join(metric.name for metric in self.metrics) or 'none'}. Pass the same ones."
            )

    def _tell_of_random_ops(self) -> None:
        if self.position.unfinished and self.settings.random:
            _log.warning(
                "The model draws random numbers in %s, which start anew: the result will not be bit-equal to that of "
                "a run without interruption.",
                ", ".join(self.settings.random),
            )

    @property
    def lock(self) -> StateLock:
        """Held while anything here is read or changed, but not while a fit reads its data or calls callbacks."""
        return self.run.lock

    @contextlib.contextmanager
    def fitting(self) -> Iterator[None]:
        """Marks a fit as under way until the block ends, and keeps other trainers out of the directory.

        Raises:
            TrainingStateError: Another fit of this trainer is under way.
            CheckpointError: Another trainer is at work in the directory, or has saved there.
        """
        applied = self.average is not None and self.average.is_applied
        with self.guard.fitting(applied), self.workspace.locked():
            self.workspace.require_own("Trainer.fit()")
            yield

    def abandon(self) -> None:
        """Makes the next fit a new one; see :meth:`Trainer.abandon_fit`."""
        with self.lock:
            self.guard.require_none("Trainer.abandon_fit()", elsewhere=True)
            self.position.abandon()

    @property
    def directory(self) -> Path:
        """Where the files of the run are."""
        return self.workspace.path

    @property
    def recorded_keys(self) -> list[str]:
        """What the fit under way records for each epoch."""
        keys = ["loss", *(metric.name for metric in self.metrics)]
        return [*keys, *(f"val_{key}" for key in keys if self.validating)]

    def check_schedule(self, plan: Plan, per_epoch: int | None) -> None:
        """Raises InputError, or warns, if the schedule over several fits is not long enough for a plan.

        `per_epoch` are the optimizer steps of an epoch, None if that is not known.
        """
        asked, total, position = plan.schedule_epochs, self.settings.total_steps, self.position
        if total is not None:
            if asked is not None:
                raise InputError(
                    f"The trainer has total_steps already; leave {argument('schedule_epochs')} out."
                )
            start = position.fit_start_step if position.unfinished else position.step
            last = start + plan.epochs * (per_epoch or 0)
            if last > total:
                _log.warning(
                    "The schedule is of total_steps=%d, and this fit ends with step %d: the steps beyond have the last "
                    "learning rate.",
                    total,
                    last,
                )
        if asked is None:
            return
        start = position.fit_start if position.unfinished else position.epoch
        last = start + plan.epochs
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < last:
            raise InputError(
                f"{argument('schedule_epochs', asked)} should be the number of epochs of all fits together that share "
                f"the schedule, counted from the trainer's first: at least {last}, which this fit ends with."
            )

    def loss_count(self, arrays: Sequence[Array]) -> float | None:
        """What the loss of a batch counts in the mean over batches; None where losses are summed."""
        mean = self.run.manifest.loss_mean
        return None if mean is None else mean.count(self.run.manifest.arguments, arrays)

    def add(self, averages: Averages, step: Step, count: float | None) -> None:
        """Adds loss and metrics of one batch to averages; `count` is what :meth:`loss_count` gives for it."""
        averages.add_loss(step.loss, count)
        if any(metric.looks_at_predictions for metric in self.metrics):
            averages.add_metrics(self.metrics, *self.judged(step), self.run.manifest.targets[0])

    def judged(self, step: Step) -> tuple[Array, Array]:
        """Returns the prediction and the target of a batch that metrics look at.

        Raises:
            InputError: There are none.
        """
        if self.settings.prediction is None or not self.run.manifest.targets:
            raise InputError("Metrics need a target, and a prediction among the model's outputs.")
        prediction = step.outputs[self.run.outputs.index(self.settings.prediction)]
        return prediction, step.arrays[len(self.run.manifest.inputs)]

    def datasets(self, data: Data) -> tuple[Source, Source | None]:
        """Returns the checked data to train on and to validate with; see :meth:`Trainer.fit`."""
        options = Options(data.batch_size, True, data.drop_last, data.limit)
        source = self.source(data.inputs, data.targets, data.weights, options, data.transform)
        validation = data.validation
        if validation is None:
            return source, None
        if isinstance(validation, float):
            source, held_out = split(source, validation, self.position.seed)
        else:
            try:
                held_out = self._validation_source(validation, data.batch_size)
            except InputError as error:
                raise InputError(f"Validation data: {error}") from error
        self._require_loss_of_incomplete(held_out)
        return source, held_out

    def _validation_source(self, validation: Any, batch_size: int | None) -> Source:
        pair = isinstance(validation, tuple) or (isinstance(validation, list) and len(validation) == 2)
        if isinstance(validation, list) and all(isinstance(entry, tuple | dict) for entry in validation):
            pair = False
        if pair and len(validation) not in (2, 3):
            raise InputError(
                f"validation must be (inputs, targets), (inputs, targets, sample_weight), a fraction or data that "
                f"brings its targets, received {type(validation).__name__} of {len(validation)}."
            )
        if isinstance(validation, str | int):
            raise InputError(
                f"validation must be (inputs, targets) or a fraction, received {type(validation).__name__}."
            )
        inputs, targets, weights = [*validation, None][:3] if pair else (validation, None, None)
        return self.source(inputs, targets, weights, Options(batch_size))

    def _require_loss_of_incomplete(self, held_out: Source) -> None:
        """Raises InputError where the model's batch is fixed and the loss of an incomplete one cannot be computed."""
        arrays = held_out.last() if self.run.batch_size is not None else None
        if arrays is not None and (self.run.weighted or not held_out.weighted):
            try:
                next(self.run.evaluate([arrays]))
            except InputError as error:
                raise InputError(f"Validation data: {error}") from error

    def source(
        self,
        inputs: Any,
        targets: Any,
        weights: Any,
        options: Options,
        transform: TransformFunction | None = None,
    ) -> Source:
        """Returns what reads the checked data."""
        layout, position = Layout.of(self.run.manifest), self.position
        if targets is not None and not layout.targets:
            raise InputError("The model computes its loss from its inputs alone; leave the targets out.")
        start = position.fit_start if position.unfinished else position.epoch
        at = Pass(position.seed, position.epoch, start) if options.training else Pass()
        return open_source(layout, inputs, targets, weights, options, transform, at)

    def weigh(self, *sources: Source | None, for_fit: bool = False) -> None:
        """Makes the models take weights for the samples if any of the sources has some, and all of them give some.

        Args:
            *sources: data, None for none.
            for_fit: whether it is the data of the fit that is about to begin.

        Raises:
            InputError: the loss cannot weigh samples.
            TrainingStateError: a fit without weights is under way.
        """
        given = [source for source in sources if source is not None]
        with self.lock:
            if not self.run.weighted and any(source.weighted for source in given):
                if not for_fit:  # the fit under way reads batches without weights
                    self.guard.require_none("Using sample weights for the first time")
                self.run.weigh()
            if self.run.weighted:
                for source in given:
                    source.layout = source.layout.with_weights()

    def inputs(self, data: Any, batch_size: int | None) -> Source:
        """Returns what reads the checked inputs for a prediction."""
        layout = Layout.of(self.run.manifest, predicting=True)
        return open_source(layout, data, options=Options(batch_size))

    def update_average(self) -> None:
        """Takes up what a step has trained in the moving averages, if there are any."""
        if self.average is not None:
            self.average.update(first=self.position.averaged == 0)
            self.position.averaged += 1

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Puts the moving averages, if there are any, in the place of what is trained until the block ends.

        No other thread uses the trainer in the meantime.
        """
        with self.lock:
            if self.average is None or not self.position.averaged:
                yield
                return
            with self.average.applied():
                yield

    def snapshot(self) -> Snapshot:
        """Returns a copy of everything that training changes."""
        averages = self.average.buffers.values() if self.average is not None else ()
        with self.lock:
            return Snapshot.take(self.run.store, self.position, averages)

    def evaluate(self, data: Source, prefix: str = "") -> dict[str, float]:
        """Returns the loss and the metrics over a data set, in inference mode."""
        averages = Averages()
        with self.averaged():
            for step in self.run.evaluate(data.read(Pass())):
                self.add(averages, step, self.loss_count(step.arrays))
        return averages.values(self.metrics, prefix)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything that :meth:`load` needs to a directory; see :meth:`Trainer.save`."""
        target = Path(path)
        with self.lock, self.workspace.saving(target):
            self._write(target)

    def _write(self, target: Path) -> None:
        self.run.state.properties[PROPERTY] = self.position.to_json(self.settings)
        try:
            self.run.save(target, companions=[BEST], write_more=self._write_more)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"Saving the run to '{target}' failed: {error}. Check that it is a directory, is writable and "
                "has room."
            ) from error
        remove_other_predictions(target, self.position)

    def _write_more(self, files: FileSet) -> None:
        write_predictions(files, self.position)
        if self.average is not None and self.position.averaged:
            with files.open(AVERAGE) as file:
                self.average.write(file)

    def save_and_keep(self) -> Path:
        """Saves into the trainer's own directory, and keeps that if it was temporary."""
        self.workspace.keep()
        self.save(self.directory)
        return self.directory
