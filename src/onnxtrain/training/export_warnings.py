"""Warns of changes that an exporter made to a model, and refuses those that training would suffer from."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnxtrain._printable import get_logger
from onnxtrain._words import argument, words
from onnxtrain.emitter import known_array, static_dims
from onnxtrain.errors import GraphBuildError
from onnxtrain.passes import TorchSignature, has_quantized_ops, is_training_batch_norm, lost_detaches
from onnxtrain.recipe import BatchNormMode
from onnxtrain.selection import some_names
from onnxtrain.training.layer_modes import place_name

_log = get_logger()


def warn_of_export(
    model: ir.Model,
    trainable: Sequence[str],
    active: Collection[ir.Value],
    *,
    as_exported: Collection[ir.Node],
    removed: Sequence[str],
) -> None:
    """Logs a warning for each way in which the model trains otherwise than the network that it was exported from.

    Args:
        model: canonical model with its loss.
        trainable: names of the parameters to train, e.g. ["fc.weight"].
        active: values between these parameters and the loss.
        as_exported: BatchNormalization and Dropout nodes that keep the mode in which they were exported.
        removed: names of Dropout modules that the exporter has removed and for which the user has chosen nothing.
    """
    # Warnings and no errors: each of these models trains, and may be meant as it is.
    _warn_of_inference_mode(as_exported)
    _warn_of_removed_dropout(removed)
    _warn_of_lost_parameters(model)
    _warn_of_shared_weights(model, trainable)
    _warn_of_lost_detaches(model, active)


def check_training_mode(model: ir.Model, batch_norm: BatchNormMode, removed: Sequence[str]) -> None:
    """Checks that BatchNormalization and Dropout can run in training mode.

    Args:
        model: canonical model in the mode in which it is trained.
        batch_norm: what the user passed, e.g. "training" or {"head.*": "training"}.
        removed: names of the Dropout modules that the exporter has removed, e.g. ["drop"].

    Raises:
        GraphBuildError: the user asked for training mode and the model has neither op, or a BatchNormalization in
            training mode would compute the statistics of a single sample.
    """
    asked = batch_norm == "training"
    nodes = list(ir.traversal.RecursiveGraphIterator(model.graph))
    norms = [node for node in nodes if node.op_type == "BatchNormalization" and node.domain == ""]
    dropouts = any(node.op_type == "Dropout" and node.domain == "" for node in nodes)
    if asked and not norms and not dropouts:
        raise GraphBuildError(
            f"building the training graph: {argument('batch_norm', 'training')} has nothing to switch, as the model "
            "has no BatchNormalization and no Dropout node. If the network has such layers, its exporter has folded or "
            "dropped them: export it in training mode (torch.onnx.export(..., "
            "training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False, dynamo=False)). "
            f"{_put_back(removed)}. Else leave {argument('batch_norm')} out"
        )
    if asked and not norms:
        _log.warning(
            "%s trains with Dropout, but the model has no BatchNormalization node. If the network "
            "has such layers, its exporter has folded them into others; export it in training mode.",
            argument("batch_norm", "training"),
        )
    # PyTorch refuses a batch of one value per channel. Images of more pixels pass there, but a model fixed to a batch
    # of 1 would be trained on the statistics of single images, unlike the running ones that inference uses.
    for node in norms:
        batch = node.inputs[0] and (static_dims(node.inputs[0]) or (None,))[0]
        if batch == 1 and is_training_batch_norm(node):
            raise GraphBuildError(
                f"building the training graph: the BatchNormalization {node.name or node.outputs[0].name!r} is to "
                "normalise by the statistics of the batch, but the model was exported for a batch of 1. Make the batch "
                f"dynamic: export it with dynamic_shapes, or {words().dynamic_batch('generate_artifacts')}. Or pass "
                f"{argument('batch_norm', 'inference')}"
            )


def _put_back(removed: Sequence[str]) -> str:
    """Says how to put Dropout back, as a sentence without its full stop."""
    if removed:
        return f"Pass {argument('dropout', 0.1)} for the removed Dropout of {some_names(removed, 5)}"
    return "Dropout can be put back by onnxtrain.restore_dropout(model, p, before=[...])"


def _warn_of_inference_mode(nodes: Collection[ir.Node]) -> None:
    """Warns of BatchNormalization and Dropout nodes in inference mode that the user did not choose.

    PyTorch's exporters write inference mode by default, so that most files are of this kind.
    """
    norms = sum(node.op_type == "BatchNormalization" and not is_training_batch_norm(node) for node in nodes)
    if norms:
        _log.warning(
            "%d BatchNormalization node(s) were exported in inference mode: their running statistics stay "
            "as they are and normalise every training batch. Pass %s to train with batch "
            "statistics, or %s to confirm.",
            norms,
            argument("batch_norm", "training"),
            argument("batch_norm", "inference"),
        )
    dropouts = [node for node in nodes if node.op_type == "Dropout" and _is_switched_off(node)]
    if dropouts:
        _log.warning(
            "%d Dropout node(s) were exported in inference mode and drop nothing: %s. Pass %s to train with the ratios "
            "of the file, %s for another ratio, or %s to train without Dropout.",
            len(dropouts),
            some_names([place_name(node) for node in dropouts], 5),
            argument("batch_norm", "training"),
            argument("dropout", 0.1),
            argument("dropout", 0.0),
        )


def _is_switched_off(node: ir.Node) -> bool:
    """True if a Dropout with a ratio above 0 drops nothing, as its third input, `training_mode`, is absent."""
    ratio = known_array(node.inputs[1]) if len(node.inputs) > 1 else None
    return len(node.inputs) < 3 and (ratio is None or bool(ratio))


def _warn_of_removed_dropout(modules: Sequence[str]) -> None:
    """Warns of Dropout modules that the exporter has removed and nobody has put back."""
    if modules:
        _log.warning(
            "The exporter has removed %d Dropout module(s), so that training drops nothing there: %s. The ratio p is "
            "not in the file. Pass %s, with the p of the PyTorch network, to train with Dropout, or %s to train "
            "without it, e.g. because p is 0 there.",
            len(modules),
            some_names(modules, 5),
            argument("dropout", 0.1),
            argument("dropout", 0.0),
        )


def _warn_of_lost_parameters(model: ir.Model) -> None:
    """Warns of parameters of the PyTorch module that the file no longer has."""
    names = TorchSignature(model).missing_parameters()
    # A quantizer has put integers in the place of the weights. Who adapts such a file does not mean to train those.
    if names and not has_quantized_ops(model.graph):
        _log.warning(
            "Of %d parameters of the PyTorch model the exporter's optimizer has left nothing, so that they are not "
            "trained: %s. It merges what is equal, drops biases of zeros and folds BatchNorm into Conv. Export with "
            "optimize=False.",
            len(names),
            some_names(names, 5),
        )


def _warn_of_shared_weights(model: ir.Model, trainable: Sequence[str]) -> None:
    """Warns of an initializer that several layers read because their weights were equal when they were exported."""
    # Both of PyTorch's exporters merge equal initializers. `passes/parameters/torch_parameters.py` undoes this for
    # those that the file tells apart; the others are named here.
    for name in trainable:
        nodes = [str(use.node.name) for use in model.graph.initializers[name].uses()]
        # TorchScript's exporter gives this name to what it folds, e.g. a transposed weight.
        if name.startswith("onnx::") and len(nodes) > 1:
            _log.warning(
                "%r, which PyTorch's exporter has computed from weights of equal values, serves in %s and is trained "
                "as one parameter. If the layers are not tied in PyTorch, export with do_constant_folding=False.",
                name,
                ", ".join(nodes),
            )


def _warn_of_lost_detaches(model: ir.Model, active: Collection[ir.Value]) -> None:
    """Warns of calls of detach() that the exporter has dropped, so that gradients flow on there."""
    nodes = [repr(node.name or node.outputs[0].name) for node in lost_detaches(model.graph, active)]
    if nodes:
        _log.warning(
            "The PyTorch model calls detach(), of which the exporter's optimizer has left nothing at %s: the "
            "gradients here flow on where PyTorch's stop. Export with optimize=False, or write "
            "onnxtrain.nn.stop_gradient(x) for x.detach().",
            some_names(nodes, 5),
        )
