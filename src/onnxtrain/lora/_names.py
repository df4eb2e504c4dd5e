"""Restores the module names of layers after onnxruntime's quantizer has dropped them."""

from __future__ import annotations

import re

import onnx
import onnx_ir as ir

from onnxtrain.errors import GraphBuildError
from onnxtrain.lora._insert import loaded_for_adapters
from onnxtrain.lora._targets import Target, find_targets
from onnxtrain.passes import ModelSource, as_given, same_kind
from onnxtrain.selection import set_module_scope

_END = re.compile(r"_(quantized|QuantizeLinear_Input)$")


@same_kind
def copy_module_names(model: ModelSource, names_from: ModelSource) -> onnx.ModelProto | ir.Model:
    """Copies module names from a float model to the linear layers of its quantized version.

    PyTorch's exporter records the module of each node, e.g. "model.layers.0.self_attn.q_proj". onnxruntime's
    `MatMulNBitsQuantizer` (1.32), and `quantize_static` with QuantFormat.QOperator, create new nodes without this
    metadata, so the layers are called "node_linear", "node_linear_1" and so on. PEFT adapters identify layers by module
    path, so they do not match such a model.

    Args:
        model: the quantized model: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`; not modified.
        names_from: the float model that was quantized.

    Returns:
        The quantized model with the module names in the metadata of its nodes: an `onnx_ir.Model` if `model` is one,
        else a `ModelProto`. Its weights are unchanged, so adapters that were trained on `model` still match.

    Raises:
        GraphBuildError: no layers of the two models have the same output name and sizes.

    Example:
        `copy_module_names("model-int4.onnx", "model.onnx")`
    """
    loaded = loaded_for_adapters(model)
    # Quantizers replace the product but keep the name of its output, on which the rest of the graph depends.
    modules = {_key(target): target.module for target in _layers(loaded_for_adapters(names_from))}
    layers = _layers(loaded)
    named = [target for target in layers if _key(target) in modules]
    if not named:
        raise GraphBuildError(
            "copying module names: no linear layers of the two models have the same output name and "
            f"sizes; the quantized model has {len(layers)} layers, the other {len(modules)}. Pass the "
            "float model from which the quantized one was made"
        )
    for target in named:
        set_module_scope(target.node, modules[_key(target)])
    return as_given(loaded, model)


def _layers(model: ir.Model) -> list[Target]:
    """Returns the linear layers of a model; a merged layer of queries, keys and values is listed without its parts."""
    return [target for target in find_targets(model) if target.output_size == target.total]


def _key(target: Target) -> tuple[str, int, int]:
    """Returns the key that matches a quantized layer to its float original: output name, input size, output size."""
    # onnxruntime's quantizer (1.32) names integers after the float value, with a suffix.
    output = _END.sub("", str(target.node.outputs[0].name))
    return output, target.input_size, target.output_size
