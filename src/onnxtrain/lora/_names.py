"""Gives the layers of a quantized file the module names that onnxruntime's quantizer has dropped."""

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
    """Names the linear layers of a quantized model after the modules that its float file names.

    PyTorch's exporter notes the module of each node, e.g. "model.layers.0.self_attn.q_proj". `MatMulNBitsQuantizer` of
    onnxruntime (1.32) writes new nodes without that note, and the layers are called "node_linear", "node_linear_1" and
    so on; so does `quantize_static` with QuantFormat.QOperator. Adapters of PEFT name modules, and fit only a model
    whose layers have these names.

    Args:
        model: the quantized model: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`; not changed.
        names_from: the float model that was quantized.

    Returns:
        The quantized model with the names in the metadata of its nodes, else the same: an `onnx_ir.Model` if `model`
        is one, else a `ModelProto`. Its weights are the same, so adapters that were trained on the file fit.

    Raises:
        GraphBuildError: no layer of `names_from` has the output and sizes of a layer of `model`.

    Example:
        `copy_module_names("model-int4.onnx", "model.onnx")`
    """
    loaded = loaded_for_adapters(model)
    # Quantizers replace the product and keep its output, on which the rest of the graph depends.
    modules = {_key(target): target.module for target in _layers(loaded_for_adapters(names_from))}
    layers = _layers(loaded)
    named = [target for target in layers if _key(target) in modules]
    if not named:
        raise GraphBuildError(
            "copying the names of modules: no linear layer of the two models has the same output, inputs and outputs; "
            f"the quantized model has {len(layers)} layers, the other {len(modules)}. Pass the file that was quantized"
        )
    for target in named:
        set_module_scope(target.node, modules[_key(target)])
    return as_given(loaded, model)


def _layers(model: ir.Model) -> list[Target]:
    """Returns the linear layers; a layer of merged queries, keys and values once, as a whole."""
    return [target for target in find_targets(model) if target.output_size == target.total]


def _key(target: Target) -> tuple[str, int, int]:
    """Returns what a layer has in common in both files: the name of its output, and its sizes."""
    # Of integers, onnxruntime's quantizer (1.32) writes the name of the float value with an ending.
    output = _END.sub("", str(target.node.outputs[0].name))
    return output, target.input_size, target.output_size
