"""Declares `onnxtrain train`'s options for callbacks and augmentation, and creates the callbacks and transforms."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from onnxtrain.cli._declared import Kept, option, switch
from onnxtrain.errors import InputError

# The functions below import the trainer when they run: `--help` reads this module, and must not import onnx.
if TYPE_CHECKING:
    from onnxtrain.trainer import Callback, CutMix, EarlyStopping, MixUp, Unfreeze

SAVES = "checkpoints"
"""Name of a run's subdirectory for the checkpoints written with `--save-every`."""


@dataclass(frozen=True)
class RegularizeOptions:
    """Options for averaging weights, seeking flat minima (SAM) and augmenting data."""

    panel: ClassVar[str] = "Averages, flat minima, augmentation"
    kept: ClassVar[Kept] = "run"

    ema_decay: float | None = option(
        "FACTOR",
        "Validate and export an exponential moving average of the weights with this decay per step, e.g. 0.999. "
        "Default: the weights themselves.",
    )
    # A string, because typer has no type for both an epoch (16) and a fraction (0.75).
    swa_start: str | None = option(
        "EPOCH|FRACTION",
        "Export the average of the weights (SWA) over all epochs starting with this one, or after this fraction of the "
        "epochs, e.g. 16 or 0.75. Default: off.",
        kept="fit",
    )
    swa_lr: float | None = option(
        "RATE",
        "Use this learning rate in the epochs that --swa-start averages, e.g. 0.05. Default: the schedule's rate.",
        kept="fit",
    )
    sam: float | None = option(
        "RADIUS",
        "Seek flat minima (SAM) with the gradient at the worst weights within this L2 distance, e.g. 0.05. Each step "
        "takes two forward and backward passes. Default: off.",
        min=0,
    )
    mixup: float | None = option(
        "ALPHA",
        "Mix pairs of samples and of targets in training (mixup), with weights drawn from Beta(ALPHA, ALPHA), e.g. "
        "0.2. Default: off.",
    )
    cutmix: float | None = option(
        "ALPHA",
        "Paste a box of another image into each training image (CutMix), with an area drawn from Beta(ALPHA, ALPHA), "
        "and mix the targets in the same proportion, e.g. 1.0. Default: off.",
    )


@dataclass(frozen=True)
class UnfreezeOptions:
    """Options for layers that are trained after some epochs only."""

    panel: ClassVar[str] = "Gradual unfreezing"
    kept: ClassVar[Kept] = "fit"

    unfreeze_after: list[str] | None = option(
        "EPOCHS|EPOCHS=PATTERN",
        "Freeze all parameters but the head, or those that match the pattern, for this many epochs of the run, e.g. 3 "
        "or '1=layer4.*'; repeat it for several groups. The first matching pattern wins. Default: train all from the "
        "start.",
    )


@dataclass(frozen=True)
class BestOptions:
    """Options that determine which epoch is exported, and when training stops early."""

    panel: ClassVar[str] = "Best epoch"
    kept: ClassVar[Kept] = "fit"

    monitor: str | None = option(
        "NAME",
        "Compare epochs by this recorded value in --patience and --save-best, e.g. val_f1. Default: val_loss, or loss "
        "without --validation.",
    )
    patience: int | None = option(
        "EPOCHS",
        "Stop after this many epochs without an improvement of --monitor, e.g. 5, and export the weights of the best "
        "epoch. Default: train all epochs and export the last.",
        min=1,
    )
    time_limit: float | None = option(
        "MINUTES",
        "Stop before an epoch that would make training exceed this many minutes, e.g. 30. Default: no limit.",
        kept="anew",
        min=0,
    )
    min_delta: float | None = option(
        "AMOUNT",
        "Count only improvements of --monitor larger than this, e.g. 0.001. Default: any improvement.",
        min=0,
    )
    save_best: bool = switch(
        "Train all epochs and export the weights of the best epoch by --monitor. Default: export the last epoch."
    )


@dataclass(frozen=True)
class LogOptions:
    """Options for log files and checkpoints. A resumed run may change them, because they do not affect the result."""

    panel: ClassVar[str] = "Logs and checkpoints"
    kept: ClassVar[Kept] = "anew"

    log: Path | None = option(
        "FILE.csv",
        "Write a row per epoch to this file, and a row per step to a second file next to it, e.g. log.csv. Default: no "
        "log.",
    )
    tensorboard: Path | None = option(
        "DIR",
        "Write TensorBoard event files to this directory, e.g. logs. Default: none.",
    )
    save_every: int | None = option(
        "STEPS",
        "Save a checkpoint to DIR/checkpoints every STEPS steps, e.g. 500. Default: only after each epoch, to DIR.",
        min=1,
    )
    keep: int | None = option(
        "COUNT",
        "Keep this many of the newest checkpoints of --save-every, e.g. 5. Default: 3.",
        min=1,
    )


@dataclass(frozen=True)
class CallbackOptions:
    """Options of `onnxtrain train` for callbacks and augmentation.

    Attributes:
        unfreeze, regularize, best, logs: groups of options.
    """

    unfreeze: UnfreezeOptions = field(default_factory=UnfreezeOptions)
    regularize: RegularizeOptions = field(default_factory=RegularizeOptions)
    best: BestOptions = field(default_factory=BestOptions)
    logs: LogOptions = field(default_factory=LogOptions)


