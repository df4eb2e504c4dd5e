"""Adds adapters to the linear layers of a model: as weights to train, or as optional inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.errors import GraphBuildError
from onnxtrain.lora._adapter_nodes import Adapter, write_adapters
from onnxtrain.lora._config import LoraConfig
from onnxtrain.lora._description import METADATA_KEY, AdapterDescription, Module, Pair, base_fingerprint
from onnxtrain.lora._targets import Target, choose_targets, find_targets
from onnxtrain.passes import ModelSource, as_given, inline_functions, load_model, same_kind
from onnxtrain.passes.tidy.constants import add_initializer


def target_names(model: ModelSource) -> list[str]:
    """Returns names of linear layers for `target_modules`: the last component of each module path.

    Linear layers are MatMul, Gemm, FusedMatMul and MatMulNBits nodes with a stored weight, which may first pass through
    Cast, Transpose and DequantizeLinear; QLinearMatMul and QGemm nodes; and convolutions with kernel size 1. If the
    model builder of onnxruntime-genai has merged queries, keys and values into one product, the parts are listed as
    "q_proj", "k_proj" and "v_proj".

    Args:
        model: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`.

    Returns:
        Names in graph order, each once, e.g. ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "lm_head"].
    """
    targets = find_targets(loaded_for_adapters(model))
    merged = {target.node for target in targets if target.output_size != target.total}
    listed = [t.module for t in targets if t.node not in merged or t.output_size != t.total]
    return list(dict.fromkeys(module.rpartition(".")[2] for module in listed))


@same_kind
def add_lora(model: ModelSource, config: LoraConfig) -> onnx.ModelProto | ir.Model:
    """Adds adapters to a model, as initializers `<module>.lora_A.weight` and `<module>.lora_B.weight`.

    They contain A and B of :class:`LoraConfig`, transposed for ONNX's MatMul: float32 [in, r] and [r, out]; for a
    convolution, A [r, in, 1, 1] and B [out, r, 1, 1]. `config.init_lora_weights` determines their initial values.
    `generate_artifacts(..., lora=config)` and `Trainer(..., lora=config)` call this function, and train only the
    adapters.

    Args:
        model: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`; not modified. Its opset is kept.
        config: selects the layers that get an adapter, and the ranks.

    Returns:
        The model with adapters: an `onnx_ir.Model` if `model` is one, else a `ModelProto`.

    Raises:
        GraphBuildError: `config` selects no layer or names a nonexistent layer, or the model already has adapters.
        ModelError: the model cannot be loaded, or is too large for one proto.

    Example:
        >>> import onnx
        >>> model = onnx.parser.parse_model('''
        ...   <ir_version: 10, opset_import: ["": 21]> g (float[n, 3] x) => (float[n, 2] y)
        ...   <float[3, 2] fc = {1, 2, 3, 4, 5, 6}> { y = MatMul(x, fc) }''')
        >>> [i.name for i in add_lora(model, LoraConfig(r=1)).graph.initializer][1:3]
        ['fc.lora_A.weight', 'fc.lora_B.weight']
    """
    return as_given(insert_adapters(loaded_for_adapters(model), config), model)


def insert_adapters(
    model: ir.Model, config: LoraConfig, weights: Mapping[str, Pair] | None = None, base: str | None = None
) -> ir.Model:
    """Adds adapters to a loaded model, in place, and returns it.

    Args:
        model: the model, without functions.
        config: selects the layers that get an adapter.
        weights: A and B by module path, with the shapes of :func:`adapter_shapes`. Default: initial values for
            training.
        base: fingerprint of the model. Default: computed, which reads all weights.

    Raises:
        GraphBuildError: the model already has adapters, or the configuration does not match its layers.
    """
    targets = _chosen(model, config)
    # Before adapters are added, because the fingerprint must cover the deployed weights.
    generator, fingerprint = np.random.default_rng(config.seed), base or base_fingerprint(model)

    def make(name: str, array: np.ndarray) -> ir.Value:
        return add_initializer(model.graph, ir.tensor(array, name=name))

    adapters: dict[str, Adapter] = {}
    for target in targets:
        # A layer that runs twice has one adapter, as it has one weight.
        if target.module not in adapters:
            rank = config.rank(target.module)
            a, b = _initial(generator, target, rank, config) if weights is None else weights[target.module]
            adapters[target.module] = Adapter(
                target,
                make(f"{target.module}.lora_A.weight", a),
                make(f"{target.module}.lora_B.weight", b),
                config.scaling(target.module),
            )
    description = AdapterDescription.of(config, [_module(target) for target in targets], fingerprint)
    write_adapters(model, targets, adapters, dropout=config.lora_dropout)
    model.metadata_props[METADATA_KEY] = json.dumps(description.to_json())
    return model


@same_kind
def adapter_model(model: ModelSource, config: LoraConfig) -> onnx.ModelProto | ir.Model:
    """Adds optional adapter inputs to a deployed model, so that ONNX Runtime and genai can switch adapters per run.

    The inputs `<module>.lora_A.weight` [in, rank] and `<module>.lora_B.weight` [rank, out] have the dtype of the
    layer's activations, and default values of rank 0. Without an active adapter, a session computes the same results as
    `model`. With an adapter from :func:`save_adapter`, activated by `RunOptions.add_active_adapter` or genai's
    `Adapters`, it computes the same results as the trained model. Adapters may have any rank.

    Args:
        model: path of a `.onnx` file, `ModelProto` or `onnx_ir.Model`; not modified. Its opset is kept.
        config: selects the layers that get inputs. Ranks and scalings are not used: :func:`save_adapter` multiplies B
            by the scaling.

    Returns:
        The model with inputs: an `onnx_ir.Model` if `model` is one, else a `ModelProto`.

    Raises:
        GraphBuildError: `config` selects no layer or names a nonexistent layer, or the model already has adapters.
        ModelError: the model cannot be loaded, or is too large for one proto.
    """
    loaded = loaded_for_adapters(model)
    targets = _chosen(loaded, config)

    def make(name: str, shape: tuple[int | str, ...], dtype: ir.DataType) -> ir.Value:
        sizes = [0 if isinstance(size, str) else size for size in shape]
        value = ir.Value(name=name, const_value=ir.tensor(np.zeros(sizes, dtype.numpy()), name=name))
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape)
        # In ONNX, an input and an initializer with the same name form an optional input.
        loaded.graph.inputs.append(value)
        loaded.graph.register_initializer(value)
        return value

    adapters: dict[str, Adapter] = {}
    fingerprint = base_fingerprint(loaded)
    for target in targets:
        if target.module not in adapters:
            # A separate name for each module: onnxruntime reuses buffers among values whose symbolic sizes have the
            # same name, and ranks may differ.
            a, b = adapter_shapes(target, f"{target.module}.rank")
            dtype = target.dtype or ir.DataType.FLOAT
            adapters[target.module] = Adapter(
                target,
                make(f"{target.module}.lora_A.weight", a, dtype),
                make(f"{target.module}.lora_B.weight", b, dtype),
                1.0,
            )
    description = AdapterDescription.of(config, [_module(target) for target in targets], fingerprint)
    write_adapters(loaded, targets, adapters, dropout=0.0)
    loaded.metadata_props[METADATA_KEY] = json.dumps(description.to_json())
    return as_given(loaded, model)


def train_adapters(
    model: ir.Model, config: LoraConfig | None, requires_grad: Sequence[str] | None
) -> list[str] | None:
    """Adds adapters to a loaded model, in place, and returns the names of the parameters to train.

    Args:
        model: the model, which may already have adapters.
        config: selects the layers that get an adapter; None to add none.
        requires_grad: names and patterns of further parameters to train; None if the caller has not specified any.

    Returns:
        If `config` is given, `requires_grad` and the new adapters. Otherwise `requires_grad`; if it is None, the
        adapters that the model already has, or None if there are none.
    """
    if config is not None:
        if not isinstance(config, LoraConfig):
            raise TypeError(
                f"adding LoRA adapters: lora is a {type(config).__name__}; pass a LoraConfig, e.g. LoraConfig(r=8)"
            )
        # Layers in functions would have no unique names.
        if model.functions:
            inline_functions(model)
        insert_adapters(model, config)
    elif requires_grad is not None or METADATA_KEY not in model.metadata_props:
        return None if requires_grad is None else list(requires_grad)
    description = AdapterDescription.from_text(model.metadata_props[METADATA_KEY], "training LoRA adapters")
    adapters = [f"{module.path}.lora_{letter}.weight" for module in description.modules for letter in "AB"]
    return [*(requires_grad or ()), *adapters]


def loaded_for_adapters(model: ModelSource) -> ir.Model:
    """Loads a model and inlines its functions, because layers in functions have no unique names."""
    loaded = load_model(model)
    if loaded.functions:
        inline_functions(loaded)
    return loaded


def _chosen(model: ir.Model, config: LoraConfig) -> list[Target]:
    """Returns the layers that `config` selects; raises GraphBuildError if the model already has adapters."""
    if METADATA_KEY in model.metadata_props:
        raise GraphBuildError(
            "adding LoRA adapters: the model already has adapters; pass the model from before add_lora or "
            "adapter_model, or merge the adapters first"
        )
    return choose_targets(model, config)


def _module(target: Target) -> Module:
    dtype = target.dtype or ir.DataType.FLOAT
    return Module(
        target.module, target.input_size, target.output_size, target.is_convolution, dtype.name.lower()
    )


def adapter_shapes(target: Target, rank: int | str) -> tuple[tuple[int | str, ...], tuple[int | str, ...]]:
    """Returns the shapes of A and B in the graph, e.g. (in, rank) and (rank, out)."""
    if target.is_convolution:
        ones = (1,) * (len(_weight_dims(target)) - 2)
        return (rank, target.input_size, *ones), (target.output_size, rank, *ones)
    return (target.input_size, rank), (rank, target.output_size)


def _weight_dims(target: Target) -> Sequence[int]:
    # A convolution's weight may be dequantized, which keeps its axes.
    weight = target.node.inputs[target.weight_index]
    while weight is not None and weight.const_value is None:
        producer = weight.producer()
        weight = producer.inputs[0] if producer is not None else None
    assert weight is not None
    assert weight.const_value is not None
    return [int(size) for size in weight.const_value.shape.numpy()]


def _initial(
    generator: np.random.Generator, target: Target, rank: int, config: LoraConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the initial values of A and B in float32, as in PEFT.

    A is random. B is zero, unless `config.init_lora_weights` is False: then B is random too.
    """
    shape_a, shape_b = (tuple(map(int, shape)) for shape in adapter_shapes(target, rank))
    # One generator for all layers, in graph order, so that a seed gives the same weights on every machine. As in PEFT's
    # reset_lora_parameters: Kaiming uniform initialization with a = sqrt(5), i.e. a bound of 1/sqrt(fan_in).
    if config.init_lora_weights == "gaussian":
        a = generator.normal(0, 1 / rank, shape_a)
    else:
        bound = 1 / math.sqrt(target.input_size)
        a = generator.uniform(-bound, bound, shape_a)
    b = np.zeros(shape_b)
    if config.init_lora_weights is False:
        b = generator.uniform(-1 / math.sqrt(rank), 1 / math.sqrt(rank), shape_b)
    return a.astype(np.float32), b.astype(np.float32)
