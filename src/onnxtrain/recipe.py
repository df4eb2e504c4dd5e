"""Defines `Recipe`: the configuration with which a model is trained.

A recipe contains all settings that determine the graphs of a training run: loss, optimizer, trained parameters, modes
of layers, precision. It does not contain the data, the length of the training, or paths of files. `generate_artifacts`,
`Trainer` and `plan_training` take a recipe, or build one from their older keyword arguments. Command-line options are
generated from its fields.

To add a training option, add a field here, the code that reads it, and a test.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, get_origin

from onnxtrain._words import argument
from onnxtrain.errors import GraphBuildError, InputError

# Importing this module must stay cheap: `--help` of the command line reads it, also where onnx is missing.
if TYPE_CHECKING:
    from onnx import ModelProto  # noqa: TID251 for type checkers

    from onnxtrain.lora import LoraConfig
    from onnxtrain.losses import Loss, TargetScale
    from onnxtrain.onnxblock import Block
    from onnxtrain.optimizers import Optimizer
    from onnxtrain.passes import ModelSource

__all__ = ["Recipe"]


class LossType(Enum):
    """The losses of onnxruntime-training. For settings and other losses, see `onnxtrain.losses`."""

    # The numbers are those of onnxruntime-training.

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """The optimizers of onnxruntime-training. For settings and other optimizers, see `onnxtrain.optimizers`."""

    # The numbers are those of onnxruntime-training.

    AdamW = 1
    SGD = 2


LossSpec: TypeAlias = (
    "LossType | Loss | str | os.PathLike[str] | ModelProto | Callable[..., object] | Block | None"
)
OptimizerSpec: TypeAlias = "OptimType | Optimizer | str | Block | None"

Names = Sequence[str] | str | None
"""Names or patterns, e.g. ["fc.*", "head.bias"]; a single one may be a plain string."""

LayerMode = Literal["as_exported", "training", "inference"]
"""Mode of a BatchNormalization or Dropout node."""

BatchNormMode = LayerMode | Mapping[str, LayerMode]
"""One mode for all BatchNormalization and Dropout, or one per pattern, e.g. {"backbone.*": "inference"}."""

DropoutRatios = float | Mapping[str, float] | None
"""One ratio for all Dropout, e.g. 0.1, or one per pattern, e.g. {"head.*": 0.5}; None for the ratios of the file."""

Precision = Literal["fp32", "bf16"]
"""Precision of float32 products and convolutions: float32, or bfloat16 with sums in float32."""

Activations = Literal["float", "deployed"]
"""Activations in products with quantized weights (MatMulNBits): floating point, or rounded to int8 where the file does
so (`accuracy_level=4`)."""

Profile = Literal["default", "portable"]
"""Hosts that the models run on: desktops and servers, or also ONNX Runtime's builds for browsers and phones."""

_MOST_SCALE = 1e6

DISTILL_WEIGHT, TEMPERATURE = 0.5, 2.0
"""Defaults of knowledge distillation."""

Recompute = bool | Literal["cheap"]
"""Activations to recompute in the backward pass: none, the results of cheap ops, or (True) also some products."""


@dataclass(frozen=True)
class ShellOption:
    """Command-line option that sets a field of :class:`Recipe`.

    Attributes:
        help: help text.
        kind: type of the value in the shell, e.g. `bool` for a switch, `list[str]` for an option that may be repeated.
        metavar: name of the value in `--help`, e.g. "PATTERN"; None for a switch or a choice.
        name: name of the option if it differs from the field, e.g. "freeze" for `--freeze`.
        group: "model", "optimizer" or "memory". `plan` has no memory options, because it tries all of their values.
        parse: converts the shell's value to the field's value; raises ValueError with the allowed values. None if the
            two values are the same.
    """

    help: str
    kind: Any
    metavar: str | None = None
    name: str = ""
    group: Literal["model", "optimizer", "memory"] = "model"
    parse: Callable[[Any], Any] | None = None


def _field(default: Any, option: ShellOption | str) -> Any:
    """Declares a field of `Recipe`.

    Args:
        default: default value.
        option: the command-line option that sets the field, or a string: the names of the options if several set the
            field, or the reason why no option sets it.
    """
    return dataclasses.field(default=default, metadata={"shell": option})


