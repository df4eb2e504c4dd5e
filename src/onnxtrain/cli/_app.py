"""Declares the commands of `onnxtrain`. The implementation of each command is in a module of its own."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from onnxtrain.cli._declared import takes_options
from onnxtrain.cli._help import CommandWithSwitches
from onnxtrain.cli._interrupts import InterruptibleGroup
from onnxtrain.cli._options import (
    ArtifactsOptions,
    BatchSizeOption,
    ConfigOption,
    JsonOption,
    MergeOptions,
    ModelArgument,
    PlanOptions,
    RunArgument,
)
from onnxtrain.cli._output import guarded, logging_to_terminal
from onnxtrain.cli._train_options import TrainOptions

app = typer.Typer(
    name="onnxtrain",
    cls=InterruptibleGroup,
    no_args_is_help=True,
    # An unexpected error is a bug: it shows Python's full traceback, for the bug report.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train any ONNX model on stock ONNX Runtime.",
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"onnxtrain {importlib.metadata.version('onnxtrain')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        # Eager: typer runs the callback before it requires a command.
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show the traceback of an error, and the package's log. Default: only the message.",
        ),
    ] = False,
) -> None:
    """Train any ONNX model on stock ONNX Runtime."""
    # Set up for one command and undone at its end, because tests and programs run several commands in one process.
    context.with_resource(logging_to_terminal(logging.DEBUG if debug else logging.WARNING))


@app.command(cls=CommandWithSwitches)
def demo(
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write the model and the results to this directory, e.g. digits.",
        ),
    ] = Path("demo-output"),
    epochs: Annotated[
        int, typer.Option(min=1, metavar="COUNT", help="Train for this many epochs, e.g. 5.")
    ] = 15,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="NUMBER",
            help="Seed the weights, shuffling and the validation split with this number, e.g. 1.",
        ),
    ] = 0,
    json: JsonOption = False,
) -> None:
    """Train a convolutional network on handwritten digits and check the exported model."""
    # Commands import their implementation when they run: importing all of it would delay `--help` by a second.
    from onnxtrain.cli._demo import run_command

    run_command(output, epochs, seed, json)


@app.command(cls=CommandWithSwitches)
@takes_options(ArtifactsOptions)
def artifacts(options: ArtifactsOptions, given: frozenset[str]) -> None:
    """Write the artifacts that a device trains from."""
    from onnxtrain.cli._artifacts import run_command

    run_command(options)


@app.command(cls=CommandWithSwitches)
@takes_options(PlanOptions)
def plan(options: PlanOptions, given: frozenset[str]) -> None:
    """Measure which ways to train a model fit in a memory budget: all parameters, adapters or the last layers.

    Each way runs a few training steps on random inputs in a separate
    process, as on a device. Prints the command for the recommended way.
    """
    from onnxtrain.cli._plan import run_command

    run_command(options)


@app.command(cls=CommandWithSwitches)
@takes_options(TrainOptions)
def train(options: TrainOptions, given: frozenset[str]) -> None:
    """Train a model on arrays or a table. Ctrl-C saves the run; `onnxtrain train DIR --data FILE` resumes it.

    A resumed run keeps the options that it was started with: pass only
    --data. A finished run can be trained further with different --epochs,
    --batch-size, --learning-rate, --validation and --patience.
    """
    from onnxtrain.cli._train_command import run_command

    run_command(options, given)


@app.command(cls=CommandWithSwitches)
def evaluate(
    directory: RunArgument,
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Evaluate on this file: .npz arrays or a .csv or .parquet table like the training data, target "
            "included.",
            show_default=False,
        ),
    ],
    batch_size: BatchSizeOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Compute the loss and metrics of a run on data; for a classifier also precision, recall and F1 per class."""
    from onnxtrain.cli._use import evaluate_run

    evaluate_run(directory, data, batch_size, json)


