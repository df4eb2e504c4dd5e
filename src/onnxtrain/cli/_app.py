"""Declares the commands of `onnxtrain`. Each command is implemented in its own module."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from typing import Annotated

import typer

from onnxtrain.cli._command_options import (
    ArtifactsOptions,
    AverageOptions,
    CalibrateOptions,
    CheckOptions,
    DemoOptions,
    EvaluateOptions,
    ExportOptions,
    InspectOptions,
    MergeOptions,
    MineOptions,
    OpsOptions,
    PlanOptions,
    PredictOptions,
)
from onnxtrain.cli._declared import takes_options
from onnxtrain.cli._help import CommandWithSwitches
from onnxtrain.cli._interrupts import InterruptibleGroup
from onnxtrain.cli._output import guarded, logging_to_terminal
from onnxtrain.cli._train_options import TrainOptions

app = typer.Typer(
    name="onnxtrain",
    cls=InterruptibleGroup,
    # An unexpected error is a bug: it shows Python's full traceback, for the bug report.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train ONNX models on stock ONNX Runtime.",
)


def _version(show: bool) -> None:
    if show:
        # Imported late: it imports onnxruntime.
        from onnxtrain.runtime.kernels import describe_kernels

        typer.echo(f"onnxtrain {importlib.metadata.version('onnxtrain')}")
        typer.echo(f"native kernels: {describe_kernels()}")
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
    """Train ONNX models on stock ONNX Runtime."""
    # Set up for one command and undone at its end, because tests and programs run several commands in one process.
    context.with_resource(logging_to_terminal(logging.DEBUG if debug else logging.WARNING))


@app.command(cls=CommandWithSwitches)
@takes_options(DemoOptions)
def demo(options: DemoOptions, given: frozenset[str]) -> None:
    """Train a convolutional network on handwritten digits and check the exported model."""
    # Commands import their implementation when they run: importing all of it would delay `--help` by a second.
    from onnxtrain.cli._demo import run_command

    run_command(options)


@app.command(cls=CommandWithSwitches)
@takes_options(ArtifactsOptions)
def artifacts(options: ArtifactsOptions, given: frozenset[str]) -> None:
    """Write the artifacts needed to train a model on a device."""
    from onnxtrain.cli._artifacts import run_command

    run_command(options)


@app.command(cls=CommandWithSwitches)
@takes_options(PlanOptions)
def plan(options: PlanOptions, given: frozenset[str]) -> None:
    """Find configurations that train a model within a memory budget: all parameters, adapters or the last layers.

    Runs a few training steps per configuration on random inputs, in a
    separate process, as on a device. Prints the commands for the
    recommended configuration.
    """
    from onnxtrain.cli._plan import run_command

    run_command(options)


@app.command(cls=CommandWithSwitches)
@takes_options(TrainOptions)
def train(options: TrainOptions, given: frozenset[str]) -> None:
    """Train a model on arrays or a table. Ctrl-C saves the run; `onnxtrain train DIR` resumes it with its options.

    A finished run can be trained further, also with different --data,
    --epochs, --batch-size, --learning-rate, --validation and --patience.
    """
    from onnxtrain.cli._train_command import run_command

    run_command(options, given)


@app.command(cls=CommandWithSwitches)
@takes_options(EvaluateOptions)
def evaluate(options: EvaluateOptions, given: frozenset[str]) -> None:
    """Compute the loss and metrics of a run or an .onnx file on a dataset and, for a classifier, a report per class.

    The report lists the precision, recall and F1 of each class.
    """
    from onnxtrain.cli._use import evaluate_run

    evaluate_run(options)


@app.command(cls=CommandWithSwitches)
@takes_options(PredictOptions)
def predict(options: PredictOptions, given: frozenset[str]) -> None:
    """Write the model's outputs for each sample and, for a classifier, class probabilities and the predicted class."""
    from onnxtrain.cli._use import write_predictions

    write_predictions(options)


@app.command(cls=CommandWithSwitches)
@takes_options(ExportOptions)
def export(options: ExportOptions, given: frozenset[str]) -> None:
    """Write the trained model of a run as an ordinary .onnx file."""
    from onnxtrain.cli._use import export_run

    export_run(options)


@app.command(cls=CommandWithSwitches)
@takes_options(MergeOptions)
def merge(options: MergeOptions, given: frozenset[str]) -> None:
    """Merge a LoRA adapter into the weights of a model."""
    from onnxtrain.cli._merge import run_command

    run_command(options)


@app.command(cls=CommandWithSwitches)
@takes_options(AverageOptions)
def average(options: AverageOptions, given: frozenset[str]) -> None:
    """Average the parameters of models that were trained from the same file, or of a run's checkpoints."""
    from onnxtrain.cli._average import run_command

    run_command(options)


@app.command(cls=CommandWithSwitches)
@takes_options(CalibrateOptions)
def calibrate(options: CalibrateOptions, given: frozenset[str]) -> None:
    """Write the model of a run with calibrated probabilities and, for two classes, the best decision threshold."""
    from onnxtrain.cli._calibrate import run_command

    run_command(options)


@app.command(cls=CommandWithSwitches)
@takes_options(MineOptions)
def mine(options: MineOptions, given: frozenset[str]) -> None:
    """Find hard negatives for pairs of texts: texts that a model takes for the positive although they are not."""
    from onnxtrain.cli._mine import run_command

    run_command(options)


@app.command(cls=CommandWithSwitches)
@takes_options(OpsOptions)
def ops(options: OpsOptions, given: frozenset[str]) -> None:
    """List ops and whether they have gradients, or check whether a model can be trained and report any obstacles."""
    from onnxtrain.cli._ops import run_command

    run_command(options)


@app.command(cls=CommandWithSwitches)
@takes_options(CheckOptions)
def check(options: CheckOptions, given: frozenset[str]) -> None:
    """Compare the gradients of a model with finite differences."""
    from onnxtrain.cli._check import run_command

    run_command(options)


@app.command(cls=CommandWithSwitches)
@takes_options(InspectOptions)
def inspect(options: InspectOptions, given: frozenset[str]) -> None:
    """Show a run's results and next steps, or the parameters of artifacts, a checkpoint or a model."""
    from onnxtrain.cli._inspect import run_command

    run_command(options)


def run() -> None:
    """Runs the command given by `sys.argv`; if it raises an exception, prints the error and exits with code 1."""
    # Not read by typer, because an error while options are parsed comes before it has read --debug.
    guarded(app, debug="--debug" in sys.argv[1:])