def _by_pattern(read: Callable[[str], Any], allowed: str) -> Callable[[Sequence[str] | None], Any]:
    """Returns a parser for an option with one value for all layers, e.g. "0.1", or one per pattern, e.g. "head.*=0.5".

    Args:
        read: converts the text of one value; raises ValueError if it is invalid.
        allowed: end of the error message, which describes the valid values.
    """

    def parse(texts: Sequence[str] | None) -> Any:
        values: dict[str, Any] = {}
        for text in texts or ():
            # Split at the last "=": names of modules and parameters may contain it, values do not.
            pattern, equals, value = text.rpartition("=")
            try:
                if equals and not pattern:
                    raise ValueError
                values[pattern or "*"] = read(value)
            except ValueError:
                raise ValueError(f"is {text!r}; {allowed}") from None
        return values["*"] if values.keys() == {"*"} else values or None

    return parse


def _scales(texts: Sequence[str] | None) -> dict[str, float] | None:
    """Parses the values of `--learning-rate-scale`, e.g. "head.*=10"."""
    chosen = _by_pattern(float, _SCALES)(texts)
    if isinstance(chosen, float):
        raise ValueError(f"is {chosen:g}; {_SCALES}")
    return chosen  # type: ignore[no-any-return]


_SCALES = "give PATTERN=FACTOR for some parameters, such as 'head.*=10'"


def _mode(text: str) -> str:
    if text not in get_args(LayerMode):
        raise ValueError
    return text


