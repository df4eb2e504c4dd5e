"""Lists what help shows first: the commands in a useful order, and the options that most people need."""

from __future__ import annotations

COMMANDS: dict[str, str] = {
    "train": "Train a model, or resume a run",
    "evaluate": "Compute the loss and metrics of a run or a model",
    "predict": "Write outputs, probabilities and classes for each sample",
    "export": "Write the trained model of a run as an .onnx file",
    "inspect": "Show a run and its next steps, artifacts, or a model",
    "ops": "Tell whether a model can be trained",
    "check": "Compare a model's gradients with finite differences",
    "plan": "Find a way to train within a memory budget",
    "artifacts": "Write the files for training on a device",
    "merge": "Merge a LoRA adapter into a model",
    "calibrate": "Calibrate the probabilities of a classifier",
    "average": "Average several trained models",
    "mine": "Find hard negatives for pairs of texts",
    "demo": "Train on handwritten digits, to test the installation",
}
"""One line per command of `onnxtrain --help`. Other commands follow, with the first sentence of their help."""

SAME_COMMAND: dict[str, str] = {
    "train": "fit finetune fine-tune resume continue run",
    "evaluate": "eval test validate score",
    "predict": "infer inference transform",
    "export": "save convert",
    "inspect": "show info summary",
}
"""Names of commands in other programs, by the command that does the same here."""

GENERAL: dict[str, str] = {
    "version": "Print the version, and that of the native kernels",
    "debug": "Show tracebacks: onnxtrain --debug COMMAND ...",
    "install_completion": "Complete commands, options and names in this shell",
    "show_completion": "Print the completion script",
}
"""One line per option of `onnxtrain` itself."""

START = "Begin with `onnxtrain demo`, and continue with `onnxtrain train --help`."

_LOSS = "cross_entropy, bce_with_logits, mse, ..."
_OPTIMIZER = "adamw, sgd, adam, ... [default: adamw]"
_MODEL = {
    "train": "Train only these parameters, e.g. 'head.*'",
    "freeze": "Train all parameters but these",
    "replace_head": "Replace the last layer, for this many classes",
    "dynamic_batch": "Make a fixed batch size dynamic",
}

OPTIONS: dict[str, dict[str, dict[str, str]]] = {
    "train": {
        "Data": {
            "data": "Arrays (.npz), a table, texts, or a folder of images",
            "target": "Predict this column of a table",
            "validation": "Validate on a part, e.g. 0.1, or on a file",
            "class_weight": "Weight rare classes, e.g. balanced",
            "flip": "Flip half of the training images",
        },
        "Training": {
            "loss": _LOSS,
            "epochs": "Passes over the data [default: 10]",
            "batch_size": "Samples per batch [default: 32]",
            "learning_rate": "E.g. 0.01 [default: 0.001]",
            "optimizer": _OPTIMIZER,
            "schedule": "cosine, linear, one_cycle, ...",
            "metric": "f1, auroc, r2, ...; may be repeated",
            "patience": "Stop early, and export the best epoch",
            "save_best": "Export the best epoch, without stopping early",
        },
        "Model": {
            **_MODEL,
            "lora_rank": "Train LoRA adapters instead of the weights",
            "network": "Make a new network for a table, without a model",
            "teacher": "Distill this .onnx model into the trained one",
        },
        "Run": {
            "output": "Write the run here [default: MODEL-trained]",
            "overwrite": "Replace a run that is there",
            "device": "cpu or cuda",
            "workers": "Train with this many processes",
            "config": "Read options from a file, e.g. run/run.toml",
            "json": "Print the result as JSON",
        },
    },
    "artifacts": {
        "Training": {"loss": _LOSS, "optimizer": _OPTIMIZER},
        "Model": {**_MODEL, "lora_rank": "Train LoRA adapters instead of the weights"},
        "Files": {
            "output": "Write the files here [default: artifacts]",
            "profile": "portable: also for browsers and phones",
            "config": "Read options from a file",
            "json": "Print the result as JSON",
        },
    },
    "plan": {
        "Budget": {
            "memory": "Memory of the whole process, e.g. 512MB",
            "batch_size": "Samples per batch [default: 32]",
            "dim": "Size of a symbolic dimension; may be repeated",
        },
        "Training": {
            "loss": _LOSS,
            "optimizer": _OPTIMIZER,
            "lora_rank": "Measure adapters of this rank; may be repeated",
        },
        "Model": {name: _MODEL[name] for name in ("train", "freeze", "replace_head")},
        "Result": {"json": "Print the result as JSON"},
    },
}
"""Options of `onnxtrain COMMAND --help` with a short text, by heading. `--help-all` shows all options."""
