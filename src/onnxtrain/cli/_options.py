"""Declares the options of the commands, each as one field: type, help text, default, and if a run keeps its value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer

from onnxtrain._names import (
    OPTIMIZERS,
    enumerated,
    losses_by_targets,
)
from onnxtrain.cli._complete import complete_losses, complete_optimizers
from onnxtrain.cli._config import use_config
from onnxtrain.cli._declared import REQUIRED, Kept, argument, flag, option, switch, with_recipe_options
from onnxtrain.errors import InputError

CONFIG_HELP = (
    "Read options from this TOML file, e.g. run.toml, which `train` writes to the directory of a run; options of the "
    "command line win, and --no-NAME switches off what the file switches on, e.g. --no-scale. Default: no file."
)
# Eager: its values are the defaults of all options that are read after it.
CONFIG_SETTINGS: dict[str, Any] = {"callback": use_config, "is_eager": True}
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE.toml", help=CONFIG_HELP, **CONFIG_SETTINGS)
]
JSON_HELP = "Print one JSON document instead of tables. Default: tables."
JsonOption = Annotated[bool, typer.Option("--json/--no-json", help=JSON_HELP)]
ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="Path of an .onnx file.")]
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Directory of a run that `onnxtrain train` has written.")
]
BATCH_SIZE_HELP = "Process this many samples at a time, e.g. 128. Default: 32, or what the model has fixed."
BatchSizeOption = Annotated[int | None, typer.Option(min=1, metavar="SAMPLES", help=BATCH_SIZE_HELP)]


@dataclass(frozen=True)
@with_recipe_options("model")
class ModelOptions:
    """Loss, changes of the model, and fields of a recipe; of `train`, `artifacts` and `plan`."""

    panel: ClassVar[str] = "Model"
    kept: ClassVar[Kept] = "run"

    loss: str | None = option(
        "NAME",
        f"Minimise this loss: {losses_by_targets()}. Default: the model's first output is the loss.",
        autocompletion=complete_losses,
    )
    # Texts, parsed by the type of each setting: the settings of one loss are not those of another.
    loss_option: list[str] | None = option(
        "NAME=VALUE",
        "Set a parameter of the loss, e.g. label_smoothing=0.1 or weight=1,5,1; repeat it for several. "
        "Default: PyTorch's values.",
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
@with_recipe_options("memory")
class MemoryOptions:
    """Fields of a recipe that trade time for memory; of `train` and `artifacts`. `plan` measures both values."""

    panel: ClassVar[str] = "Model"
    kept: ClassVar[Kept] = "run"


@dataclass(frozen=True)
@with_recipe_options("optimizer")
class OptimizerOptions:
    """The optimizer, its settings and gradient clipping; of `train`, `artifacts` and `plan`."""

    panel: ClassVar[str] = "Optimizer"
    kept: ClassVar[Kept] = "run"

    optimizer: str = option(
        "NAME",
        f"Update parameters by this optimizer: {enumerated(list(OPTIMIZERS))}, with PyTorch's defaults.",
        default="adamw",
        autocompletion=complete_optimizers,
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
        "--id",
        "--id-column",
    )
    missing: list[str] | None = option(
        "TEXT",
        "Read this text in a table as a missing value, e.g. NA; repeat it for several. Default: only "
        "the empty field is missing.",
    )
    # Texts, parsed by `_tables.parse_impute`: a value may name a column of the table.
    impute: list[str] | None = option(
        "[COLUMN=]mean|median|most_frequent|value=VALUE",
        "Fill missing values of a table: numbers by mean, median, most frequent value or VALUE, categories by "
        "the most frequent one or VALUE. Without COLUMN of all columns, e.g. median; repeat it for single columns, "
        "e.g. cabin=value=none. Default: a missing value is an error.",
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
    unknown_category: Literal["error", "ignore", "own"] = option(
        None,
        "Treat categories that training has not seen as an error, one-hot encode them as zeros (ignore), or give "
        "them an input or a number of their own (own), e.g. ignore.",
        default="error",
    )
    scale: bool = switch(
        "Standardise numeric columns of a table to mean 0 and standard deviation 1. Default: off."
    )

    def check(self) -> None:
        """Raises InputError for options that do not go together."""
        if self.one_hot and self.ordinal:
            raise InputError(
                "--one-hot and --ordinal are two ways to encode the same columns; give one of them."
            )

    def given(self) -> list[str]:
        """Lists the options that were given, as on the command line, e.g. ["--target", "--one-hot"]."""
        defaults = {entry.name: entry.default for entry in fields(self)}
        return [flag(name) for name, value in vars(self).items() if value and value != defaults[name]]


@dataclass(frozen=True)
class ArtifactsOptions:
    """Options of `onnxtrain artifacts`.

    Attributes:
        source: path of the model.
        model, memory, optimizer, lora: groups of options.
    """

    source: Path = argument("MODEL", "Path of an .onnx file.")
    model: ModelOptions = field(default_factory=ModelOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    config: Path | None = option("FILE.toml", CONFIG_HELP, **CONFIG_SETTINGS)
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


@dataclass(frozen=True)
class MergeOptions:
    """Options of `onnxtrain merge`.

    Attributes:
        source: path of the model.
        adapter: path of the adapter.
    """

    source: Path = argument("MODEL", "Path of an .onnx file.")
    adapter: Path = argument(
        "ADAPTER", "Path of an .onnx_adapter file, or of a folder that PEFT has written."
    )
    output: Path = option(
        "FILE",
        "Write the merged model to this file, e.g. merged.onnx.",
        "--output",
        "-o",
        default=REQUIRED,
        show_default=False,
    )
    requantize: bool = switch(
        "Round quantised weights to the same bits and blocks again, which may lose what the adapter has learned. "
        "Default: they become float32."
    )
    data: Path | None = option(
        "FILE.npz",
        "Compute --loss over the arrays of this file, with the adapter beside the model and after the merge. Default: "
        "no losses.",
    )
    loss: str | None = option(
        "NAME", f"Compute this loss over --data: {losses_by_targets()}. Default: no losses."
    )
    batch_size: int | None = option("SAMPLES", BATCH_SIZE_HELP, min=1)
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