def _ratio(text: str) -> float:
    ratio = float(text)
    if not 0 <= ratio < 1:
        raise ValueError
    return ratio


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Training configuration of a model: loss, optimizer, trained parameters, layer modes, precision.

    One recipe serves :func:`onnxtrain.generate_artifacts`, :class:`onnxtrain.Trainer` and
    :func:`onnxtrain.plan_training`. `dataclasses.replace(recipe, precision="bf16")` returns a modified copy.

    Raises:
        GraphBuildError: two fields cannot be combined.
        InputError: `dropout` is not a number in [0, 1) or a mapping to such numbers; or `distill_weight`,
            `temperature`, `layer_decay` or a factor of `learning_rate_scale` is out of range.
        TypeError: a field that contains names is not a string or a list of strings.
        ValueError: `precision`, `activations`, `profile` or `recompute` has an unknown value.

    Example:
        >>> from onnxtrain import Recipe
        >>> recipe = Recipe(loss="cross_entropy", optimizer="sgd", requires_grad="fc.*")
        >>> recipe.requires_grad
        ['fc.*']
    """

    loss: LossSpec = _field(None, "--loss and --loss-option")
    """The loss: an object of `onnxtrain.losses` or its name ("cross_entropy", "mse", ...); a function of PyTorch
    tensors, e.g. `lambda scores, y: F.cross_entropy(scores, y)`, or a loss of `torch.nn`
    (:class:`onnxtrain.losses.TorchLoss`); the path of a `.onnx` file or an onnxscript function
    (:class:`onnxtrain.losses.ModelLoss`); a :class:`LossType`, or an onnxblock block. None if the model's first output,
    a scalar, is the loss."""

    optimizer: OptimizerSpec = _field("adamw", "--optimizer, --weight-decay and --optimizer-option")
    """The optimizer: an object of `onnxtrain.optimizers` or its name ("adamw", "sgd", ...), with PyTorch's defaults;
    or an :class:`OptimType`, a block of `onnxblock.optim`, or a block that calls such a block with its own arguments.
    `OptimType.AdamW` and `onnxblock.optim.AdamW` have the defaults of onnxruntime-training: eps 1e-6, no weight decay,
    decay after the step. With None, `generate_artifacts` writes no optimizer model."""

    clip_grad_norm: float | None = _field(
        None,
        ShellOption(
            "Scale all gradients down if their total L2 norm exceeds this value, e.g. 1.0. Default: no clipping.",
            float | None,
            "NORM",
            name="clip_norm",
            group="optimizer",
        ),
    )
    """Maximum total L2 norm of the gradients, e.g. 1.0. Larger gradients are all scaled down to it. None: no limit."""

    clip_grad_value: float | None = _field(
        None,
        ShellOption(
            "Clip each element of the gradients to plus or minus this value, e.g. 0.5. Default: no clipping.",
            float | None,
            "VALUE",
            name="clip_value",
            group="optimizer",
        ),
    )
    """Maximum absolute value of each gradient element, e.g. 0.5; elements are clipped to it. None: no limit."""

    layer_decay: float | None = _field(
        None,
        ShellOption(
            "Multiply the learning rate of each layer by this factor once for every layer between it and the loss, "
            "e.g. 0.75: the head trains fastest. Default: one rate for all layers.",
            float | None,
            "FACTOR",
            group="optimizer",
        ),
    )
    """Layer-wise decay of the learning rate, above 0 and at most 1, e.g. 0.75: the rate of a parameter is multiplied by
    `layer_decay` to the power of the number of layers between it and the loss, as in BEiT, ELECTRA and timm. A layer is
    a block, whose parameters have the same name up to the first number ("encoder.layer.3"), or outside of blocks a
    product, convolution or embedding; see `docs/guides/learning-rates-by-layer.md`."""

    learning_rate_scale: Mapping[str, float] | None = _field(
        None,
        ShellOption(
            "Multiply the learning rate of the parameters with these names or patterns by a factor, e.g. 'head.*=10'; "
            "repeat it for several. The first matching pattern wins. Default: one rate for all parameters.",
            list[str] | None,
            "PATTERN=FACTOR",
            group="optimizer",
            parse=_scales,
        ),
    )
    """Factors of the learning rate by name or pattern of parameters, e.g. {"head.*": 10.0, "embed*": 0.1}. The first
    pattern that matches a parameter decides. The factors multiply those of `layer_decay` and of the optimizer's
    groups."""

    requires_grad: Names = _field(
        None,
        ShellOption(
            "Train only the parameters with these names or patterns, e.g. 'fc.*'; repeat it for "
            "several. Default: all that are not frozen.",
            list[str] | None,
            "PATTERN",
            name="train",
        ),
    )
    """Names of the parameters to train, or patterns such as "fc.*". None trains all floating-point parameters that are
    not in `frozen_params`. Running statistics of BatchNormalization and settings of ops (bounds of Clip, scales of
    Resize) are not parameters. Neither are buffers and constants, if the file distinguishes them, as files from
    PyTorch's Dynamo exporter do."""

    frozen_params: Names = _field(
        None,
        ShellOption(
            "Freeze the parameters with these names or patterns, e.g. 'conv?.*'; repeat it for several. "
            "Default: none.",
            list[str] | None,
            "PATTERN",
            name="freeze",
        ),
    )
    """Names or patterns of parameters that are stored in the checkpoint, but not trained. A parameter that matches both
    `requires_grad` and `frozen_params` is frozen, unless only `requires_grad` contains its exact name."""

    batch_norm: BatchNormMode = _field(
        "as_exported",
        ShellOption(
            "Set the mode of BatchNormalization and Dropout in training: as_exported, training "
            "(PyTorch's model.train()) or inference. Repeat it for single layers, e.g. "
            "backbone.*=inference; the first matching pattern wins. Default: as_exported.",
            list[str] | None,
            "MODE|PATTERN=MODE",
            parse=_by_pattern(
                _mode, f"choose from {', '.join(get_args(LayerMode))}, or give PATTERN=MODE for each layer"
            ),
        ),
    )
    """Mode of BatchNormalization and Dropout in training: "as_exported" keeps the modes of the model; "training" is
    PyTorch's `model.train()`, an error if the exporter left none of these layers in the model; "inference" keeps the
    statistics fixed. Per layer, a mapping of patterns to modes. The first pattern that matches the layer's module, node
    or scale decides: `{"backbone.*": "inference", "*": "training"}`."""

    dropout: DropoutRatios = _field(
        None,
        ShellOption(
            "Drop this fraction of elements in Dropout layers, e.g. 0.1, including layers that the "
            "exporter has removed; 0 trains without Dropout. Repeat it for single layers, e.g. "
            "head.*=0.5; the first matching pattern wins. Default: the ratios of the file.",
            list[str] | None,
            "P|PATTERN=P",
            parse=_by_pattern(
                _ratio,
                "give a number in [0, 1), such as 0.1, or PATTERN=NUMBER for each layer, such as "
                "'head.*=0.5'",
            ),
        ),
    )
    """Fraction of elements that Dropout drops in training, e.g. 0.1, also where the exporter has removed Dropout and
    left a trace of it. Per layer, a mapping of patterns to fractions. The first pattern that matches the layer's module
    or node decides: `{"head.*": 0.5, "*": 0.1}`. It overrides `batch_norm` and the ratios of the file. 0.0 trains
    without Dropout. None keeps the Dropout of the file, and warns of removed Dropout."""

    precision: Precision = _field(
        "fp32",
        ShellOption(
            "Compute matrix products and convolutions in float32, or in bfloat16 with float32 sums and "
            "parameters, e.g. bf16.",
            Precision,
        ),
    )
    """Precision of the training model's float32 matrix products and convolutions, forward and backward: "fp32", or
    "bf16" to round the factors to bfloat16 and accumulate in float32. Parameters, gradients, optimizer, all other ops,
    and the eval and inference models stay float32. "bf16" is faster with native kernels on processors with AVX512_BF16;
    elsewhere the results are the same, but it is no faster than "fp32"."""

    straight_through: bool = _field(
        False,
        ShellOption(
            "Pass gradients through rounding and quantization unchanged (straight-through). `train` then also "
            "trains the integer weights of an int8 model. Default: the gradient of rounding is zero.",
            bool,
        ),
    )
    """True to pass gradients through rounding and quantization unchanged (straight-through estimator), as in
    quantization-aware training."""

    activations: Activations = _field(
        "float",
        ShellOption(
            "Keep activations in floating point in matrix products with quantized weights (MatMulNBits), or "
            "round them to int8 as the deployed model does, e.g. deployed.",
            Activations,
        ),
    )
    """Activations in products with quantized weights (MatMulNBits), in the training and eval models: "float" for
    floating point, or "deployed" to round them to int8 where the file does (`accuracy_level=4`). Gradients then pass
    all rounding unchanged, as with `straight_through`. The inference model computes as the file does."""

    profile: Profile = _field(
        "default",
        ShellOption(
            "Write models for desktops and servers, or models that also run in browsers and on phones, "
            "e.g. portable.",
            Profile,
        ),
    )
    """Hosts that the models run on: "default", or "portable" for models that also run in ONNX Runtime's builds for
    browsers and phones, with the same results. Ops that one of the builds lacks or gets wrong are replaced, and Dropout
    masks are generated from an additional input of the training model. The on-device API feeds it;
    `docs/devices/own-host.md` describes it for other hosts."""

    recompute: Recompute = _field(
        False,
        ShellOption(
            "Recompute activations in the backward pass instead of keeping them, which takes less "
            "memory and more time. Default: keep them.",
            bool,
            group="memory",
        ),
    )
    """True to recompute results of elementwise ops and normalizations, and of some products, in the backward pass
    instead of keeping them: less memory, more time, the same gradients. "cheap" recomputes elementwise ops and
    normalizations only, which takes hardly any time; it is always done when adapters are trained."""

    sparse_gradients: Names = _field(
        None,
        ShellOption(
            "Update only the rows of these embedding tables that a batch uses (sparse gradients), e.g. "
            "'embed.*'; repeat it for several. Default: update whole tables.",
            list[str] | None,
            "PATTERN",
        ),
    )
    """Names or patterns of embeddings `[n, *rest]` that get a sparse gradient: only the rows used in the batch are
    updated. `<parameter>_grad` is `[reads, *rest]`, and another output contains the row indices. Such an embedding may
    be read only by Gather on axis 0, and updated by SparseAdam, or by SGD or Adagrad without momentum and weight
    decay."""

    lora: LoraConfig | None = _field(None, "--lora-rank, --lora-targets, --lora-alpha and --lora-dropout")
    """Adapters to add to linear layers and train, e.g. `LoraConfig(r=8)`; other parameters are trained only if
    `requires_grad` names them. The checkpoint then contains the adapters, and the models contain the other weights. A
    model that already has adapters (`add_lora`, `load_adapter`) needs no `lora`: its adapters are trained if
    `requires_grad` is None."""

    teacher: ModelSource | None = _field(
        None,
        ShellOption(
            "Also imitate the outputs of this larger model (knowledge distillation), e.g. teacher.onnx. Default: "
            "learn from the targets only.",
            Path | None,
            "FILE",
        ),
    )
    """A trained model whose outputs the model imitates (knowledge distillation), as a path, `ModelProto` or
    `onnx_ir.Model`: see `docs/guides/distil-a-model.md`. It reads the same inputs, by name, or the only one, and scores
    the same classes. It is frozen and in inference mode. The training and eval models contain it, the checkpoint and
    the exported model do not. The loss must be one of `onnxtrain.losses`."""

    distill_weight: float = _field(
        DISTILL_WEIGHT,
        ShellOption(
            "Weigh the distance to the teacher with this fraction of the loss, and the loss on the targets with the "
            "rest, e.g. 0.9; 1 trains without targets. Default: 0.5.",
            float,
            "FRACTION",
        ),
    )
    """Weight a of the distance to the `teacher`, above 0 and at most 1. The loss on the targets has the weight 1 - a;
    with 1, the model is trained without targets."""

    temperature: float = _field(
        TEMPERATURE,
        ShellOption(
            "Divide the scores of model and teacher by this number before they are compared as probabilities, e.g. 4; "
            "higher values show more of what the teacher knows about unlikely classes. Default: 2.",
            float,
            "NUMBER",
        ),
    )
    """Temperature T of the distance to the `teacher`: T²·KL(softmax(teacher/T) || softmax(scores/T)) for class scores;
    the same with sigmoid for scores of independent labels. Losses for quantities ignore it: the distance is then the
    squared difference."""

    teacher_output: str | None = _field(
        None,
        ShellOption(
            "Take this output of the teacher as its scores, e.g. logits. Default: the one with the name of the "
            "model's scores, or the only one.",
            str | None,
            "NAME",
        ),
    )
    """Name of the output, or of another value, of the `teacher` that the scores are compared with. Default: the output
    with the name of the scores, or the only one."""

    loss_input_names: Names = _field(
        None,
        ShellOption(
            "Compare this output of the model with the target, e.g. logits. A second NAME is the value "
            "of the model to use as the target. Without --loss, NAME is the loss. Default: the only "
            "output; without --loss the first.",
            list[str] | None,
            "NAME",
            name="loss_input",
        ),
    )
    """Inputs of the loss, e.g. ["logits"]. For a loss of `onnxtrain.losses`, the first is the prediction; a second one
    is used as the target instead of a new input; default: the only output of the model. For a loss of several outputs,
    e.g. TripletMarginLoss, first the outputs in its order, then existing values to use as targets; default: all outputs
    of the model. For a function or a `.onnx` file, the values of the model among its arguments. For a block, the
    arguments of the call; default: all outputs. Without a loss, the name of the loss; default: the first output."""

    target_scale: TargetScale | None = _field(None, "`train` computes it from a table if asked to")
    """Mean and standard deviation of the target of a regression, e.g. `TargetScale(mean=22.5, deviation=9.2)` of
    `onnxtrain.losses`. The loss then compares standardized targets, and the models return predictions in the target's
    units."""

    additional_output_names: Names = _field(None, "the commands return all outputs of the model")
    """Values that the training and eval models return after the loss, e.g. ["logits"]."""

    sample_weight: bool = _field(False, "`train` asks for it when the data has weights")
    """True for models that take a weight for each sample, as an additional last target `sample_weight` of shape
    [N]. The loss is then the weighted mean sum(w*l) / sum(w)."""

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            value, option = getattr(self, entry.name), entry.metadata["shell"]
            if entry.type == "Names":
                # Only the constructor of a frozen dataclass may set fields.
                object.__setattr__(self, entry.name, _name_list(entry.name, value))
            if isinstance(option, ShellOption) and get_origin(option.kind) is Literal:
                choices = get_args(option.kind)
                if value not in choices:
                    raise ValueError(
                        f"choosing how to train: {entry.name}={value!r} is unknown; pass one of "
                        f"{', '.join(map(repr, choices))}"
                    )
        _check_dropout(self.dropout)
        _check_learning_rates(self.layer_decay, self.learning_rate_scale)
        _check_distillation(self)
        if self.recompute not in (True, False, "cheap"):
            raise ValueError(
                f"choosing how to train: recompute={self.recompute!r} is unknown; pass True, False or 'cheap'"
            )
        if self.profile == "portable" and self.precision == "bf16":
            raise GraphBuildError(
                f"building the training graph: {argument('profile', 'portable')} and "
                f"{argument('precision', 'bf16')} cannot be combined, because onnxruntime-web has no "
                "bfloat16; pass only one of them"
            )
        if self.clip_grad_norm is not None and self.clip_grad_value is not None:
            raise GraphBuildError(
                f"choosing an optimizer: pass {argument('clip_grad_norm')} or {argument('clip_grad_value')}, not both"
            )


