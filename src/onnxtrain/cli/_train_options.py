"""Declares the options of `onnxtrain train`, one field per option. Options for callbacks are in `_callbacks.py`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

from onnxtrain._names import enumerated, settings_by_name
from onnxtrain.cli._callbacks import CallbackOptions
from onnxtrain.cli._declared import Kept, argument, option, switch
from onnxtrain.cli._options import (
    BATCH_SIZE_HELP,
    CONFIG_HELP,
    CONFIG_SETTINGS,
    JSON_HELP,
    ImageOptions,
    LoraOptions,
    MemoryOptions,
    ModelOptions,
    OptimizerOptions,
    PairOptions,
    TableOptions,
    TextOptions,
    TokenizerOptions,
)
from onnxtrain.schedules import SCHEDULES

# Parameters of each schedule, by name. "constant" is left out, because it has no effect.
_SCHEDULES = {
    name: ", ".join(entry.name for entry in fields(kind))
    for name, kind in SCHEDULES.items()
    if name != "constant"
}


@dataclass(frozen=True)
class ScheduleOptions:
    """Options for the learning rate and its schedule."""

    panel: ClassVar[str] = "Learning rate"

    learning_rate: float = option(
        "RATE",
        "Set the learning rate, or the highest rate of a schedule, e.g. 0.01.",
        "--learning-rate",
        "--lr",
        default=1e-3,
        kept="fit",
    )
    find_lr: bool = switch(
        "Find a learning rate: take up to 100 steps at rising rates, print the rate at which the loss falls fastest, "
        "and train nothing. Default: train."
    )
    schedule: str | None = option(
        "NAME",
        f"Schedule the learning rate: {enumerated(list(_SCHEDULES))}. Default: a constant rate.",
        kept="run",
        python="scheduler",
    )
    schedule_option: list[str] | None = option(
        "NAME=VALUE",
        "Set a parameter of --schedule, e.g. step_size=5 or milestones=30,60; repeat it for several. "
        f"{settings_by_name(_SCHEDULES)}. Default: the schedule's own values.",
        kept="run",
    )
    schedule_epochs: int | None = option(
        "COUNT",
        "Spread the schedule over this many epochs, including those of later commands that resume the run, e.g. 20. "
        "Default: the epochs of this command.",
        kept="fit",
        min=1,
    )
    warmup: int = option(
        "STEPS",
        "Warm up the learning rate over this many steps at the start, e.g. 100.",
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
class WorkerOptions:
    """Options for training a model with several processes."""

    panel: ClassVar[str] = "Workers"

    workers: int | None = option(
        "COUNT",
        "Train with this many processes, each of which computes the gradient of its share of a batch, e.g. 4. "
        "Default: one process.",
        min=1,
    )
    hosts: str | None = option(
        "auto|local|ADDRESS,...",
        "Start the workers of --workers with Ray on any machines of its cluster (auto), on this machine (local), or in "
        "turn on the machines with these IP addresses, e.g. 10.0.0.1,10.0.0.2. Default: on this machine, without Ray.",
    )
    restarts: int | None = option(
        "COUNT",
        "Restart the workers from the last checkpoint if one of them fails or is killed, at most this many times, e.g. "
        "10. Default: 3.",
        min=0,
    )
    save_steps: int | None = option(
        "STEPS",
        "Also save the run every STEPS steps, so that restarted workers repeat fewer steps, e.g. 500. "
        "Default: only after each epoch.",
        min=1,
    )
    shard_optimizer: bool = switch(
        "Shard the optimizer state to save memory: keep each parameter's state on only one worker. Default: on all."
    )
    compress: Literal["bf16"] | None = option(
        None, "Compress gradients to bfloat16 for the all-reduce, e.g. bf16. Default: no compression."
    )


@dataclass(frozen=True)
class NetworkOptions:
    """Options for a network that the command makes for the columns of a table."""

    panel: ClassVar[str] = "Network for a table"
    kept: ClassVar[Kept] = "run"

    network: Literal["mlp"] | None = option(
        None,
        "Train a new network instead of a MODEL: a multilayer perceptron for the columns of --data, e.g. mlp. Unless "
        "--epochs is given, it trains for at least 20 epochs and 250 steps. Categories are one-hot encoded, numbers "
        "and a numeric target standardized. Default: a MODEL is required.",
    )
    hidden: str = option(
        "SIZES", "Give the network hidden layers of these sizes, e.g. 64,32, or 0 for none.", default="128,64"
    )
    activation: Literal["relu", "leaky_relu", "elu", "gelu", "silu", "tanh"] = option(
        None, "Apply this activation in the hidden layers, e.g. gelu.", default="relu"
    )


# By keyword, because an optional argument comes before a required option.
@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `onnxtrain train`.

    Attributes:
        source: path of a model, or directory of a run; None with `--network`.
        net, text, table, images, texts, tokenizing, model, memory, optimizer, lora, rate, callbacks, workers: groups of
            options.
    """

    source: Path | None = argument(
        "MODEL|DIR",
        "Path of an .onnx file, or directory of a run to resume. Leave it out with --network.",
        default=None,
    )
    data: Path | None = option(
        "FILE|DIR",
        "Train on this file: an .npz file with arrays named like the model's inputs and targets (or x and y), "
        "or a .csv, .tsv or .parquet table. Or on a folder of images with one subfolder per class, e.g. photos/train. "
        "Required for a new run. Default for a resumed run: the data that it was trained on, if that has not changed.",
    )
    net: NetworkOptions = field(default_factory=NetworkOptions)
    text: TextOptions = field(default_factory=TextOptions)
    table: TableOptions = field(default_factory=TableOptions)
    images: ImageOptions = field(default_factory=ImageOptions)
    texts: PairOptions = field(default_factory=PairOptions)
    tokenizing: TokenizerOptions = field(default_factory=TokenizerOptions)
    # A string for both: a number is a fraction, anything else a path.
    validation: str | None = option(
        "FRACTION|FILE|DIR",
        "Validate after each epoch on a random fraction of the samples, which is excluded from training, e.g. 0.1, or "
        "on a second file or folder in the format of --data, e.g. valid.npz. Default: no validation, or the subfolder "
        "val of a folder of images.",
        kept="fit",
    )
    stratify: bool = switch(
        "Stratify the split of --validation FRACTION: take the same fraction of each class. Default: off.",
        kept="fit",
    )
    evaluate_every: int | None = option(
        "STEPS",
        "Also validate every STEPS steps, e.g. 500. Default: only after each epoch.",
        kept="fit",
        min=1,
    )
    model: ModelOptions = field(default_factory=ModelOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    rate: ScheduleOptions = field(default_factory=ScheduleOptions)
    # May change when an interrupted fit is resumed; the trainer checks that they are not less than those done.
    epochs: int = option(
        "COUNT",
        "Train for this many epochs, e.g. 30. If the run was interrupted, they count from where the interrupted "
        "command began.",
        default=10,
        kept="anew",
        min=1,
    )
    batch_size: int | None = option("SAMPLES", BATCH_SIZE_HELP, kept="fit", min=1)
    accumulate: int = option(
        "BATCHES",
        "Accumulate the gradients of this many batches per optimizer step, e.g. 4.",
        default=1,
        kept="fit",
        min=1,
    )
    steps_per_epoch: int | None = option(
        "STEPS",
        "End an epoch after this many optimizer steps, e.g. 1000, and validate on all data. Default: after one pass "
        "over the data.",
        kept="fit",
        min=1,
    )
    # A string, because typer has no type for both a number of batches (2) and a fraction (0.05).
    limit_batches: str | None = option(
        "COUNT|FRACTION",
        "Try the command out: train and validate on this many batches per epoch, e.g. 2, or on this fraction of them, "
        "e.g. 0.05, and check the exported model. Default: all batches.",
        kept="fit",
    )
    verify: bool = switch(
        "Run trained.onnx on a batch, compare its outputs with those in training, and print the largest difference. "
        "Default: only with --limit-batches."
    )
    drop_last: bool = switch(
        "Drop the last batch of an epoch if it is incomplete. Default: train on it.", kept="fit"
    )
    no_shuffle: bool = switch(
        "Keep the samples in the order of the file. Default: shuffle them in each epoch.", kept="fit"
    )
    metric: list[str] | None = option(
        "NAME",
        "Record this metric in addition to the loss, e.g. f1, auroc, r2, or kind:accuracy for the output "
        "kind of a model with several; repeat it for several. Default: "
        "accuracy for classes, mean absolute and root mean square error for quantities.",
        kept="run",
        python="metrics",
    )
    # A string, because classes of a table have names; a class index is parsed from it.
    positive: str | None = option(
        "CLASS",
        "Compute f1, precision, recall and auroc for this class, e.g. fraud or 1. Default: the mean over "
        "classes (f1_macro) if the target contains strings, otherwise class 1 of two classes.",
        kept="run",
    )
    sample_weight: str | None = option(
        "NAME",
        "Weight the samples in the training loss by this column of a table or array of the .npz file, e.g. weight. "
        "Default: equal weights.",
        kept="run",
    )
    class_weight: list[str] | None = option(
        "balanced|CLASS=WEIGHT",
        "Weight the classes in the training loss: balanced gives rare classes as much weight as frequent ones, "
        "fraud=10 gives one class ten times the weight; repeat it for several. Default: equal weights.",
        kept="fit",
    )
    callbacks: CallbackOptions = field(default_factory=CallbackOptions)
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    seed: int = option(
        "NUMBER",
        "Seed shuffling, the validation split, Dropout and a new head with this number, e.g. 1.",
        default=0,
        kept="run",
        min=0,
    )
    # Not kept here: the trainer saves the number, and a run may be resumed with another one on another machine.
    threads: int | None = option(
        "COUNT", "Run each op with this many threads, e.g. 4. Default: one per core.", min=1
    )
    # Not kept, because a run may be resumed on another device.
    device: str = option(
        "NAME", "Train on this device: cpu, cuda or cuda:<index>, e.g. cuda:1.", default="cpu"
    )
    config: Path | None = option("FILE.toml", CONFIG_HELP, **CONFIG_SETTINGS)
    overwrite: bool = switch(
        "Replace a run that already exists in the output directory. Default: stop with an error."
    )
    output: Path | None = option(
        "DIR",
        "Write the run and trained.onnx to this directory, e.g. run. Default: MODEL's name with -trained.",
        "--output",
        "-o",
    )
    json: bool = switch(JSON_HELP)
