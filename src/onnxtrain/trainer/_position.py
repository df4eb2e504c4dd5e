"""Where a training run stands: everything beside parameters and optimizer state that resuming needs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.json_text import parse_json
from onnxtrain.trainer._history import History
from onnxtrain.trainer._metrics import Averages

__all__ = ["CUSTOM", "PROPERTY", "Plan", "Position", "Settings"]

PROPERTY = "onnxtrain.trainer"
"""Name of the checkpoint property that holds the position, as JSON text."""


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
        warmup_steps: steps over which the learning rate first rises.
    """

    loss: str = ""
    prediction: str | None = None
    metrics: list[str] | None = None
    scheduler: str | None = None
    warmup_steps: int = 0


@dataclass(frozen=True)
class Plan:
    """How an epoch is cut into steps; a position within an epoch means something for the same plan only."""

    samples: int
    batch_size: int
    accumulate: int
    shuffle: bool


@dataclass
class Position:
    """Where a training run stands.

    Attributes:
        seed: what shuffling and splitting derive from.
        learning_rate: the rate that schedules multiply.
        epoch: finished epochs, over the whole life of the trainer.
        batch: batches done in the current epoch.
        fit_start: value of `epoch` when the fit under way, or the last one, began.
        unfinished: whether that fit was cut off.
        plan: of that fit.
        averages: sums over the current epoch.
        history: of all epochs.
    """

    seed: int
    learning_rate: float
    epoch: int = 0
    batch: int = 0
    fit_start: int = 0
    unfinished: bool = False
    plan: Plan | None = None
    averages: Averages = field(default_factory=Averages)
    history: History = field(default_factory=History)

    def begin(self, plan: Plan) -> None:
        """Starts a new fit, or goes on with one that was cut off.

        Raises:
            InputError: That one stopped in the middle of an epoch, which was cut into steps in another way.
        """
        if self.batch and self.plan != plan:
            raise InputError(
                f"The last fit was interrupted in the middle of epoch {self.epoch + 1}, over {self.plan}; "
                "this one "
                f"has {plan}. Finish it with the same data and arguments first, or start a new Trainer."
            )
        if not self.unfinished:
            self.fit_start = self.epoch
        self.plan, self.unfinished, self.history.stopped = plan, True, None

    def to_json(self, settings: Settings) -> str:
        """Returns JSON text of the position and of the trainer's settings; floats are kept exactly."""
        return json.dumps({"version": 1, "position": asdict(self), "settings": asdict(settings)})

    @classmethod
    def from_json(cls, text: str, source: str) -> tuple[Position, Settings]:
        """Returns the position and settings written in `text`; `source` names the checkpoint, for messages.

        Raises:
            CheckpointError: The text is not what :meth:`to_json` writes.
        """
        try:
            content = parse_json(text)
            if content["version"] != 1:
                raise ValueError(f"version {content['version']}")
            fields = dict(content["position"])
            plan = fields.pop("plan")
            return cls(
                **fields
                | {
                    "plan": None if plan is None else Plan(**plan),
                    "averages": Averages(**fields["averages"]),
                    "history": History(**fields["history"]),
                }
            ), Settings(**content["settings"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"Resuming from {source}: its property '{PROPERTY}' is not a trainer's state ({error}). "
                "It may have been written by a newer onnxtrain; upgrade."
            ) from error
