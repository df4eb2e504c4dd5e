"""Declares the options of each command except `train`, one dataclass per command and one field per option."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from onnxtrain._names import losses_by_targets
from onnxtrain.cli._declared import REQUIRED, argument, option, switch
from onnxtrain.cli._options import (
    BATCH_SIZE_HELP,
    CONFIG_HELP,
    CONFIG_SETTINGS,
    JSON_HELP,
    MAX_LENGTH_HELP,
    RUN_HELP,
    TEXT_COLUMNS_HELP,
    LoraOptions,
    MemoryOptions,
    ModelOptions,
    OptimizerOptions,
    PreparationOptions,
    TextOptions,
)


@dataclass(frozen=True)
class DemoOptions:
    """Options of `onnxtrain demo`."""

    output: Path = option(
        "DIR",
        "Write the model and the results to this directory, e.g. digits.",
        "--output",
        "-o",
        default=Path("demo-output"),
    )
    epochs: int = option("COUNT", "Train for this many epochs, e.g. 5.", default=15, min=1)
    seed: int = option(
        "NUMBER",
        "Seed the weights, shuffling and the validation split with this number, e.g. 1.",
        default=0,
        min=0,
    )
    json: bool = switch(JSON_HELP)


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
        "Write the artifacts to this directory, e.g. device.",
        "--output",
        "-o",
        default=Path("artifacts"),
        python="artifact_directory",
    )
    nominal: bool = switch(
        "Also write a checkpoint with names and shapes but without values. Default: off.",
        "nominal_checkpoint",
    )
    share_weights: bool | None = switch(
        "Store frozen weights of more than 64 kB once for all models, in a .data file beside them. Default: on with "
        "--profile portable, else off.",
        default=None,
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
        "Find ways to train within this memory budget for the whole process, e.g. 512MB, 1.5GB or 800MiB.",
        default=REQUIRED,
        show_default=False,
    )
    model: ModelOptions = field(default_factory=ModelOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    lora_rank: list[int] | None = option(
        "RANK",
        "Measure adapters of this LoRA rank, e.g. 8; repeat it for several. Default: 4, 8, 16 and 32.",
        python="ranks",
        min=1,
    )
    batch_size: int | None = option("SAMPLES", BATCH_SIZE_HELP, min=1)
    dim: list[str] | None = option(
        "NAME=SIZE",
        "Set the size of a symbolic dimension, e.g. sequence_length=128; repeat it for several. Default: only the "
        "batch size is set, see --batch-size.",
        python="dims",
    )
    threads: int | None = option(
        "COUNT", "Run each op with this many threads, e.g. 4. Default: one per core.", min=1
    )
    json: bool = switch(JSON_HELP)


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of `onnxtrain evaluate`.

    Attributes:
        source: path of a model, or directory of a run.
        text, images: groups of options.
    """

    source: Path = argument("MODEL|RUN", "Path of an .onnx file, or directory of a run.")
    data: Path = option(
        "FILE|DIR",
        "Evaluate on this file, in the format of the training data and with the target: .npz arrays, or a .csv, .tsv "
        "or .parquet table. Or on a folder of images with one subfolder per class, e.g. photos/val; or on pairs of "
        "texts, in a .csv, .tsv or .jsonl file.",
        default=REQUIRED,
        show_default=False,
    )
    text: TextOptions = field(default_factory=TextOptions)
    images: PreparationOptions = field(default_factory=PreparationOptions)
    text_columns: list[str] | None = option("COLUMNS", TEXT_COLUMNS_HELP)
    max_length: int | None = option("TOKENS", MAX_LENGTH_HELP, min=1)
    tokenizer: Path | None = option(
        "FILE",
        "Tokenize texts for an .onnx file with this tokenizer.json. Default: the file beside the model.",
    )
    loss: str | None = option(
        "NAME",
        f"Compute this loss of an .onnx file: {losses_by_targets()}; or that of a file, e.g. my_loss.onnx or "
        "losses.py:detection. Default: no loss, only the metrics that suit the "
        "target. A run has its own loss.",
    )
    loss_option: list[str] | None = option(
        "NAME=VALUE",
        "Set a parameter of --loss, e.g. label_smoothing=0.1; repeat it for several. Default: PyTorch's values.",
    )
    loss_input: list[str] | None = option(
        "NAME",
        "Compare this output of an .onnx file with the target, e.g. logits; repeat it for a loss of several outputs. "
        "Default: all outputs for such a loss, else the first one with floating-point numbers.",
    )
    metric: list[str] | None = option(
        "NAME",
        "Compute this metric of an .onnx file, e.g. f1; repeat it for several. Default: those of the loss. A run has "
        "its own metrics.",
        python="metrics",
    )
    mistakes: Path | None = option(
        "FILE.png",
        "Plot the images that the model is most wrong about, with true and predicted classes, to this file (.png, .pdf "
        "or .svg), e.g. mistakes.png. Default: no plot.",
    )
    batch_size: int | None = option("SAMPLES", BATCH_SIZE_HELP, min=1)
    config: Path | None = option("FILE.toml", CONFIG_HELP, **CONFIG_SETTINGS)
    json: bool = switch(JSON_HELP)


