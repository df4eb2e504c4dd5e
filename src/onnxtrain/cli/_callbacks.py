"""Creates the callbacks and the augmentation of `onnxtrain train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnxtrain.cli._train_options import TrainOptions
from onnxtrain.errors import InputError
from onnxtrain.trainer import (
    SAM,
    SWA,
    Callback,
    CSVLogger,
    CutMix,
    EarlyStopping,
    MixUp,
    ModelCheckpoint,
    TensorBoardLogger,
)

SAVES = "checkpoints"
"""Name of the subdirectory of a run for the checkpoints of `--save-every`."""


def chosen_callbacks(options: TrainOptions, directory: Path) -> list[Callback]:
    """Returns the callbacks that the options ask for, in the order in which `fit` calls them.

    Args:
        options: options of the command.
        directory: directory of the run.

    Raises:
        InputError: options cannot be combined, or a value is out of range.
    """
    regularize, logs = options.regularize, options.logs
    callbacks: list[Callback] = [] if regularize.sam is None else [SAM(regularize.sam)]
    # The order matters: losses are logged and saved after SAM has changed the gradient.
    if (early := _early_stopping(options)) is not None:
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


def _early_stopping(options: TrainOptions) -> EarlyStopping | None:
    """Returns the callback that restores the best epoch, or None without `--patience` and `--save-best`."""
    best = options.best
    if best.patience is None and not best.save_best:
        # Without --patience or --save-best they would silently have no effect.
        given = {"--monitor": best.monitor, "--min-delta": best.min_delta}
        if alone := [name for name, value in given.items() if value is not None]:
            raise InputError(f"{' and '.join(alone)} needs --patience or --save-best, which compare epochs.")
        return None
    monitor = best.monitor or ("loss" if options.validation is None else "val_loss")
    # With --save-best alone the fit never stops early: the patience is as long as the fit.
    patience = best.patience if best.patience is not None else options.epochs
    return EarlyStopping(monitor, patience, best.min_delta or 0.0, restore_best=True)


def _start(text: str) -> int | float:
    """Parses `--swa-start`: an epoch (int) or a fraction of the epochs (float)."""
    # The types differ in meaning: 1 is the first epoch, 1.0 would be all epochs.
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise InputError(
            f"--swa-start is '{text}'; give an epoch such as 16, or a fraction such as 0.75."
        ) from None


def chosen_transform(options: TrainOptions) -> MixUp | CutMix | None:
    """Returns the augmentation of `--mixup` or `--cutmix`, or None without either.

    Raises:
        InputError: both are given, or ALPHA is out of range.
    """
    mixup, cutmix = options.regularize.mixup, options.regularize.cutmix
    # timm alternates between the two from batch to batch; in Python, a custom transform can do so, too.
    if mixup is not None and cutmix is not None:
        raise InputError("--mixup and --cutmix are alternative ways to mix samples; pass only one.")
    if mixup is not None:
        return MixUp(mixup)
    return None if cutmix is None else CutMix(cutmix)


def prepare_for_transform(x: Any, y: Any) -> tuple[Any, Any]:
    """Returns x and y as transforms expect them: a single array instead of a dictionary with one entry.

    Integer and Boolean targets become float32, because transforms average them.
    """
    array = next(iter(y.values())) if isinstance(y, dict) and len(y) == 1 else y
    if getattr(array, "dtype", None) is not None and array.dtype.kind in "iub":
        array = array.astype("float32")
    return (next(iter(x.values())) if isinstance(x, dict) and len(x) == 1 else x), array
