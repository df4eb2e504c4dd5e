"""The commands and their options; each command's work is in a module of its own."""

from __future__ import annotations

import enum
import importlib.metadata
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from onnxtrain.cli._output import JsonOption, ShellHandler, given_options, guarded

__all__ = ["app", "run"]

app = typer.Typer(
    name="onnxtrain",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train any ONNX model on stock ONNX Runtime.",
)

ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.")]

BatchNormOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODE|PATTERN=MODE",
        help="as_exported (default), training or inference; for layers like body.*=inference, the first match decides.",
    ),
]


class PrecisionName(enum.StrEnum):
    """The values of `--precision`."""

    FP32 = "fp32"
    BF16 = "bf16"


PrecisionOption = Annotated[
    PrecisionName, typer.Option(help="Of products and convolutions in training; parameters stay float32.")
]
DynamicBatchOption = Annotated[
    bool,
    typer.Option("--dynamic-batch", help="Make the batch of a model that was exported for one size dynamic."),
]
ReplaceHeadOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="CLASSES", help="Give the model a new last linear layer first."),
]


def _version(show: bool) -> None:
    if show:
        typer.echo(f"onnxtrain {importlib.metadata.version('onnxtrain')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the package's log.")] = False,
) -> None:
    """Train any ONNX model on stock ONNX Runtime."""
    level = logging.DEBUG if debug else logging.WARNING
    logger = logging.getLogger("onnxtrain")
    logger.setLevel(level)
    handler = ShellHandler(level, Console(stderr=True), show_time=False, show_path=False)
    logger.addHandler(handler)
    context.call_on_close(lambda: logger.removeHandler(handler))


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory for the model and the figures.")
    ] = Path("demo-output"),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 15,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, shuffling and the validation split.")] = 0,
    json: JsonOption = False,
) -> None:
    """Train a convolutional network on handwritten digits and prove the exported file."""
    from onnxtrain.cli._demo import run_command

    run_command(output, epochs, seed, json)


@app.command()
def artifacts(
    model: ModelArgument,
    loss: Annotated[
        str | None, typer.Option(help="Name of the loss; without it the first output is the loss.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="Name of the optimizer.")] = "adamw",
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write to.")] = Path(
        "artifacts"
    ),
    train: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Train only parameters like fc.*")
    ] = None,
    freeze: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Do not train parameters like conv?.*")
    ] = None,
    batch_norm: BatchNormOption = None,
    precision: PrecisionOption = PrecisionName.FP32,
    dynamic_batch: DynamicBatchOption = False,
    replace_head: ReplaceHeadOption = None,
    nominal: Annotated[bool, typer.Option("--nominal", help="Also write a checkpoint without data.")] = False,
    json: JsonOption = False,
) -> None:
    """Write the files that a device trains from."""
    from onnxtrain.cli._artifacts import prepared, run_command

    source = prepared(model, dynamic_batch=dynamic_batch, classes=replace_head, seed=0)
    run_command(source, loss, optimizer, output, train, freeze, batch_norm, precision.value, nominal, json)


