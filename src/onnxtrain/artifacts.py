"""Writes the files of a training run: `generate_artifacts`, source compatible with onnxruntime-training 1.19.2."""

from __future__ import annotations

# First, so that a device without onnx is told what to install instead of getting an import error of onnx.
import onnxtrain._desk  # noqa: F401  # isort: skip

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain import losses, onnxblock, optimizers
from onnxtrain._artifact_files import write_files
from onnxtrain._building import without_collection
from onnxtrain._words import argument
from onnxtrain.autodiff import straight_through_rules
from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError, ModelError
from onnxtrain.lora import METADATA_KEY as METADATA_KEY_OF_ADAPTERS
from onnxtrain.lora import LoraConfig, train_adapters
from onnxtrain.onnxblock.onnxblock import build_forward
from onnxtrain.passes import ModelSource, canonicalize, load_model
from onnxtrain.selection import expand_names
from onnxtrain.training.key_value_cache import find_cache
from onnxtrain.training.layer_modes import BatchNormMode, DropoutRatios, check_dropout
from onnxtrain.training.training_graph import (
    Activations,
    Precision,
    Profile,
    build_training_graphs,
)

__all__ = ["LossType", "OptimType", "generate_artifacts", "optimizer_for"]


class LossType(Enum):
    """Losses that onnxruntime-training had; `onnxtrain.losses` has them with their options, and more."""

    # The numbers are those of onnxruntime-training.

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """Optimizers that onnxruntime-training had; `onnxtrain.optimizers` has them with their options, and more."""

    # The numbers are those of onnxruntime-training.

    AdamW = 1
    SGD = 2


LossSpec = LossType | losses.Loss | str | onnxblock.Block | None
OptimizerSpec = OptimType | optimizers.Optimizer | str | onnxblock.Block | None

# The members of OptimType have the defaults of onnxruntime-training, e.g. no weight decay; names and classes have
# PyTorch's.
_OPTIMIZERS: dict[OptimType, Callable[[], optimizers.Optimizer]] = {
    OptimType.AdamW: optimizers.AdamW.of_onnxruntime_training,
    OptimType.SGD: optimizers.SGD,
}


