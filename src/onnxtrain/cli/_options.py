"""Declares the options that several commands share, in groups: one dataclass per group, one field per option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from onnxtrain._names import (
    OPTIMIZERS,
    enumerated,
    losses_by_targets,
)
from onnxtrain.cli._config import use_config
from onnxtrain.cli._declared import Kept, flag, option, switch, with_recipe_options
from onnxtrain.errors import InputError

CONFIG_HELP = (
    "Read options from this TOML file, e.g. the run.toml that `train` writes to the directory of a run. Options on the "
    "command line override it; --no-NAME turns a switch of the file off, e.g. --no-scale. Default: no file."
)
# Eager: typer must read the file first, because its values are the defaults of all other options.
CONFIG_SETTINGS: dict[str, Any] = {"callback": use_config, "is_eager": True}
RUN_HELP = "Directory of a run, written by `onnxtrain train`."
JSON_HELP = "Print one JSON document instead of tables. Default: tables."
TEXT_COLUMNS_HELP = (
    "Read texts from these columns: anchor, positive and any negatives, e.g. question,answer. Default: columns with "
    "such names, or all of two or three."
)
MAX_LENGTH_HELP = (
    "Truncate texts to this many tokens, e.g. 128. Default: the limit in the files beside the model, such as "
    "config.json."
)
BATCH_SIZE_HELP = (
    "Process this many samples at a time, e.g. 128. Default: 32, or the model's fixed batch size."
)


@dataclass(frozen=True)
@with_recipe_options("model")
class ModelOptions:
    """Options of `train`, `artifacts` and `plan` for the loss, the model and the recipe's fields of group "model"."""

    panel: ClassVar[str] = "Model"
    kept: ClassVar[Kept] = "run"

    loss: str | None = option(
        "NAME",
        f"Minimize this loss: {losses_by_targets()}; or the loss that a .onnx file computes, e.g. my_loss.onnx, "
        "or that a Python file defines, as a function of PyTorch tensors: losses.py:detection. Default: the model's "
        "first output is the loss.",
    )
    # Strings, because each loss has settings of its own; they are parsed by the type of the setting.
    loss_option: list[str] | None = option(
        "NAME=VALUE",
        "Set a parameter of the loss, e.g. label_smoothing=0.1 or weight=1,5,1; repeat it for several. "
        "Default: PyTorch's values.",
    )
    dynamic_batch: bool = switch(
        "Make the batch size dynamic in a model that was exported with a fixed batch size. Default: "
        "the model is not changed."
    )
    replace_head: int | None = option(
        "CLASSES",
        "Replace the last linear layer with a new one for this many classes, e.g. 3. Default: keep the layer.",
        min=1,
    )
    add_classes: int | None = option(
        "COUNT",
        "Add this many classes to the last linear layer, e.g. 2. Their indices follow those of the old classes, whose "
        "scores are kept; to keep them in training, too, also pass --train 'added.*'. Default: keep the layer.",
        min=1,
    )


@dataclass(frozen=True)
@with_recipe_options("memory")
class MemoryOptions:
    """Options of `train` and `artifacts` that trade time for memory.

    `plan` does not have these options: it measures training with each of their values.
    """

    panel: ClassVar[str] = "Model"
    kept: ClassVar[Kept] = "run"


@dataclass(frozen=True)
@with_recipe_options("optimizer")
class OptimizerOptions:
    """Options of `train`, `artifacts` and `plan` for the optimizer, its settings and gradient clipping."""

    panel: ClassVar[str] = "Optimizer"
    kept: ClassVar[Kept] = "run"

    optimizer: str = option(
        "NAME",
        f"Update the parameters with this optimizer: {enumerated(list(OPTIMIZERS))}, with PyTorch's defaults.",
        default="adamw",
    )
    weight_decay: float | None = option(
        "FACTOR",
        "Set the weight decay of the optimizer, e.g. 0.1. Default: PyTorch's, which is 0.01 for adamw, 0.1 for muon "
        "and 0 for the others.",
        min=0,
    )
    optimizer_option: list[str] | None = option(
        "NAME=VALUE",
        "Set a parameter of the optimizer, e.g. momentum=0.9, betas=0.9,0.95 or nesterov=true; "
        "repeat it for several. Default: PyTorch's values.",
    )


