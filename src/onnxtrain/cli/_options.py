"""Declares the options of the commands, each as one field: type, help text, default, and if a run keeps its value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from onnxtrain._names import OPTIMIZERS, enumerated, losses_by_targets
from onnxtrain.cli._declared import REQUIRED, Kept, argument, flag, option, switch
from onnxtrain.errors import InputError

JSON_HELP = "Print one JSON document instead of tables. Default: tables."
JsonOption = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="Path of an .onnx file.")]
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Directory of a run that `onnxtrain train` has written.")
]
BATCH_SIZE_HELP = "Process this many samples at a time, e.g. 128. Default: 32, or what the model has fixed."
BatchSizeOption = Annotated[int | None, typer.Option(min=1, metavar="SAMPLES", help=BATCH_SIZE_HELP)]


@dataclass(frozen=True)
class ModelOptions:
    """Loss, trained parameters, modes and precision of a model; of `train` and `artifacts`."""

    panel: ClassVar[str] = "Model"
    kept: ClassVar[Kept] = "run"

    loss: str | None = option(
        "NAME",
        f"Minimise this loss: {losses_by_targets()}. Default: the model's first output is the loss.",
    )
    train: list[str] | None = option(
        "PATTERN",
        "Train only the parameters whose names match, e.g. 'fc.*'; repeat it for several. Default: "
        "all that are not frozen.",
        python="requires_grad",
    )
    freeze: list[str] | None = option(
        "PATTERN",
        "Do not train the parameters whose names match, e.g. 'conv?.*'; repeat it for several. Default: none.",
        python="frozen_params",
    )
    batch_norm: list[str] | None = option(
        "MODE|PATTERN=MODE",
        "Train BatchNormalization and Dropout as_exported, in training mode (as PyTorch's "
        "model.train()) or in inference mode. Repeat it for each layer, e.g. body.*=inference; the "
        "first match decides. Default: as_exported.",
    )
    precision: Literal["fp32", "bf16"] = option(
        None,
        "Compute matrix products and convolutions of training in float32, or in bfloat16 with sums "
        "and parameters in float32, e.g. bf16.",
        default="fp32",
    )
    activations: Literal["float", "deployed"] = option(
        None,
        "Multiply by quantised weights (MatMulNBits) in floating point, or round activations to int8 where "
        "the file does, e.g. deployed.",
        default="float",
    )
    profile: Literal["default", "portable"] = option(
        None,
        "Write models for desks and servers, or such that also run in browsers and on phones, e.g. portable.",
        default="default",
    )
    dynamic_batch: bool = switch(
        "Make the batch of a model that was exported for a fixed number of samples dynamic. Default: "
        "the model stays as it is."
    )
    replace_head: int | None = option(
        "CLASSES",
        "Replace the last linear layer by a new one with this many outputs, e.g. 3. Default: the model's own.",
        min=1,
    )


@dataclass(frozen=True)
class RecomputeOptions:
    """The choice between memory and time; of `train` and `artifacts`. `plan` measures both."""

    panel: ClassVar[str] = "Model"
    kept: ClassVar[Kept] = "run"

    recompute: bool = switch(
        "Compute activations again for the gradients instead of keeping them, which takes less memory and more "
        "time. Default: keep them."
    )


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer and its settings; of `train` and `artifacts`."""

    panel: ClassVar[str] = "Optimizer"
    kept: ClassVar[Kept] = "run"

    optimizer: str = option(
        "NAME",
        f"Update parameters by this optimizer: {enumerated(list(OPTIMIZERS))}, with PyTorch's defaults.",
        default="adamw",
    )
    weight_decay: float | None = option(
        "FACTOR",
        "Decay weights by this factor, e.g. 0.1. Default: the optimizer's own, as in PyTorch 0.01 "
        "for adamw, 0.1 for muon, 0 for the others.",
        min=0,
    )
    optimizer_option: list[str] | None = option(
        "NAME=VALUE",
        "Set another setting of the optimizer, e.g. momentum=0.9, betas=0.9,0.95 or nesterov=true; "
        "repeat it for several. Default: PyTorch's values.",
    )


