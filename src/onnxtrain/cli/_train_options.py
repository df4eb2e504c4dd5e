"""Declares the options of `onnxtrain train`, each as one field."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

from onnxtrain._names import enumerated, settings_by_name
from onnxtrain.cli._complete import complete_metrics, complete_schedules
from onnxtrain.cli._declared import REQUIRED, Kept, argument, option, switch
from onnxtrain.cli._options import (
    BATCH_SIZE_HELP,
    CONFIG_HELP,
    CONFIG_SETTINGS,
    JSON_HELP,
    LoraOptions,
    MemoryOptions,
    ModelOptions,
    OptimizerOptions,
    TableOptions,
)
from onnxtrain.schedules import SCHEDULES

# Per name of a schedule, its parameters; without the one that leaves the rate as it is.
_SCHEDULES = {
    name: ", ".join(entry.name for entry in fields(kind))
    for name, kind in SCHEDULES.items()
    if name != "constant"
}


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
        f"Change the learning rate during training: {enumerated(list(_SCHEDULES))}. Default: it stays constant.",
        kept="run",
        autocompletion=complete_schedules,
    )
    schedule_option: list[str] | None = option(
        "NAME=VALUE",
        "Set a parameter of --schedule, e.g. step_size=5 or milestones=30,60; repeat it for several. "
        f"{settings_by_name(_SCHEDULES)}. Default: the schedule's own values.",
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
class RegularizeOptions:
    """Averages of weights, flat minima and mixed samples."""

    panel: ClassVar[str] = "Averages, flat minima, augmentation"
    kept: ClassVar[Kept] = "run"

    ema_decay: float | None = option(
        "FACTOR",
        "Validate and export exponential moving averages of the weights, which keep this factor in "
        "each step, e.g. 0.999. Default: the weights themselves.",
    )
    # A text: 16 is an epoch, 0.75 a fraction, and typer knows no type of both.
    swa_start: str | None = option(
        "EPOCH|FRACTION",
        "Average the weights after this epoch and the later ones (SWA), or after this fraction of the epochs, e.g. "
        "16 or 0.75, and export the average. Default: off.",
        kept="fit",
    )
    swa_lr: float | None = option(
        "RATE",
        "Set the learning rate of the epochs that --swa-start averages, e.g. 0.05. Default: unchanged.",
        kept="fit",
    )
    sam: float | None = option(
        "RADIUS",
        "Seek flat minima (SAM): step with the gradient at the worst weights within this L2 distance, e.g. "
        "0.05. Each step takes two passes. Default: off.",
        min=0,
    )
    mixup: float | None = option(
        "ALPHA",
        "Average pairs of samples and their targets in training, with shares drawn from Beta(ALPHA, ALPHA), e.g. "
        "0.2. Default: off.",
    )
    cutmix: float | None = option(
        "ALPHA",
        "Paste a box of another image into each image in training, and mix the targets by its area, drawn from "
        "Beta(ALPHA, ALPHA), e.g. 1.0. Default: off.",
    )


@dataclass(frozen=True)
class BestOptions:
    """The choice of the epoch that is exported, and the end of training."""

    panel: ClassVar[str] = "Best epoch"
    kept: ClassVar[Kept] = "fit"

    monitor: str | None = option(
        "NAME",
        "Compare epochs by this recorded value for --patience and --save-best, e.g. val_f1. Default: val_loss, or "
        "loss without --validation.",
    )
    patience: int | None = option(
        "EPOCHS",
        "Stop after this many epochs without a better --monitor, e.g. 5, and export the weights of the best epoch. "
        "Default: train all epochs and export the last.",
        min=1,
    )
    min_delta: float | None = option(
        "AMOUNT",
        "Count only improvements of --monitor larger than this, e.g. 0.001. Default: any improvement.",
        min=0,
    )
    save_best: bool = switch(
        "Train all epochs and export the weights of the best one by --monitor. Default: export the last."
    )


@dataclass(frozen=True)
class LogOptions:
    """Files beside the run; they do not change its result, so they may be given anew at any time."""

    panel: ClassVar[str] = "Logs and saves"
    kept: ClassVar[Kept] = "anew"

    log: Path | None = option(
        "FILE.csv",
        "Write a row per epoch to this file, and a row per step beside it, e.g. log.csv. Default: no log.",
    )
    tensorboard: Path | None = option(
        "DIR",
        "Write event files for TensorBoard to this directory, e.g. logs. Default: none.",
    )
    save_every: int | None = option(
        "STEPS",
        "Save the run to DIR/checkpoints after every so many steps, e.g. 500. Default: after each epoch, to DIR.",
        min=1,
    )
    keep: int | None = option(
        "COUNT",
        "Keep this many of the saves of --save-every, the newest ones, e.g. 5. Default: 3.",
        min=1,
    )


@dataclass(frozen=True)
class WorkerOptions:
    """Several processes that train one model; of `train`."""

    panel: ClassVar[str] = "Workers"

    workers: int | None = option(
        "COUNT",
        "Train on this many processes, each of which computes the gradient of its share of a batch, e.g. 4. "
        "Default: in one process.",
        min=1,
    )
    hosts: str | None = option(
        "auto|local|ADDRESS,...",
        "Start the workers of --workers by Ray on any machines of its cluster (auto), on this machine (local), or on "
        "those with these IP addresses in turn, e.g. 10.0.0.1,10.0.0.2. Default: on this machine, without Ray.",
    )
    restarts: int | None = option(
        "COUNT",
        "Start the workers again from the last save at most this often if one of them is killed or fails, e.g. 10. "
        "Default: 3.",
        min=0,
    )
    save_steps: int | None = option(
        "STEPS",
        "Save the run after every so many steps, too, for workers that are started again, e.g. 500. Default: after "
        "epochs only.",
        min=1,
    )
    shard_optimizer: bool = switch(
        "Keep the optimizer's state of a parameter on one worker only, which takes less memory. Default: on all."
    )
    compress: Literal["bf16"] | None = option(
        None, "Send gradients between workers as bfloat16, e.g. bf16. Default: as they are."
    )


@dataclass(frozen=True)
class TrainOptions:
    """Options of `onnxtrain train`.

    Attributes:
        source: path of a model, or directory of a run.
        table, model, memory, optimizer, lora, rate, regularize, best, logs, workers: groups of options.
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
    memory: MemoryOptions = field(default_factory=MemoryOptions)
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
    steps_per_epoch: int | None = option(
        "STEPS",
        "End an epoch after this many optimizer steps, e.g. 1000. Default: after a pass over the data.",
        kept="fit",
        min=1,
    )
    drop_last: bool = switch(
        "Leave out the last batch of an epoch if it is incomplete. Default: train on it.", kept="fit"
    )
    no_shuffle: bool = switch(
        "Take the samples in the order of the file. Default: in a new random order in each epoch.", kept="fit"
    )
    metric: list[str] | None = option(
        "NAME",
        "Record this metric beside the loss, e.g. f1, auroc, r2; repeat it for several. Default: "
        "accuracy for classes, mean absolute and root mean square error for quantities.",
        kept="run",
        autocompletion=complete_metrics,
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
    regularize: RegularizeOptions = field(default_factory=RegularizeOptions)
    best: BestOptions = field(default_factory=BestOptions)
    logs: LogOptions = field(default_factory=LogOptions)
    workers: WorkerOptions = field(default_factory=WorkerOptions)
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
    # Not kept: a run may go on with another device on another machine.
    device: str = option(
        "NAME", "Train on this device: cpu, cuda or cuda:<index>, e.g. cuda:1.", default="cpu"
    )
    config: Path | None = option("FILE.toml", CONFIG_HELP, **CONFIG_SETTINGS)
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
