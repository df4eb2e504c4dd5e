"""Declares the options of the commands, each as one field: type, default, help text, and if a run keeps its value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from onnxtrain.cli._declared import Kept, Rule, flag
from onnxtrain.errors import InputError

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of tables. Default: tables.")
]
ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="Path of an .onnx file.")]
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Directory of a run that `onnxtrain train` has written.")
]
BatchSizeOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="SAMPLES",
        help="Process this many samples at a time, e.g. 128. Default: 32, or what the model has fixed.",
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """Loss, trained parameters, modes and precision of a model; of `train` and `artifacts`."""

    panel: ClassVar[str] = "Model"
    kept: ClassVar[Kept] = "run"

    loss: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Minimise this loss: cross_entropy or nll for classes, bce_with_logits or focal for yes or no, "
            "mse, l1, huber or smooth_l1 for quantities. Default: the model's first output is the loss.",
        ),
    ] = None
    train: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Train only the parameters whose names match, e.g. 'fc.*'; repeat it for several. Default: "
            "all that are not frozen.",
        ),
        Rule(python="requires_grad"),
    ] = None
    freeze: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Do not train the parameters whose names match, e.g. 'conv?.*'; repeat it for several. Default: none.",
        ),
        Rule(python="frozen_params"),
    ] = None
    batch_norm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODE|PATTERN=MODE",
            help="Train BatchNormalization and Dropout as_exported, in training mode (as PyTorch's "
            "model.train()) or in inference mode. Repeat it for each layer, e.g. body.*=inference; the "
            "first match decides. Default: as_exported.",
        ),
    ] = None
    precision: Annotated[
        Literal["fp32", "bf16"],
        typer.Option(
            help="Compute matrix products and convolutions of training in float32, or in bfloat16 with sums "
            "and parameters in float32, e.g. bf16."
        ),
    ] = "fp32"
    dynamic_batch: Annotated[
        bool,
        typer.Option(
            "--dynamic-batch",
            help="Make the batch of a model that was exported for a fixed number of samples dynamic. Default: "
            "the model stays as it is.",
        ),
    ] = False
    replace_head: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="CLASSES",
            help="Replace the last linear layer by a new one with this many outputs, e.g. 3. Default: the model's own.",
        ),
    ] = None


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer and its settings; of `train` and `artifacts`."""

    panel: ClassVar[str] = "Optimizer"
    kept: ClassVar[Kept] = "run"

    optimizer: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Update parameters by this optimizer: adamw, adam, sgd, adagrad, rmsprop, lion, adafactor, "
            "muon, prodigy or sparse_adam, with PyTorch's defaults.",
        ),
    ] = "adamw"
    weight_decay: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="FACTOR",
            help="Decay weights by this factor, e.g. 0.1. Default: the optimizer's own, as in PyTorch 0.01 "
            "for adamw, 0.1 for muon, 0 for the others.",
        ),
    ] = None
    optimizer_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Set another setting of the optimizer, e.g. momentum=0.9, betas=0.9,0.95 or nesterov=true; "
            "repeat it for several. Default: PyTorch's values.",
        ),
    ] = None


