"""Checks that an adapter is complete and matches the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import AdapterMismatchError
from onnxtrain.lora._config import ALL_LINEAR, LoraConfig
from onnxtrain.lora._description import Pair
from onnxtrain.lora._insert import adapter_shapes
from onnxtrain.lora._targets import Target, find_targets
from onnxtrain.selection import some_names

Layers = Mapping[str, Target]
"""Maps the module path of each layer of a model to the layer."""

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
BASE_KEY = "onnxtrain.base"
"""Key of the base model's fingerprint in the metadata of PEFT's safetensors file."""


def pairs(arrays: Mapping[str, np.ndarray[Any, Any]], doing: str) -> dict[str, Pair]:
    """Returns A and B of each module, converted to float32, by module path.

    Args:
        arrays: the arrays of an adapter file, e.g. with the names "fc.lora_A.weight" and "fc.lora_B.weight".
        doing: beginning of error messages.

    Raises:
        AdapterMismatchError: a name is unknown, A or B is missing, or a weight is invalid.
    """
    found: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    foreign = []
    for name, array in arrays.items():
        module, separator, rest = name.rpartition(".lora_")
        if not separator or rest not in ("A.weight", "B.weight"):
            foreign.append(name)
        else:
            found.setdefault(module, {})[rest[0]] = _trainable(array, name, doing)
    # E.g. `lora_embedding_A`, or `lora_magnitude_vector` of DoRA.
    if foreign or not found:
        raise AdapterMismatchError(
            f"{doing}: its tensors {some_names(foreign, 3)} are not LoRA's A and B; the names must be "
            "<module>.lora_A.weight and <module>.lora_B.weight"
        )
    half = [module for module, pair in found.items() if len(pair) < 2]
    if half:
        raise AdapterMismatchError(
            f"{doing}: {some_names(half, 3)} has only one of A and B; save the whole adapter again"
        )
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _trainable(array: np.ndarray[Any, Any], name: str, doing: str) -> np.ndarray[Any, Any]:
    """Converts an adapter weight to float32, the dtype in which adapters are trained.

    Raises:
        AdapterMismatchError: the array is not floating-point, or contains NaN or infinite values.
    """
    # numpy does not classify bfloat16 of ml_dtypes as floating point.
    if not (np.issubdtype(array.dtype, np.floating) or array.dtype.name == "bfloat16"):
        raise AdapterMismatchError(
            f"{doing}: {name} has the dtype {array.dtype}, but LoRA weights are floating-point; save the "
            "adapter again, not quantized"
        )
    result = array.astype(np.float32)
    # After diverged training, or in a damaged file; such an adapter makes every output NaN.
    if not np.isfinite(result).all():
        raise AdapterMismatchError(
            f"{doing}: {name} contains values that are NaN or infinite; use an adapter from before the "
            "training diverged"
        )
    return result


def layers_of(model: ir.Model) -> dict[str, Target]:
    return {target.module: target for target in find_targets(model)}


def layer_of(layers: Layers, module: str, doing: str) -> Target:
    """Returns the layer of a module; raises AdapterMismatchError if the model has none."""
    if module in layers:
        return layers[module]
    raise AdapterMismatchError(
        f"{doing}: it has an adapter for the layer {module}, which the model does not have; the model has "
        f"{some_names(layers, 5)}. Pass the model that it was trained for; if a quantizer has dropped the "
        "module names, onnxtrain.lora.copy_module_names(model, float_model) restores them"
    )


def rank_of(target: Target, pair: Pair, doing: str) -> int:
    """Returns the rank of an adapter; raises AdapterMismatchError if its shapes do not match the layer."""
    axis = 0 if target.is_convolution else 1
    rank = pair[0].shape[axis] if pair[0].ndim > axis else 0
    expected = adapter_shapes(target, rank)
    if rank == 0 or (pair[0].shape, pair[1].shape) != expected:
        raise AdapterMismatchError(
            f"{doing}: A and B of {target.module} have the shapes {list(pair[0].shape)} and "
            f"{list(pair[1].shape)}, but the layer has {target.input_size} inputs and {target.output_size} "
            "outputs. Pass the model that the adapter was trained for"
        )
    return int(rank)


def check_named(layers: Layers, config: LoraConfig, weights: Mapping[str, Pair], doing: str) -> None:
    """Raises AdapterMismatchError if a layer that PEFT's settings select has no adapter in `weights`."""
    # PEFT replaces "all-linear" with the names that it selected. If the file still has "all-linear", all layers with
    # the same name must have adapters.
    if config.target_modules == ALL_LINEAR:
        check_whole(layers, weights, doing)
    missing = [
        module
        for module in layers
        if config.names(module) and not config.excludes(module) and module not in weights
    ]
    if missing:
        raise AdapterMismatchError(
            f"{doing}: {CONFIG_FILE} names the layers {some_names(missing, 5)}, but the file has no "
            "adapters for them; save the whole adapter again"
        )


def check_whole(layers: Layers, weights: Mapping[str, Pair], doing: str) -> None:
    """Raises AdapterMismatchError if a layer has no adapter, but layers of the same name in other blocks have one."""
    # The file does not list the intended layers, but all blocks of a transformer are adapted alike.
    ends = {module.rpartition(".")[2] for module in weights}
    missing = [module for module in layers if module.rpartition(".")[2] in ends and module not in weights]
    if missing:
        raise AdapterMismatchError(
            f"{doing}: it has adapters for other layers of the same name, but none for "
            f"{some_names(missing, 5)}; save the whole adapter again"
        )


def other_base(doing: str) -> str:
    return (
        f"{doing}: it was trained on other base weights; pass the model that it was trained for. To use it "
        f"with this model anyway, save it in PEFT format and remove {BASE_KEY!r} from the metadata of "
        f"{WEIGHTS_FILE}"
    )
