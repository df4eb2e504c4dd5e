"""The files of a training run: `generate_artifacts`, source compatible with onnxruntime-training 1.19.2."""

from __future__ import annotations

import onnxtrain._desk  # noqa: F401  # isort: skip

import json
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain import losses, onnxblock, optimizers
from onnxtrain._building import without_collection
from onnxtrain.autodiff import straight_through_rules
from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError, ModelError
from onnxtrain.onnxblock.onnxblock import build_forward, parameter_protos
from onnxtrain.onnxblock.optim import build_optimizer
from onnxtrain.passes import ModelSource, canonicalize, load_model, save_model, write_model
from onnxtrain.runtime.atomic import FileSet
from onnxtrain.runtime.checkpoint import encode_checkpoint
from onnxtrain.runtime.manifest import METADATA_KEY
from onnxtrain.runtime.state import CheckpointState
from onnxtrain.selection import expand_names
from onnxtrain.training.layer_modes import BatchNormMode
from onnxtrain.training.training_graph import Precision, TrainingGraphs, build_training_graphs

__all__ = ["LossType", "OptimType", "generate_artifacts", "optimizer_for"]

_log = logging.getLogger("onnxtrain")


class LossType(Enum):
    """Losses to choose from by name; `onnxtrain.losses` has them with their options, and more."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """Optimizers to choose from by name; `onnxtrain.optimizers` has them with their options, and more."""

    AdamW = 1
    SGD = 2


LossSpec = LossType | losses.Loss | str | onnxblock.Block | None
OptimizerSpec = OptimType | optimizers.Optimizer | str | onnxblock.Block | None

_LOSSES: dict[LossType, type[losses.Loss]] = {
    LossType.MSELoss: losses.MSELoss,
    LossType.CrossEntropyLoss: losses.CrossEntropyLoss,
    LossType.BCEWithLogitsLoss: losses.BCEWithLogitsLoss,
    LossType.L1Loss: losses.L1Loss,
}
# Names of the old package, with its defaults; those of `onnxtrain.optimizers` are PyTorch's.
_OPTIMIZERS: dict[OptimType | str, Callable[[], optimizers.Optimizer]] = {
    OptimType.AdamW: optimizers.AdamW.of_onnxruntime_training,
    OptimType.SGD: optimizers.SGD,
    "adamw": optimizers.AdamW.of_onnxruntime_training,
}


@dataclass(frozen=True)
class _Files:
    directory: Path
    prefix: str

    def path(self, stem: str) -> Path:
        suffix = ".onnx" if stem.endswith("_model") else ".json" if stem == "manifest" else ""
        return self.directory / f"{self.prefix}{stem}{suffix}"


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
    straight_through: bool = False,
    sample_weight: bool = False,
    recompute: bool = False,
    precision: Precision = "fp32",
    sparse_gradients: list[str] | None = None,
) -> None:
    """Writes the files that the on-device API trains from.

    They are `{prefix}training_model.onnx`, `{prefix}eval_model.onnx`, `{prefix}inference_model.onnx` (the outputs of
    `model`, without labels), `{prefix}checkpoint`, `{prefix}manifest.json`, and on request
    `{prefix}optimizer_model.onnx`, `{prefix}nominal_checkpoint` and `.ort` files of the models.
    `docs/contracts.md` describes each.

    Args:
        model: path of an `.onnx` file (any size), `ModelProto` or `onnx_ir.Model`; not changed.
        requires_grad: names of the parameters to train, or patterns such as "fc.*". None trains every
            floating-point parameter that is not in `frozen_params`, no BatchNorm running statistic, and not only a
            setting of ops (the bounds of Clip, the scales of Resize). In files of PyTorch's Dynamo exporter, which
            tell them, buffers and constants are no parameters.
        frozen_params: names or patterns of parameters that the checkpoint holds, but that are not trained. Where
            patterns of both match, the parameter is frozen; a name counts more than a pattern.
        loss: a :class:`LossType`, a loss of `onnxtrain.losses` or its name ("cross_entropy", "mse", ...), or
            an onnxblock block. None: the model's first output is the loss, a scalar.
        optimizer: an :class:`OptimType`, an optimizer of `onnxtrain.optimizers` or its name, a block of
            `onnxblock.optim`, or a block that calls one with what it is called with. None writes no
            optimizer model. `OptimType.AdamW` and "adamw" have the defaults of onnxruntime-training (eps 1e-6, no
            weight decay, decay after the step); `onnxtrain.optimizers.AdamW()` has PyTorch's.
        artifact_directory: where to write; made if missing. Default: the current directory.
        prefix: put before every file name.
        ort_format: also write the models in ORT format.
        custom_op_library: shared library with custom ops that the model needs when converted to ORT format.
        additional_output_names: values that the training and eval models return after the loss.
        nominal_checkpoint: also write a checkpoint with names and shapes only.
        loss_input_names: the values that go into the loss. For the losses named above, the first is the
            prediction, and a second one is used as the target instead of a new input; default: the output of
            a model that has one only. A block is called with all outputs by default. Without a loss: the name
            of the loss; default: the first output.
        batch_norm: what BatchNormalization and Dropout do in the training model: what the model says
            ("as_exported"), or what they do in "training" or "inference". For each layer by patterns of the names of
            its module, its node or its scale, of which the first that matches decides:
            `{"backbone.*": "inference", "*": "training"}`.
        straight_through: whether gradients pass through rounding and quantisation as if these did nothing, as in
            quantisation-aware training.
        sample_weight: whether the models take a weight for each sample, as a last target `sample_weight` of shape
            [N]: the loss is then the weighted mean, sum(w·l) / sum(w).
        recompute: whether results of elementwise ops and normalisations, and of some products, are computed again for
            the gradients instead of being kept: less memory for some more time, and the same gradients.
        precision: "bf16" for a training model whose products and convolutions of float32, forward and backward, round
            their factors to bfloat16 and add up in float32. Parameters, gradients, optimizer, all other ops, and the
            eval and inference models stay float32. It is fast with native kernels on processors with AVX512_BF16;
            elsewhere it computes the same, and no faster than "fp32".
        sparse_gradients: names or patterns of embeddings `[n, *rest]` of which only the rows that a batch reads get a
            gradient and are updated: `<parameter>_grad` is `[reads, *rest]`, beside the rows' numbers. They are read by
            Gather on axis 0 alone, and updated by SparseAdam, or by SGD or Adagrad without momentum and weight decay.

    Raises:
        ModelError: the model cannot be loaded or converted, also to ORT format; a file cannot be written.
        GraphBuildError: a name is unknown, a parameter is both frozen and trainable, a value would be
            returned twice, the loss does not fit, a parameter cannot have the sparse gradient that is asked for, or
            its optimizer cannot use it.
        NothingToTrain: no parameter is left to train, or the loss depends on none of those that are.
        NoGradientRule: an op between the loss and a trainable parameter has no gradient rule.
        TypeError: `loss`, `optimizer` or a list of names is of no known kind.
        ValueError: `batch_norm` is, or maps to, none of its three values; `precision` is none of its two.
    """
    for option, names in (
        ("requires_grad", requires_grad),
        ("frozen_params", frozen_params),
        ("additional_output_names", additional_output_names),
        ("loss_input_names", loss_input_names),
        ("sparse_gradients", sparse_gradients),
    ):
        _check_names(option, names)
    optimizer_ = optimizer_for(optimizer)
    library = _library(custom_op_library)
    parameters = [*(requires_grad or ()), *(frozen_params or ())]
    loaded = load_model(model)
    own = [str(value.name) for value in loaded.graph.outputs]
    forward, loss_name, extra = _with_loss(model, loaded, loss, loss_input_names, parameters, sample_weight)
    with straight_through_rules(straight_through):
        graphs = build_training_graphs(
            forward,
            loss_name,
            [*extra, *(additional_output_names or ())],
            requires_grad=requires_grad,
            frozen=frozen_params,
            batch_norm=batch_norm,
            inference_outputs=[name for name in own if name != loss_name],
            recompute=recompute,
            precision=precision,
            sparse_gradients=sparse_gradients or (),
        )
    directory = Path(os.fsdecode(artifact_directory)) if artifact_directory is not None else Path.cwd()
    try:
        _write(graphs, optimizer_, _Files(directory, prefix), nominal_checkpoint, ort_format, library)
    except OSError as error:
        raise ModelError(
            f"generate_artifacts: writing to the directory '{directory}' failed: {error}. Check that it is a "
            "directory, is writable and has room."
        ) from error


def _check_names(option: str, names: object) -> None:
    # A str is a sequence of names too, of one letter each.
    if names is None or (isinstance(names, Collection) and not isinstance(names, str | bytes | Mapping)):
        wrong = [name for name in names or () if not isinstance(name, str)]
        received = f"holds {wrong[0]!r}" if wrong else ""
    else:
        received = f"is a {type(names).__name__}"
    if received:
        raise TypeError(f"generate_artifacts: {option} {received}; pass a list of strings")


def optimizer_for(spec: OptimizerSpec) -> optimizers.Optimizer | onnxblock.Block | None:
    """Returns what :func:`generate_artifacts` takes a name for; objects stay as they are.

    Raises:
        GraphBuildError: there is no optimizer of that name.
        TypeError: it is nothing that names an optimizer.
    """
    if isinstance(spec, OptimType | str) and spec in _OPTIMIZERS:
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
    """Appends the loss to the model that was loaded from a source.

    Returns:
        The canonical model, the name of the loss, and further outputs that a block asked for.
    """
    outputs = [str(value.name) for value in loaded.graph.outputs]
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
                "generate_artifacts without a loss: one value of the model must be the loss, but loss_input_names "
                f"gives {len(names)} ({', '.join(names)}); name one"
            )
        return model, names[0], []
    if isinstance(spec, LossType):
        loss = _LOSSES[spec]()
    elif isinstance(spec, str | losses.Loss):
        loss = losses.make_loss(spec)
    else:
        raise TypeError(
            f"generate_artifacts: loss is a {type(spec).__name__}; pass a LossType, a loss of "
            "onnxtrain.losses, its name, or an onnxblock block"
        )
    if len(names) > 2 or (len(names) == 2 and not loss_input_names):
        raise GraphBuildError(
            f"generate_artifacts: {type(loss).__name__} takes one prediction (and optionally the name of "
            f"its target), received {', '.join(names)}; name them in loss_input_names"
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
    """The block sees the model in its own opset, and its weights stay in their files."""
    path = source if isinstance(source, str | os.PathLike) else None
    if path is not None:
        proto = onnx.load(path, load_external_data=False)
    else:
        proto = source if isinstance(source, onnx.ModelProto) else ir.to_proto(loaded)
    model, outputs = build_forward(block, proto, names, model_path=path)
    return _canonical(model, parameters), outputs[0], outputs[1:]


def _canonical(model: ir.Model, parameters: Sequence[str]) -> ir.Model:
    """Returns the canonical form; nothing is computed from parameters that are named or match a pattern."""
    known = {str(value.name) for node in model.graph for value in node.outputs} | {*model.graph.initializers}
    if known.issuperset(parameters):
        return canonicalize(model, parameters)
    return canonicalize(model, [*parameters, *expand_names(canonicalize(model), parameters)])


def _write(
    graphs: TrainingGraphs,
    optimizer: optimizers.Optimizer | onnxblock.Block | None,
    files: _Files,
    nominal_checkpoint: bool,
    ort_format: bool,
    custom_op_library: Path | None,
) -> None:
    models = {"training_model": graphs.training, "eval_model": graphs.eval}
    manifest = graphs.manifest | {"optimizer": None}
    if optimizer is not None:
        models["optimizer_model"], manifest["optimizer"] = _optimizer_model(graphs, optimizer)
    if graphs.inference is not None:
        models["inference_model"] = graphs.inference
    names = [*models, "checkpoint", *(["nominal_checkpoint"] if nominal_checkpoint else [])]
    manifest["files"] = {name: files.path(name).name for name in names}
    text = json.dumps(manifest, indent=2)
    state = CheckpointState.from_arrays(
        {name: tensor.numpy() for name, tensor in graphs.parameters.items()},
        trainable=graphs.trainable,
        statistics={name: tensor.numpy() for name, tensor in graphs.statistics.items()},
        copy=False,
    )
    files.directory.mkdir(parents=True, exist_ok=True)
    with FileSet(files.directory) as written:  # all of them, or those that were there before
        for name, model in models.items():
            model.metadata_props[METADATA_KEY] = text
            write_model(model, written, files.path(name).name)
            if ort_format:
                _write_ort_format(model, written, files.path(name), custom_op_library)
        for name in names[len(models) :]:
            encode = encode_checkpoint(
                state._store, f"Writing '{name}'", nominal=name == "nominal_checkpoint"
            )
            with written.open(files.path(name).name) as file:
                encode(file)
        with written.open(files.path("manifest").name) as file:
            file.write(text.encode())
    _log.info("wrote %s to %s", ", ".join(names), files.directory)


def _optimizer_model(
    graphs: TrainingGraphs, optimizer: optimizers.Optimizer | onnxblock.Block
) -> tuple[ir.Model, dict[str, Any]]:
    """The optimizer model and what the manifest says of it."""
    if isinstance(optimizer, onnxblock.Block):
        if any("gradient_indices" in entry for entry in graphs.manifest["parameters"]):
            raise GraphBuildError(
                "building the optimizer model: blocks of onnxblock.optim take no sparse gradients; pass an optimizer "
                "of onnxtrain.optimizers, or leave out sparse_gradients"
            )
        return build_optimizer(optimizer, parameter_protos(graphs))
    parameters = [
        optimizers.ParameterSpec(
            entry["name"], entry["dtype"], tuple(entry["shape"]), sparse="gradient_indices" in entry
        )
        for entry in graphs.manifest["parameters"]
        if entry["trainable"]
    ]
    model = optimizers.build_optimizer_model(optimizer, parameters, graphs.manifest["opset"])
    return model, optimizers.manifest_entry(optimizer, parameters)


def _write_ort_format(model: ir.Model, files: FileSet, path: Path, custom_op_library: Path | None) -> None:
    """Writes `model` in ORT format to a set of files; `path` is that of its ONNX file."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        source = Path(folder) / path.name
        save_model(model, source)
        before = set(source.parent.iterdir())
        _convert_to_ort(source, path, custom_op_library)
        for made in sorted(set(source.parent.iterdir()) - before):
            files.copy(made, made.name)


def _convert_to_ort(source: Path, path: Path, custom_op_library: Path | None) -> None:
    # Importing the tool sets up logging for the whole process, and running it prints its progress.
    root = logging.getLogger()
    handlers = list(root.handlers)
    from onnxruntime.tools.convert_onnx_models_to_ort import OptimizationStyle, convert_onnx_models_to_ort

    root.handlers[:] = handlers
    logging.getLogger("ort_format_model.utils").setLevel(logging.WARNING)
    try:
        with redirect_stdout(StringIO()):
            convert_onnx_models_to_ort(
                source,
                output_dir=source.parent,
                custom_op_library_path=custom_op_library,
                optimization_styles=[OptimizationStyle.Fixed],
            )
    except Exception as error:  # onnxruntime's own exceptions share no base class but Exception
        raise ModelError(
            f"Converting '{path}' to ORT format failed: {error}. Nothing has been written; check "
            "custom_op_library, or leave out ort_format."
        ) from error
