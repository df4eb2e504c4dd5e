"""Lists the linear layers of a model for other packages, without changing the graph."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxtrain.lora._config import LoraConfig
from onnxtrain.lora._insert import loaded_for_adapters
from onnxtrain.lora._targets import choose_targets, find_targets
from onnxtrain.passes import ModelSource


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer that can get an adapter.

    Attributes:
        path: path of its module, e.g. "model.layers.0.self_attn.q_proj".
        inputs: number of input features, e.g. 128.
        outputs: number of output features, e.g. 64.
        is_quantised: True if its weight is stored as integers.
        part_of: path of the merged layer that contains it, e.g. "model.layers.0.self_attn.qkv_proj"; else None.
    """

    path: str
    inputs: int
    outputs: int
    is_quantised: bool
    part_of: str | None = None


def linear_layers(model: ModelSource, config: LoraConfig | None = None) -> list[LinearLayer]:
    """Returns the linear layers of a model, each once, in graph order.

    Args:
        model: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`; not modified.
        config: selects the layers that would get an adapter. Default: all layers, with a merged layer of queries, keys
            and values before its parts.

    Raises:
        GraphBuildError: `config` selects no layer, or names a nonexistent layer.

    Example:
        >>> import onnx
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]> g (float[n, 3] x) => (float[n, 2] y)
        ...   <float[3, 2] fc = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, fc) }''')
        >>> linear_layers(model)
        [LinearLayer(path='fc', inputs=3, outputs=2, is_quantised=False, part_of=None)]
    """
    loaded = loaded_for_adapters(model)
    targets = find_targets(loaded)
    wholes = {target.node: target.module for target in targets if target.output_size == target.total}
    chosen = targets if config is None else choose_targets(loaded, config)
    layers = (
        LinearLayer(
            target.module,
            target.input_size,
            target.output_size,
            _is_quantized(target.node.inputs[target.weight_index]),
            None if target.output_size == target.total else wholes[target.node],
        )
        for target in chosen
    )
    # A layer that runs twice has one weight.
    return list({layer.path: layer for layer in layers}.values())


def _is_quantized(weight: ir.Value | None) -> bool:
    """True if a weight is stored as integers."""
    while weight is not None and not weight.is_initializer():
        node = weight.producer()
        weight = None if node is None else node.inputs[0]
    return weight is not None and weight.dtype is not None and not weight.dtype.is_floating_point()
