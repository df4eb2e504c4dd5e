"""Warns of changes that an exporter made to a model, if they make it train differently."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnxtrain._printable import get_logger
from onnxtrain._words import argument
from onnxtrain.emitter import known_array
from onnxtrain.passes import TorchSignature, has_quantized_ops, is_training_batch_norm, lost_detaches
from onnxtrain.passes.parameters.integer_weights import constant, integer_weights
from onnxtrain.selection import layer_name, some_names
from onnxtrain.training.layer_modes import Unchosen

_log = get_logger()

# Parameters of models that the process has warned of. A program may make many trainers of one file.
_reported: set[tuple[str, ...]] = set()


def warn_of_export(
    model: ir.Model,
    trainable: Sequence[str],
    active: Collection[ir.Value],
    unchosen: Unchosen,
) -> None:
    """Logs a warning for each difference between training the model and training the original network.

    Args:
        model: canonical model with its loss.
        trainable: names of the parameters to train, e.g. ["fc.weight"].
        active: values between these parameters and the loss.
        unchosen: layers whose mode the user has not chosen.
    """
    # Not errors: each of these models can be trained, and may be intended as it is.
    _warn_of_inference_mode(unchosen.as_exported)
    _warn_of_removed_dropout(unchosen.removed)
    _warn_of_lost_parameters(model)
    _warn_of_shared_weights(model, trainable)
    _warn_of_lost_detaches(model, active)


def _warn_of_inference_mode(nodes: Collection[ir.Node]) -> None:
    """Logs a warning if BatchNormalization or Dropout nodes run in inference mode only because they were exported so.

    PyTorch's exporters write inference mode by default, so most files have such nodes.

    Args:
        nodes: nodes whose mode the user has not chosen.
    """
    norms = sum(node.op_type == "BatchNormalization" and not is_training_batch_norm(node) for node in nodes)
    if norms:
        _log.warning(
            "%d BatchNormalization node(s) were exported in inference mode: their running statistics do not change "
            "and normalize every training batch. Pass %s to train with batch "
            "statistics, or %s to confirm.",
            norms,
            argument("batch_norm", "training"),
            argument("batch_norm", "inference"),
        )
    dropouts = [node for node in nodes if node.op_type == "Dropout" and _is_switched_off(node)]
    if dropouts:
        _log.warning(
            "%d Dropout node(s) were exported in inference mode and drop nothing: %s. Pass %s to train "
            "with the ratios in the file, %s for another ratio, or %s to train without Dropout.",
            len(dropouts),
            some_names([layer_name(node) for node in dropouts], 5),
            argument("batch_norm", "training"),
            argument("dropout", 0.1),
            argument("dropout", 0.0),
        )


def _is_switched_off(node: ir.Node) -> bool:
    """True if a Dropout with a ratio above 0 drops nothing, because its third input, `training_mode`, is absent."""
    ratio = known_array(node.inputs[1]) if len(node.inputs) > 1 else None
    return len(node.inputs) < 3 and (ratio is None or bool(ratio))


def _warn_of_removed_dropout(modules: Sequence[str]) -> None:
    """Warns of Dropout modules that the exporter has removed and the user has not restored."""
    if modules:
        _log.warning(
            "The exporter removed %d Dropout module(s), so these places drop nothing in training: %s. The "
            "ratio p is not in the file. Pass %s, with the p of the PyTorch network, to train with "
            "Dropout, or %s to train without it, e.g. because p is 0 in the network.",
            len(modules),
            some_names(modules, 5),
            argument("dropout", 0.1),
            argument("dropout", 0.0),
        )


def _warn_of_lost_parameters(model: ir.Model) -> None:
    """Warns of parameters of the PyTorch module that the file lacks, once in a process."""
    names = TorchSignature(model).missing_parameters()
    key = (str(model.graph.name), *map(str, model.graph.initializers), *names)
    # A quantizer has replaced weights with integers, which nobody expects to train.
    if names and key not in _reported and not has_quantized_ops(model.graph):
        _reported.add(key)
        _log.warning(
            "The exporter's optimizer removed %d parameters of the PyTorch model, so they are not "
            "trained: %s. It merges equal tensors, drops all-zero biases and folds BatchNorm into Conv. "
            "To train them, export with optimize=False; if you only have the file, ignore this warning.",
            len(names),
            some_names(names, 5),
        )


def _warn_of_shared_weights(model: ir.Model, trainable: Sequence[str]) -> None:
    """Warns of initializers that several layers share because their weights were equal at export."""
    # Both of PyTorch's exporters merge equal initializers. `passes/parameters/torch_parameters.py` splits them if the
    # file still lists the separate parameters; this warning names the others.
    for name in trainable:
        nodes = [str(use.node.name) for use in model.graph.initializers[name].uses()]
        # TorchScript's exporter gives such names to folded constants, e.g. a transposed weight.
        if name.startswith("onnx::") and len(nodes) > 1:
            _log.warning(
                "PyTorch's exporter stored %r once for weights with equal values: %s share it, and it is "
                "trained as one parameter. If the layers are not tied in PyTorch, export with "
                "do_constant_folding=False.",
                name,
                ", ".join(nodes),
            )


def _warn_of_lost_detaches(model: ir.Model, active: Collection[ir.Value]) -> None:
    """Warns of detach() calls that the exporter has dropped, so that gradients flow where PyTorch stops them."""
    nodes = [repr(node.name or node.outputs[0].name) for node in lost_detaches(model.graph, active)]
    if nodes:
        _log.warning(
            "The PyTorch model calls detach(), but the exporter's optimizer removed it at %s: gradients "
            "flow where PyTorch would stop them. Export with optimize=False, or write "
            "onnxtrain.nn.stop_gradient(x) for x.detach().",
            some_names(nodes, 5),
        )


def warn_of_integer_weights(model: ir.Model, trainable: Sequence[str]) -> None:
    """Logs a warning if training with straight-through gradients leaves a model's integer weights unchanged.

    Args:
        model: canonical model, in which the user has chosen no parameters.
        trainable: names of the parameters to train, e.g. ["norm.weight"].
    """
    integers = sum(constant(w.value).size for w in integer_weights(model) if not w.is_bias)
    if integers:
        _log.warning(
            "%s trains the %s floating-point parameters of this quantized model, but not its %s integer weights. To "
            "train them as well, pass onnxtrain.qat.prepare(model) instead of the model, and convert the exported "
            "model with onnxtrain.qat.convert (docs/guides/train-an-int8-model.md).",
            argument("straight_through", True),
            f"{sum(constant(model.graph.initializers[name]).size for name in trainable):,}",
            f"{integers:,}",
        )
