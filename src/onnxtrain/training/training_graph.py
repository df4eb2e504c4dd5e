"""From a forward graph with a loss to the training model and the eval model (`docs/architecture.md`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import onnx_ir as ir

from onnxtrain.autodiff import active_values, add_gradients, append_outputs
from onnxtrain.emitter import Emitter, find_value, static_dims, values_by_name
from onnxtrain.errors import GraphBuildError, NothingToTrain
from onnxtrain.fusion import fuse_exported, fuse_kernels
from onnxtrain.losses import LABELS_KEY, TARGET_KEY, loss_mean, mark_labels
from onnxtrain.passes import (
    CleanupPass,
    ReluAfterMaxPoolPass,
    TrainingModePass,
    infer_shapes,
    promote_initializers,
    settle_shapes,
    simplify_gradients,
    suit_runtime,
    why_untyped,
)
from onnxtrain.runtime.manifest import FORMAT, METADATA_KEY, SPARSE_VERSION, VERSION, fingerprint
from onnxtrain.selection import batch_norms, float_initializers, is_float, select_parameters
from onnxtrain.training.export_warnings import check_training_mode, warn_of_export
from onnxtrain.training.inference_graph import build_inference_model, inference_entry
from onnxtrain.training.layer_modes import BatchNormMode, switch_modes
from onnxtrain.training.recompute import RecomputePass
from onnxtrain.training.running_variance import update_unbiased
from onnxtrain.training.sparse_gradients import keep_rows, match_sparse

Precision = Literal["fp32", "bf16"]
"""What products and convolutions of float32 are computed in: float32, or bfloat16 with sums in float32."""


@dataclass(frozen=True)
class TrainingGraphs:
    """The two models of a training run, and what their manifest says.

    Attributes:
        training: loss, additional outputs, gradients and updated statistics from inputs, targets and
            parameters.
        eval: loss and additional outputs, with Dropout and BatchNormalization in inference mode.
        manifest: the manifest, without `files` and `optimizer`.
        parameters: all parameters, trainable and frozen, in graph order: their values before training.
        statistics: all BatchNorm running statistics, in graph order: their values before training.
        inference: the outputs of the original model from its inputs and the parameters; None if not asked for.
    """

    training: ir.Model
    eval: ir.Model
    manifest: dict[str, Any]
    parameters: dict[str, ir.TensorProtocol]
    statistics: dict[str, ir.TensorProtocol]
    inference: ir.Model | None = None

    @property
    def trainable(self) -> list[str]:
        """Names of the trainable parameters."""
        return [entry["name"] for entry in self.manifest["parameters"] if entry["trainable"]]


def build_training_graphs(
    model: ir.Model,
    loss: str,
    additional_outputs: Sequence[str] = (),
    *,
    requires_grad: Iterable[str] | None = None,
    frozen: Iterable[str] | None = None,
    batch_norm: BatchNormMode = "as_exported",
    input_gradients: Sequence[str] = (),
    inference_outputs: Sequence[str] = (),
    recompute: bool = False,
    precision: Precision = "fp32",
    sparse_gradients: Iterable[str] = (),
) -> TrainingGraphs:
    """Returns the training and eval models of a canonical model that computes the scalar `loss`.

    Args:
        model: canonical model, with the parameters named here among its `variable` ones; it is not changed.
            Inputs with metadata :data:`TARGET_KEY` are targets.
        loss: name of the scalar to minimise.
        additional_outputs: names of further values to return beside the loss.
        requires_grad: names of the parameters to train; None trains every floating-point parameter that is
            neither frozen, nor a BatchNorm statistic, nor only a setting of ops (bounds of Clip, scales of
            Resize, ...), nor a buffer or constant of a PyTorch module where the file tells.
        frozen: names of parameters that are inputs of the training model but not trained.
        batch_norm: whether BatchNormalization (and Dropout) run as the model says, or are switched to
            training or inference mode in the training model; for each layer by a mapping of patterns to modes.
        input_gradients: names of floating-point inputs of which the training model returns the gradients too.
        inference_outputs: names of what an inference model returns; none for no such model.
        recompute: whether values are computed again for the gradients instead of being kept.
        precision: of the training model's products and convolutions; the other models compute in float32.
        sparse_gradients: names of trained parameters whose gradients are those of the rows that were read.

    Raises:
        DifferentiationError: one of `input_gradients` is no floating-point value.
        GraphBuildError: a name is unknown, both trainable and frozen, or to be returned twice; the loss is
            no scalar; one of `sparse_gradients` is read otherwise than by rows.
        NothingToTrain: no parameter is left to train, or the loss depends on none of those that are.
        NoGradientRule: an op on the way has no gradient rule.
        ValueError: `precision` is none of its two values.
    """
    if precision not in get_args(Precision):
        raise ValueError(
            f"building the training graph: precision={precision!r} is unknown; pass 'fp32' (the default), or "
            "'bf16' for products and convolutions in bfloat16"
        )
    mean = loss_mean(_named(model, loss))
    forward = model.clone()
    _set_outputs(forward, [loss, *additional_outputs])
    _make_scalar(forward)
    frozen = list(frozen or ())
    CleanupPass(keep={*(name for name, _ in float_initializers(forward)), *frozen})(forward)
    mark_labels(forward.graph)
    ReluAfterMaxPoolPass()(forward)
    unsaid = switch_modes(forward, batch_norm)
    check_training_mode(forward, asked=batch_norm == "training")
    selection = select_parameters(forward, requires_grad, frozen)
    sparse = match_sparse(sparse_gradients, selection.trainable)
    active = _active_values(forward, selection.trainable)
    warn_of_export(forward, selection.trainable, active, as_exported=unsaid)
    values = {name: _tensor(forward, name) for name in forward.graph.initializers}

    # From here on nothing can rely on the values that parameters and statistics have now: they are inputs.
    order = [name for name in forward.graph.initializers if name in selection.parameters]
    _order_inputs(forward)
    promote_initializers(forward, [*order, *selection.statistics])
    forward = settle_shapes(forward)

    evaluation = forward.clone()
    TrainingModePass(batch_norm="inference", dropout="inference")(evaluation)
    CleanupPass(keep=set())(evaluation)

    statistics = _chain_statistics(forward, selection.statistics)
    fuse_exported(forward)
    computed_forward = {str(value.name) for node in forward.graph for value in node.outputs if value.name}
    training, gradients = add_gradients(forward, loss, [*selection.trainable, *input_gradients])
    trained = len(selection.trainable)
    append_outputs(training, selection.trainable, gradients[:trained])
    whole = dict(zip(selection.trainable, list(training.graph.outputs)[-trained:], strict=True))
    parameters = {str(value.name): value for value in forward.graph.inputs}
    indices = keep_rows(training, {name: whole[name] for name in sparse}, parameters)
    computed = values_by_name(training.graph)
    training.graph.outputs.extend(computed[output] for output in statistics.values())
    append_outputs(training, input_gradients, gradients[trained:])
    CleanupPass(keep=set())(training)
    training, evaluation = suit_runtime(training), suit_runtime(evaluation)
    simplify_gradients(training)
    fuse_kernels(training, bfloat16=precision == "bf16")
    if recompute:
        RecomputePass(computed_forward)(training)

    manifest = _manifest(
        training, loss, additional_outputs, order, set(selection.trainable), statistics, indices
    )
    manifest["loss_mean"] = mean
    inference = build_inference_model(model, inference_outputs, order, selection.statistics)
    held = [*order, *selection.statistics]
    manifest["inference"] = None if inference is None else inference_entry(inference, held)
    _name_input_gradients(manifest, training, input_gradients)
    for graph_model in (training, evaluation):
        graph_model.metadata_props[METADATA_KEY] = json.dumps(manifest | {"files": {}, "optimizer": None})
    return TrainingGraphs(
        training,
        evaluation,
        manifest,
        {name: values[name] for name in order},
        {name: values[name] for name in statistics},
        inference,
    )


def _active_values(model: ir.Model, trainable: Sequence[str]) -> set[ir.Value]:
    """Returns the values between the loss, the model's first output, and the parameters to train.

    Raises:
        NothingToTrain: there are none.
    """
    loss = model.graph.outputs[0]
    active = active_values(model.graph, [loss], [model.graph.initializers[name] for name in trainable])
    if loss not in active:
        shown = ", ".join(trainable[:5]) + (", ..." if len(trainable) > 5 else "")
        raise NothingToTrain(
            f"building the training graph: no gradient flows from the loss {loss.name!r} to any of the parameters to "
            f"train ({shown}): it does not depend on them, or through ops without a gradient only. Choose "
            "another value of the model in loss_input_names, or other parameters in requires_grad."
        )
    return active


def _set_outputs(model: ir.Model, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise GraphBuildError(
            f"building the training graph: {', '.join(twice)} would be returned twice; the first "
            f"output is always the loss, {names[0]!r}: name every other value once in additional_output_names"
        )
    values = [_named(model, name) for name in names]
    model.graph.outputs.clear()
    model.graph.outputs.extend(values)


def _make_scalar(model: ir.Model) -> None:
    """Makes the loss, the model's first output, a tensor of rank 0 under the name that it has."""
    loss = model.graph.outputs[0]
    if loss.shape is None or loss.dtype is None:  # a loss of one's own, which need not say what it is
        infer_shapes(model)
    dims = static_dims(loss)
    if not is_float(loss) or dims is None or any(dim != 1 for dim in dims):
        raise GraphBuildError(
            f"building the training graph: the loss {loss.name!r} is {loss.dtype} of shape {loss.shape}, "
            "which is not a scalar of floating point. Choose a loss with reduction 'mean' or 'sum', or name "
            f"a scalar of the model in loss_input_names.{why_untyped(loss) if dims is None else ''}"
        )
    if dims:
        writer = Emitter(model.graph)
        name = str(loss.name)
        scalar = writer.Squeeze(loss)
        loss.name = writer.unique_name(f"{name}_unsqueezed")
        scalar.name, scalar.shape, scalar.type = name, ir.Shape([]), loss.type
        model.graph.outputs[0] = scalar