@dataclass(frozen=True)
class PredictOptions:
    """Options of `onnxtrain predict`.

    Attributes:
        source: path of a model, or directory of a run.
        text, images: groups of options.
    """

    source: Path = argument("MODEL|RUN", "Path of an .onnx file, or directory of a run.")
    data: Path = option(
        "FILE|DIR",
        "Predict the samples in this file, in the format of the training data: .npz arrays, or a .csv, .tsv or "
        ".parquet table. The target may be left out. Or predict the images in a folder and its subfolders, e.g. "
        "photos/new.",
        default=REQUIRED,
        show_default=False,
    )
    text: TextOptions = field(default_factory=TextOptions)
    images: PreparationOptions = field(default_factory=PreparationOptions)
    output: Path = option(
        "FILE",
        "Write the predictions to this .npz, .csv or .parquet file, or embeddings of texts to this .npy file.",
        "--output",
        "-o",
        default=Path("predictions.npz"),
    )
    loss: str | None = option(
        "NAME",
        "Also write the class probabilities and the predicted class of an .onnx file that was trained with this loss, "
        "e.g. cross_entropy. Default: only its outputs. A run has its own loss.",
    )
    id: list[str] | None = option(
        "COLUMN",
        "Write this column of the table before the predictions, e.g. passenger_id; repeat it for several. Default: the "
        "columns of `train --id`.",
        "--id",
        "--id-column",
    )
    text_columns: list[str] | None = option(
        "COLUMN",
        "Embed the texts in this column of a .csv, .tsv or .jsonl file, e.g. question. Default: the only column, or "
        "text.",
    )
    probabilities: bool = switch(
        "Write only the class probabilities, and the columns of --id. Default: also the outputs of the network and the "
        "predicted class."
    )
    batch_size: int | None = option("SAMPLES", BATCH_SIZE_HELP, min=1)
    config: Path | None = option("FILE.toml", CONFIG_HELP, **CONFIG_SETTINGS)
    json: bool = switch(JSON_HELP)