def chosen_callbacks(
    options: CallbackOptions, directory: Path, epochs: int, validated: bool
) -> list[Callback]:
    """Creates the callbacks that the options request, in the order in which `fit` calls them.

    Args:
        options: options of the command.
        directory: directory of the run.
        epochs: number of epochs that `fit` trains.
        validated: True if `fit` validates, so that it records `val_loss`.

    Raises:
        InputError: options cannot be combined, or a value is out of range.
    """
    from onnxtrain.trainer import SAM, SWA, CSVLogger, ModelCheckpoint, TensorBoardLogger, TimeLimit

    regularize, logs = options.regularize, options.logs
    callbacks: list[Callback] = [*map(_unfreeze, options.unfreeze.unfreeze_after or ())]
    if regularize.sam is not None:
        callbacks.append(SAM(regularize.sam))
    # The order matters: losses are logged and saved after SAM has changed the gradient.
    if (early := _early_stopping(options.best, epochs, validated)) is not None:
        callbacks.append(early)
    if regularize.swa_start is not None:
        callbacks.append(SWA(_start(regularize.swa_start), regularize.swa_lr))
        # Both replace the last weights at the end of the fit.
        if early is not None:
            raise InputError(
                "--swa-start exports an average of the last epochs, but --patience and --save-best export "
                "a single epoch; choose one."
            )
    elif regularize.swa_lr is not None:
        raise InputError("--swa-lr is given without --swa-start.")
    if options.best.time_limit is not None:
        callbacks.append(TimeLimit(60 * options.best.time_limit))
    if logs.log is not None:
        callbacks.append(CSVLogger(logs.log))
    if logs.tensorboard is not None:
        callbacks.append(TensorBoardLogger(logs.tensorboard))
    if logs.save_every is not None:
        where = directory / SAVES
        callbacks.append(ModelCheckpoint(where, every_n_steps=logs.save_every, keep=logs.keep or 3))
    elif logs.keep is not None:
        raise InputError("--keep is given without --save-every.")
    return callbacks


def _unfreeze(text: str) -> Unfreeze:
    """Creates the callback for a value of `--unfreeze-after`, e.g. "3" or "1=layer4.*".

    Raises:
        InputError: the number of epochs is missing or not positive.
    """
    from onnxtrain.trainer import Unfreeze

    epochs, equals, pattern = text.partition("=")
    if not (epochs.isascii() and epochs.isdecimal() and int(epochs[:9])) or (equals and not pattern):
        raise InputError(
            f"--unfreeze-after is '{text}'; give a number of epochs such as 3, or with a pattern such as '1=layer4.*'."
        )
    return Unfreeze(int(epochs[:9]), pattern or None)


def _early_stopping(best: BestOptions, epochs: int, validated: bool) -> EarlyStopping | None:
    """Returns the callback that restores the best epoch; None if neither `--patience` nor `--save-best` is given.

    Raises:
        InputError: `--monitor` or `--min-delta` is given without `--patience` or `--save-best`.
    """
    from onnxtrain.trainer import EarlyStopping

    if best.patience is None and not best.save_best:
        # Without --patience or --save-best they would silently have no effect.
        given = {"--monitor": best.monitor, "--min-delta": best.min_delta}
        if alone := [name for name, value in given.items() if value is not None]:
            raise InputError(f"{' and '.join(alone)} needs --patience or --save-best, which compare epochs.")
        return None
    monitor = best.monitor or ("val_loss" if validated else "loss")
    # With --save-best alone the fit never stops early: the patience is as long as the fit.
    patience = best.patience if best.patience is not None else epochs
    return EarlyStopping(monitor, patience, best.min_delta or 0.0, restore_best=True)


def _start(text: str) -> int | float:
    """Parses the value of `--swa-start`: an epoch (int) or a fraction of the epochs (float)."""
    # The types differ in meaning: 1 is the first epoch, 1.0 would be all epochs.
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise InputError(
            f"--swa-start is '{text}'; give an epoch such as 16, or a fraction such as 0.75."
        ) from None


def chosen_transform(options: CallbackOptions) -> MixUp | CutMix | None:
    """Creates the augmentation for `--mixup` or `--cutmix`; returns None if neither is given.

    Raises:
        InputError: both are given, or ALPHA is out of range.
    """
    from onnxtrain.trainer import CutMix, MixUp

    mixup, cutmix = options.regularize.mixup, options.regularize.cutmix
    # timm alternates between the two from batch to batch; in Python, a custom transform can do so, too.
    if mixup is not None and cutmix is not None:
        raise InputError("--mixup and --cutmix are alternative ways to mix samples; pass only one.")
    if mixup is not None:
        return MixUp(mixup)
    return None if cutmix is None else CutMix(cutmix)


def prepare_for_transform(x: Any, y: Any) -> tuple[Any, Any]:
    """Converts inputs and targets to the form that transforms expect: an array instead of a dict with one entry.

    Integer and Boolean targets become float32, because transforms average them.
    """
    array = next(iter(y.values())) if isinstance(y, dict) and len(y) == 1 else y
    if getattr(array, "dtype", None) is not None and array.dtype.kind in "iub":
        array = array.astype("float32")
    return (next(iter(x.values())) if isinstance(x, dict) and len(x) == 1 else x), array