def _named(model: ir.Model, name: str) -> ir.Value:
    value = find_value(model.graph, name)
    if value is not None:
        return value
    outputs = ", ".join(str(v.name) for v in model.graph.outputs)
    raise GraphBuildError(
        f"building the training graph: the model has no value {name!r} to return; its outputs are {outputs}"
    )


def _tensor(model: ir.Model, name: str) -> ir.TensorProtocol:
    tensor = model.graph.initializers[name].const_value
    if tensor is None:
        raise GraphBuildError(f"building the training graph: the parameter {name!r} has no value")
    return tensor


def _chain_statistics(model: ir.Model, names: Sequence[str]) -> dict[str, str]:
    """Makes every running statistic an output, named `<statistic>_updated`; returns these names.

    Where several nodes share a statistic, each continues from the one before, as running the layers in turn
    does.
    """
    latest: dict[str, ir.Value] = {}
    writer = Emitter(model.graph)
    for node, training in batch_norms(model):
        if not training:
            continue
        node.resize_outputs(3)
        for index in (3, 4):
            statistic = node.inputs[index]
            if statistic is None or statistic.name not in names:
                continue
            name = str(statistic.name)
            if name in latest:
                node.replace_input_with(index, latest[name])
            output = node.outputs[index - 2]
            output.shape, output.type = statistic.shape, statistic.type
            latest[name] = output if index == 3 else update_unbiased(writer, node)
    for name, value in latest.items():
        value.name = writer.unique_name(f"{name}_updated")
    return {name: str(latest[name].name) for name in names}


