"""Draws jobs of the command line: a training with random options, and commands that use what it has written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from onnxtrain._names import LOSSES, OPTIMIZERS
from onnxtrain.cli._command_options import ArtifactsOptions
from onnxtrain.cli._declared import Option, options_of
from onnxtrain.cli._options import ImageOptions, PairOptions, TableOptions, TextOptions, TokenizerOptions
from onnxtrain.cli._train_options import NetworkOptions, TrainOptions
from onnxtrain.schedules import SCHEDULES

ODD_TEXTS = [
    "",
    " ",
    "nan",
    "inf",
    "-1",
    "0",
    "1e999",
    "=",
    "a=",
    "=1",
    "*",
    "[",
    "ü",
    "x" * 300,
    "[bold]",
    "a\nb",
    "--",
    "True",
]
ODD_NUMBERS = ["0", "-1", "nan", "inf", "-inf", "1e-300", "1e38", "1e300", "x", ""]
ODD_COUNTS = ["0", "-1", "1000000", "99999999999999999999", "1.5", "x", ""]

# Model, data, and what is learned.
TABLE_JOBS = [
    ("table.onnx", "table.csv", "classes"),
    ("table.onnx", "table.parquet", "classes"),
    ("amount.onnx", "table.csv", "amount"),
    ("table.onnx", "gaps.csv", "classes"),
]
ARRAY_JOBS = [
    ("mlp.onnx", "data.npz", "classes"),
    ("images.onnx", "images.npz", "classes"),
    ("mlp.onnx", "amounts.npz", "amount"),
]
TARGETS = ["label", "kind", "amount"]

# What a user would give, by option; the odd texts come from the lists above.
TEXTS: dict[str, Sequence[str]] = {
    "loss": list(LOSSES),
    "loss_option": ["reduction=sum", "reduction=mean", "label_smoothing=0.1", "weight=1,2,3", "delta=2"],
    "learning_rate_scale": ["w1=0.1", "*=2", "b*=0", "w2=-1"],
    "train": ["w2", "b*", "*", "w?", "fc.*"],
    "freeze": ["w1", "b*", "fc.*"],
    "batch_norm": ["training", "inference", "as_exported", "*=training"],
    "dropout": ["0.1", "0", "h=0.5", "*=0.25", "2"],
    "loss_input": ["logits", "a", "h"],
    "teacher_output": ["logits", "a"],
    "sparse_gradients": ["w1", "*"],
    "optimizer": list(OPTIMIZERS),
    "optimizer_option": ["betas=0.9,0.95", "eps=1e-6", "bias_correction=false", "adam_mode=1", "momentum=0.9"],
    "lora_targets": ["w1", "w2", "h", "m"],
    "target": TARGETS,
    "inputs": ["age,weight", "age,weight,number,flag", "town", "age"],
    "id": ["number", "town"],
    "missing": ["NA", "?"],
    "impute": ["mean", "median", "most_frequent", "value=0", "town=value=none", "age=mean"],
    "categorical": ["number", "flag", "number,flag"],
    "decimal": [".", ","],
    "separator": ["comma", ",", "semicolon", "tab"],
    "encoding": ["utf-8", "latin-1", "utf-16", "hex"],
    "validation": ["0.2", "0.5", "0.9", "1", "0.001", "table.csv", "data.npz"],
    "schedule": list(SCHEDULES),
    "schedule_option": ["step_size=1", "milestones=1,2", "gamma=0.5", "power=2", "cycles=2", "unit=step"],
    "metric": ["accuracy", "f1", "f1_macro", "auroc", "r2", "mae", "rmse", "precision", "top2_accuracy", "perplexity"],
    "positive": ["1", "0", "yes", "b"],
    "sample_weight": ["weight", "age", "number"],
    "class_weight": ["balanced", "1=2", "b=3", "yes=0"],
    "unfreeze_after": ["1", "2", "1=w1", "2=b*", "1=*", "0"],
    "limit_batches": ["1", "2", "100", "0.5", "1.0", "0", "x"],
    "swa_start": ["1", "0.5", "2"],
    "monitor": ["loss", "val_loss", "accuracy", "val_accuracy"],
    "device": ["cpu", "gpu"],
}  # fmt: skip
NUMBERS = ["0", "0.001", "0.01", "0.1", "0.5", "0.9", "1", "2"]
# A long job is not a fault, and processes of their own (workers) take seconds: both have other tests.
SMALL = {"epochs": ["1", "2", "3"], "schedule_epochs": ["1", "3", "7"]}
# An option that means nothing without another one is mostly given with it.
NEEDS = {
    "stratify": ["--validation=0.2"],
    "evaluate_every": ["--validation=0.2"],
    "min_delta": ["--patience=1"],
    "monitor": ["--save-best"],
    "keep": ["--save-every=2"],
    "swa_lr": ["--swa-start=1"],
    "schedule_epochs": ["--epochs=1"],
    "lora_targets": ["--lora-rank=2"],
    "lora_alpha": ["--lora-rank=2"],
    "lora_dropout": ["--lora-rank=2"],
    "ordinal": ["--categorical=number"],
    "one_hot": [],
}
PROCESSES = {"workers", "hosts", "restarts", "save_steps", "shard_optimizer", "compress"}
# A run that is repeated stops at another epoch if the machine is slower.
CLOCKS = {"time_limit"}
# Options of folders of images, which these jobs have none of; tests/cli/test_images.py has them.
OF_IMAGES = set(options_of(ImageOptions))
# They need texts, a tokenizer and another model, and have their own tests (test_texts.py).
OF_TEXTS = {*options_of(PairOptions), *options_of(TokenizerOptions)}
# Options of a network that is made in place of the model.
NETWORK = set(options_of(NetworkOptions))
# A command that trains nothing leaves no run for the commands after it.
LEFT_OUT = {
    "find_lr",
    "source", "data", "output", "config", "overwrite", "json",
    *NETWORK, *PROCESSES, *CLOCKS, *OF_IMAGES, *OF_TEXTS,
}  # fmt: skip
OF_TABLES = {*options_of(TableOptions), *options_of(TextOptions)}


def _odd(draw: random.Random, odd: Sequence[str], usual: Sequence[str]) -> str:
    return draw.choice(odd if draw.random() < 0.06 else usual)


def _value(draw: random.Random, name: str, kind: Any) -> str:
    """Draws the text of a value of a type, e.g. int."""
    if get_origin(kind) is Literal:
        return _odd(draw, ODD_TEXTS, get_args(kind))
    if kind is int:
        # A count that is too large for an epoch is one for the numbers of steps, too.
        odd = ["0", "-1", "x"] if name in SMALL else ODD_COUNTS
        return _odd(draw, odd, SMALL.get(name, ["1", "2", "3", "4", "8", "32", "100"]))
    if kind is float:
        return _odd(draw, ODD_NUMBERS, NUMBERS)
    if kind is Path:
        return f"{name}-{draw.randint(0, 2)}" + (".csv" if name == "log" else "")
    return _odd(draw, ODD_TEXTS, TEXTS[name])


def _option(draw: random.Random, name: str, option: Option) -> list[str]:
    """Draws the arguments that give an option."""
    spelling = f"--{option.key}"
    hint = get_args(option.annotation)[0]
    if get_origin(hint) is UnionType:
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if hint is bool:
        return [spelling]
    if get_origin(hint) is list:
        (inner,) = get_args(hint)
        times = draw.choice([1, 1, 2])
        return [text for _ in range(times) for text in (f"{spelling}={_value(draw, name, inner)}",)]
    # One argument: a value that begins with a dash is a value.
    return [f"{spelling}={_value(draw, name, hint)}"]


def _options(draw: random.Random, kind: type, most: int, without: set[str]) -> list[str]:
    options = {name: option for name, option in options_of(kind).items() if name not in LEFT_OUT | without}
    chosen = draw.sample(sorted(options), draw.randint(0, most))
    drawn = [text for name in chosen for text in _option(draw, name, options[name])]
    if draw.random() < 0.9:
        drawn += [text for name in chosen for text in NEEDS.get(name, [])]
    return drawn


def draw_job(seed: int) -> list[list[str]]:
    """Draws the commands of a job, each as its arguments; `files.make` has the files that they name."""
    draw = random.Random(f"options {seed}")
    tabular = draw.random() < 0.4
    # Most option sets make sense: the data's own loss and target come first, options may override them.
    source, data, kind = draw.choice(TABLE_JOBS if tabular else ARRAY_JOBS)
    usual = ["--loss", "cross_entropy" if kind == "classes" else draw.choice(["mse", "l1", "huber"])]
    if tabular:
        usual += ["--target", draw.choice(["label", "kind"]) if kind == "classes" else "amount"]
        usual += ["--inputs", "age,weight,number,flag"]
    fixed = {"loss", "target", "inputs"} if draw.random() < 0.95 else set()
    json = ["--json"] if draw.random() < 0.3 else []
    if draw.random() < 0.15:
        return [
            [
                "artifacts",
                source,
                *usual[:2],
                *_options(draw, ArtifactsOptions, 5, fixed),
                "-o",
                "device",
                *json,
            ]
        ]
    without = fixed if tabular else fixed | OF_TABLES
    train = [
        "train",
        source,
        "--data",
        data,
        *(usual if fixed else []),
        *_options(draw, TrainOptions, 7, without),
    ]
    # The last spelling wins: few epochs, whatever was drawn.
    if not any(text.startswith("--epochs") for text in train):
        train += ["--epochs", draw.choice(["1", "2", "3"])]
    jobs = [[*train, "-o", "run", *json]]
    later = [
        ["evaluate", "run", "--data", data],
        ["predict", "run", "--data", data, "-o", draw.choice(["p.npz", "p.csv", "p.parquet"])],
        ["predict", "run", "--data", data, "-o", "q.csv", "--probabilities"],
        ["export", "run", "-o", "exported.onnx"],
        ["inspect", "run"],
        ["inspect", "run", "--parameters"],
        ["train", "run", "--data", data, *_options(draw, TrainOptions, 1, without)],
        ["check", source, "--seed", "1"],
        ["ops", source],
    ]
    jobs += [[*command, *json] for command in draw.sample(later, draw.randint(1, 3))]
    # Before a command that resumes the run.
    return (
        [jobs[0], ["train", "--config", "run/run.toml", "-o", "again"], *jobs[1:]]
        if draw.random() < 0.2
        else jobs
    )
