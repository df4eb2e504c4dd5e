"""Defines the position of a training run: everything needed to resume it except tensors, saved as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, get_type_hints

from onnxtrain._words import argument
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.runtime.state import Properties
from onnxtrain.trainer._checks import check_integer, check_types
from onnxtrain.trainer._metrics.metrics import Averages
from onnxtrain.trainer._run.history import History

PROPERTY = "onnxtrain.trainer"
"""Name of the checkpoint property that contains the position as JSON text."""


MOST_THREADS = 4096
"""Upper limit of `threads`: ONNX Runtime starts all threads at once, and a larger number is probably a typo."""

CUSTOM = "custom"
"""Placeholder for a function in settings, because functions are not saved."""


@dataclass(frozen=True)
class Settings:
    """Arguments of `Trainer` that are saved in the checkpoint, so that the run can be resumed.

    Attributes:
        loss: class name of the loss.
        prediction: name of the output that metrics compare with the target; None if there is none.
        metrics: names of the metrics, :data:`CUSTOM` for functions; None for the default of the loss.
        scheduler: name of the schedule; None for no schedule, :data:`CUSTOM` for a function.
        scheduler_parameters: parameters of the schedule by name, e.g. {"end_factor": 0.1}.
        warmup_steps: number of warm-up steps.
        warmup_ratio: fraction of all steps over which the learning rate is warmed up.
        total_steps: length of a single schedule for all fits, in optimizer steps; None for one schedule per fit.
        ema_decay: decay of the moving averages; None for no averages.
        threads: number of threads per op; None for ONNX Runtime's default.
        positive: index of the class that f1, precision, recall and auroc measure; None for class 1 if there are two
            classes, otherwise for the mean over all classes.
        random: op types with a random state that checkpoints cannot contain, e.g. ["RandomNormal"]. A resumed run
            restarts their random numbers in evaluation and in subgraphs.
    """

    loss: str = ""
    prediction: str | None = None
    metrics: list[str] | None = None
    scheduler: str | None = None
    scheduler_parameters: dict[str, int | float | str | list[int]] = field(default_factory=dict)
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    total_steps: int | None = None
    ema_decay: float | None = None
    threads: int | None = None
    positive: int | None = None
    random: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """Arguments of a call to `fit`, saved in the checkpoint; an interrupted fit resumes only with the same arguments.

    Exception: `epochs` may change.

    Attributes:
        samples: number of samples; None for a stream.
        batch_size: samples per batch; None for a stream.
        accumulate: batches per optimizer step.
        shuffle: True to shuffle the samples in each epoch.
        epochs: number of epochs of the fit.
        validation: fraction that was split off, or number of validation samples (0 if unknown); None for no validation.
        schedule_epochs: length of a schedule for several fits, in epochs counted from the trainer's first epoch; None
            for one schedule per fit.
        steps_per_epoch: optimizer steps per epoch; None for a full pass over the data.
        limit_batches: number or fraction of the batches of each pass over the data; None for all.
        drop_last: True to drop an incomplete last batch.
        weighted: True if samples have weights.
        class_weight: weight of each class in the loss, e.g. [0.6, 3.0]; None for equal weights.
        stratify: True if the validation split has the same fraction of each class.
        evaluate_every: optimizer steps between evaluations in the middle of epochs; None to evaluate only after epochs.
        transform: True if batches are augmented. The function itself is not saved, so a resumed fit may pass a
            different function without an error.
        images: settings of a folder of images that change the model's inputs, as text; None for other data.
    """

    samples: int | None
    batch_size: int | None
    accumulate: int
    shuffle: bool
    epochs: int
    validation: float | int | None
    schedule_epochs: int | None = None
    steps_per_epoch: int | None = None
    limit_batches: int | float | None = None
    drop_last: bool = False
    weighted: bool = False
    transform: bool = False
    class_weight: list[float] | None = None
    stratify: bool = False
    evaluate_every: int | None = None
    images: str | None = None

    def differences(self, other: Plan) -> str:
        """Describes the differences between two plans for an error message, e.g. "epochs 6, now 7"."""
        ours, theirs = asdict(self), asdict(other)
        return ", ".join(f"{key} {ours[key]}, now {theirs[key]}" for key in ours if ours[key] != theirs[key])


class Progress(NamedTuple):
    """Progress of a schedule: current step, total number of steps (None if unknown), and current epoch."""

    step: int
    total: int | None
    epoch: int


@dataclass
class Position:
    """Position of a training run: everything needed to resume it, except tensors.

    Attributes:
        seed: seed of shuffling, splitting and Dropout.
        learning_rate: learning rate before the schedule's factor.
        epoch: number of finished epochs, over all fits.
        batch: number of batches done in the current epoch.
        step: number of optimizer steps, over all fits.
        averaged: number of optimizer steps in the moving averages.
        fit_start: value of `epoch` when the current or last fit began.
        fit_start_step: value of `step` when that fit began.
        unfinished: True if that fit was interrupted or is running.
        plan: arguments of that fit.
        skipped: number of optimizer steps during which a parameter was frozen, by name; empty if none ever was.
        stream: states of a stream's random generators at the start of the current pass, as text.
        averages: sums of loss and metrics over the current epoch.
        history: record of all epochs.
    """

    seed: int
    learning_rate: float
    epoch: int = 0
    batch: int = 0
    step: int = 0
    averaged: int = 0
    fit_start: int = 0
    fit_start_step: int = 0
    unfinished: bool = False
    plan: Plan | None = None
    skipped: dict[str, int] = field(default_factory=dict)
    stream: str | None = None
    averages: Averages = field(default_factory=Averages)
    history: History = field(default_factory=History)

    def check(self, plan: Plan) -> None:
        """Raises InputError if an interrupted fit cannot be resumed with this plan.

        Only the number of epochs may differ. It counts from the start of the fit, as in the interrupted call.
        """
        if not self.unfinished or self.plan is None:
            return
        if self.plan != replace(plan, epochs=self.plan.epochs):
            where = f"in the middle of epoch {self.epoch + 1}" if self.batch else f"after epoch {self.epoch}"
            raise InputError(
                f"The last call to fit was interrupted {where}, and this call differs from it "
                f"({self.plan.differences(plan)}). Pass the same data and arguments to resume it, or call "
                "abandon_fit() first to start a new fit from here."
            )
        # With fewer, part of an epoch would be trained and never recorded.
        done, begun = self.epoch - self.fit_start, bool(self.batch)
        if plan.epochs < done + begun:
            raise InputError(
                f"{argument('epochs', plan.epochs)} is the length of the whole fit, of whose {self.plan.epochs} epochs "
                f"{done} {'are done and the next one has begun' if begun else 'are done'}. Pass at least "
                f"{argument('epochs', done + begun)}."
            )

    def begin(self, plan: Plan) -> dict[str, Any]:
        """Starts a new fit, or resumes an interrupted one; returns the state that :meth:`undo` restores."""
        names = ("fit_start", "fit_start_step", "unfinished", "plan")
        before = {name: getattr(self, name) for name in names} | {"stopped": self.history.stopped}
        # A resumed fit keeps its start: its last epoch and its schedule are relative to it.
        if not self.unfinished:
            self.fit_start, self.fit_start_step = self.epoch, self.step
        # "early" is kept: if the process was killed during the last callbacks of a stopped fit, only these are
        # repeated.
        if not self.unfinished or self.history.stopped == "interrupted":
            self.history.stopped = None
        self.plan, self.unfinished = plan, True
        return before

    def undo(self, before: dict[str, Any]) -> None:
        """Undoes :meth:`begin`, which returned the state `before`."""
        self.history.stopped = before.pop("stopped")
        for name, value in before.items():
            setattr(self, name, value)

    def progress(self, plan: Plan, per_epoch: int | None, total_steps: int | None) -> Progress:
        """Returns the progress of the schedule.

        Args:
            plan: arguments of the current fit.
            per_epoch: optimizer steps per epoch; None if unknown.
            total_steps: length of a single schedule for all fits, in optimizer steps; None for one schedule per fit.
        """
        if total_steps is not None:
            return Progress(self.step, total_steps, self.epoch)
        if plan.schedule_epochs is not None:
            # Epochs of earlier fits are done: only the remaining ones have the length of this data.
            left = plan.schedule_epochs - self.fit_start
            total = None if per_epoch is None else self.fit_start_step + left * per_epoch
            return Progress(self.step, total, self.epoch)
        total = None if per_epoch is None else plan.epochs * per_epoch
        return Progress(self.step - self.fit_start_step, total, self.epoch - self.fit_start)

    def abandon(self) -> None:
        """Discards the interrupted fit and its unfinished epoch."""
        self.unfinished, self.batch, self.averages = False, 0, Averages()

    def to_json(self, settings: Settings) -> str:
        """Serializes position and settings as JSON text; floats round-trip exactly.

        Predictions for metric functions are not included; they are in a separate file.
        """
        # As JSON, the predictions of an epoch would be slow and large.
        position = asdict(replace(self, averages=Averages(self.averages.sums)))
        position["averages"]["parts"] = bool(self.averages.parts)
        return json.dumps({"version": 1, "position": position, "settings": asdict(settings)})

    @classmethod
    def from_json(cls, text: str, source: str) -> tuple[Position, Settings, bool]:
        """Parses the JSON of :meth:`to_json`; `source` names the checkpoint in error messages.

        Returns:
            Position, settings, and True if the epoch's predictions are in a file next to the checkpoint.

        Raises:
            CheckpointError: the text is damaged, or was written by a newer onnxtrain.
        """
        try:
            content = parse_json(text)
            if content["version"] != 1:
                raise ValueError(f"version {content['version']}")
            fields = dict(content["position"])
            plan = fields.pop("plan")
            position = cls(
                **fields
                | {
                    "plan": None if plan is None else Plan(**plan),
                    "averages": Averages(fields["averages"]["sums"]),
                    "history": History(**fields["history"]),
                }
            )
            settings = Settings(**content["settings"])
            _check(position, settings)
            return position, settings, bool(fields["averages"]["parts"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"Resuming from {source}: its property '{PROPERTY}' is not a trainer's state ({error}). "
                "It may have been written by a newer onnxtrain; upgrade."
            ) from error


def check_threads(threads: int | None) -> int | None:
    """Checks a number of threads and returns it as an int; None, ONNX Runtime's default, is returned unchanged.

    Raises:
        InputError: the number is not an integer from 1 to `MOST_THREADS`.
    """
    if threads is None:
        return None
    number = check_integer(argument("threads"), threads)
    if number > MOST_THREADS:
        raise InputError(f"{argument('threads')} must be at most {MOST_THREADS}, received {threads!r}.")
    return number


def saved_threads(properties: Properties) -> int | None:
    """Returns the number of threads from a checkpoint's properties; None if it is missing or damaged.

    Sessions need this number before the rest of the properties is parsed. :meth:`Position.from_json` parses the rest
    later, and reports any damage.
    """
    try:
        threads = parse_json(str(properties[PROPERTY]))["settings"]["threads"]
    except (KeyError, TypeError, ValueError):
        return None
    return threads if type(threads) is int and 0 < threads <= MOST_THREADS else None


def _check(position: Position, settings: Settings) -> None:
    """Raises ValueError if position and settings from a file are inconsistent."""
    # A checkpoint may come from anywhere. Values of wrong types would fail much later, or train something else.
    for name, kind in (
        *((n, k) for n, k in get_type_hints(Position).items() if n != "averages"),
        ("sums", dict[str, list[float]]),
    ):
        check_types(position.averages.sums if name == "sums" else getattr(position, name), kind, name)
    check_types(settings, Settings, "the settings")
    if not 0 <= position.learning_rate < math.inf:
        raise ValueError(f"the learning rate is {position.learning_rate}")
    if not position.fit_start <= position.epoch == len(position.history.epochs):
        raise ValueError(
            f"it is at epoch {position.epoch} of a fit that began after epoch {position.fit_start}, and has recorded "
            f"{len(position.history.epochs)}"
        )
    if position.fit_start_step > position.step:
        raise ValueError(
            f"it is at step {position.step} of a fit that began at step {position.fit_start_step}"
        )
    if not all(0 <= count <= position.step for count in position.skipped.values()):
        raise ValueError(f"parameters were frozen during {position.skipped} of {position.step} steps")
    if settings.threads is not None and not 0 < settings.threads <= MOST_THREADS:
        raise ValueError(f"the number of threads is {settings.threads}")
    # Otherwise the averages would grow without bound.
    if settings.ema_decay is not None and not 0 <= settings.ema_decay < 1:
        raise ValueError(f"the decay of averages is {settings.ema_decay}")
    if any(len(entry) != 2 for entry in position.averages.sums.values()):
        raise ValueError("a sum is not a pair of total and count")
    plan = position.plan
    if plan is not None and min(plan.samples or 1, plan.batch_size or 1, plan.accumulate, plan.epochs) < 1:
        raise ValueError(f"its plan is {plan}")
    # The skipped batches are read from the stream, which may be endless.
    limit = None if plan is None or plan.steps_per_epoch is None else plan.steps_per_epoch * plan.accumulate
    if limit is not None and position.batch > limit:
        raise ValueError(f"it is at batch {position.batch} of an epoch of {limit}")
