"""Defines `generate_artifacts`, which writes training artifacts; source compatible with onnxruntime-training 1.19.2."""

from __future__ import annotations

# Imported first, so that without onnx the error says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain import losses, onnxblock, optimizers
from onnxtrain._artifact_files import Files, write_files
from onnxtrain._building import without_collection
from onnxtrain._dialects import advice, explains_arguments
from onnxtrain._words import argument
from onnxtrain.autodiff import straight_through_rules
from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError, ModelError
from onnxtrain.lora import METADATA_KEY as METADATA_KEY_OF_ADAPTERS
from onnxtrain.lora import LoraConfig, train_adapters
from onnxtrain.onnxblock.onnxblock import build_forward
from onnxtrain.passes import ModelSource, load_model
from onnxtrain.recipe import (
    Activations,
    BatchNormMode,
    DropoutRatios,
    LossSpec,
    LossType,
    OptimizerSpec,
    OptimType,
    Precision,
    Profile,
    Recipe,
    filled_recipe,
)
from onnxtrain.selection import canonical_with_names, match_names, some_names
from onnxtrain.training.key_value_cache import trained_outputs
from onnxtrain.training.layer_depth import layers_behind
from onnxtrain.training.teacher import attach_teacher
from onnxtrain.training.training_graph import TrainingGraphs, build_training_graphs

__all__ = ["LossType", "OptimType", "generate_artifacts", "optimizer_for"]


# Members of OptimType use onnxruntime-training's defaults, e.g. no weight decay; optimizer names and classes use
# PyTorch's.
_OPTIMIZERS: dict[OptimType, Callable[[], optimizers.Optimizer]] = {
    OptimType.AdamW: optimizers.AdamW.of_onnxruntime_training,
    OptimType.SGD: optimizers.SGD,
}


