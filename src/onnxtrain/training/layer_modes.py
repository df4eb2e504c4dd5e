"""Switches BatchNormalization and Dropout nodes to training or inference mode, all at once or by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain._printable import get_logger
from onnxtrain._words import argument, words
from onnxtrain.emitter import static_dims
from onnxtrain.errors import GraphBuildError
from onnxtrain.op_facts import SWITCHED
from onnxtrain.passes import Mode, TrainingModePass, is_training_batch_norm
from onnxtrain.passes.parameters.dropout_traces import (
    constant_ratio,
    dropout_traces,
    is_adapter_dropout,
    set_ratio,
    write_dropout,
)
from onnxtrain.passes.tidy.replace_value import replace_node
from onnxtrain.recipe import BatchNormMode, DropoutRatios
from onnxtrain.selection import match_names, module_scope, some_names
from onnxtrain.training.running_variance import mark_unbiased

_log = get_logger()


@dataclass(frozen=True)
class DropoutPlaces:
    """Places of Dropout in a model, after :func:`set_dropout`.

    Attributes:
        decided: Dropout nodes whose mode the user has chosen.
        removed: nodes left in place of Dropout modules that the exporter removed, if the user chose no ratio for them.
    """

    decided: frozenset[ir.Node] = frozenset()
    removed: tuple[ir.Node, ...] = ()


class Unchosen(NamedTuple):
    """Layers of a model whose mode the user has not chosen.

    Attributes:
        as_exported: BatchNormalization and Dropout nodes that keep the mode in which they were exported.
        removed: names of Dropout modules that the exporter has removed, e.g. ["drop"].
    """

    as_exported: Sequence[ir.Node]
    removed: Sequence[str]


def set_dropout(model: ir.Model, dropout: DropoutRatios) -> DropoutPlaces:
    """Sets the ratios of Dropout, in place, and inserts Dropout where an exporter has removed it.

    A ratio above 0 switches Dropout to training mode, 0 to inference mode.

    Args:
        model: canonical model that still has what an exporter leaves of Dropout modules (`passes.dropout_traces`).
        dropout: one ratio for all places, or ratios by pattern. The first pattern
            (:func:`onnxtrain.selection.match_names`) that matches a place's module or node decides. None changes
            nothing.

    Returns:
        The places of Dropout.

    Raises:
        GraphBuildError: a pattern matches no place, or the model has no place for a ratio above 0.
    """
    traces = dropout_traces(model.graph)
    if dropout is None:
        return DropoutPlaces(removed=tuple(traces))
    ratios = _ratios([*_nodes(model, ["Dropout"]), *traces], dropout)
    constants = {ratio: constant_ratio(model, ratio) for ratio in dict.fromkeys(ratios.values()) if ratio}
    modes: dict[ir.Node, Mode] = {}
    for node, ratio in ratios.items():
        if node.op_type == "Dropout":
            if ratio:
                set_ratio(node, constants[ratio])
            modes[node] = "training" if ratio else "inference"
        elif ratio:
            written = write_dropout(model, node, constants[ratio])
            replace_node(node, written.outputs[0])
            modes[written] = "training"
    TrainingModePass(dropout=modes)(model)
    return DropoutPlaces(frozenset(modes), tuple(node for node in traces if node not in ratios))


def _ratios(places: Sequence[ir.Node], dropout: float | Mapping[str, float]) -> dict[ir.Node, float]:
    """Returns the ratio that the user has chosen for each node; see :func:`set_dropout`."""
    if not isinstance(dropout, Mapping):
        if not places and dropout:
            raise GraphBuildError(
                f"building the training graph: {argument('dropout', dropout)} has no effect, because the "
                "file has no Dropout. Exporters remove it in inference mode: the TorchScript exporter "
                "always, the Dynamo exporter unless optimize=False. Export again with optimize=False or "
                "in training mode, or insert Dropout in front of layers that you name: "
                f"onnxtrain.restore_dropout(model, p={dropout}, before=['fc'])"
            )
        return dict.fromkeys(places, float(dropout))
    matches = _first_matches(places, dropout, "dropout", "Dropout")
    return {node: float(dropout[pattern]) for node, pattern in matches.items()}


def _first_matches(
    nodes: Sequence[ir.Node], patterns: Iterable[str], option: str, kind: str
) -> dict[ir.Node, str]:
    """Returns the first pattern that matches each node; nodes that no pattern matches are left out.

    Args:
        nodes: the nodes.
        patterns: patterns in order of precedence.
        option: the argument that holds the patterns, e.g. "batch_norm".
        kind: what the error message calls the nodes, e.g. "BatchNormalization or Dropout".

    Raises:
        GraphBuildError: a pattern matches no node.
    """
    names = {node: _names(node) for node in nodes}
    all_names = list(dict.fromkeys(name for of_node in names.values() for name in of_node))
    first: dict[ir.Node, str] = {}
    for pattern, matched in match_names(patterns, all_names).items():
        if not matched:
            shown = [of_node[0] for of_node in names.values() if of_node]
            raise GraphBuildError(
                f"building the training graph: no {kind} matches {pattern!r} of {argument(option)}; the "
                f"model has {some_names(shown)}"
            )
        for node in nodes:
            if not set(matched).isdisjoint(names[node]):
                first.setdefault(node, pattern)
    return first


def _switch_adapters_on(model: ir.Model) -> None:
    """Switches the Dropout of adapters to training mode, which files of opsets before 12 cannot store."""
    nodes = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if is_adapter_dropout(node)]
    TrainingModePass(dropout=dict.fromkeys(nodes, "training"))(model)


def _nodes(model: ir.Model, op_types: Collection[str]) -> list[ir.Node]:
    """Returns the nodes of the given standard ops, subgraphs included, without the Dropout of adapters."""
    return [
        node
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        if node.op_type in op_types and node.domain == "" and not is_adapter_dropout(node)
    ]


def switch_modes(model: ir.Model, batch_norm: BatchNormMode, places: DropoutPlaces) -> Unchosen:
    """Switches BatchNormalization and Dropout to their modes, in place.

    Args:
        model: canonical model.
        batch_norm: one mode for all nodes, or modes by pattern. The first pattern
            (:func:`onnxtrain.selection.match_names`) that matches a node decides. A pattern can match the name of the
            node, e.g. `/body/bn/BatchNormalization`, of its scale, `body.bn.weight`, or of its module, `body.bn`.
        places: places of Dropout; nodes whose mode `dropout` has decided keep that mode.

    Returns:
        The layers whose mode the user has not chosen.

    Raises:
        GraphBuildError: a pattern matches no node, or a layer cannot run in training mode.
        ValueError: a mode is not "as_exported", "training" or "inference".
    """
    nodes = _nodes(model, SWITCHED)
    if isinstance(batch_norm, Mapping):
        matches = _first_matches(nodes, batch_norm, "batch_norm", "BatchNormalization or Dropout")
        modes = {node: batch_norm[pattern] for node, pattern in matches.items()}
    else:
        modes = dict.fromkeys(nodes, batch_norm)
    for node in places.decided:
        modes.pop(node, None)
    # A single mode is passed on unchanged, so that the pass checks it even in a model without such nodes.
    TrainingModePass(batch_norm if isinstance(batch_norm, str) else modes, modes)(model)
    _switch_adapters_on(model)
    _update_as_pytorch(node for node, mode in modes.items() if mode == "training")
    removed = _removed_dropouts(places.removed, batch_norm)
    _check_training_mode(model, batch_norm, removed)
    as_exported = [
        node
        for node in nodes
        if node not in places.decided and modes.get(node, "as_exported") == "as_exported"
    ]
    return Unchosen(as_exported, removed)


def _removed_dropouts(nodes: Iterable[ir.Node], batch_norm: BatchNormMode) -> list[str]:
    """Returns the names of removed Dropout modules, except those that `batch_norm` puts into inference mode.

    Args:
        nodes: nodes left in place of removed Dropout modules (`passes.dropout_traces`).
        batch_norm: as in :func:`switch_modes`. Of several patterns, the first that matches a module decides, e.g. "*"
            for `head.drop` in {"backbone.*": "inference", "*": "training"}.
    """
    removed = []
    for node in nodes:
        if isinstance(batch_norm, Mapping):
            names = _names(node)
            matched = [mode for pattern, mode in batch_norm.items() if match_names([pattern], names)[pattern]]
            mode = matched[0] if matched else "as_exported"
        else:
            mode = batch_norm
        if mode != "inference":
            removed.append(place_name(node))
    return removed


def _check_training_mode(model: ir.Model, batch_norm: BatchNormMode, removed: Sequence[str]) -> None:
    """Raises GraphBuildError if BatchNormalization and Dropout cannot run in the requested training mode.

    Args:
        model: canonical model, with its layers in the modes in which they are trained.
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


