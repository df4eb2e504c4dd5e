"""Restores Dropout that an exporter removed, or inserts it before layers."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxtrain.errors import InputError, ModelError
from onnxtrain.passes import ModelSource, TrainingModePass, as_given, canonicalize, load_model, same_kind
from onnxtrain.passes.parameters.dropout_traces import dropout_traces, write_dropout
from onnxtrain.selection import matched_names, some_names
from onnxtrain.surgery._linear import Linear, read_linear

_LOST = (
    "Restoring Dropout: the file has neither Dropout nor a trace of it. Exporters remove Dropout in "
    "inference mode: the TorchScript exporter without a trace, the Dynamo exporter too, unless "
    "optimize=False. Name layers to insert Dropout in front of, e.g. before=['fc'], or export in training "
    "mode."
)


@same_kind
def restore_dropout(
    model: ModelSource, p: float | None = None, *, before: str | Sequence[str] = ()
) -> onnx.ModelProto | ir.Model:
    """Returns a copy of the model with its Dropout in training mode, so that training drops elements.

    An exporter keeps a Dropout node in inference mode, with its ratio; or replaces it with an Identity whose metadata
    names Dropout, without the ratio (PyTorch's Dynamo exporter with `optimize=False`); or removes it without a trace.
    In the last case, pass `before`. `Trainer` disables Dropout for evaluation, prediction and export.

    Args:
        model: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`; not modified.
        p: the fraction of elements to drop, e.g. 0.5. Default: the ratio of each Dropout node. Required with `before`,
            or if the file has an Identity in place of a Dropout.
        before: names or patterns of layers before which Dropout is inserted, e.g. ["fc", "classifier.*"]. They may name
            the layer's node (Gemm, MatMul or Conv), its weight or its module.

    Returns:
        The model in canonical form (opset 21 or newer): an `onnx_ir.Model` if `model` is one, else a `ModelProto`,
        which `onnx.save` accepts.

    Raises:
        ModelError: there is no trace of Dropout and `before` is empty; the ratio is unknown; no layer matches.
        InputError: `p` is not a number in [0, 1).
    """
    # bool is a subclass of int: p=False would otherwise be accepted as 0.
    if p is not None and (isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1):
        raise InputError(f"Restoring Dropout: p must be a number in [0, 1), received {p!r}.")
    result = canonicalize(load_model(model))
    nodes = list(result.graph)
    dropouts = [
        node
        for node in ir.traversal.RecursiveGraphIterator(result.graph)
        if node.op_type == "Dropout" and node.domain == ""
    ]
    traces = dropout_traces(result.graph)
    layers = _layers(nodes, [before] if isinstance(before, str) else before)
    # An error, because a model without Dropout would silently train, and overfit.
    if not (dropouts or traces or layers):
        raise ModelError(_LOST)
    if p is None and (traces or layers):
        raise ModelError(
            "Restoring Dropout: the file does not contain its ratio. Pass it: restore_dropout(model, p=0.5)."
        )
    if p is not None:
        dropouts = write_dropout(result, dict.fromkeys([*dropouts, *traces, *layers], p))
    TrainingModePass(dropout=dict.fromkeys(dropouts, "training"))(result)
    return as_given(result, model)


def _layers(nodes: Sequence[ir.Node], names: Sequence[str]) -> list[ir.Node]:
    """Returns the nodes of the linear layers that match `names`, which may be patterns.

    Raises:
        ModelError: a name or pattern matches no linear layer.
    """
    if not names:
        return []
    by_name: dict[str, list[ir.Node]] = {}
    for node in nodes:
        # The Add of a bias ends a layer, but Dropout is inserted before the product at its beginning.
        layer = read_linear(node, any_kernel=True) if node.op_type != "Add" else None
        if isinstance(layer, Linear):
            for name in layer.names:
                by_name.setdefault(name, []).append(node)
    wanted = matched_names(
        names,
        by_name,
        lambda name: ModelError(
            f"Restoring Dropout: no Gemm, MatMul or Conv with its own weight matches {name!r} of before; "
            f"the layers are {some_names(list(by_name))}."
        ),
    )
    matched = {node for name in wanted for node in by_name[name]}
    return [node for node in nodes if node in matched]
