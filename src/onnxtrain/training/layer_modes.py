"""Sets the modes of BatchNormalization and Dropout and the ratios of Dropout, all at once or by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain._printable import get_logger
from onnxtrain._words import argument, words
from onnxtrain.emitter import static_dims
from onnxtrain.errors import GraphBuildError
from onnxtrain.op_facts import SWITCHED
from onnxtrain.passes import Mode, TrainingModePass, is_training_batch_norm
from onnxtrain.passes.parameters.dropout_traces import dropout_traces, is_adapter_dropout, write_dropout
from onnxtrain.recipe import BatchNormMode, DropoutRatios
from onnxtrain.selection import choice_at, layer_choices, layer_name, some_names
from onnxtrain.training.running_statistics import UNBIASED_KEY

_log = get_logger()


class Unchosen(NamedTuple):
    """Layers of a model whose mode the user has not chosen.

    Attributes:
        as_exported: BatchNormalization and Dropout nodes that keep the mode in which they were exported.
        removed: names of Dropout modules that the exporter has removed, e.g. ["drop"].
    """

    as_exported: Sequence[ir.Node]
    removed: Sequence[str]


def set_modes(model: ir.Model, batch_norm: BatchNormMode, dropout: DropoutRatios) -> Unchosen:
    """Sets modes and ratios, in place, and inserts Dropout where an exporter has removed it.

    Args:
        model: canonical model that still contains the traces of Dropout modules that an exporter removed
            (`dropout_traces`).
        batch_norm: one mode for all BatchNormalization and Dropout nodes, or modes by pattern
            (:func:`onnxtrain.selection.layer_choices`).
        dropout: one ratio for all Dropout layers, including removed layers, or ratios by pattern. Regardless of
            `batch_norm`, a ratio above 0 switches Dropout to training mode, and 0 to inference mode. None changes
            nothing.

    Returns:
        The layers whose mode the user has not chosen.

    Raises:
        GraphBuildError: a pattern matches no layer, `dropout` is above 0 and the model has no Dropout, or a layer
            cannot run in training mode.
        ValueError: a mode is not "as_exported", "training" or "inference".
    """
    chosen = _choose(model, batch_norm, dropout)
    above_0 = {node: ratio for node, ratio in chosen.ratios.items() if ratio}
    modes = chosen.modes | dict.fromkeys(chosen.ratios.keys() - above_0.keys(), "inference")
    modes |= dict.fromkeys(write_dropout(model, above_0), "training")
    # Files of opsets before 12 cannot store that the Dropout of adapters trains.
    adapters = filter(is_adapter_dropout, ir.traversal.RecursiveGraphIterator(model.graph))
    modes |= dict.fromkeys(adapters, "training")
    # A single mode is passed on unchanged, so that the pass checks it even in a model without such nodes.
    TrainingModePass(batch_norm if isinstance(batch_norm, str) else modes, modes)(model)
    # Nodes that were exported in training mode keep ONNX's population variance.
    for node, mode in chosen.modes.items():
        if node.op_type == "BatchNormalization" and mode == "training":
            node.metadata_props[UNBIASED_KEY] = "1"
    _check_training_mode(model, batch_norm, chosen.unchosen.removed)
    return chosen.unchosen


class _Choices(NamedTuple):
    """The user's choices for a model's layers. The Dropout of LoRA adapters is not included.

    Attributes:
        ratios: Dropout ratios, by Dropout node or, if an exporter removed the Dropout, by the node that is its trace.
        modes: chosen modes of BatchNormalization nodes, and of Dropout nodes without a chosen ratio.
        unchosen: layers whose mode the user has not chosen.
    """

    ratios: dict[ir.Node, float]
    modes: dict[ir.Node, Mode]
    unchosen: Unchosen


def _choose(model: ir.Model, batch_norm: BatchNormMode, dropout: DropoutRatios) -> _Choices:
    """Resolves the arguments of :func:`set_modes`; does not change the model."""
    nodes = [
        node for node in ir.traversal.RecursiveGraphIterator(model.graph) if not is_adapter_dropout(node)
    ]
    layers = [node for node in nodes if node.op_type in SWITCHED and node.domain == ""]
    traces = dropout_traces(model.graph)
    places = [*(node for node in layers if node.op_type == "Dropout"), *traces]
    if isinstance(dropout, float) and dropout and not places:
        raise GraphBuildError(
            f"building the training graph: {argument('dropout', dropout)} has no effect, because the "
            "file has no Dropout. Exporters remove it in inference mode: the TorchScript exporter "
            "always, the Dynamo exporter unless optimize=False. Export again with optimize=False or "
            "in training mode, or insert Dropout in front of layers that you name: "
            f"onnxtrain.restore_dropout(model, p={dropout}, before=['fc'])"
        )
    ratios = {} if dropout is None else layer_choices(places, dropout, "dropout", "Dropout")
    # Dropout that will be inserted can be named, too, but its ratio decides.
    named = {*layers, *(node for node, ratio in ratios.items() if ratio)}
    of_layers: dict[ir.Node, Mode] = layer_choices(
        [node for node in nodes if node in named], batch_norm, "batch_norm", "BatchNormalization or Dropout"
    )
    modes = {node: mode for node, mode in of_layers.items() if node not in ratios}
    as_exported = [
        node for node in layers if node not in ratios and modes.get(node, "as_exported") == "as_exported"
    ]
    removed = [
        layer_name(node)
        for node in traces
        if node not in ratios and choice_at(node, batch_norm) != "inference"
    ]
    return _Choices(ratios, modes, Unchosen(as_exported, removed))


def _check_training_mode(model: ir.Model, batch_norm: BatchNormMode, removed: Sequence[str]) -> None:
    """Raises GraphBuildError if BatchNormalization and Dropout cannot run in the requested training mode.

    Args:
        model: canonical model, with its layers in the modes in which they are trained.
        batch_norm: the user's argument, e.g. "training" or {"head.*": "training"}.
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
            f"building the training graph: {argument('batch_norm', 'training')} has no effect, because the "
            "model has no BatchNormalization and no Dropout node. If the network has such layers, the "
            "exporter has folded or removed them: export it in training mode (torch.onnx.export(..., "
            "training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False, dynamo=False)). "
            f"{_put_back(removed)}. Otherwise leave {argument('batch_norm')} out"
        )
    if asked and not norms:
        _log.warning(
            "%s trains with Dropout, but the model has no BatchNormalization node. If the network has "
            "such layers, the exporter has folded them into other layers; export it in training mode.",
            argument("batch_norm", "training"),
        )
    # PyTorch raises for a batch with one value per channel. It accepts larger images, but a model with a fixed batch of
    # 1 would be trained on the statistics of single images, unlike the running statistics that inference uses.
    for node in norms:
        batch = node.inputs[0] and (static_dims(node.inputs[0]) or (None,))[0]
        if batch == 1 and is_training_batch_norm(node):
            raise GraphBuildError(
                "building the training graph: the BatchNormalization "
                f"{node.name or node.outputs[0].name!r} cannot normalize with the statistics of the batch, "
                "because the model was exported with a batch of 1. Make the batch dynamic: export it with "
                f"dynamic_shapes, or {words().dynamic_batch('generate_artifacts')}. Or pass "
                f"{argument('batch_norm', 'inference')}"
            )


def _put_back(removed: Sequence[str]) -> str:
    """Returns advice on how to restore Dropout, as a sentence without its full stop."""
    if removed:
        return f"Pass {argument('dropout', 0.1)} for the removed Dropout of {some_names(removed, 5)}"
    return "To insert Dropout, use onnxtrain.restore_dropout(model, p, before=[...])"
