"""State of a trainer: models and tensors, training position, metrics and moving averages.

`Trainer` is its public interface; `loop.py` and `step.py` update it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from onnxtrain._printable import get_logger
from onnxtrain._words import argument
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.atomic import FileSet
from onnxtrain.runtime.dtypes import Array
from onnxtrain.runtime.lock import StateLock
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.trainer._fit.fit_guard import FitGuard
from onnxtrain.trainer._fit.moving_average import MovingAverage
from onnxtrain.trainer._fit.schedule import (
    Curve,
    ScheduleSpec,
    describe_schedule,
    make_schedule,
    named_schedule,
)
from onnxtrain.trainer._fit.snapshot import Snapshot
from onnxtrain.trainer._fit.workers import Workers
from onnxtrain.trainer._metrics.metrics import (
    Averages,
    Metric,
    Metrics,
    complete,
    default_metrics,
    listed,
    make_metrics,
)
from onnxtrain.trainer._metrics.whole_set import Task
from onnxtrain.trainer._run.files import AVERAGE, BEST, SWA_AVERAGE, refuse_model_name
from onnxtrain.trainer._run.position import CUSTOM, PROPERTY, Plan, Position, Settings
from onnxtrain.trainer._run.predictions import read_predictions, remove_other_predictions, write_predictions
from onnxtrain.trainer._run.run import Run, Step
from onnxtrain.trainer._run.workspace import Workspace
from onnxtrain.trainer.data import Source, TransformFunction

_log = get_logger()


def scheduler_settings(spec: ScheduleSpec | None) -> dict[str, Any]:
    """Returns a schedule's name and parameters as values for the fields of :class:`Settings`."""
    name, parameters = describe_schedule(spec) or (CUSTOM, {})
    return {"scheduler": name, "scheduler_parameters": parameters}


def _saved_schedule(directory: Path, settings: Settings, passed: ScheduleSpec | None) -> Curve:
    """Restores the schedule of a saved run.

    Args:
        directory: directory of the run, for error messages.
        settings: saved settings of the run.
        passed: schedule that replaces the saved schedule, but not its warm-up; None to keep the saved schedule.

    Raises:
        CheckpointError: the saved schedule is unknown.
    """
    warmup = settings.warmup_steps, settings.warmup_ratio
    if passed is not None:
        return make_schedule(passed, *warmup)
    try:
        name = settings.scheduler
        return make_schedule(name and named_schedule(name, settings.scheduler_parameters), *warmup)
    except InputError as error:
        raise CheckpointError(
            f"Resuming from '{directory}': its schedule cannot be restored ({error}) It may have been "
            "written by a newer onnxtrain; upgrade."
        ) from error