def _order_inputs(model: ir.Model) -> None:
    """User inputs first, then targets."""
    inputs = list(model.graph.inputs)
    model.graph.inputs.clear()
    model.graph.inputs.extend(sorted(inputs, key=lambda value: TARGET_KEY in value.metadata_props))


def _manifest(
    training: ir.Model,
    loss: str,
    additional_outputs: Sequence[str],
    parameters: Sequence[str],
    trainable: set[str],
    statistics: Mapping[str, str],
    indices: Mapping[str, str],
) -> dict[str, Any]:
    by_name = {str(value.name): value for value in training.graph.inputs}
    gradients = dict(zip(parameters, (None,) * len(parameters), strict=True)) | _gradient_names(
        training, [name for name in parameters if name in trainable], 1 + len(additional_outputs)
    )
    listed = [_tensor_entry(by_name[name]) for name in parameters]
    listed_statistics = [_tensor_entry(by_name[name]) for name in statistics]
    users = [value for value in training.graph.inputs if value.name not in {*parameters, *statistics}]
    return {
        "format": FORMAT,
        "version": SPARSE_VERSION if indices else VERSION,
        "fingerprint": fingerprint(
            *([(e["name"], e["dtype"], e["shape"]) for e in g] for g in (listed, listed_statistics))
        ),
        "inputs": [
            _tensor_entry(value) | json.loads(value.metadata_props.get(LABELS_KEY, "{}"))
            for value in users
            if TARGET_KEY not in value.metadata_props
        ],
        "targets": [
            _tensor_entry(value) | json.loads(value.metadata_props[TARGET_KEY])
            for value in users
            if TARGET_KEY in value.metadata_props
        ],
        "outputs": [loss, *additional_outputs],
        "loss": loss,
        "parameters": [
            entry
            | {"trainable": entry["name"] in trainable, "gradient": gradients[entry["name"]]}
            | ({"gradient_indices": indices[entry["name"]]} if entry["name"] in indices else {})
            for entry in listed
        ],
        "statistics": [entry | {"output": statistics[entry["name"]]} for entry in listed_statistics],
        "opset": training.graph.opset_imports[""],
    }