@dataclass(frozen=True)
class MineOptions:
    """Options of `onnxtrain mine`.

    Attributes:
        source: path of a model, or directory of a run.
    """

    source: Path = argument("MODEL|RUN", "Path of an .onnx file that embeds texts, or directory of a run.")
    data: Path = option(
        "FILE",
        "Find negatives for the pairs in this .csv, .tsv or .jsonl file, e.g. pairs.csv.",
        default=REQUIRED,
        show_default=False,
    )
    output: Path = option(
        "FILE",
        "Write the pairs with their negatives to this .csv, .tsv or .jsonl file, e.g. triples.csv.",
        "--output",
        "-o",
        default=REQUIRED,
        show_default=False,
    )
    corpus: Path | None = option(
        "FILE",
        "Choose the negatives from the texts in this file: the lines of a .txt file, or the only column of a .csv, "
        ".tsv or .jsonl file, e.g. corpus.txt. Default: the positives of --data.",
    )
    text_columns: list[str] | None = option("COLUMNS", TEXT_COLUMNS_HELP)
    num_negatives: int = option("COUNT", "Find this many negatives for each pair, e.g. 5.", default=3, min=1)
    range_min: int = option(
        "COUNT",
        "Skip this many of the most similar texts, e.g. 10, because they may be positives that nobody has labelled.",
        default=0,
        min=0,
    )
    range_max: int | None = option(
        "COUNT",
        "Consider this many of the most similar texts, e.g. 50. Default: ten for each negative, after --range-min.",
        min=1,
    )
    margin: float | None = option(
        "AMOUNT",
        "Take only negatives whose cosine similarity is at least this much less than that of the pair, e.g. 0.05. "
        "Default: any.",
    )
    relative_margin: float | None = option(
        "FRACTION",
        "Take only negatives whose cosine similarity is at least this fraction less than that of the pair, e.g. 0.05. "
        "Default: any.",
    )
    min_score: float | None = option(
        "SIMILARITY", "Take only negatives with at least this cosine similarity, e.g. 0.3. Default: any."
    )
    max_score: float | None = option(
        "SIMILARITY", "Take only negatives with at most this cosine similarity, e.g. 0.9. Default: any."
    )
    random: bool = switch(
        "Draw the negatives at random from the texts considered. Default: take the most similar."
    )
    triplets: bool = switch(
        "Write a row for each negative, e.g. for --loss triplet. Default: a row for each pair, with all its negatives."
    )
    tokenizer: Path | None = option(
        "FILE",
        "Tokenize the texts of an .onnx file with this tokenizer.json. Default: the file beside the model.",
    )
    seed: int = option("NUMBER", "Seed --random with this number, e.g. 1.", default=0, min=0)
    json: bool = switch(JSON_HELP)