@without_collection()
def generate_artifacts(
    model: ModelSource,
    requires_grad: list[str] | None = None,
    frozen_params: list[str] | None = None,
    loss: LossSpec = None,
    optimizer: OptimizerSpec = None,
    artifact_directory: str | bytes | os.PathLike[Any] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | bytes | os.PathLike[Any] | None = None,
    additional_output_names: list[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: list[str] | None = None,
    *,
    batch_norm: BatchNormMode = "as_exported",
    dropout: DropoutRatios = None,
    straight_through: bool = False,
    sample_weight: bool = False,
    recompute: bool = False,
    precision: Precision = "fp32",
    sparse_gradients: list[str] | None = None,
    lora: LoraConfig | None = None,
    activations: Activations = "float",
    profile: Profile = "default",
) -> None:
    """Writes the files from which the on-device API trains.

    They are `{prefix}training_model.onnx`, `{prefix}eval_model.onnx`, `{prefix}inference_model.onnx` (the outputs of
    `model`, without labels), `{prefix}checkpoint`, `{prefix}manifest.json`, and on request
    `{prefix}optimizer_model.onnx`, `{prefix}nominal_checkpoint` and `.ort` files of the models. `docs/contracts.md`
    describes each file.

    Args:
        model: path of an `.onnx` file (any size), `ModelProto` or `onnx_ir.Model`; not changed.
        requires_grad: names of the parameters to train, or patterns such as "fc.*". None trains all floating-point
            parameters that are not in `frozen_params`. BatchNorm running statistics and settings of ops (bounds of
            Clip, scales of Resize) are no parameters, nor are buffers and constants, if the file tells them apart as
            those of PyTorch's Dynamo exporter do.
        frozen_params: names or patterns of parameters that are in the checkpoint, but not trained. If a parameter
            matches both `requires_grad` and `frozen_params`, it is frozen. An exact name wins over a pattern.
        loss: a :class:`LossType`, a loss of `onnxtrain.losses` or its name ("cross_entropy", "mse", ...), or
            an onnxblock block. None: the model's first output is the loss, a scalar.
        optimizer: an optimizer of `onnxtrain.optimizers` or its name ("adamw", "sgd", ...), with PyTorch's defaults;
            or an :class:`OptimType`, a block of `onnxblock.optim`, or a block that calls such a block with its own
            arguments. None writes no optimizer model. `OptimType.AdamW` and `onnxblock.optim.AdamW` have the defaults
            of onnxruntime-training: eps 1e-6, no weight decay, decay after the step.
        artifact_directory: directory of the files; made if missing. Default: the current directory.
        prefix: text before every file name, e.g. "net_".
        ort_format: also write the models in ORT format.
        custom_op_library: path of a shared library with custom ops, which the conversion to ORT format needs.
        additional_output_names: values that the training and eval models return after the loss, e.g. ["logits"].
        nominal_checkpoint: also write a checkpoint with names, dtypes and shapes only.
        loss_input_names: inputs of the loss, e.g. ["logits"]. For a loss of `onnxtrain.losses`, the first is the
            prediction, and a second one is used as the target instead of a new input; default: the only output of the
            model. For a block, the arguments of the call; default: all outputs. Without a loss, the name of the
            loss; default: the first output.
        batch_norm: mode of BatchNormalization and Dropout in the training model: that of the given model
            ("as_exported"), "training" or "inference". Per layer, a mapping from patterns to modes, of which the first
            that matches the layer's module, node or scale decides: `{"backbone.*": "inference", "*": "training"}`.
        dropout: fraction of elements that Dropout drops in training, e.g. 0.1, also where the exporter has removed
            Dropout and left its place. Per layer, a mapping from patterns to fractions, of which the first that matches
            the layer's module or node decides: `{"head.*": 0.5, "*": 0.1}`. It wins over `batch_norm` and over the
            ratios of the file. 0.0 trains without Dropout. None keeps the Dropout of the file, and warns of removed
            Dropout.
        straight_through: True to let gradients pass through rounding and quantisation unchanged, as in
            quantisation-aware training.
        sample_weight: True for models that take a weight for each sample, as a last target `sample_weight` of shape
            [N]. The loss is then the weighted mean sum(w·l) / sum(w).
        recompute: True to compute results of elementwise ops and normalisations, and of some products, again for the
            gradients instead of keeping them. It takes less memory and more time, and gives the same gradients. With
            adapters, the elementwise ops and normalisations are computed again in any case, as that takes hardly any
            time.
        precision: "fp32", or "bf16" for a training model whose products and convolutions of float32, forward and
            backward, round their factors to bfloat16 and add up in float32. Parameters, gradients, optimizer, all
            other ops, and the eval and inference models stay float32. It is fast with native kernels on processors
            with AVX512_BF16; elsewhere it computes the same, and no faster than "fp32".
        sparse_gradients: names or patterns of embeddings `[n, *rest]` that get a sparse gradient: only the rows that
            a batch reads have one and are updated. `<parameter>_grad` is `[reads, *rest]`, and a further output has the
            numbers of the rows. Such an embedding may be read only by Gather on axis 0, and updated by SparseAdam, or
            by SGD or Adagrad without momentum and weight decay.
        lora: a :class:`onnxtrain.lora.LoraConfig` to train adapters beside the linear layers that it names, and
            nothing else but what `requires_grad` names. The checkpoint then holds the adapters, the models hold the
            other weights. A model that has adapters already (`add_lora`, `load_adapter`) needs no `lora`: they are
            trained if `requires_grad` is None.
        activations: "float" to multiply by quantised weights (MatMulNBits) in floating point in the training and eval
            models, or "deployed" to round the other factor to int8 where the file does (`accuracy_level=4`). Gradients
            pass that rounding unchanged, and all other rounding as with `straight_through`. The inference model
            computes as the file does. The manifest records the mode.
        profile: "default", or "portable" for models that also run, and compute the same, in ONNX Runtime's builds for
            browsers and phones: what one of them lacks or gets wrong is written in other ops, and masks of Dropout
            follow from an input of the training model. `docs/own-host.md` says what a host feeds there; the on-device
            API does it. The manifest records the profile.

    Raises:
        ModelError: the model cannot be loaded or converted, also to ORT format; a file cannot be written.
        GraphBuildError: a name is unknown, there is no place for Dropout, a parameter is both frozen and trainable, a
            value would be returned twice,
            the loss does not fit or does not depend on an adapter, a parameter cannot have a sparse gradient, its
            optimizer cannot use one, or a model of `profile="portable"` has an op that some build lacks.
        NothingToTrain: no parameter is left to train, or the loss depends on no trainable parameter.
        NoGradientRule: an op between the loss and a trainable parameter has no gradient rule.
        InputError: `dropout` is not a number in [0, 1), or a mapping to such numbers.
        TypeError: `loss`, `optimizer`, `lora` or a list of names is of an unknown type.
        ValueError: `batch_norm`, `precision`, `activations` or `profile` has an unknown value.
    """
    for option, names in (
        ("requires_grad", requires_grad),
        ("frozen_params", frozen_params),
        ("additional_output_names", additional_output_names),
        ("loss_input_names", loss_input_names),
        ("sparse_gradients", sparse_gradients),
    ):
        _check_names(option, names)
    # Arguments are checked before the graph is built, which takes time.
    check_dropout(dropout)
    optimizer_ = optimizer_for(optimizer)
    library = _library(custom_op_library)
    loaded = load_model(model)
    asked = set(requires_grad or ())
    requires_grad = train_adapters(loaded, lora, requires_grad)
    if lora is not None:
        # A block reads its model again from what the caller has passed, which has no adapters.
        model = loaded
    parameters = [*(requires_grad or ()), *(frozen_params or ())]
    # Before the loss changes the outputs.
    model_outputs = [str(value.name) for value in loaded.graph.outputs]
    forward, loss_name, extra = _with_loss(model, loaded, loss, loss_input_names, parameters, sample_weight)
    adapters = loaded.metadata_props.get(METADATA_KEY_OF_ADAPTERS)
    with straight_through_rules(straight_through or activations == "deployed"):
        graphs = build_training_graphs(
            forward,
            loss_name,
            [*extra, *(additional_output_names or ())],
            requires_grad=requires_grad,
            adapters=set(requires_grad or ()) - asked,
            frozen=frozen_params,
            batch_norm=batch_norm,
            dropout=dropout,
            inference_outputs=[name for name in model_outputs if name != loss_name],
            # The weights beside adapters have no gradients: activations are most of the memory of such a training.
            recompute=recompute or ("cheap" if adapters else False),
            precision=precision,
            sparse_gradients=sparse_gradients or (),
            activations=activations,
            profile=profile,
        )
    directory = Path(os.fsdecode(artifact_directory)) if artifact_directory is not None else Path.cwd()
    try:
        write_files(graphs, optimizer_, directory, prefix, nominal_checkpoint, ort_format, library, adapters)
    except OSError as error:
        raise ModelError(
            f"generate_artifacts: writing to the directory '{directory}' failed: {error}. Check that it is a "
            "directory, is writable and has room."
        ) from error


def _check_names(option: str, names: object) -> None:
    """Raises TypeError if an argument is no collection of strings."""
    # A str is a collection of names, too: one per letter.
    if names is None or (isinstance(names, Collection) and not isinstance(names, str | bytes | Mapping)):
        wrong = [name for name in names or () if not isinstance(name, str)]
        received = f"holds {wrong[0]!r}" if wrong else ""
    else:
        received = f"is a {type(names).__name__}"
    if received:
        raise TypeError(f"generate_artifacts: {option} {received}; pass a list of strings")


def optimizer_for(spec: OptimizerSpec) -> optimizers.Optimizer | onnxblock.Block | None:
    """Makes the optimizer of an :class:`OptimType` or a name; returns optimizers and blocks as they are.

    Raises:
        GraphBuildError: there is no optimizer of that name.
        TypeError: the argument is of an unknown type.
    """
    if isinstance(spec, OptimType):
        return _OPTIMIZERS[spec]()
    if isinstance(spec, str | optimizers.Optimizer):
        return optimizers.make_optimizer(spec)
    if spec is None or isinstance(spec, onnxblock.Block):
        return spec
    raise TypeError(
        f"generate_artifacts: optimizer is a {type(spec).__name__}; pass an OptimType, an optimizer of "
        "onnxtrain.optimizers, its name, or a block of onnxblock.optim"
    )


def _library(path: str | bytes | os.PathLike[Any] | None) -> Path | None:
    """Checks that the file of the custom op library exists."""
    library = Path(os.fsdecode(path)) if path is not None else None
    if library is not None and not library.is_file():
        raise ModelError(f"generate_artifacts: there is no custom_op_library '{library}'; check the path")
    return library


def _with_loss(
    source: ModelSource,
    loaded: ir.Model,
    spec: LossSpec,
    loss_input_names: Sequence[str] | None,
    parameters: Sequence[str],
    sample_weight: bool,
) -> tuple[ir.Model, str, list[str]]:
    """Appends the loss to a model that was loaded from `source`.

    Returns:
        The canonical model, the name of the loss, and names of further outputs that a block has returned.
    """
    cached = find_cache(loaded.graph).values()
    outputs = [str(value.name) for value in loaded.graph.outputs if value.name not in cached]
    names = list(loss_input_names or (outputs[:1] if spec is None else outputs))
    if sample_weight and (spec is None or isinstance(spec, onnxblock.Block)):
        raise GraphBuildError(
            "generate_artifacts: sample weights need a loss of onnxtrain.losses, which is told to weigh its samples; a "
            "loss inside the model or an onnxblock block has to take the weights as an input of its own"
        )
    if isinstance(spec, onnxblock.Block):
        return _with_block_loss(source, loaded, spec, names, parameters)
    model = _canonical(loaded, parameters)
    if spec is None:
        if len(names) != 1:
            raise GraphBuildError(
                "generate_artifacts without a loss: one value of the model must be the loss, but "
                f"{argument('loss_input_names')} gives {len(names)} ({', '.join(names)}); name one"
            )
        return model, names[0], []
    loss: losses.Loss
    if isinstance(spec, LossType):
        # The members are named as the classes.
        loss = getattr(losses, spec.name)()
    elif isinstance(spec, str | losses.Loss):
        loss = losses.make_loss(spec)
    else:
        raise TypeError(
            f"generate_artifacts: loss is a {type(spec).__name__}; pass a LossType, a loss of "
            "onnxtrain.losses, its name, or an onnxblock block"
        )
    # Two outputs of the model are no prediction and target unless the user says that they are.
    if len(names) > 2 or (len(names) == 2 and not loss_input_names):
        raise GraphBuildError(
            f"generate_artifacts: {type(loss).__name__} takes one prediction (and optionally the name of "
            f"its target), received {', '.join(names)}; name them in {argument('loss_input_names')}"
        )
    op = Emitter(model.graph, functions=model.functions)
    value = losses.attach_loss(op, loss, *names, sample_weight=sample_weight)
    return model, str(value.name), []


def _with_block_loss(
    source: ModelSource,
    loaded: ir.Model,
    block: onnxblock.Block,
    names: Sequence[str],
    parameters: Sequence[str],
) -> tuple[ir.Model, str, list[str]]:
    """Appends an onnxblock block as the loss; returns as :func:`_with_loss` does."""
    # The block gets the proto in the model's own opset, for which its author wrote the nodes, without external data.
    path = source if isinstance(source, str | os.PathLike) else None
    if path is not None:
        proto = onnx.load(path, load_external_data=False)
    else:
        proto = source if isinstance(source, onnx.ModelProto) else ir.to_proto(loaded)
    model, outputs = build_forward(block, proto, names, model_path=path)
    return _canonical(model, parameters), outputs[0], outputs[1:]


def _canonical(model: ir.Model, parameters: Sequence[str]) -> ir.Model:
    """Returns the canonical form of a model, in which no constant is computed from the named parameters."""
    # Patterns match names of the canonical form, so with patterns it is made twice: once to expand them.
    names = {str(value.name) for node in model.graph for value in node.outputs} | {*model.graph.initializers}
    if names.issuperset(parameters):
        return canonicalize(model, parameters)
    return canonicalize(model, [*parameters, *expand_names(canonicalize(model), parameters)])
