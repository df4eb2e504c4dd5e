"""Makes the callbacks and the augmentation of `onnxtrain train`."""

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
"""Directory in that of a run with the saves of `--save-every`."""


def chosen_callbacks(options: TrainOptions, directory: Path) -> list[Callback]:
    """Makes the callbacks of a fit.

    Args:
        options: options of the command.
        directory: directory of the run.

    Raises:
        InputError: options do not go together, or a value is out of range.
    """
    regularize, logs = options.regularize, options.logs
    callbacks: list[Callback] = [] if regularize.sam is None else [SAM(regularize.sam)]
    # Callbacks are called in this order: losses are logged and saved after SAM has chosen the gradient.
    if (early := _early_stopping(options)) is not None:
        callbacks.append(early)
    if regularize.swa_start is not None:
        callbacks.append(SWA(_start(regularize.swa_start), regularize.swa_lr))
        # Both put other weights in place of the last ones at the end of the fit.
        if early is not None:
            raise InputError(
                "--swa-start averages the last epochs, and --patience and --save-best export one. Choose."
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
    """Makes the callback of `--patience` or `--save-best`, which restores the best epoch; None without both."""
    best = options.best
    if best.patience is None and not best.save_best:
        # Alone they would change nothing, without a word.
        given = {"--monitor": best.monitor, "--min-delta": best.min_delta}
        if alone := [name for name, value in given.items() if value is not None]:
            raise InputError(f"{' and '.join(alone)} compares epochs; give --patience or --save-best, too.")
        return None
    monitor = best.monitor or ("loss" if options.validation is None else "val_loss")
    # With --save-best alone no number of epochs without improvement ends the fit.
    patience = best.patience if best.patience is not None else options.epochs
    return EarlyStopping(monitor, patience, best.min_delta or 0.0, restore_best=True)


def _start(text: str) -> int | float:
    """Reads the value of `--swa-start`: an epoch, or a fraction of the epochs."""
    # 1 is the first epoch, 1.0 would be all of them.
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise InputError(
            f"--swa-start is '{text}'; give an epoch such as 16, or a fraction such as 0.75."
        ) from None


def chosen_transform(options: TrainOptions) -> MixUp | CutMix | None:
    """Makes the augmentation of `--mixup` or `--cutmix`; raises InputError for both, or a wrong ALPHA."""
    mixup, cutmix = options.regularize.mixup, options.regularize.cutmix
    # Timm switches between the two from batch to batch; a function of one's own in Python can do so, too.
    if mixup is not None and cutmix is not None:
        raise InputError("--mixup and --cutmix are two ways to mix samples; give one of them.")
    if mixup is not None:
        return MixUp(mixup)
    return None if cutmix is None else CutMix(cutmix)


def for_transform(x: Any, y: Any) -> tuple[Any, Any]:
    """Takes the arrays of a single input and target out of their dictionaries, as transforms want them."""
    # Integers of yes-or-no targets and of quantities are averaged, too.
    array = next(iter(y.values())) if isinstance(y, dict) and len(y) == 1 else y
    if getattr(array, "dtype", None) is not None and array.dtype.kind in "iub":
        array = array.astype("float32")
    return (next(iter(x.values())) if isinstance(x, dict) and len(x) == 1 else x), array
