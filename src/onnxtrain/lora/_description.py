"""Describes a model's adapters: the modules that have adapters, the settings, and the base model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import AdapterMismatchError
from onnxtrain.lora._config import LoraConfig
from onnxtrain.runtime.manifest import ADAPTERS_KEY

Array = np.ndarray[Any, Any]
Pair = tuple[Array, Array]
"""A and B of an adapter as the graph reads them, e.g. with shapes [in, r] and [r, out]."""

METADATA_KEY = ADAPTERS_KEY
"""Key of the adapter description in the metadata of a model and in the properties of a checkpoint."""


@dataclass(frozen=True)
class Module:
    """A layer with an adapter.

    Attributes:
        path: path of the module, e.g. "model.layers.0.self_attn.q_proj".
        inputs: number of input features.
        outputs: number of output features.
        convolution: True for a convolution with kernel size 1.
        dtype: dtype of the layer's activations, e.g. "float". `.onnx_adapter` files store the adapter in this dtype.
    """

    path: str
    inputs: int
    outputs: int
    convolution: bool = False
    dtype: str = "float"


@dataclass(frozen=True)
class AdapterDescription:
    """Description of the adapters of a model.

    Attributes:
        config: the settings.
        modules: the layers with an adapter, each once, in graph order.
        base: fingerprint of the base model, see :func:`base_fingerprint`.
    """

    config: LoraConfig
    modules: tuple[Module, ...]
    base: str

    @classmethod
    def of(cls, config: LoraConfig, modules: Sequence[Module], base: str) -> AdapterDescription:
        """Creates a description, in which each module is listed once."""
        return cls(config, tuple({module.path: module for module in modules}.values()), base)

    def to_json(self) -> dict[str, Any]:
        """Returns the description as a JSON object."""
        return {
            "config": asdict(self.config),
            "modules": [asdict(m) for m in self.modules],
            "base": self.base,
        }

    @classmethod
    def from_text(cls, text: str, doing: str) -> AdapterDescription:
        """Parses the description from JSON.

        Raises:
            AdapterMismatchError: the text is not a valid description.
        """
        try:
            read: Mapping[str, Any] = json.loads(text)
            modules = [Module(**entry) for entry in read["modules"]]
            return cls.of(LoraConfig(**read["config"]), modules, str(read["base"]))
        # An untrusted model may contain any text.
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise AdapterMismatchError(
                f"{doing}: its description of the adapters is corrupt ({error}); create it again with "
                "add_lora, adapter_model or generate_artifacts(lora=)"
            ) from error


def base_fingerprint(model: ir.Model) -> str:
    """Returns the SHA-256 digest (hexadecimal) of a model's stored tensors with at least two axes.

    The digest covers the name, dtype, shape and bytes of each initializer, in order of name. Constants that passes add
    or fold do not change it, because they are scalars and vectors. Initializers that are also graph inputs, such as the
    default values of optional adapters, are skipped.
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.graph.initializers.items()):
        tensor = value.const_value
        # Passes fold and merge scalars and vectors. Inputs for adapters are not weights.
        if tensor is None or len(tensor.shape) < 2 or value.is_graph_input():
            continue
        signature = [name, tensor.dtype.name, [int(size) for size in tensor.shape.numpy()]]
        digest.update(json.dumps(signature, separators=(",", ":"), ensure_ascii=False).encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()