@app.command(cls=CommandWithSwitches)
def predict(
    source: Annotated[
        Path, typer.Argument(metavar="MODEL|RUN", help="Path of an .onnx file, or directory of a run.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Predict for this file: .npz arrays or a .csv or .parquet table like the training data; it needs no "
            "target.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the predictions to this .npz, .csv or .parquet file.",
        ),
    ] = Path("predictions.npz"),
    id: Annotated[
        list[str] | None,
        typer.Option(
            "--id",
            "--id-column",
            metavar="COLUMN",
            help="Write this column of the table before the predictions, e.g. passenger_id; repeat it for "
            "several. Default: the columns of `train --id`.",
        ),
    ] = None,
    probabilities: Annotated[
        bool,
        typer.Option(
            "--probabilities/--no-probabilities",
            help="Write only the class probabilities, and the columns of --id. Default: also the outputs of the "
            "network and the predicted class.",
        ),
    ] = False,
    batch_size: BatchSizeOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Write the model's outputs for each sample; for a classifier also class probabilities and the predicted class."""
    from onnxtrain.cli._use import write_predictions

    write_predictions(source, data, output, id, batch_size, json, only_probabilities=probabilities)


@app.command(cls=CommandWithSwitches)
def export(
    directory: RunArgument,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="Write the model to this file, e.g. model.onnx."),
    ],
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--outputs",
            metavar="NAME",
            help="Return this value of the network instead of its outputs, e.g. features; repeat it for "
            "several. Default: the network's outputs.",
        ),
    ] = None,
    network: Annotated[
        bool,
        typer.Option(
            "--network",
            help="Write only the network, whose inputs are the encoded columns of a table. Default: a model whose "
            "inputs are the columns themselves.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write the trained model of a run as an ordinary .onnx file."""
    from onnxtrain.cli._use import export_run

    export_run(directory, output, outputs, network, json)


@app.command(cls=CommandWithSwitches)
@takes_options(MergeOptions)
def merge(options: MergeOptions, given: frozenset[str]) -> None:
    """Merge a LoRA adapter into the weights of a model."""
    from onnxtrain.cli._merge import run_command

    run_command(options)


@app.command(cls=CommandWithSwitches)
def ops(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL]", help="Path of an .onnx file to check. Default: list all ops."),
    ] = None,
    status: Annotated[
        str | None,
        typer.Option(
            metavar="STATUS",
            help="List only ops of this status: rule, function, nondifferentiable, not yet or unknown. Default: all.",
        ),
    ] = None,
    domain: Annotated[
        str,
        typer.Option(
            metavar="DOMAIN",
            help="List the ops of this domain that onnxruntime has, e.g. com.microsoft. Default: the ops of the ONNX "
            "standard.",
            show_default=False,
        ),
    ] = "",
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Also check whether this profile supports artifacts of the model, and list the nodes "
            "that it does not support, e.g. portable. Default: no such check.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List ops and whether they have gradients, or check whether a model can be trained and what prevents it."""
    from onnxtrain.cli._ops import list_ops, model_ops

    if model is None:
        list_ops(domain, status, json)
    else:
        model_ops(model, json, profile)


@app.command(cls=CommandWithSwitches)
def check(
    model: ModelArgument,
    of: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Differentiate this output, e.g. logits. Default: the model's first one."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter",
            metavar="PATTERN",
            help="Check only the parameters whose names match, e.g. 'fc.*'; repeat it for several. Default: all.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="Use the arrays in this file as inputs, by name, e.g. data.npz. Default: random inputs.",
        ),
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SIZE",
            help=(
                "Set the size of a symbolic dimension, e.g. sequence=16; repeat it for several. Default: "
                "a small size."
            ),
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0, metavar="NUMBER", help="Seed the random inputs and directions with this number, e.g. 1."
        ),
    ] = 0,
    json: JsonOption = False,
) -> None:
    """Compare the gradients of a model with finite differences."""
    from onnxtrain.cli._check import run_command

    run_command(model, of, only, data, dim, seed, json)


@app.command(cls=CommandWithSwitches)
def inspect(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|FILE",
            help="Directory of a run or of artifacts, or path of a checkpoint or an .onnx file.",
        ),
    ],
    parameters: Annotated[
        bool,
        typer.Option(
            "--parameters",
            help="List the inputs and parameters of a run, too. Default: only its settings, best epoch and files.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show a run's results and next steps, or the parameters of artifacts, a checkpoint or a model."""
    from onnxtrain.cli._inspect import run_command

    run_command(directory, json, parameters)


def run() -> None:
    """Runs the command line with the arguments of this process."""
    # Not read by typer, because an error while options are parsed comes before it has read --debug.
    guarded(app, debug="--debug" in sys.argv[1:])