@dataclass(frozen=True)
class TableOptions:
    """Encoding of the columns of a .csv or .parquet file, learned from the table that is trained on."""

    # Panels group the options of `--help`; typer would list all fifty in one.
    panel: ClassVar[str] = "Tables (.csv, .parquet)"
    kept: ClassVar[Kept] = "run"

    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN", help="Learn this column of a table, e.g. survived. Required for tables."
        ),
    ] = None
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMNS",
            help="Feed these columns of a table to the model, in this order, e.g. age,weight. Default: all "
            "but the target and --id.",
        ),
    ] = None
    id: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="Keep this column of a table out of the inputs and write it beside predictions, e.g. "
            "passenger_id. Default: none.",
        ),
    ] = None
    missing: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Read this text in a table as a missing value, e.g. NA; repeat it for several. Default: only "
            "the empty field is missing.",
        ),
    ] = None
    # A text, checked by `check`: the message of a choice of typer would not mention the table.
    impute: Annotated[
        str | None,
        typer.Option(
            metavar="mean|median",
            help="Fill missing values of a table: numbers by the column's mean or median, categories by the "
            "most frequent one. Default: a missing value is an error.",
        ),
    ] = None
    categorical: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMNS",
            help="Read these columns of a table as categories although they hold numbers, e.g. zip,pclass. "
            "Default: columns of texts only.",
        ),
    ] = None
    # Truth values name their option: typer would add --no-one-hot to a name that it makes itself.
    one_hot: Annotated[
        bool,
        typer.Option(
            "--one-hot",
            help="One-hot encode categories of a table: one input 0 or 1 per category. Default: off.",
        ),
    ] = False
    ordinal: Annotated[
        bool,
        typer.Option(
            "--ordinal",
            help="Encode categories of a table as numbers 0, 1, 2 ... in alphabetical order. Default: off.",
        ),
    ] = False
    scale: Annotated[
        bool,
        typer.Option(
            "--scale",
            help="Standardise numeric columns of a table to mean 0 and standard deviation 1. Default: off.",
        ),
    ] = False

    def check(self) -> None:
        """Raises InputError for options that do not go together."""
        if self.impute not in (None, "mean", "median"):
            raise InputError(f"--impute is {self.impute!r}; choose mean or median.")
        if self.one_hot and self.ordinal:
            raise InputError(
                "--one-hot and --ordinal are two ways to encode the same columns; give one of them."
            )

    def given(self) -> list[str]:
        """Lists the options that were given, as on the command line, e.g. ["--target", "--one-hot"]."""
        return [flag(name) for name, value in vars(self).items() if value]


@dataclass(frozen=True)
class ScheduleOptions:
    """The learning rate from step to step; of `train`."""

    panel: ClassVar[str] = "Learning rate"

    learning_rate: Annotated[
        float,
        typer.Option(
            "--learning-rate",
            "--lr",
            metavar="RATE",
            help="Set the learning rate, or the highest one of a schedule, e.g. 0.01.",
        ),
        Rule("fit"),
    ] = 1e-3
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Change the learning rate during training: linear, cosine, cosine_with_restarts, polynomial, "
            "one_cycle, step, multistep or exponential. Default: it stays constant.",
        ),
        Rule("run"),
    ] = None
    schedule_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Set a parameter of --schedule, e.g. step_size=5 or milestones=30,60; repeat it for several. "
            "Default: the schedule's own values.",
        ),
        Rule("run"),
    ] = None
    schedule_epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="COUNT",
            help="Spread one schedule over this many epochs, those of commands that go on with the run "
            "included, e.g. 20. Default: the epochs of this command.",
        ),
        Rule("fit"),
    ] = None
    warmup: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="STEPS",
            help="Warm up the learning rate over this many first steps, e.g. 100.",
        ),
        Rule("run", "warmup_steps"),
    ] = 0
    warmup_ratio: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="FRACTION",
            help="Warm up the learning rate over this fraction of all steps, e.g. 0.1. Default 0: no warm-up. "
            "Use instead of --warmup.",
        ),
        Rule("run"),
    ] = 0.0


@dataclass(frozen=True)
class ArtifactsOptions:
    """Options of `onnxtrain artifacts`.

    Attributes:
        source: path of the model.
        model, optimizer: groups of options.
    """

    source: Annotated[Path, typer.Argument(metavar="MODEL", help="Path of an .onnx file.")]
    model: ModelOptions = field(default_factory=ModelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Write the files to this directory, e.g. device."),
        Rule(python="artifact_directory"),
    ] = Path("artifacts")
    nominal: Annotated[
        bool,
        typer.Option(
            "--nominal", help="Also write a checkpoint with names and shapes but without data. Default: off."
        ),
        Rule(python="nominal_checkpoint"),
    ] = False
    json: JsonOption = False