class TrainingState:
    """State of a trainer: its run, its training position and its metrics.

    Attributes:
        run: models, sessions and tensors.
        workspace: directory of the run's files.
        position: epoch, batch and step reached, and the history.
        settings: the trainer's arguments that are saved with the run.
        schedule: learning rate schedule, including the warm-up.
        workers: the processes that train together.
        average: moving averages of parameters and statistics; None without `ema_decay`.
        task: description of predictions and targets, for metrics.
        metrics: metrics recorded in addition to the loss.
        validating: True during a fit with validation data.
        training_data: data of the current fit; None between fits.
        guard: guard that allows only one fit at a time.
        resume_hint: sentence shown after Ctrl-C; `{}` is replaced with the directory.
        transform: transform of the last fit of this process; None if it had none.
        image_origin: where to look for the preprocessing of the model's images: its path, or its metadata; None for a
            resumed run.
    """

    def __init__(
        self,
        run: Run,
        workspace: Workspace,
        position: Position,
        settings: Settings,
        schedule: Curve,
        metrics: Metrics | None,
        workers: Workers,
    ) -> None:
        self.run = run
        self.workspace = workspace
        self.position = position
        self.settings = settings
        self.schedule = schedule
        self.workers = workers
        self.average = None
        if settings.ema_decay is not None:
            self.average = MovingAverage(run.store)
        self.validating = False
        self.training_data: Source | None = None
        self.transform: TransformFunction | None = None
        self.image_origin: Path | Mapping[str, str] | None = None
        self.guard = FitGuard(run.lock)
        self.resume_hint = "Trainer.resume('{}') and the same call to fit resume it."
        # A model that computes its loss from its inputs alone has no target to compare predictions with.
        # Embeddings of several texts per sample are measured by `texts.py`.
        measurable = (
            bool(run.manifest.targets) and settings.prediction is not None and run.manifest.groups is None
        )
        target = run.manifest.targets[0] if run.manifest.targets else None
        self.task = Task(target, settings.loss, settings.positive)
        self.task.check()
        # `[]` means no metrics; None chooses the default metrics of the loss.
        if metrics is None:
            metrics = default_metrics(self.task.target, settings.loss) if measurable else []
            # Perplexity is the exponential of a mean, not of a sum.
            metrics = [name for name in metrics if name != "perplexity" or run.manifest.loss_mean is not None]
        targets = [spec for spec in run.manifest.targets if not spec.sample_weight]
        names = [spec.name for spec in targets]
        pairs = (
            targets
            if len(targets) == len(run.outputs)
            else targets * len(run.outputs)
            if len(targets) == 1
            else []
        )
        task = replace(self.task, of_outputs=dict(zip(run.outputs, pairs, strict=False)))
        self.metrics: list[Metric] = [
            complete(metric, run.outputs, names, settings.prediction) if measurable else metric
            for metric in make_metrics(listed(metrics), task)
        ]
        if not measurable and any(metric.looks_at_predictions for metric in self.metrics):
            raise InputError(
                "metrics need a target, and a prediction among the model's outputs; pass metrics=[]."
            )
        if run.manifest.loss_mean is None and any(metric.name == "perplexity" for metric in self.metrics):
            raise InputError("The perplexity is the exponential of a mean loss, but this loss is a sum.")

    @classmethod
    def load(
        cls,
        directory: Path,
        metrics: Metrics | None,
        scheduler: ScheduleSpec | None,
        device: str,
        threads: int | None,
        workers: Workers,
    ) -> TrainingState:
        """Restores the state from a directory that :meth:`save` or `generate_artifacts` wrote.

        Args:
            directory: directory of the run.
            metrics: metrics that replace the saved metrics; None to keep them.
            scheduler: schedule that replaces the saved schedule; None to keep it.
            device: execution device.
            threads: number of threads per op; None for the saved number.
            workers: the processes that train together.

        Raises:
            CheckpointError: the directory does not contain a run, or the run is damaged.
            InputError: `metrics` or `scheduler` is required but missing, or `metrics` differs from the saved metrics in
                the middle of an epoch.
        """

        def begin() -> tuple[Workspace, Run]:
            workspace = Workspace(directory)
            run = Run(workspace.path, device, threads)
            if PROPERTY not in run.state.properties:
                workspace.require_settings(trainer=run.manifest.trainer)
            return workspace, run

        workspace, run = workers.open(begin, device, threads)
        # Workers other than worker 0 have a directory of their own.
        directory = run.directory
        predictions = False
        if PROPERTY in run.state.properties:
            text = str(run.state.properties[PROPERTY])
            position, settings, predictions = Position.from_json(text, f"'{directory}'")
            if threads is not None:
                settings = replace(settings, threads=threads)
            if not position.step:
                # The first checkpoint has no optimizer state.
                run.optimizer.set_learning_rate(position.learning_rate)
            if settings.prediction is not None and settings.prediction not in run.outputs:
                raise CheckpointError(
                    f"Resuming from '{directory}': its metrics read the output "
                    f"'{settings.prediction[:60]}', which the models do not return (outputs: "
                    f"{', '.join(run.outputs)}). The checkpoint belongs to another run, or is corrupt."
                )
        else:
            # Artifacts of generate_artifacts have neither position nor settings: training starts at step 0. Without
            # optimizer state in the checkpoint, the learning rate is the default of `api.Optimizer`.
            rate = run.store.optimizer.learning_rate if run.store.optimizer is not None else 1e-3
            position = Position(seed=0, learning_rate=rate)
            settings = Settings(prediction=next(iter(run.outputs), None))
        # Functions are not saved: whoever opened the file would run its code.
        for name, passed, saved in (
            ("metrics", metrics, settings.metrics or ()),
            ("scheduler", scheduler, (settings.scheduler,)),
        ):
            if passed is None and CUSTOM in saved:
                raise InputError(
                    f"Resuming from '{directory}': its {name} included a function, which is not saved. Pass "
                    f"{name}=... again."
                )
        if scheduler is not None:
            settings = replace(settings, **scheduler_settings(scheduler))
        schedule = _saved_schedule(directory, settings, scheduler)
        chosen = settings.metrics if metrics is None else metrics
        state = cls(run, workspace, position, settings, schedule, chosen, workers)
        state._check_metrics(predictions)
        if predictions:
            read_predictions(directory, position)
        if state.average is not None and position.averaged:
            state.average.read(directory / AVERAGE)
        state._warn_of_random_ops()
        state.workspace.note()
        return state

    def _check_metrics(self, predictions: bool) -> None:
        """Raises InputError if a run saved in the middle of an epoch recorded metrics other than :attr:`metrics`.

        Args:
            predictions: True if predictions were saved, which only some metrics need.
        """
        sums = set(self.position.averages.sums) - {"loss"}
        metric_keys = {metric.name for metric in self.metrics if metric.measure is not None}
        needs_predictions = any(metric.function is not None for metric in self.metrics)
        # Other metrics cannot be completed: the batches before the interruption are not read again.
        if self.position.batch and (sums != metric_keys or (predictions and not needs_predictions)):
            raise InputError(
                f"Resuming from '{self.directory}': it was interrupted in the middle of an epoch with other metrics "
                f"than {', '.join(metric.name for metric in self.metrics) or 'none'}. Pass the same ones."
            )

    def _warn_of_random_ops(self) -> None:
        if self.position.unfinished and self.settings.random:
            _log.warning(
                "The model draws random numbers in %s, which restart in evaluation and in subgraphs: their results "
                "will not be bit-equal to those of an uninterrupted run.",
                ", ".join(self.settings.random),
            )

    @property
    def lock(self) -> StateLock:
        """Lock to hold while reading or changing the state. A fit releases it to read data and to call callbacks."""
        return self.run.lock

    @contextlib.contextmanager
    def fitting(self) -> Iterator[None]:
        """Context manager that marks a fit as running, and keeps other trainers out of the directory.

        Raises:
            TrainingStateError: another fit of this trainer is running, or moving averages replace the trained values.
            CheckpointError: another trainer is working in the directory, or has saved there.
        """
        # Within `with trainer.averaged()`, a fit would train the averages, and lose its steps at the end of the block.
        applied = self.average is not None and self.average.is_applied
        with self.guard.fitting(applied), self.workspace.locked():
            self.workspace.require_own("Trainer.fit()")
            yield

    def abandon(self) -> None:
        """Discards an interrupted fit, so that the next call to `Trainer.fit` starts a new fit instead of resuming it.

        Raises:
            TrainingStateError: a fit is running in another thread.
        """
        with self.lock:
            self.guard.require_no_fit("Trainer.abandon_fit()", elsewhere=True)
            self.position.abandon()

    @property
    def directory(self) -> Path:
        """Directory of the run's files."""
        return self.workspace.path

    @property
    def recorded_keys(self) -> list[str]:
        """Keys that the current fit records for each epoch."""
        keys = ["loss", *(metric.name for metric in self.metrics)]
        return [*keys, *(f"val_{key}" for key in keys if self.validating)]

    @property
    def run_settings(self) -> dict[str, Any]:
        """Settings of the trainer and of its last fit by name, for loggers and model cards."""
        position, optimizer = self.position, self.run.manifest.optimizer
        return {
            **asdict(self.settings),
            **({} if position.plan is None else asdict(position.plan)),
            "optimizer": None if optimizer is None else optimizer.type,
            "optimizer_settings": {} if optimizer is None else dict(optimizer.settings),
            "learning_rate": position.learning_rate,
            "seed": position.seed,
        }

    def check_schedule(self, plan: Plan, per_epoch: int | None) -> None:
        """Checks that a schedule shared by several fits does not end before the next fit.

        The length of the schedule is `schedule_epochs` or `total_steps`. Exceeding `total_steps` only causes a warning,
        because a constant learning rate after the end of the schedule may be intended.

        Args:
            plan: arguments of the next fit.
            per_epoch: optimizer steps per epoch; None if unknown.

        Raises:
            InputError: `schedule_epochs` is not an integer, is less than the last epoch of the next fit, or was passed
                although the trainer has `total_steps`.
        """
        epochs, total, position = plan.schedule_epochs, self.settings.total_steps, self.position
        if total is not None:
            if epochs is not None:
                raise InputError(
                    f"The trainer already has total_steps; leave {argument('schedule_epochs')} out."
                )
            start = position.fit_start_step if position.unfinished else position.step
            last = start + plan.epochs * (per_epoch or 0)
            # Only a warning: a constant learning rate after the end of the schedule may be intended.
            if last > total:
                _log.warning(
                    "The schedule has total_steps=%d, but this fit ends with step %d: the steps beyond "
                    "the schedule use its last learning rate.",
                    total,
                    last,
                )
        if epochs is None:
            return
        start = position.fit_start if position.unfinished else position.epoch
        last = start + plan.epochs
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < last:
            raise InputError(
                f"{argument('schedule_epochs', epochs)} is the total number of epochs of all calls to fit "
                "that share the schedule, counted from the trainer's first epoch; it must be at least "
                f"{last}, the last epoch of this call."
            )

    def loss_count(self, arrays: Sequence[Array]) -> float | None:
        """Returns the weight of a batch in the mean loss, e.g. its number of labels; None if losses are summed."""
        mean = self.run.manifest.loss_mean
        return None if mean is None else mean.count(self.run.manifest.arguments, arrays)

    def add(self, averages: Averages, step: Step, count: float | None) -> None:
        """Adds the loss and the metrics of one batch to `averages`; `count` is its weight from :meth:`loss_count`."""
        averages.add_loss(step.loss, count)
        if any(metric.looks_at_predictions for metric in self.metrics):
            manifest = self.run.manifest
            named: dict[str, tuple[Array, InputSpec | None]] = {
                name: (array, None) for name, array in zip(self.run.outputs, step.outputs, strict=False)
            }
            arrays = step.arrays[len(manifest.inputs) :]
            named |= {spec.name: (a, spec) for spec, a in zip(manifest.targets, arrays, strict=False)}
            averages.add_metrics(self.metrics, *self.metric_arrays(step), manifest.targets[0], named)

    def metric_arrays(self, step: Step) -> tuple[Array, Array]:
        """Returns the prediction and the target of a batch, for metrics.

        Raises:
            InputError: the run has no prediction or no target.
        """
        if self.settings.prediction is None or not self.run.manifest.targets:
            raise InputError("Metrics need a target, and a prediction among the model's outputs.")
        prediction = step.outputs[self.run.outputs.index(self.settings.prediction)]
        return prediction, step.arrays[len(self.run.manifest.inputs)]

    def update_average(self) -> None:
        """Updates the moving averages after a step, if there are any."""
        decay = self.settings.ema_decay
        if self.average is not None and decay is not None:
            # The first update copies the values.
            self.average.update(1.0 - decay if self.position.averaged else 1.0)
            self.position.averaged += 1

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Context manager that replaces the trained values with their moving averages, if there are any.

        Other threads that use the trainer wait for the end of the block.
        """
        with self.lock:
            # The averages are zeros before the first step.
            if self.average is None or not self.position.averaged:
                yield
                return
            with self.average.applied():
                yield

    def snapshot(self) -> Snapshot:
        """Returns an in-memory copy of everything that training changes."""
        # Moving averages return to the snapshot together with the values.
        averages = self.average.buffers.values() if self.average is not None else ()
        with self.lock:
            return Snapshot.take(self.run.store, self.position, averages)

    def evaluate(self, data: Source, prefix: str = "") -> dict[str, float]:
        """Computes the loss and the metrics over a dataset, in inference mode; adds `prefix` to their names."""
        averages = Averages()
        with self.averaged():
            for step in self.run.evaluate(self.workers.read_share(data)):
                self.add(averages, step, self.loss_count(step.arrays))
        total = self.workers.total(averages, self.metrics, summed=self.run.manifest.loss_mean is None)
        return total.values(self.metrics, prefix)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the run to a directory from which :meth:`load` can restore it."""
        target = Path(path).absolute()
        refuse_model_name(path, "Trainer.save", "a directory with all that Trainer.resume needs")
        with self.lock, self.workers.saving(self.run.store) as writes:
            if writes:
                with self.workspace.saving(target):
                    self._write(target)

    def _write(self, target: Path) -> None:
        # The position is a property of the checkpoint, not a separate file, so that one rename saves both.
        self.run.state.properties[PROPERTY] = self.position.to_json(self.settings)
        try:
            self.run.save(target, companions=[BEST], write_more=lambda files: self._write_more(files, target))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"Saving the run to '{target}' failed: {error}. Check that it is a directory, is writable and "
                "has free space."
            ) from error
        remove_other_predictions(target, self.position)

    def _write_more(self, files: FileSet, target: Path) -> None:
        write_predictions(files, self.position)
        if self.average is not None and self.position.averaged:
            with files.open(AVERAGE) as file:
                self.average.write(file)
        # The callback has written them to the trainer's own directory.
        averages = self.directory / SWA_AVERAGE
        if averages.is_file() and target.resolve() != self.directory.resolve():
            files.copy(averages, SWA_AVERAGE)

    def save_and_keep(self) -> Path:
        """Saves the run to the trainer's own directory and returns its path.

        If this directory is temporary, it is kept when the process ends.
        """
        # Otherwise an interrupted run in a temporary directory would be lost when the process ends.
        self.workspace.keep()
        self.save(self.directory)
        return self.directory