@dataclass(frozen=True)
class LoraOptions:
    """Adapters that are trained instead of the weights of linear layers; of `train` and `artifacts`."""

    panel: ClassVar[str] = "Adapters (LoRA)"
    kept: ClassVar[Kept] = "run"

    lora_rank: int | None = option(
        "RANK",
        "Train adapters of this rank beside the linear layers, and nothing else but what --train names, e.g. 8. "
        "Default: no adapters.",
        min=1,
    )
    lora_targets: list[str] | None = option(
        "NAME",
        "Give an adapter to the layers of this name, e.g. q_proj; repeat it for several. Default: all linear "
        "layers but the output layer of a language model.",
    )
    lora_alpha: float | None = option(
        "ALPHA", "Multiply what adapters compute by ALPHA / RANK, e.g. 32. Default: 16."
    )
    lora_dropout: float | None = option(
        "PROBABILITY",
        "Drop elements of the adapters' inputs in training with this probability, e.g. 0.05. Default: 0.",
    )


@dataclass(frozen=True)
class TableOptions:
    """Encoding of the columns of a .csv or .parquet file, learned from the table that is trained on."""

    # Panels group the options of `--help`; typer would list all fifty in one.
    panel: ClassVar[str] = "Tables (.csv, .parquet)"
    kept: ClassVar[Kept] = "run"

    target: list[str] | None = option(
        "COLUMN", "Learn this column of a table, e.g. survived. Required for tables."
    )
    inputs: list[str] | None = option(
        "COLUMNS",
        "Feed these columns of a table to the model, in this order, e.g. age,weight. Default: all "
        "but the target and --id.",
    )
    id: list[str] | None = option(
        "COLUMN",
        "Keep this column of a table out of the inputs and write it beside predictions, e.g. "
        "passenger_id. Default: none.",
    )
    missing: list[str] | None = option(
        "TEXT",
        "Read this text in a table as a missing value, e.g. NA; repeat it for several. Default: only "
        "the empty field is missing.",
    )
    # A text, checked by `check`: the message of a choice of typer would not mention the table.
    impute: str | None = option(
        "mean|median",
        "Fill missing values of a table: numbers by the column's mean or median, categories by the "
        "most frequent one. Default: a missing value is an error.",
    )
    categorical: list[str] | None = option(
        "COLUMNS",
        "Read these columns of a table as categories although they hold numbers, e.g. zip,pclass. "
        "Default: columns of texts only.",
    )
    one_hot: bool = switch(
        "One-hot encode categories of a table: one input 0 or 1 per category. Default: off."
    )
    ordinal: bool = switch(
        "Encode categories of a table as numbers 0, 1, 2 ... in alphabetical order. Default: off."
    )
    scale: bool = switch(
        "Standardise numeric columns of a table to mean 0 and standard deviation 1. Default: off."
    )

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

    learning_rate: float = option(
        "RATE",
        "Set the learning rate, or the highest one of a schedule, e.g. 0.01.",
        "--learning-rate",
        "--lr",
        default=1e-3,
        kept="fit",
    )
    schedule: str | None = option(
        "NAME",
        "Change the learning rate during training: linear, cosine, cosine_with_restarts, polynomial, "
        "one_cycle, step, multistep or exponential. Default: it stays constant.",
        kept="run",
    )
    schedule_option: list[str] | None = option(
        "NAME=VALUE",
        "Set a parameter of --schedule, e.g. step_size=5 or milestones=30,60; repeat it for several. "
        "Default: the schedule's own values.",
        kept="run",
    )
    schedule_epochs: int | None = option(
        "COUNT",
        "Spread one schedule over this many epochs, those of commands that go on with the run "
        "included, e.g. 20. Default: the epochs of this command.",
        kept="fit",
        min=1,
    )
    warmup: int = option(
        "STEPS",
        "Warm up the learning rate over this many first steps, e.g. 100.",
        default=0,
        kept="run",
        python="warmup_steps",
        min=0,
    )
    warmup_ratio: float = option(
        "FRACTION",
        "Warm up the learning rate over this fraction of all steps, e.g. 0.1. Default 0: no warm-up. "
        "Use instead of --warmup.",
        default=0.0,
        kept="run",
        min=0,
        max=1,
    )