@explains_arguments
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
    recipe: Recipe | None = None,
    share_weights: bool | None = None,
) -> None:
    """Writes the models, checkpoint and manifest for training with the on-device API.

    The files are `{prefix}training_model.onnx`, `{prefix}eval_model.onnx`, `{prefix}inference_model.onnx` (computes the
    outputs of `model`, without labels), `{prefix}checkpoint`, `{prefix}manifest.json`, and on request
    `{prefix}optimizer_model.onnx`, `{prefix}nominal_checkpoint` and `.ort` files of the models.
    `docs/reference/file-formats.md` describes each file. Arguments that are fields of :class:`onnxtrain.Recipe` are
    described there.

    Args:
        model: path of an `.onnx` file (any size), `ModelProto` or `onnx_ir.Model`; not changed.
        requires_grad: see :class:`onnxtrain.Recipe`.
        frozen_params: see :class:`onnxtrain.Recipe`.
        loss: see :class:`onnxtrain.Recipe`.
        optimizer: see :class:`onnxtrain.Recipe`; with None no optimizer model is written.
        artifact_directory: directory for the files; created if missing. Default: the current directory.
        prefix: prefix of every file name, e.g. "net_".
        ort_format: True to also write the models in ORT format.
        custom_op_library: path of a shared library with custom ops, which the conversion to ORT format needs.
        additional_output_names: see :class:`onnxtrain.Recipe`.
        nominal_checkpoint: True to also write a checkpoint that has only the names, dtypes and shapes of parameters,
            and the data of BatchNorm running statistics.
        loss_input_names: see :class:`onnxtrain.Recipe`.
        batch_norm: see :class:`onnxtrain.Recipe`.
        dropout: see :class:`onnxtrain.Recipe`.
        straight_through: see :class:`onnxtrain.Recipe`.
        sample_weight: see :class:`onnxtrain.Recipe`.
        recompute: see :class:`onnxtrain.Recipe`.
        precision: see :class:`onnxtrain.Recipe`.
        sparse_gradients: see :class:`onnxtrain.Recipe`.
        lora: see :class:`onnxtrain.Recipe`.
        activations: see :class:`onnxtrain.Recipe`. The manifest records the mode.
        profile: see :class:`onnxtrain.Recipe`. The manifest records the profile.
        recipe: an :class:`onnxtrain.Recipe` with the settings, instead of passing them as arguments.
        share_weights: True to store frozen weights once for all models, in a data file that the manifest names with its
            SHA-256, if they take more than 64 kB. The data file is that of `model` itself if it is in
            `artifact_directory` and has hardly anything but these weights, e.g. "model.onnx.data"; otherwise it is
            `weights.<12 hexadecimal digits>.data`. False to store them in each model, up to 16 MB in total. Default:
            True with `profile="portable"`, so that a browser downloads them once.

    Raises:
        ModelError: the model cannot be loaded, or cannot be converted, e.g. to ORT format; a file cannot be written.
        GraphBuildError: a name is unknown, `dropout` applies to no layer of the model, a parameter is both frozen and
            trainable, a value would be returned twice, the loss does not match the model's outputs or does not depend
            on an adapter, a parameter cannot have a sparse gradient, the optimizer does not support sparse gradients,
            or with `profile="portable"` a model has an op that some build of ONNX Runtime lacks.
        NothingToTrain: no parameter is left to train, or the loss depends on no trainable parameter.
        NoGradientRule: an op between the loss and a trainable parameter has no gradient rule.
        InputError: `dropout` is not a number in [0, 1), or a mapping to such numbers.
        TypeError: an argument is of an unknown type, or a field of `recipe` is also passed as an argument.
        ValueError: `batch_norm`, `precision`, `activations` or `profile` has an unknown value.
    """
    recipe = filled_recipe(
        generate_artifacts,
        recipe,
        {
            "requires_grad": requires_grad,
            "frozen_params": frozen_params,
            "loss": loss,
            "optimizer": optimizer,
            "additional_output_names": additional_output_names,
            "loss_input_names": loss_input_names,
            "batch_norm": batch_norm,
            "dropout": dropout,
            "straight_through": straight_through,
            "sample_weight": sample_weight,
            "recompute": recompute,
            "precision": precision,
            "sparse_gradients": sparse_gradients,
            "lora": lora,
            "activations": activations,
            "profile": profile,
        },
    )
    files = Files(
        Path(os.fsdecode(artifact_directory)) if artifact_directory is not None else Path.cwd(),
        prefix=prefix,
        nominal_checkpoint=nominal_checkpoint,
        ort_format=ort_format,
        custom_op_library=_library(custom_op_library),
        share_weights=recipe.profile == "portable" if share_weights is None else share_weights,
        base=model,
    )
    build_and_write(model, recipe, files)


@without_collection()
def build_and_write(model: ModelSource, recipe: Recipe, files: Files) -> None:
    """Builds the models of a training run and writes them to a directory.

    Args:
        model: path of an `.onnx` file, `ModelProto` or `onnx_ir.Model`; not changed.
        recipe: the training settings, e.g. loss and optimizer.
        files: directory, names and formats of the files.

    Raises:
        OnnxTrainError: the same errors as :func:`generate_artifacts`.
    """
    # Before the slow building of the graphs, so that a wrong optimizer is reported immediately.
    stepper = clipped_optimizer(recipe)
    graphs = build(model, recipe)
    try:
        write_files(graphs, stepper, files)
    except OSError as error:
        raise ModelError(
            f"generate_artifacts: writing to the directory '{files.directory}' failed: {error}. Check that it is a "
            "directory, is writable and has free space."
        ) from error