@dataclass(frozen=True)
class LoraOptions:
    """Options of `train` and `artifacts` for LoRA adapters, which are trained instead of the linear layers' weights."""

    panel: ClassVar[str] = "Adapters (LoRA)"
    kept: ClassVar[Kept] = "run"

    lora_rank: int | None = option(
        "RANK",
        "Freeze the weights and train LoRA adapters of this rank on the linear layers, e.g. 8. Parameters of --train "
        "are trained as well. Default: no adapters.",
        min=1,
    )
    lora_targets: list[str] | None = option(
        "NAME",
        "Add an adapter to the layers with this name, e.g. q_proj; repeat it for several. Default: all linear "
        "layers except the output layer of a language model.",
    )
    lora_alpha: float | None = option(
        "ALPHA", "Scale the outputs of adapters by ALPHA / RANK, e.g. 32. Default: 8."
    )
    lora_dropout: float | None = option(
        "PROBABILITY",
        "Apply Dropout with this probability to the inputs of adapters, e.g. 0.05. Default: 0.",
    )


TABLES = "Tables (.csv, .tsv, .parquet)"


@dataclass(frozen=True)
class TextOptions:
    """Options for reading a text file with a table, for files that can be read in several ways."""

    panel: ClassVar[str] = TABLES
    kept: ClassVar[Kept] = "run"

    separator: str | None = option(
        "CHARACTER",
        "Split the fields of a text file at this character, e.g. semicolon, or comma, tab, pipe, space. Default: "
        "recognized.",
    )
    decimal: Literal[".", ","] | None = option(
        None, "Read the numbers of a text file with this decimal mark, e.g. ','. Default: recognized."
    )
    encoding: str | None = option(
        "NAME", "Decode a text file from this encoding, e.g. cp1252. Default: UTF-8 or UTF-16, recognized."
    )


@dataclass(frozen=True)
class TableOptions:
    """Options for encoding the columns of a table. The encoding is fitted to the training data."""

    # Panels group the options in `--help`; otherwise typer would list all fifty in one table.
    panel: ClassVar[str] = TABLES
    kept: ClassVar[Kept] = "run"

    target: list[str] | None = option(
        "COLUMN", "Predict this column of a table, e.g. survived; repeat it for several. Required for tables."
    )
    inputs: list[str] | None = option(
        "COLUMNS",
        "Feed these columns of a table to the model, in this order, e.g. age,weight. Default: all "
        "except the target and --id.",
    )
    id: list[str] | None = option(
        "COLUMN",
        "Exclude this column of a table from the inputs and write it before the predictions, e.g. "
        "passenger_id. Default: none.",
        "--id",
        "--id-column",
    )
    missing: list[str] | None = option(
        "TEXT",
        "Read this text in a table as a missing value, e.g. NA; repeat it for several. Default: only "
        "the empty field is missing.",
    )
    # Strings, parsed by `_tables.parse_impute`, because a value may name a column of the table.
    impute: list[str] | None = option(
        "[COLUMN=]mean|median|most_frequent|value=VALUE",
        "Fill missing values of a table: numbers with the mean, median, most frequent value or VALUE, categories with "
        "the most frequent one or VALUE. Without COLUMN it applies to all columns, e.g. median; repeat it for single "
        "columns, e.g. cabin=value=none. Default: a missing value raises an error.",
    )
    categorical: list[str] | None = option(
        "COLUMNS",
        "Treat these numeric columns of a table as categories, e.g. zip,pclass. "
        "Default: only columns of strings.",
    )
    one_hot: bool = switch(
        "One-hot encode the categories of a table, with one 0/1 input per category. Default: off."
    )
    ordinal: bool = switch(
        "Encode the categories of a table as 0, 1, 2, ... in alphabetical order. Default: off."
    )
    unknown_category: Literal["error", "ignore", "own"] = option(
        None,
        "Handle categories that are not in the training data: raise an error (error), encode them as zeros with "
        "--one-hot (ignore), or encode them all as one additional category (own).",
        default="error",
    )
    # None: on for a network that the command makes, off for a model that the user passes.
    scale: bool | None = switch(
        "Standardize numeric columns of a table to mean 0 and standard deviation 1. Default: on with --network, else "
        "off.",
        default=None,
    )
    scale_target: bool | None = switch(
        "Standardize the target of a regression in training. Predictions and metrics, except the loss, keep the "
        "target's units. Default: on with --network, else off.",
        python="target_scale",
        default=None,
    )

    def check(self) -> None:
        """Raises InputError if mutually exclusive options are given."""
        if self.one_hot and self.ordinal:
            raise InputError(
                "--one-hot and --ordinal are alternative encodings of the same columns; pass only one."
            )

    def given(self) -> list[str]:
        """Returns the options whose values differ from the defaults, e.g. ["--target", "--one-hot"]."""
        defaults = {entry.name: entry.default for entry in fields(self)}
        return [flag(name) for name, value in vars(self).items() if value and value != defaults[name]]


