"""Options that several commands have."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="Path of an .onnx file.")]

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Directory of a run that `onnxtrain train` has written.")
]

BatchNormOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODE|PATTERN=MODE",
        help="Train BatchNormalization and Dropout as_exported, in training mode (as PyTorch's "
        "model.train()) or in inference mode. Repeat it for each layer, e.g. body.*=inference; the "
        "first match decides. Default: as_exported.",
    ),
]


class PrecisionName(enum.StrEnum):
    """The values of `--precision`."""

    FP32 = "fp32"
    BF16 = "bf16"


PrecisionOption = Annotated[
    PrecisionName,
    typer.Option(
        help="Compute matrix products and convolutions of training in float32, or in bfloat16 with sums "
        "and parameters in float32, e.g. bf16."
    ),
]
DynamicBatchOption = Annotated[
    bool,
    typer.Option(
        "--dynamic-batch",
        help="Make the batch of a model that was exported for a fixed number of samples dynamic. Default: "
        "the model stays as it is.",
    ),
]
ReplaceHeadOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="CLASSES",
        help="Replace the last linear layer by a new one with this many outputs, e.g. 3. Default: the "
        "model's own.",
    ),
]
LossOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Minimise this loss: cross_entropy or nll for classes, bce_with_logits for yes or no, mse, "
        "l1, huber or smooth_l1 for quantities. Default: the model's first output is the loss.",
    ),
]
OptimizerOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Update parameters by this optimizer: adamw, adam, sgd, adagrad, rmsprop, lion, adafactor or "
        "muon, with PyTorch's defaults.",
    ),
]
WeightDecayOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="FACTOR",
        help="Decay weights by this factor, e.g. 0.1. Default: the optimizer's own, as in PyTorch 0.01 "
        "for adamw, 0.1 for muon, 0 for the others.",
    ),
]
OptimizerOptionOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Set another setting of the optimizer, e.g. momentum=0.9, betas=0.9,0.95 or nesterov=true; "
        "repeat it for several. Default: PyTorch's values.",
    ),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--train",
        metavar="PATTERN",
        help="Train only the parameters whose names match, e.g. 'fc.*'; repeat it for several. Default: "
        "all that are not frozen.",
    ),
]
FreezeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Keep the parameters whose names match as they are, e.g. 'conv?.*'; repeat it for several. "
        "Default: none.",
    ),
]
BatchSizeOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="SAMPLES",
        help="Process this many samples at a time, e.g. 128. Default: 32, or what the model has fixed.",
    ),
]
