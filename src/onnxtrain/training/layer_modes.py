"""Which BatchNormalization and Dropout nodes train, where a pattern says so for each layer."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Literal

import onnx_ir as ir

from onnxtrain.errors import GraphBuildError
from onnxtrain.op_facts import SWITCHED
from onnxtrain.passes import Mode, TrainingModePass
from onnxtrain.selection import match_names, some_names
from onnxtrain.training.running_variance import mark_unbiased

BatchNormMode = Literal["as_exported", "training", "inference"] | Mapping[str, Mode]
"""What BatchNormalization and Dropout do in training: one mode for all, or one for each pattern of names."""

_SCOPES = "pkg.torch.onnx.name_scopes"


def switch_modes(model: ir.Model, batch_norm: BatchNormMode) -> list[ir.Node]:
    """Puts BatchNormalization and Dropout into their modes, in place; returns the nodes of which none was given.

    Patterns (:func:`onnxtrain.selection.match_names`) are tried in their order, and the first that matches a node
    decides. A node has the names of itself, of its scale and its module: `/body/bn/BatchNormalization`,
    `body.bn.weight`, `body.bn`. What no pattern matches stays as it was exported.

    Raises:
        GraphBuildError: a pattern matches no node.
        ValueError: a mode is none of "as_exported", "training", "inference".
    """
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
    known = list(dict.fromkeys(name for own in names.values() for name in own))
    modes: dict[ir.Node, Mode] = {}
    for pattern, matched in match_names(batch_norm, known).items():
        if not matched:
            shown = [own[0] for own in names.values() if own]
            raise GraphBuildError(
                f"building the training graph: no BatchNormalization or Dropout matches {pattern!r} of batch_norm; "
                f"there are {some_names(shown)}"
            )
        for node in nodes:
            if not set(matched).isdisjoint(names[node]):
                modes.setdefault(node, batch_norm[pattern])
    TrainingModePass(batch_norm=modes, dropout=modes)(model)
    _update_as_pytorch(node for node, mode in modes.items() if mode == "training")
    return [node for node in nodes if node not in modes]


def _update_as_pytorch(nodes: Iterable[ir.Node]) -> None:
    """Marks BatchNormalization nodes whose training mode was asked for: their running variance is PyTorch's.

    One whose training mode is the file's own keeps ONNX's population variance: the file says so.
    """
    for node in nodes:
        if node.op_type == "BatchNormalization":
            mark_unbiased(node)


def _names(node: ir.Node) -> list[str]:
    """Returns the names of a node, the one that PyTorch has for its module first."""
    names = []
    scopes = node.metadata_props.get(_SCOPES)
    if scopes:
        names += [scope for scope in ast.literal_eval(scopes)[:-1] if scope][-1:]
    scale = node.inputs[1] if node.op_type == "BatchNormalization" else None
    if scale is not None and scale.name:
        names += [scale.name.rpartition(".")[0], scale.name]
    if node.name:
        names.append(node.name)
        if node.name.startswith("/"):  # as TorchScript's exporter writes the path of the module
            names.append(node.name[1:].rpartition("/")[0].replace("/", "."))
    return [name for name in dict.fromkeys(names) if name]