@dataclass(frozen=True)
class PreparationOptions:
    """Options for the inputs that are made of the images in a folder, of all commands that read one."""

    panel: ClassVar[str] = "Images (a folder)"
    kept: ClassVar[Kept] = "run"

    # Strings, because typer has no type for one number or several; `_images.py` parses them.
    image_size: str | None = option(
        "PIXELS|HEIGHT,WIDTH",
        "Feed images of this size to the model, e.g. 224. Default: the size of the model's input, or that in a file "
        "beside the model.",
        python="size",
    )
    mean: str | None = option(
        "NUMBER|RED,GREEN,BLUE",
        "Subtract this mean from pixels that are scaled to 0 to 1, e.g. 0.485,0.456,0.406. Default: the mean in the "
        "model's metadata, or in preprocessor_config.json or config.json beside the model.",
    )
    std: str | None = option(
        "NUMBER|RED,GREEN,BLUE",
        "Divide by this standard deviation after subtracting --mean, e.g. 0.229,0.224,0.225. Default: as for --mean.",
    )
    resize: str | None = option(
        "PIXELS|HEIGHT,WIDTH",
        "Resize the shorter side of images to this length before the center is cropped, e.g. 256. Default: that of the "
        "model, or the smallest that covers --image-size.",
    )
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"] | None = option(
        None,
        "Resize images with this filter of Pillow, e.g. bicubic. Default: that of the model, or bilinear.",
    )

    def given(self) -> list[str]:
        """Returns the options that differ from the defaults, e.g. ["--mean", "--flip"]."""
        return [flag(name) for name, value in vars(self).items() if value]


@dataclass(frozen=True)
class ImageOptions(PreparationOptions):
    """Options of `train` for a folder of images."""

    flip: bool = switch("Flip half of the training images horizontally. Default: off.", kept="fit")
    crop: str | None = option(
        "LEAST|LEAST,MOST",
        "Train on random crops of images with at least this share of the area, e.g. 0.25. Default: the center.",
        kept="fit",
    )
    image_workers: int | None = option(
        "COUNT",
        "Decode images with this many threads, e.g. 4. Default: one per core, at most 8.",
        kept="anew",
        min=1,
        max=64,
    )


@dataclass(frozen=True)
class PairOptions:
    """Options of `train` for the losses over pairs and triples of texts."""

    panel: ClassVar[str] = "Texts (.csv, .tsv, .jsonl)"
    kept: ClassVar[Kept] = "run"

    text_columns: list[str] | None = option("COLUMNS", TEXT_COLUMNS_HELP, python="columns")
    max_length: int | None = option("TOKENS", MAX_LENGTH_HELP, min=1)
    include_pooling: bool = switch(
        "Add the output sentence_embedding to trained.onnx, pooled as in training. Default: the outputs of the model."
    )

    def given(self) -> list[str]:
        """Returns the options whose values differ from the defaults, e.g. ["--text-columns"]."""
        return [flag(name) for name, value in vars(self).items() if value]


@dataclass(frozen=True)
class TokenizerOptions:
    """Option of `train` for the tokenizer file. It is not kept: a run contains its tokenizer."""

    panel: ClassVar[str] = PairOptions.panel

    tokenizer: Path | None = option(
        "FILE", "Tokenize texts with this tokenizer.json in a new run. Default: the file beside the model."
    )


def parse_dims(items: Sequence[str]) -> dict[str, int]:
    """Parses the values of `--dim` into sizes by dimension name, e.g. {"sequence": 16} for ["sequence=16"].

    Raises:
        InputError: a value does not have the form NAME=SIZE, or the size is not a positive integer.
    """
    sizes = {}
    for item in items:
        # Split at the last "=", because generated names of dimensions may contain "=".
        name, equals, size = item.rpartition("=")
        if not equals or not size.isdecimal() or int(size) < 1:
            raise InputError(f"--dim is {item!r}; write it as NAME=SIZE, such as sequence=16")
        sizes[name] = int(size)
    return sizes
