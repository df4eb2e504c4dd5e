"""The options of `onnxtrain train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onnxtrain.cli._columns import TableOptions


@dataclass(frozen=True)
class TrainOptions:
    """The command's arguments; `onnxtrain train --help` describes them."""

    source: Path
    data: Path
    validation: str | None
    loss: str | None
    optimizer: str
    weight_decay: float | None
    optimizer_option: list[str] | None
    learning_rate: float
    epochs: int
    batch_size: int | None
    accumulate: int
    schedule: str | None
    schedule_option: list[str] | None
    schedule_epochs: int | None
    warmup: int
    warmup_ratio: float
    metric: list[str] | None
    positive: str | None
    ema_decay: float | None
    clip_norm: float | None
    patience: int | None
    log: Path | None
    save_every: int | None
    keep: int | None
    train: list[str] | None
    freeze: list[str] | None
    batch_norm: list[str] | None
    precision: str
    dynamic_batch: bool
    replace_head: int | None
    seed: int
    threads: int | None
    overwrite: bool
    output: Path | None
    json: bool
    target: list[str] | None = None
    inputs: list[str] | None = None
    impute: str | None = None
    one_hot: bool = False
    ordinal: bool = False
    scale: bool = False
    missing: list[str] | None = None
    categorical: list[str] | None = None
    id: list[str] | None = None

    @property
    def table(self) -> TableOptions:
        """What is said of a table."""
        return TableOptions(
            self.target,
            self.inputs,
            self.impute,
            self.one_hot,
            self.ordinal,
            self.scale,
            self.missing,
            self.categorical,
            self.id,
        )
