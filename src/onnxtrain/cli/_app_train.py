"""The options of `onnxtrain train`; the work is in `_train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnxtrain.cli._output import JsonOption, given_options
from onnxtrain.cli._shared import (
    BatchNormOption,
    BatchSizeOption,
    DynamicBatchOption,
    FreezeOption,
    LossOption,
    OnlyOption,
    OptimizerOption,
    OptimizerOptionOption,
    PrecisionName,
    PrecisionOption,
    ReplaceHeadOption,
    WeightDecayOption,
)


def train(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL|DIR", help="Path of an .onnx file, or directory of a run to go on with."
        ),
    ],
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Train on this file: .npz with arrays named as the model's inputs and targets (or x and y), "
            "or a .csv or .parquet table.",
            show_default=False,
        ),
    ],
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN", help="Learn this column of a table, e.g. survived. Required for tables."
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMNS",
            help="Feed these columns of a table to the model, in this order, e.g. age,weight. Default: all "
            "but the target and --id.",
        ),
    ] = None,
    id: Annotated[
        list[str] | None,
        typer.Option(
            "--id",
            metavar="COLUMN",
            help="Keep this column of a table out of the inputs and write it beside predictions, e.g. "
            "passenger_id. Default: none.",
        ),
    ] = None,
    missing: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Read this text in a table as a missing value, e.g. NA; repeat it for several. Default: only "
            "the empty field is missing.",
        ),
    ] = None,
    impute: Annotated[
        str | None,
        typer.Option(
            metavar="mean|median",
            help="Fill missing values of a table: numbers by the column's mean or median, categories by the "
            "most frequent one. Default: a missing value is an error.",
        ),
    ] = None,
    categorical: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMNS",
            help="Read these columns of a table as categories although they hold numbers, e.g. zip,pclass. "
            "Default: columns of texts only.",
        ),
    ] = None,
    one_hot: Annotated[
        bool,
        typer.Option(
            "--one-hot",
            help="One-hot encode categories of a table: one input 0 or 1 per category. Default: off.",
        ),
    ] = False,
    ordinal: Annotated[
        bool,
        typer.Option(
            "--ordinal",
            help="Encode categories of a table as numbers 0, 1, 2 ... in alphabetical order. Default: off.",
        ),
    ] = False,
    scale: Annotated[
        bool,
        typer.Option(
            "--scale",
            help="Standardise numeric columns of a table to mean 0 and standard deviation 1. Default: off.",
        ),
    ] = False,
    validation: Annotated[
        str | None,
        typer.Option(
            metavar="FRACTION|FILE",
            help="Measure loss and metrics after each epoch on a random fraction of the samples, which is "
            "then not trained on, e.g. 0.1, or on another file like --data. Default: no validation.",
        ),
    ] = None,
    loss: LossOption = None,
    optimizer: OptimizerOption = "adamw",
    learning_rate: Annotated[
        float,
        typer.Option(
            "--learning-rate",
            "--lr",
            metavar="RATE",
            help="Set the learning rate, or the highest one of a schedule, e.g. 0.01.",
        ),
    ] = 1e-3,
    weight_decay: WeightDecayOption = None,
    optimizer_option: OptimizerOptionOption = None,
    epochs: Annotated[
        int, typer.Option(min=1, metavar="COUNT", help="Pass this often over the data, e.g. 30.")
    ] = 10,
    batch_size: BatchSizeOption = None,
    accumulate: Annotated[
        int,
        typer.Option(
            min=1, metavar="BATCHES", help="Take one optimizer step for this many batches together, e.g. 4."
        ),
    ] = 1,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Change the learning rate during training: linear, cosine, cosine_with_restarts, polynomial, "
            "one_cycle, step, multistep or exponential. Default: it stays constant.",
        ),
    ] = None,
    schedule_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Set a parameter of --schedule, e.g. step_size=5 or milestones=30,60; repeat it for several. "
            "Default: the schedule's own values.",
        ),
    ] = None,
    schedule_epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="COUNT",
            help="Spread one schedule over this many epochs, those of commands that go on with the run "
            "included, e.g. 20. Default: the epochs of this command.",
        ),
    ] = None,
    warmup: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="STEPS",
            help="Raise the learning rate from near 0 over this many first steps, e.g. 100.",
        ),
    ] = 0,
    warmup_ratio: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="FRACTION",
            help="Warm up the learning rate over this fraction of all steps, e.g. 0.1. Default 0: no warm-up. "
            "Use instead of --warmup.",
        ),
    ] = 0.0,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Record this metric beside the loss, e.g. f1, auroc, r2; repeat it for several. Default: "
            "accuracy for classes, mean absolute and root mean square error for quantities.",
        ),
    ] = None,
    positive: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS",
            help="Compute f1, precision, recall and auroc of this class, e.g. fraud or 1. Default: the mean "
            "over classes if the target holds texts (f1_macro), else of class 1 of two.",
        ),
    ] = None,
    ema_decay: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR",
            help="Validate and export exponential moving averages of the weights, which keep this factor in "
            "each step, e.g. 0.999. Default: the weights themselves.",
        ),
    ] = None,
    clip_norm: Annotated[
        float | None,
        typer.Option(
            metavar="NORM",
            help="Scale all gradients down if their common L2 norm is larger, e.g. 1.0. Default: no clipping.",
        ),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="EPOCHS",
            help="Stop after this many epochs without a lower validation loss (training loss without "
            "--validation), e.g. 5, and export the weights of the best epoch. Default: train all epochs "
            "and export the last.",
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="Write a row per epoch to this file, and a row per step beside it, e.g. log.csv. Default: no "
            "log.",
        ),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            help="Save the run to DIR/checkpoints after every so many steps, e.g. 500. Default: after each "
            "epoch, to DIR.",
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="COUNT",
            help="Keep this many of the saves of --save-every, the newest ones, e.g. 5. Default: 3.",
        ),
    ] = None,
    only: OnlyOption = None,
    freeze: FreezeOption = None,
    batch_norm: BatchNormOption = None,
    precision: PrecisionOption = PrecisionName.FP32,
    dynamic_batch: DynamicBatchOption = False,
    replace_head: ReplaceHeadOption = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="NUMBER",
            help="Derive shuffling, the validation split, Dropout and a new head from this number, e.g. 1.",
        ),
    ] = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="COUNT",
            help="Compute each operation with this many threads, e.g. 4. Default: one per core.",
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace a run that is in the output directory already. Default: that is an error.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write the run and trained.onnx here, e.g. run. Default: MODEL's name with -trained.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Train a model on arrays or a table; Ctrl-C saves, and training the directory goes on.

    A run that goes on keeps the options that it was started with: leave them out. Of one that has finished, epochs,
    batch size, learning rate, validation and patience can be given anew.
    """
    from onnxtrain.cli._options import TrainOptions
    from onnxtrain.cli._train import run_command

    chosen = TrainOptions(
        source=source,
        data=data,
        validation=validation,
        loss=loss,
        optimizer=optimizer,
        weight_decay=weight_decay,
        optimizer_option=optimizer_option,
        learning_rate=learning_rate,
        epochs=epochs,
        batch_size=batch_size,
        accumulate=accumulate,
        schedule=schedule,
        schedule_option=schedule_option,
        schedule_epochs=schedule_epochs,
        warmup=warmup,
        warmup_ratio=warmup_ratio,
        metric=metric,
        positive=positive,
        ema_decay=ema_decay,
        clip_norm=clip_norm,
        patience=patience,
        log=log,
        save_every=save_every,
        keep=keep,
        train=only,
        freeze=freeze,
        batch_norm=batch_norm,
        precision=precision.value,
        dynamic_batch=dynamic_batch,
        replace_head=replace_head,
        target=target,
        inputs=inputs,
        impute=impute,
        one_hot=one_hot,
        ordinal=ordinal,
        scale=scale,
        missing=missing,
        categorical=categorical,
        id=id,
        seed=seed,
        threads=threads,
        overwrite=overwrite,
        output=output,
        json=json,
    )
    run_command(chosen, given_options(context))