def build(model: ModelSource, recipe: Recipe) -> TrainingGraphs:
    """Builds the models of a training run in memory.

    Args:
        model: path of an `.onnx` file, `ModelProto` or `onnx_ir.Model`; not changed.
        recipe: the training settings, e.g. loss and optimizer.

    Returns:
        The models with their manifest and initial values.

    Raises:
        OnnxTrainError: the same errors as :func:`generate_artifacts`.
    """
    loaded = load_model(model)
    asked = set(recipe.requires_grad or ())
    recipe = dataclasses.replace(
        recipe, requires_grad=train_adapters(loaded, recipe.lora, recipe.requires_grad)
    )
    added = set(recipe.requires_grad or ()) - asked
    if recipe.lora is not None:
        # `_with_block_loss` loads the model from its source again, which has no adapters.
        model = loaded
    adapters = loaded.metadata_props.get(METADATA_KEY_OF_ADAPTERS)
    if adapters and not recipe.recompute:
        # With adapters, the other weights have no gradients, so activations use most of the memory.
        recipe = dataclasses.replace(recipe, recompute="cheap")
    # Before the loss changes the outputs.
    model_outputs = [str(value.name) for value in loaded.graph.outputs]
    forward, loss, recipe = _with_loss(model, loaded, recipe)
    with straight_through_rules(recipe.straight_through or recipe.activations == "deployed"):
        graphs = build_training_graphs(
            forward,
            loss,
            recipe,
            adapters=added,
            inference_outputs=[name for name in model_outputs if name != loss],
        )
    scales = _learning_rate_scales(forward, graphs.trainable, recipe)
    return dataclasses.replace(graphs, adapters=adapters, learning_rate_scales=scales)


def _learning_rate_scales(forward: ir.Model, trained: Sequence[str], recipe: Recipe) -> dict[str, float]:
    """Returns the factor of the learning rate for each trained parameter; an empty dict if all have the same rate.

    Raises:
        GraphBuildError: a pattern of `learning_rate_scale` matches no trained parameter.
    """
    decay, patterns = recipe.layer_decay, recipe.learning_rate_scale or {}
    if decay is None and not patterns:
        return {}
    matched = match_names(patterns, trained)
    if unmatched := next((pattern for pattern, names in matched.items() if not names), None):
        raise GraphBuildError(
            f"choosing learning rates: no trained parameter matches {unmatched!r} of {argument('learning_rate_scale')};"
            f" the trained parameters are {some_names(trained)}"
        )
    behind = dict.fromkeys(trained, 0) if decay is None else layers_behind(forward, trained)
    scales = {name: 1.0 if decay is None else decay ** behind[name] for name in trained}
    for name in trained:
        # The first pattern that matches decides, as for Dropout.
        scales[name] *= next((patterns[pattern] for pattern, names in matched.items() if name in names), 1.0)
    return scales


def returned_outputs(graph: ir.Graph, recipe: Recipe) -> list[str]:
    """Returns the names of the model outputs that a training model can return in addition to the loss.

    Args:
        graph: graph of the model, before the loss of the recipe is appended.
        recipe: the training settings, e.g. loss and optimizer.
    """
    outputs = trained_outputs(graph)
    if recipe.loss is not None:
        return outputs
    # Without a loss to append, one of the outputs is the loss itself.
    loss = next(iter(recipe.loss_input_names or outputs), None)
    return [name for name in outputs if name != loss]


