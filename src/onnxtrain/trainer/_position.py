"""Where a training run stands: everything beside parameters and optimizer state that resuming needs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from onnxtrain.errors import CheckpointError
from onnxtrain.trainer._history import History
from onnxtrain.trainer._metrics import Averages

__all__ = ["PROPERTY", "Plan", "Position"]

PROPERTY = "onnxtrain.trainer"
"""Name of the checkpoint property that holds the position, as JSON text."""


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

    def to_json(self, settings: dict[str, object]) -> str:
        """Returns JSON text of the position and of the trainer's settings; floats are kept exactly."""
        return json.dumps({"version": 1, "position": asdict(self), "settings": settings})

    @classmethod
    def from_json(cls, text: str, source: str) -> tuple[Position, dict[str, object]]:
        """Returns the position and settings written in `text`; `source` names the checkpoint, for messages.

        Raises:
            CheckpointError: The text is not what :meth:`to_json` writes.
        """
        try:
            content = json.loads(text)
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
            ), content["settings"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"Resuming from {source}: its property '{PROPERTY}' is not a trainer's state ({error}). "
                "It may have been written by a newer onnxtrain; upgrade."
            ) from error