def filled_recipe(
    function: Callable[..., object], recipe: Recipe | None, arguments: Mapping[str, Any]
) -> Recipe:
    """Returns the recipe that was passed to a function, or builds one from the function's other arguments.

    Args:
        function: the function, e.g. `generate_artifacts`. An argument counts as passed if it differs from the default
            in the function's signature.
        recipe: the function's `recipe` argument; None to build a recipe.
        arguments: the function's arguments that set fields of a recipe, by name, e.g. {"optimizer": "sgd"}.

    Raises:
        TypeError: `recipe` is not a Recipe, or was passed together with one of `arguments`.
    """
    if recipe is None:
        return Recipe(**arguments)
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{function.__name__}: recipe is a {type(recipe).__name__}; pass an onnxtrain.Recipe")
    parameters = inspect.signature(function).parameters
    twice = [
        name
        for name, value in arguments.items()
        if value is not (default := parameters[name].default) and value != default
    ]
    if twice:
        raise TypeError(
            f"{function.__name__}: pass {', '.join(twice)} in the recipe or as an argument, not both: a "
            f"recipe sets all of its fields, also those left at their defaults. Pass "
            f"recipe=dataclasses.replace(recipe, {twice[0]}={arguments[twice[0]]!r})"
        )
    return recipe


def _name_list(option: str, names: object) -> list[str] | None:
    """Converts the value of a field, a name or a collection of names, to a list; returns None for None.

    Args:
        option: name of the field, for error messages, e.g. "frozen_params".
        names: value of the field.

    Raises:
        TypeError: the value is not a collection, or contains a value that is not a string.
    """
    if names is None:
        return None
    if isinstance(names, str):
        return [names]
    # Bytes are a collection of numbers, and a mapping one of its keys.
    if not isinstance(names, Collection) or isinstance(names, bytes | Mapping):
        raise TypeError(f"{argument(option)} is a {type(names).__name__}; pass a list of strings")
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise TypeError(f"{argument(option)} contains {wrong[0]!r}; pass a list of strings")
    return list(names)


