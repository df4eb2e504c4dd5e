"""Switches BatchNormalization and Dropout nodes to training or inference mode, all or by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.errors import GraphBuildError
from onnxtrain.op_facts import SWITCHED
from onnxtrain.passes import Mode, TrainingModePass
from onnxtrain.selection import match_names, module_scope, some_names
from onnxtrain.training.running_variance import mark_unbiased

BatchNormMode = Literal["as_exported", "training", "inference"] | Mapping[str, Mode]
"""Mode of BatchNormalization and Dropout: one for all, or one per pattern, e.g. {"backbone.*": "inference"}."""


def switch_modes(model: ir.Model, batch_norm: BatchNormMode) -> list[ir.Node]:
    """Switches BatchNormalization and Dropout to their modes, in place; returns the nodes that stay as exported.

    Args:
        model: canonical model.
        batch_norm: one mode for all nodes, or modes by pattern. The first pattern
            (:func:`onnxtrain.selection.match_names`) that matches a node decides. A node matches by its own name, e.g.
            `/body/bn/BatchNormalization`, by that of its scale, `body.bn.weight`, or of its module, `body.bn`.

    Raises:
        GraphBuildError: a pattern matches no node.
        ValueError: a mode is none of "as_exported", "training", "inference".
    """
    # Subgraphs too: a BatchNormalization in a branch of If trains as any other.
    nodes = [
        node
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        if node.op_type in SWITCHED and node.domain == ""
    ]
    if not isinstance(batch_norm, Mapping):
        TrainingModePass(batch_norm=batch_norm, dropout=batch_norm)(model)
        _update_as_pytorch(nodes if batch_norm == "training" else ())
        return nodes if batch_norm == "as_exported" else []
    names = {node: _names(node) for node in nodes}
    all_names = list(dict.fromkeys(name for of_node in names.values() for name in of_node))
    modes: dict[ir.Node, Mode] = {}
    for pattern, matched in match_names(batch_norm, all_names).items():
        if not matched:
            shown = [of_node[0] for of_node in names.values() if of_node]
            raise GraphBuildError(
                f"building the training graph: no BatchNormalization or Dropout matches {pattern!r} of "
                f"{argument('batch_norm')}; there are {some_names(shown)}"
            )
        for node in nodes:
            if not set(matched).isdisjoint(names[node]):
                # A mode that is already set came from an earlier pattern, which wins.
                modes.setdefault(node, batch_norm[pattern])
    TrainingModePass(batch_norm=modes, dropout=modes)(model)
    _update_as_pytorch(node for node, mode in modes.items() if mode == "training")
    return [node for node in nodes if node not in modes]


def lost_dropouts(traces: Iterable[ir.Node], batch_norm: BatchNormMode) -> list[str]:
    """Returns the names of the Dropout modules that `batch_norm` would train if the exporter had kept them.

    Args:
        traces: nodes that stand in the place of Dropout modules (`passes.dropout_traces`).
        batch_norm: as in :func:`switch_modes`. By pattern, a module counts if the first pattern that matches it says
            "training", e.g. `head.drop` under {"backbone.*": "inference", "*": "training"}.
    """
    lost = []
    for node in traces:
        names = _names(node)
        if isinstance(batch_norm, Mapping):
            matched = [mode for pattern, mode in batch_norm.items() if match_names([pattern], names)[pattern]]
            mode = matched[0] if matched else "as_exported"
        else:
            mode = batch_norm
        if mode == "training":
            lost.append(names[0] if names else str(node.outputs[0].name))
    return lost


def _update_as_pytorch(nodes: Iterable[ir.Node]) -> None:
    """Marks BatchNormalization nodes that are switched to training mode: their running variance follows PyTorch."""
    # A node that the file itself has in training mode keeps ONNX's population variance, as the file says.
    for node in nodes:
        if node.op_type == "BatchNormalization":
            mark_unbiased(node)


def _names(node: ir.Node) -> list[str]:
    """Returns the names by which a pattern can match a node, that of its PyTorch module first."""
    # The first is the one that the message shows if a pattern matches nothing.
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