def place_name(node: ir.Node) -> str:
    """Returns the name of a Dropout for error messages: that of its module, its node, or its output."""
    return next(iter(_names(node)), str(node.outputs[0].name))


def _update_as_pytorch(nodes: Iterable[ir.Node]) -> None:
    """Marks BatchNormalization nodes whose running variance is updated as in PyTorch, from the unbiased variance."""
    # Nodes that were exported in training mode are not passed in: they keep ONNX's population variance.
    for node in nodes:
        if node.op_type == "BatchNormalization":
            mark_unbiased(node)


def _names(node: ir.Node) -> list[str]:
    """Returns the names that patterns can match for a node, the name of its PyTorch module first."""
    # If a pattern matches nothing, the error message shows the first name.
    names = []
    scope = module_scope(node)
    if scope is not None:
        names.append(scope)
    scale = node.inputs[1] if node.op_type == "BatchNormalization" else None
    if scale is not None and scale.name:
        names += [scale.name.rpartition(".")[0], scale.name]
    if node.name:
        names.append(node.name)
        # TorchScript's exporter writes the path of the module, as in "/body/bn/BatchNormalization".
        if node.name.startswith("/"):
            names.append(node.name[1:].rpartition("/")[0].replace("/", "."))
    return [name for name in dict.fromkeys(names) if name]