def _check_dropout(dropout: object) -> None:
    """Raises InputError if `dropout`, a ratio or a dict with a ratio per pattern, has a ratio outside [0, 1)."""
    for ratio in dropout.values() if isinstance(dropout, Mapping) else () if dropout is None else (dropout,):
        # bool is a subclass of int: True would otherwise pass for 1.
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio < 1:
            raise InputError(
                f"building the training graph: {argument('dropout')} must be a number in [0, 1), or one "
                f"per pattern, received {ratio!r}"
            )


def _check_learning_rates(decay: object, scales: object) -> None:
    """Raises InputError if `layer_decay` or a factor of `learning_rate_scale` is out of range."""
    # bool is a subclass of int: True would otherwise pass for 1.
    numbers = dict(scales) if isinstance(scales, Mapping) else {}
    if scales is not None and (
        not isinstance(scales, Mapping) or not all(isinstance(name, str) for name in scales)
    ):
        raise InputError(
            f"choosing learning rates: {argument('learning_rate_scale')} must map names or patterns to factors, e.g. "
            f"{{'head.*': 10.0}}, received {scales!r}"
        )
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_SCALE:
            raise InputError(
                f"choosing learning rates: the factor of {name!r} in {argument('learning_rate_scale')} must be a "
                f"number from 0 to {_MOST_SCALE:g}, received {value!r}"
            )
    if decay is not None and (
        isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1
    ):
        raise InputError(
            f"choosing learning rates: {argument('layer_decay')} must be a number above 0 and at most 1, e.g. 0.75, "
            f"received {decay!r}"
        )


def _check_distillation(recipe: Recipe) -> None:
    """Raises an error for settings of knowledge distillation that are out of range, or without a teacher."""
    settings = {"distill_weight": DISTILL_WEIGHT, "temperature": TEMPERATURE, "teacher_output": None}
    given = [name for name, default in settings.items() if getattr(recipe, name) != default]
    if recipe.teacher is None and given:
        raise GraphBuildError(
            f"building the training graph: {argument(given[0], getattr(recipe, given[0]))} has no effect without a "
            f"teacher; pass {argument('teacher', 'teacher.onnx')}"
        )
    ranges = {
        "distill_weight": (1.0, "above 0 and at most 1"),
        "temperature": (sys.float_info.max, "above 0"),
    }
    for name, (most, allowed) in ranges.items():
        value = getattr(recipe, name)
        # bool is a subclass of int: True would otherwise pass for 1.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise InputError(
                f"building the training graph: {argument(name)} must be a number {allowed}, received {value!r}"
            )