@app.command()
def train(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(metavar="MODEL|DIR", help="An .onnx file, or the directory of a run to go on with."),
    ],
    data: Annotated[
        Path,
        typer.Option(
            help=".npz file with arrays named as the inputs and targets, or x and y; or a .csv or .parquet table.",
            show_default=False,
        ),
    ],
    target: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Of a table: the column to learn.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMNS", help="Of a table: columns such as age,weight. Default: all others."),
    ] = None,
    impute: Annotated[
        str | None,
        typer.Option(help="Of a table: fill missing values by mean or median (of texts the most frequent)."),
    ] = None,
    one_hot: Annotated[
        bool, typer.Option("--one-hot", help="Of a table: a number for each category of a column of texts.")
    ] = False,
    ordinal: Annotated[
        bool, typer.Option("--ordinal", help="Of a table: the place of the category among the sorted ones.")
    ] = False,
    scale: Annotated[
        bool, typer.Option("--scale", help="Of a table: numbers minus their mean, over their deviation.")
    ] = False,
    validation: Annotated[
        str | None, typer.Option(help="A fraction such as 0.1, or another file like --data.")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="Name of the loss; without it the first output is the loss.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="Name of the optimizer.")] = "adamw",
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr", help="Learning rate.")] = 1e-3,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 10,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples per batch.")] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches per optimizer step.")] = 1,
    schedule: Annotated[
        str | None, typer.Option(help="linear, cosine, one_cycle, step, polynomial, ...")
    ] = None,
    schedule_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Of the schedule, like step_size=5 or milestones=30,60."),
    ] = None,
    schedule_epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of one schedule, with those that follow when going on.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps over which the rate rises.")] = 0,
    warmup_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="The part of all steps over which it does.")
    ] = 0.0,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Like f1, auroc, r2; default: what suits the loss."),
    ] = None,
    ema_decay: Annotated[
        float | None, typer.Option(help="Evaluate and export averages of the weights, like 0.999.")
    ] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Largest norm of all gradients together.")] = None,
    patience: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many epochs without improvement.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Write the epochs there, and the steps beside it.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Save to DIR/checkpoints after so many steps.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=1, help="How many of these to keep; default: 3.")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--train", metavar="PATTERN", help="Train only parameters like fc.*")
    ] = None,
    freeze: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Do not train parameters like conv?.*")
    ] = None,
    batch_norm: BatchNormOption = None,
    precision: PrecisionOption = PrecisionName.FP32,
    dynamic_batch: DynamicBatchOption = False,
    replace_head: ReplaceHeadOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Of shuffling, splitting and Dropout.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each operation; default: all cores.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a run that is in the directory already.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory of the run. Default: MODEL's name with -trained."),
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
        seed=seed,
        threads=threads,
        overwrite=overwrite,
        output=output,
        json=json,
    )
    run_command(chosen, given_options(context))


@app.command()
def evaluate(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")],
    data: Annotated[Path, typer.Option(help="Data like that of training.", show_default=False)],
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples per batch.")] = None,
    json: JsonOption = False,
) -> None:
    """Measure the loss and the metrics of a run on data."""
    from onnxtrain.cli._use import evaluate_run

    evaluate_run(directory, data, batch_size, json)


@app.command()
def predict(
    source: Annotated[
        Path, typer.Argument(metavar="MODEL|RUN", help="An .onnx file, or the directory of a run.")
    ],
    data: Annotated[
        Path, typer.Option(help="Data like that of training; targets are not needed.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help=".npz, .csv or .parquet file to write.")
    ] = Path("predictions.npz"),
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples per batch.")] = None,
    json: JsonOption = False,
) -> None:
    """Write the outputs for each sample, and where a run knows classes, the class."""
    from onnxtrain.cli._use import write_predictions

    write_predictions(source, data, output, batch_size, json)


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .onnx file to write.")],
    outputs: Annotated[
        list[str] | None, typer.Option("--outputs", metavar="NAME", help="Other values to return.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write the trained model of a run as an ordinary .onnx file."""
    from onnxtrain.cli._use import export_run

    export_run(directory, output, outputs, json)


@app.command()
def ops(
    model: Annotated[Path | None, typer.Argument(metavar="[MODEL]", help="An .onnx file.")] = None,
    status: Annotated[str | None, typer.Option(help="Only ops of this status.")] = None,
    json: JsonOption = False,
) -> None:
    """List which ops have gradients; for a model, whether it can be trained and what stops it."""
    from onnxtrain.cli._ops import list_ops, model_ops

    if model is None:
        list_ops(status, json)
    else:
        model_ops(model, json)


@app.command()
def check(
    model: ModelArgument,
    of: Annotated[str | None, typer.Option(help="Output to differentiate; default: the first one.")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--parameter", metavar="PATTERN", help="Only these parameters.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help=".npz file with inputs; the others are random.")] = None,
    dim: Annotated[
        list[str] | None, typer.Option(metavar="NAME=SIZE", help="Size of a symbolic dimension.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
    json: JsonOption = False,
) -> None:
    """Compare a model's gradients with finite differences."""
    from onnxtrain.cli._check import run_command

    run_command(model, of, only, data, dim, seed, json)


@app.command()
def inspect(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|FILE", help="A directory of artifacts, a checkpoint file, or an .onnx file."
        ),
    ],
    json: JsonOption = False,
) -> None:
    """Show manifest, parameters and checkpoint of a training run, or inputs and parameters of a model."""
    from onnxtrain.cli._inspect import run_command

    run_command(directory, json)


def run() -> None:
    """Runs the command line of this process."""
    guarded(app, debug="--debug" in sys.argv[1:])