@dataclass(frozen=True)
class ArtifactsOptions:
    """Options of `onnxtrain artifacts`.

    Attributes:
        source: path of the model.
        model, recomputation, optimizer, lora: groups of options.
    """

    source: Path = argument("MODEL", "Path of an .onnx file.")
    model: ModelOptions = field(default_factory=ModelOptions)
    recomputation: RecomputeOptions = field(default_factory=RecomputeOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    output: Path = option(
        "DIR",
        "Write the files to this directory, e.g. device.",
        "--output",
        "-o",
        default=Path("artifacts"),
        python="artifact_directory",
    )
    nominal: bool = switch(
        "Also write a checkpoint with names and shapes but without data. Default: off.", "nominal_checkpoint"
    )
    json: bool = switch(JSON_HELP)


@dataclass(frozen=True)
class TrainOptions:
    """Options of `onnxtrain train`.

    Attributes:
        source: path of a model, or directory of a run.
        table, model, recomputation, optimizer, lora, rate: groups of options.
    """

    source: Path = argument("MODEL|DIR", "Path of an .onnx file, or directory of a run to go on with.")
    data: Path = option(
        "FILE",
        "Train on this file: .npz with arrays named as the model's inputs and targets (or x and y), "
        "or a .csv or .parquet table.",
        default=REQUIRED,
        show_default=False,
    )
    table: TableOptions = field(default_factory=TableOptions)
    # One text for both: a number is a fraction, anything else a path.
    validation: str | None = option(
        "FRACTION|FILE",
        "Measure loss and metrics after each epoch on a random fraction of the samples, which is "
        "then not trained on, e.g. 0.1, or on another file like --data. Default: no validation.",
        kept="fit",
    )
    stratify: bool = switch(
        "Split off the same fraction of each class by --validation FRACTION. Default: at random.", kept="fit"
    )
    evaluate_every: int | None = option(
        "STEPS",
        "Measure loss and metrics of --validation after every so many steps, too, e.g. 500. Default: after "
        "epochs only.",
        kept="fit",
        min=1,
    )
    model: ModelOptions = field(default_factory=ModelOptions)
    recomputation: RecomputeOptions = field(default_factory=RecomputeOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    rate: ScheduleOptions = field(default_factory=ScheduleOptions)
    epochs: int = option("COUNT", "Pass this often over the data, e.g. 30.", default=10, kept="fit", min=1)
    batch_size: int | None = option("SAMPLES", BATCH_SIZE_HELP, kept="fit", min=1)
    accumulate: int = option(
        "BATCHES",
        "Take one optimizer step for this many batches together, e.g. 4.",
        default=1,
        kept="fit",
        min=1,
    )
    metric: list[str] | None = option(
        "NAME",
        "Record this metric beside the loss, e.g. f1, auroc, r2; repeat it for several. Default: "
        "accuracy for classes, mean absolute and root mean square error for quantities.",
        kept="run",
    )
    # A text: classes of a table have names. The number of a class is read from it.
    positive: str | None = option(
        "CLASS",
        "Compute f1, precision, recall and auroc of this class, e.g. fraud or 1. Default: the mean "
        "over classes if the target holds texts (f1_macro), else of class 1 of two.",
        kept="run",
    )
    sample_weight: str | None = option(
        "NAME",
        "Weigh the samples in the training loss by this column of a table, or this array of the .npz file, e.g. "
        "weight. Default: all samples count alike.",
        kept="run",
    )
    class_weight: list[str] | None = option(
        "balanced|CLASS=WEIGHT",
        "Weigh the classes in the training loss: balanced makes rare classes count as much as frequent ones, "
        "fraud=10 counts this class ten times; repeat it for several. Default: all samples count alike.",
        kept="fit",
    )
    ema_decay: float | None = option(
        "FACTOR",
        "Validate and export exponential moving averages of the weights, which keep this factor in "
        "each step, e.g. 0.999. Default: the weights themselves.",
        kept="run",
    )
    clip_norm: float | None = option(
        "NORM",
        "Scale all gradients down if their common L2 norm is larger, e.g. 1.0. Default: no clipping.",
        kept="run",
        python="clip_grad_norm",
    )
    sam: float | None = option(
        "RADIUS",
        "Seek flat minima (SAM): step with the gradient at the worst weights within this L2 distance, e.g. "
        "0.05. Each step takes two passes. Default: off.",
        kept="run",
        min=0,
    )
    patience: int | None = option(
        "EPOCHS",
        "Stop after this many epochs without a lower validation loss (training loss without --validation), "
        "e.g. 5, and export the weights of the best epoch. Default: train all epochs and export the last.",
        kept="fit",
        min=1,
    )
    # Files and saves beside the run do not change its result, so they may be given anew at any time.
    log: Path | None = option(
        "FILE.csv",
        "Write a row per epoch to this file, and a row per step beside it, e.g. log.csv. Default: no log.",
        kept="anew",
    )
    save_every: int | None = option(
        "STEPS",
        "Save the run to DIR/checkpoints after every so many steps, e.g. 500. Default: after each epoch, to DIR.",
        kept="anew",
        min=1,
    )
    keep: int | None = option(
        "COUNT",
        "Keep this many of the saves of --save-every, the newest ones, e.g. 5. Default: 3.",
        kept="anew",
        min=1,
    )
    seed: int = option(
        "NUMBER",
        "Derive shuffling, the validation split, Dropout and a new head from this number, e.g. 1.",
        default=0,
        kept="run",
        min=0,
    )
    # Not kept here: the trainer saves the number, and a run may go on with another one on another machine.
    threads: int | None = option(
        "COUNT", "Compute each operation with this many threads, e.g. 4. Default: one per core.", min=1
    )
    overwrite: bool = switch(
        "Replace a run that is in the output directory already. Default: that is an error."
    )
    output: Path | None = option(
        "DIR",
        "Write the run and trained.onnx here, e.g. run. Default: MODEL's name with -trained.",
        "--output",
        "-o",
    )
    json: bool = switch(JSON_HELP)


@dataclass(frozen=True)
class PlanOptions:
    """Options of `onnxtrain plan`.

    Attributes:
        source: path of the model.
        model, optimizer: groups of options.
    """

    source: Path = argument("MODEL", "Path of an .onnx file.")
    memory: str = option(
        "SIZE",
        "Find trainings that fit into this memory, the whole process included, e.g. 512MB, 1.5GB or 800MiB.",
        default=REQUIRED,
        show_default=False,
    )
    model: ModelOptions = field(default_factory=ModelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    lora_rank: list[int] | None = option(
        "RANK",
        "Measure adapters of this rank, e.g. 8; repeat it for several. Default: 4, 8, 16 and 32.",
        python="ranks",
        min=1,
    )
    batch_size: int | None = option("SAMPLES", BATCH_SIZE_HELP, min=1)
    dim: list[str] | None = option(
        "NAME=SIZE",
        "Give a symbolic dimension this size, e.g. sequence_length=128; repeat it for several. Default: only the "
        "batch has one, see --batch-size.",
        python="dims",
    )
    threads: int | None = option(
        "COUNT", "Compute each operation with this many threads, e.g. 4. Default: one per core.", min=1
    )
    json: bool = switch(JSON_HELP)


def parse_dims(items: Sequence[str]) -> dict[str, int]:
    """Parses the values of `--dim`, e.g. ["sequence=16"]; raises InputError for one that is not NAME=SIZE."""
    sizes = {}
    for item in items:
        # Split at the last "=": names that tools compute, e.g. of a convolution's output, may contain it.
        name, equals, size = item.rpartition("=")
        if not equals or not size.isdecimal() or int(size) < 1:
            raise InputError(f"--dim is {item!r}; write it as NAME=SIZE, such as sequence=16")
        sizes[name] = int(size)
    return sizes