@dataclass(frozen=True)
class ExportOptions:
    """Options of `onnxtrain export`.

    Attributes:
        directory: directory of the run.
    """

    directory: Path = argument("RUN", RUN_HELP)
    output: Path = option(
        "FILE",
        "Write the model to this file, e.g. model.onnx.",
        "--output",
        "-o",
        default=REQUIRED,
        show_default=False,
    )
    outputs: list[str] | None = option(
        "NAME",
        "Return this value of the network instead of its outputs, e.g. features; repeat it for several. Default: the "
        "network's outputs.",
    )
    network: bool = switch(
        "Write only the network, whose inputs are the encoded columns of a table. Default: a model whose inputs are "
        "the columns themselves."
    )
    include_preprocessing: bool = switch(
        "Write the preprocessing of images into the model, which then takes decoded images of any size, uint8 [batch, "
        "height, width, channels]. Default: the model takes what the network takes."
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
    adapter: Path = argument("ADAPTER", "Path of an .onnx_adapter file, or of a directory written by PEFT.")
    output: Path = option(
        "FILE",
        "Write the merged model to this file, e.g. merged.onnx.",
        "--output",
        "-o",
        default=REQUIRED,
        show_default=False,
    )
    requantize: bool = switch(
        "Quantize the merged weights again, to the file's bit width and block size; the rounding may undo "
        "part of the adapter. Default: the merged weights become floating point, in the dtype of the activations."
    )
    data: Path | None = option(
        "FILE.npz",
        "Compute --loss over the arrays in this file, before and after the merge, e.g. test.npz. Default: no losses.",
    )
    loss: str | None = option(
        "NAME", f"Compute this loss over --data: {losses_by_targets()}. Default: no losses."
    )
    batch_size: int | None = option("SAMPLES", BATCH_SIZE_HELP, min=1)
    json: bool = switch(JSON_HELP)


@dataclass(frozen=True)
class AverageOptions:
    """Options of `onnxtrain average`.

    Attributes:
        models: paths of models, runs and directories of checkpoints.
    """

    models: list[Path] = argument(
        "MODEL|RUN...",
        "Paths of .onnx files, directories of runs, or directories with the checkpoints of a run, e.g. "
        "run/checkpoints.",
    )
    output: Path = option(
        "FILE",
        "Write the averaged model to this file, e.g. soup.onnx.",
        "--output",
        "-o",
        default=REQUIRED,
        show_default=False,
    )
    weights: str | None = option(
        "NUMBERS", "Weight the models with these numbers, e.g. 2,1,1. Default: equal weights."
    )
    greedy: bool = switch(
        "Add the models one by one, the best first, and leave out each one that makes the mean worse on --data. "
        "Default: average all models.",
        python="score",
    )
    data: Path | None = option(
        "FILE",
        "Compare the models of --greedy on this file with inputs and targets: .npz arrays or a table, e.g. valid.npz. "
        "Default: no comparison.",
    )
    loss: str | None = option(
        "NAME",
        f"Compare the models of --greedy by this loss: {losses_by_targets()}. Default: the loss of the first run.",
    )
    loss_option: list[str] | None = option(
        "NAME=VALUE",
        "Set a parameter of --loss, e.g. label_smoothing=0.1; repeat it for several. Default: PyTorch's values.",
    )
    metric: str | None = option(
        "NAME", "Compare the models of --greedy by this metric, e.g. accuracy. Default: by the loss."
    )
    batch_size: int | None = option("SAMPLES", BATCH_SIZE_HELP, min=1)
    json: bool = switch(JSON_HELP)


@dataclass(frozen=True)
class CalibrateOptions:
    """Options of `onnxtrain calibrate`.

    Attributes:
        directory: directory of the run.
        text: group of options.
    """

    directory: Path = argument("RUN", RUN_HELP)
    data: Path = option(
        "FILE|DIR",
        "Calibrate on this file, in the format of the training data and with the target: data that the model was not "
        "trained on, e.g. valid.npz, or a folder of images with one subfolder per class.",
        default=REQUIRED,
        show_default=False,
    )
    output: Path = option(
        "FILE",
        "Write the calibrated model to this file, e.g. calibrated.onnx. The run itself is not changed.",
        "--output",
        "-o",
        default=REQUIRED,
        show_default=False,
    )
    text: TextOptions = field(default_factory=TextOptions)
    threshold: Literal["f1", "accuracy", "mcc"] | None = option(
        None,
        "For a model with two classes, also find the probability above which to predict the positive class, so that "
        "this metric is highest, e.g. f1. Default: 0.5.",
    )
    batch_size: int | None = option("SAMPLES", BATCH_SIZE_HELP, min=1)
    json: bool = switch(JSON_HELP)


@dataclass(frozen=True)
class OpsOptions:
    """Options of `onnxtrain ops`.

    Attributes:
        model: path of the model to check; None to list all ops.
    """

    model: Path | None = argument(
        "[MODEL]", "Path of an .onnx file to check. Default: list all ops.", default=None
    )
    status: str | None = option(
        "STATUS",
        "List only ops with this status: rule, function, nondifferentiable, not-yet or unknown. Default: all.",
    )
    domain: str = option(
        "DOMAIN",
        "List the ops that ONNX Runtime has in this domain, e.g. com.microsoft. Default: the ops of the ONNX standard.",
        default="",
        show_default=False,
    )
    profile: str | None = option(
        "NAME",
        "Also check whether artifacts of the model can have this profile, e.g. portable, and list the nodes that "
        "prevent it. Default: no such check.",
    )
    json: bool = switch(JSON_HELP)


@dataclass(frozen=True)
class CheckOptions:
    """Options of `onnxtrain check`.

    Attributes:
        model: path of the model.
    """

    model: Path = argument("MODEL", "Path of an .onnx file.")
    of: str | None = option("NAME", "Differentiate this output, e.g. logits. Default: the model's first one.")
    parameter: list[str] | None = option(
        "PATTERN",
        "Check only the parameters whose names match, e.g. 'fc.*'; repeat it for several. Default: all.",
    )
    data: Path | None = option(
        "FILE.npz",
        "Use the arrays in this file as inputs, by name, e.g. data.npz. Default: random inputs.",
    )
    dim: list[str] | None = option(
        "NAME=SIZE",
        "Set the size of a symbolic dimension, e.g. sequence=16; repeat it for several. Default: a small "
        "size.",
    )
    seed: int = option(
        "NUMBER", "Seed the random inputs and directions with this number, e.g. 1.", default=0, min=0
    )
    json: bool = switch(JSON_HELP)


@dataclass(frozen=True)
class InspectOptions:
    """Options of `onnxtrain inspect`.

    Attributes:
        path: path of the run, artifacts, checkpoint or model to show.
    """

    path: Path = argument(
        "DIR|FILE", "Directory of a run or of artifacts, or path of a checkpoint or an .onnx file."
    )
    parameters: bool = switch(
        "Also list the inputs and parameters of a run. Default: only its settings, best epoch and files."
    )
    json: bool = switch(JSON_HELP)