@dataclass(frozen=True)
class TrainOptions:
    """Options of `onnxtrain train`.

    Attributes:
        source: path of a model, or directory of a run.
        table, model, optimizer, rate: groups of options.
    """

    source: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL|DIR", help="Path of an .onnx file, or directory of a run to go on with."
        ),
    ]
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Train on this file: .npz with arrays named as the model's inputs and targets (or x and y), "
            "or a .csv or .parquet table.",
            show_default=False,
        ),
    ]
    table: TableOptions = field(default_factory=TableOptions)
    # One text for both: a number is a fraction, anything else a path.
    validation: Annotated[
        str | None,
        typer.Option(
            metavar="FRACTION|FILE",
            help="Measure loss and metrics after each epoch on a random fraction of the samples, which is "
            "then not trained on, e.g. 0.1, or on another file like --data. Default: no validation.",
        ),
        Rule("fit"),
    ] = None
    model: ModelOptions = field(default_factory=ModelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    rate: ScheduleOptions = field(default_factory=ScheduleOptions)
    epochs: Annotated[
        int,
        typer.Option(min=1, metavar="COUNT", help="Pass this often over the data, e.g. 30."),
        Rule("fit"),
    ] = 10
    batch_size: Annotated[BatchSizeOption, Rule("fit")] = None
    accumulate: Annotated[
        int,
        typer.Option(
            min=1, metavar="BATCHES", help="Take one optimizer step for this many batches together, e.g. 4."
        ),
        Rule("fit"),
    ] = 1
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Record this metric beside the loss, e.g. f1, auroc, r2; repeat it for several. Default: "
            "accuracy for classes, mean absolute and root mean square error for quantities.",
        ),
        Rule("run"),
    ] = None
    # A text: classes of a table have names. The number of a class is read from it.
    positive: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS",
            help="Compute f1, precision, recall and auroc of this class, e.g. fraud or 1. Default: the mean "
            "over classes if the target holds texts (f1_macro), else of class 1 of two.",
        ),
        Rule("run"),
    ] = None
    ema_decay: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR",
            help="Validate and export exponential moving averages of the weights, which keep this factor in "
            "each step, e.g. 0.999. Default: the weights themselves.",
        ),
        Rule("run"),
    ] = None
    clip_norm: Annotated[
        float | None,
        typer.Option(
            metavar="NORM",
            help="Scale all gradients down if their common L2 norm is larger, e.g. 1.0. Default: no clipping.",
        ),
        Rule("run", "clip_grad_norm"),
    ] = None
    sam: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="RADIUS",
            help="Seek flat minima (SAM): step with the gradient at the worst weights within this L2 distance, e.g. "
            "0.05. Each step takes two passes. Default: off.",
        ),
        Rule("run"),
    ] = None
    patience: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="EPOCHS",
            help="Stop after this many epochs without a lower validation loss (training loss without --validation), "
            "e.g. 5, and export the weights of the best epoch. Default: train all epochs and export the last.",
        ),
        Rule("fit"),
    ] = None
    # Files and saves beside the run do not change its result, so they may be given anew at any time.
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="Write a row per epoch to this file, and a row per step beside it, e.g. log.csv. Default: no log.",
        ),
        Rule("anew"),
    ] = None
    save_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            help="Save the run to DIR/checkpoints after every so many steps, e.g. 500. Default: after each "
            "epoch, to DIR.",
        ),
        Rule("anew"),
    ] = None
    keep: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="COUNT",
            help="Keep this many of the saves of --save-every, the newest ones, e.g. 5. Default: 3.",
        ),
        Rule("anew"),
    ] = None
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="NUMBER",
            help="Derive shuffling, the validation split, Dropout and a new head from this number, e.g. 1.",
        ),
        Rule("run"),
    ] = 0
    # Not kept here: the trainer saves the number, and a run may go on with another one on another machine.
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="COUNT",
            help="Compute each operation with this many threads, e.g. 4. Default: one per core.",
        ),
    ] = None
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace a run that is in the output directory already. Default: that is an error.",
        ),
    ] = False
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write the run and trained.onnx here, e.g. run. Default: MODEL's name with -trained.",
        ),
    ] = None
    json: JsonOption = False
