"""Describes the inputs and outputs of a training model as its manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxtrain.emitter import static_dims
from onnxtrain.errors import GraphBuildError
from onnxtrain.losses import LABELS_KEY, TARGET_KEY
from onnxtrain.passes.portable import HOLDS, every_node, trains
from onnxtrain.runtime.manifest import FORMAT, SPARSE_VERSION, VERSION, fingerprint
from onnxtrain.training.build_state import Build


def describe_training(build: Build, training: ir.Model) -> dict[str, Any]:
    """Returns the manifest of the training model, without `files`, `optimizer`, `loss_mean` and `inference`."""
    # Outputs are identified by their position, in the order in which `gradient_graph.py` appends them: outputs of the
    # forward graph, gradients of the trained parameters, row indices, updated statistics, gradients of inputs.
    inputs = {str(value.name): value for value in training.graph.inputs}
    outputs = [str(value.name) for value in training.graph.outputs]
    returned = [str(value.name) for value in build.forward.graph.outputs]
    gradients = dict(zip(build.trainable, outputs[len(returned) :], strict=False))
    first_input_gradient = len(outputs) - len(build.input_gradients)
    input_gradients = dict(zip(build.input_gradients, outputs[first_input_gradient:], strict=True))
    parameters = [_tensor_entry(inputs[name]) for name in build.parameters]
    statistics = [_tensor_entry(inputs[name]) for name in build.statistics]
    drawn = set() if build.random is None else {str(build.random.name)}
    users = [
        value for name, value in inputs.items() if name not in {*build.parameters, *build.statistics, *drawn}
    ]
    of_users, of_targets = (
        [
            _user_entry(value, key, input_gradients)
            for value in users
            if (TARGET_KEY in value.metadata_props) == (key == TARGET_KEY)
        ]
        for key in (LABELS_KEY, TARGET_KEY)
    )
    of_hosts = [_tensor_entry(inputs[name]) | {"holds": list(HOLDS)} for name in sorted(drawn)]
    return {
        "format": FORMAT,
        # Runtimes of version 1 do not know sparse gradients and must not load such a file; they load all others.
        "version": SPARSE_VERSION if build.row_indices else VERSION,
        "fingerprint": fingerprint(
            *([(e["name"], e["dtype"], e["shape"]) for e in group] for group in (parameters, statistics))
        ),
        "inputs": of_users,
        "targets": of_targets,
        "outputs": returned,
        "loss": returned[0],
        "parameters": [
            entry
            | {"trainable": entry["name"] in gradients, "gradient": gradients.get(entry["name"])}
            | _optional("gradient_indices", build.row_indices.get(entry["name"]))
            for entry in parameters
        ],
        "statistics": [entry | {"output": build.updated[entry["name"]]} for entry in statistics],
        "host_inputs": of_hosts,
        "draws": any(
            "Dropout" in node.op_type and (node.domain != "" or trains(node)) for node in every_node(training)
        ),
        "opset": training.graph.opset_imports[""],
    }


def _user_entry(value: ir.Value, key: str, gradients: Mapping[str, str]) -> dict[str, Any]:
    """Returns the manifest entry of an input or target.

    Args:
        value: the input or target.
        key: metadata key under which a loss has stored further entries, such as the class labels.
        gradients: names of the outputs with input gradients, by input name.
    """
    facts: dict[str, Any] = json.loads(value.metadata_props.get(key, "{}"))
    return _tensor_entry(value) | facts | _optional("gradient", gradients.get(str(value.name)))


def _optional(key: str, name: str | None) -> dict[str, str]:
    """Returns {key: name}, or an empty dict if `name` is None, because the manifest omits keys without a value."""
    return {} if name is None else {key: name}


def _tensor_entry(value: ir.Value) -> dict[str, Any]:
    """Returns the name, dtype and shape of a value for the manifest, with symbolic sizes as their names.

    Raises:
        GraphBuildError: the value is a string tensor.
    """
    dims = static_dims(value)
    shape = None
    if dims is not None and value.shape is not None:
        symbols = [getattr(dim, "value", None) for dim in value.shape]
        shape = [symbol if dim is None else dim for dim, symbol in zip(dims, symbols, strict=True)]
    if value.dtype == ir.DataType.STRING:
        raise GraphBuildError(
            f"building the training graph: the input '{value.name}' contains strings, which ONNX Runtime's "
            "IO binding does not support. Convert them to numbers outside of the model: cut the model "
            "after the op that looks them up (onnx.utils.extract_model), and look them up in Python."
        )
    dtype = value.dtype.numpy().name if value.dtype is not None else None
    return {"name": str(value.name), "dtype": dtype, "shape": shape}