def optimizer_for(spec: OptimizerSpec) -> optimizers.Optimizer | onnxblock.Block | None:
    """Creates the optimizer from its specification.

    Args:
        spec: an :class:`OptimType`, the name of an optimizer, or an optimizer, block or None, which are returned
            unchanged.

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
    meant = advice("optimizer", spec, optimizers.OPTIMIZERS)
    raise TypeError(
        f"choosing an optimizer: received {_kind(spec)}; "
        + (
            f"{meant}, or for settings an object of onnxtrain.optimizers"
            if meant
            else "pass an OptimType, an optimizer of onnxtrain.optimizers, its name, or a block of onnxblock.optim"
        )
    )


def clipped_optimizer(recipe: Recipe) -> optimizers.Optimizer | onnxblock.Block | None:
    """Returns the optimizer of a recipe, with the recipe's gradient clipping.

    Raises:
        GraphBuildError: there is no optimizer of that name; or the recipe sets gradient clipping, and its optimizer
            already clips gradients, is an onnxblock block, or is None; or the recipe gives parameters their own
            learning rates, and its optimizer is a block or None.
        TypeError: the optimizer is of an unknown type.
    """
    optimizer = optimizer_for(recipe.optimizer)
    scaled = [name for name in ("layer_decay", "learning_rate_scale") if getattr(recipe, name) is not None]
    if scaled and not isinstance(optimizer, optimizers.Optimizer):
        raise GraphBuildError(
            f"choosing an optimizer: {argument(scaled[0])} needs an optimizer of onnxtrain.optimizers, received "
            f"{optimizer!r}; blocks of onnxblock.optim have one learning rate"
        )
    norm, value = recipe.clip_grad_norm, recipe.clip_grad_value
    if norm is None and value is None:
        return optimizer
    if not isinstance(optimizer, optimizers.Optimizer) or optimizer.clip_grad is not None:
        raise GraphBuildError(
            f"choosing an optimizer: {argument('clip_grad_norm')} and clip_grad_value cannot be combined with "
            f"{optimizer!r}; set its own clip_grad"
        )
    clipping = optimizers.ClipGradNorm(norm) if norm is not None else optimizers.ClipGradValue(value or 0)
    return dataclasses.replace(optimizer, clip_grad=clipping)


def loss_for(spec: LossSpec) -> losses.Loss | onnxblock.Block | None:
    """Creates the loss from its specification.

    Args:
        spec: a :class:`LossType`, or what :func:`onnxtrain.losses.make_loss` takes; a loss, block or None is returned
            unchanged.

    Raises:
        GraphBuildError: there is no loss of that name.
        TypeError: the argument is of an unknown type.
    """
    if isinstance(spec, LossType):
        # Members have the names of the classes in `onnxtrain.losses`.
        loss: losses.Loss = getattr(losses, spec.name)()
        return loss
    if spec is None or isinstance(spec, onnxblock.Block):
        return spec
    if isinstance(spec, str | os.PathLike | losses.Loss | onnx.ModelProto | ir.Model) or callable(spec):
        return losses.make_loss(spec)
    meant = advice("loss", spec, losses.LOSSES)
    raise TypeError(
        f"choosing a loss: received {_kind(spec)}; "
        + (
            meant
            or "pass a LossType, a loss of onnxtrain.losses, its name, a function of PyTorch tensors, a .onnx file, or "
            "an onnxblock block"
        )
    )


def _kind(spec: object) -> str:
    """Returns a class or the class of an object for an error message, e.g. "the class torch.optim.Adam"."""
    kind = spec if isinstance(spec, type) else type(spec)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]}'s "
    return f"{'the class' if spec is kind else 'an object of'} {module}{kind.__name__}"


def _library(path: str | bytes | os.PathLike[Any] | None) -> Path | None:
    """Returns the path of the custom op library, or None if there is none.

    Raises:
        ModelError: there is no such file.
    """
    library = Path(os.fsdecode(path)) if path is not None else None
    if library is not None and not library.is_file():
        raise ModelError(f"generate_artifacts: there is no custom_op_library '{library}'; check the path")
    return library


def _with_loss(source: ModelSource, loaded: ir.Model, recipe: Recipe) -> tuple[ir.Model, str, Recipe]:
    """Appends the loss of a recipe to `loaded`, which was loaded from `source`.

    Returns:
        The canonicalized model with the loss appended, the name of the loss output, and an updated recipe. In its
        `requires_grad` and `frozen_params`, patterns such as "bias*" are expanded to parameter names. If the loss is
        an onnxblock block, the block's other outputs are added to `additional_output_names`.

    Raises:
        GraphBuildError: the loss does not fit the named outputs or the sample weights, there is no loss of that name,
            or a pattern matches no parameter.
        TypeError: the loss is of an unknown type.
    """
    loss = loss_for(recipe.loss)
    # If all outputs are computed from strings, the loss of the first one is refused below, with a message that says so.
    outputs = trained_outputs(loaded.graph) or [str(loaded.graph.outputs[0].name)]
    names = list(recipe.loss_input_names or (outputs[:1] if loss is None else outputs))
    if recipe.sample_weight and not isinstance(loss, losses.Loss):
        raise GraphBuildError(
            "choosing a loss: sample weights need a loss of onnxtrain.losses, which can weight its "
            "samples; a loss inside the model or an onnxblock block must take the weights as its own "
            "input"
        )
    if isinstance(loss, onnxblock.Block):
        # The block gets the proto in the opset for which its author wrote it, without external data.
        path = source if isinstance(source, str | os.PathLike) else None
        if path is not None:
            proto = onnx.load(path, load_external_data=False)
        else:
            proto = source if isinstance(source, onnx.ModelProto) else ir.to_proto(loaded)
        # The block returns the loss first.
        loaded, names = build_forward(loss, proto, names, model_path=path)
        returned = [*names[1:], *(recipe.additional_output_names or ())]
        recipe = dataclasses.replace(recipe, additional_output_names=returned)
    model, requires_grad, frozen = canonical_with_names(loaded, recipe.requires_grad, recipe.frozen_params)
    recipe = dataclasses.replace(recipe, requires_grad=requires_grad, frozen_params=frozen)
    if loss is None and len(names) != 1:
        raise GraphBuildError(
            "training without a loss: one value of the model must be the loss, but "
            f"{argument('loss_input_names')} gives {len(names)} ({', '.join(names)}); name one"
        )
    if not isinstance(loss, losses.Loss):
        if recipe.teacher is not None:
            raise GraphBuildError(
                f"attaching the teacher: {argument('teacher')} needs a loss of onnxtrain.losses, whose scores are "
                f"compared with the teacher's, e.g. {argument('loss', 'cross_entropy')}"
            )
        if recipe.target_scale is not None:
            raise GraphBuildError(
                f"choosing a loss: {argument('target_scale')} needs a loss of onnxtrain.losses, e.g. "
                f"{argument('loss', 'mse')}"
            )
        return model, names[0], recipe
    op = Emitter(model.graph, functions=model.functions)
    if isinstance(loss, losses.JointLoss):
        if recipe.target_scale is not None:
            raise GraphBuildError(
                f"choosing a loss: {argument('target_scale')} needs a loss of one output and one target, e.g. "
                f"{argument('loss', 'mse')}"
            )
        if recipe.teacher is not None:
            raise GraphBuildError(
                f"attaching the teacher: {type(loss).__name__} is a loss of several values, whose teacher would have "
                f"several outputs; choose a loss of one output, e.g. {argument('loss', 'cross_entropy')}"
            )
        value = losses.attach_joint_loss(
            op, loss, names, named=recipe.loss_input_names is not None, sample_weight=recipe.sample_weight
        )
        return model, str(value.name), recipe
    # Two outputs of the model are prediction and target only if the user names them.
    if len(names) > 2 or (len(names) == 2 and not recipe.loss_input_names):
        raise GraphBuildError(
            f"appending the loss: {type(loss).__name__} takes one prediction (and optionally the name of "
            f"its target), received {', '.join(names)}; name them in {argument('loss_input_names')}"
        )
    if recipe.teacher is not None:
        loss = losses.DistillationLoss(
            hard=loss,
            teacher=attach_teacher(model, recipe.teacher, loss, names[0], recipe.teacher_output),
            weight=recipe.distill_weight,
            temperature=recipe.temperature,
            reduction=loss.reduction,
            total=loss.reduction,
        )
    if recipe.target_scale is not None:
        if recipe.teacher is not None:
            raise GraphBuildError(
                f"attaching the teacher: {argument('teacher')} cannot be combined with {argument('target_scale')}, "
                "because the teacher's outputs are in other units; pass only one of them"
            )
        loss = losses.ScaledTargetLoss(loss, recipe.target_scale)
    value = losses.attach_loss(op, loss, *names, sample_weight=recipe.sample_weight)
    if recipe.target_scale is not None:
        losses.restore_units(op, names[0], recipe.target_scale)
    return model, str(value.name), recipe