def _name_input_gradients(manifest: dict[str, Any], training: ir.Model, names: Sequence[str]) -> None:
    """Adds the names of the last outputs to what the manifest says of the inputs that they are the gradients of."""
    outputs = [value.name for value in training.graph.outputs][len(training.graph.outputs) - len(names) :]
    gradients = dict(zip(names, outputs, strict=True))
    for entry in (*manifest["inputs"], *manifest["targets"]):
        if entry["name"] in gradients:
            entry["gradient"] = gradients[entry["name"]]


def _gradient_names(training: ir.Model, trainable: Sequence[str], first: int) -> dict[str, str | None]:
    outputs = list(training.graph.outputs)[first : first + len(trainable)]
    return dict(zip(trainable, (value.name for value in outputs), strict=True))


def _tensor_entry(value: ir.Value) -> dict[str, Any]:
    dims = static_dims(value)
    shape = None
    if dims is not None and value.shape is not None:
        symbols = [getattr(dim, "value", None) for dim in value.shape]
        shape = [symbol if dim is None else dim for dim, symbol in zip(dims, symbols, strict=True)]
    if value.dtype == ir.DataType.STRING:
        raise GraphBuildError(
            f"building the training graph: the input '{value.name}' holds texts, which ONNX Runtime does not bind "
            "beside parameters. Turn them into numbers before the model: cut it behind the op that looks them up "
            "(onnx.utils.extract_model), and look them up in Python."
        )
    dtype = value.dtype.numpy().name if value.dtype is not None else None
    return {"name": str(value.name), "dtype": dtype, "shape": shape}
