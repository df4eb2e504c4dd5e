"""Where a training run stands: everything beside parameters and optimizer state that resuming needs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, get_type_hints

from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.runtime.state import Properties
from onnxtrain.trainer._history import History
from onnxtrain.trainer._metrics import Averages
from onnxtrain.trainer._typed import check_types

PROPERTY = "onnxtrain.trainer"
"""Name of the checkpoint property that holds the position, as JSON text."""


MOST_THREADS = 4096
"""Threads that a session may be asked for: a number beyond is a mistake, and each of them is made at once."""

CUSTOM = "custom"
"""What stands for a function in settings, which do not hold functions."""


@dataclass(frozen=True)
class Settings:
    """What a trainer was asked to do, as far as resuming needs it.

    Attributes:
        loss: class name of the loss.
        prediction: the output that metrics look at, None for none.
        metrics: names of the metrics, None when they are the default for the loss, :data:`CUSTOM` for
            functions.
        scheduler: name of the schedule, None for none, :data:`CUSTOM` for a function.
        scheduler_parameters: of the schedule.
        warmup_steps: steps over which the learning rate first rises.
        warmup_ratio: part of all steps over which it does.
        total_steps: steps of the schedule over all fits; None for a schedule per fit.
        ema_decay: of the averages of what is trained; None for none.
        threads: that each session computes with; None for onnxruntime's default.
        positive: class that f1, precision, recall and auroc are of; None for the default.
        random: ops whose random numbers do not follow the trainer's seed from step to step.
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
    """What a fit was asked to do; a fit that was cut off means something for the same plan only."""

    samples: int | None
    """None for a stream, whose batches are its own."""
    batch_size: int | None
    accumulate: int
    shuffle: bool
    epochs: int
    validation: float | int | None
    """The fraction that was split off, or the number of samples (0 if unknown); None for no validation."""
    schedule_epochs: int | None = None
    """Epochs of the schedule, counted from the trainer's first; None for a schedule of this fit alone."""
    steps_per_epoch: int | None = None
    drop_last: bool = False
    weighted: bool = False
    transform: bool = False

    def differences(self, other: Plan) -> str:
        """Returns what `other` has in place of what this one has, for messages; empty if they are equal."""
        ours, theirs = asdict(self), asdict(other)
        return ", ".join(f"{key} {ours[key]}, now {theirs[key]}" for key in ours if ours[key] != theirs[key])


class Progress(NamedTuple):
    """How far a schedule has come; `total` is None where the number of all steps is not known."""

    step: int
    total: int | None
    epoch: int


@dataclass
class Position:
    """Where a training run stands.

    Attributes:
        seed: what shuffling and splitting derive from.
        learning_rate: the rate that schedules multiply.
        epoch: finished epochs, over the whole life of the trainer.
        batch: batches done in the current epoch.
        step: optimizer steps, over the whole life of the trainer.
        averaged: optimizer steps that are in the averages of what is trained.
        fit_start: value of `epoch` when the fit under way, or the last one, began.
        fit_start_step: value of `step` then.
        unfinished: whether that fit was cut off.
        plan: of that fit.
        stream: where the generators of a stream were when what is being read began, as its source gives it.
        averages: sums over the current epoch.
        history: of all epochs.
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
    stream: str | None = None
    averages: Averages = field(default_factory=Averages)
    history: History = field(default_factory=History)

    def check(self, plan: Plan) -> None:
        """Raises InputError if a fit was cut off that was asked to do something else than `plan`."""
        if self.unfinished and self.plan is not None and self.plan != plan:
            where = f"in the middle of epoch {self.epoch + 1}" if self.batch else f"after epoch {self.epoch}"
            raise InputError(
                f"The last fit was interrupted {where}, and this call differs from it "
                f"({self.plan.differences(plan)}). Give the same data and arguments to go on with it, or call "
                "abandon_fit() first to start a new fit from here."
            )

    def begin(self, plan: Plan) -> dict[str, Any]:
        """Starts a new fit, or goes on with one that was cut off; returns what :meth:`undo` needs."""
        names = ("fit_start", "fit_start_step", "unfinished", "plan")
        before = {name: getattr(self, name) for name in names} | {"stopped": self.history.stopped}
        if not self.unfinished:
            self.fit_start, self.fit_start_step = self.epoch, self.step
        if not self.unfinished or self.history.stopped == "interrupted":
            self.history.stopped = None  # "early" stays where only the end of the fit was cut off
        self.plan, self.unfinished = plan, True
        return before

    def undo(self, before: dict[str, Any]) -> None:
        """Takes back :meth:`begin`."""
        self.history.stopped = before.pop("stopped")
        for name, value in before.items():
            setattr(self, name, value)

    def progress(self, plan: Plan, per_epoch: int | None, total_steps: int | None) -> Progress:
        """Returns how far the schedule has come.

        Args:
            plan: of the fit under way.
            per_epoch: optimizer steps of an epoch; None if that is not known.
            total_steps: steps of a schedule over all fits.
        """
        if total_steps is not None:
            return Progress(self.step, total_steps, self.epoch)
        if plan.schedule_epochs is not None:
            left = plan.schedule_epochs - self.fit_start
            total = None if per_epoch is None else self.fit_start_step + left * per_epoch
            return Progress(self.step, total, self.epoch)
        total = None if per_epoch is None else plan.epochs * per_epoch
        return Progress(self.step - self.fit_start_step, total, self.epoch - self.fit_start)

    def abandon(self) -> None:
        """Makes the next fit a new one, from the last whole epoch's count on."""
        self.unfinished, self.batch, self.averages = False, 0, Averages()

    def to_json(self, settings: Settings) -> str:
        """Returns JSON text of the position and of the trainer's settings; floats are kept exactly.

        The predictions that metric functions wait for are not in it.
        """
        position = asdict(replace(self, averages=Averages(self.averages.sums)))
        position["averages"]["parts"] = bool(self.averages.parts)
        return json.dumps({"version": 1, "position": position, "settings": asdict(settings)})

    @classmethod
    def from_json(cls, text: str, source: str) -> tuple[Position, Settings, bool]:
        """Returns what `text` holds; `source` names the checkpoint, for messages.

        Returns:
            The position, the settings, and whether predictions belong to the position that the text does not hold.

        Raises:
            CheckpointError: The text is not what :meth:`to_json` writes.
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


def saved_threads(properties: Properties) -> int | None:
    """Returns the number of threads in a checkpoint's properties; None for none, or where they are damaged.

    Sessions are made with it before the rest is read, which is what tells of damage.
    """
    try:
        threads = parse_json(str(properties[PROPERTY]))["settings"]["threads"]
    except (KeyError, TypeError, ValueError):
        return None
    return threads if type(threads) is int and 0 < threads <= MOST_THREADS else None


def _check(position: Position, settings: Settings) -> None:
    """Raises ValueError unless the two, which were read from a file, hang together."""
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
    if settings.threads is not None and not 0 < settings.threads <= MOST_THREADS:
        raise ValueError(f"the number of threads is {settings.threads}")
    if settings.ema_decay is not None and not 0 <= settings.ema_decay < 1:
        raise ValueError(f"the decay of averages is {settings.ema_decay}")
    if any(len(entry) != 2 for entry in position.averages.sums.values()):
        raise ValueError("a sum is no pair of total and count")
    plan = position.plan
    if plan is not None and min(plan.samples or 1, plan.batch_size or 1, plan.accumulate, plan.epochs) < 1:
        raise ValueError(f"its plan is {plan}")
