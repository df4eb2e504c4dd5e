"""The architectures of the sweep, as files of both PyTorch exporters."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

sys.path.append(str(Path(__file__).parents[1] / "architectures"))
from zoo import load

EXPORTERS = TORCHSCRIPT, DYNAMO = "torchscript", "dynamo"
OPSETS = {TORCHSCRIPT: range(13, 21), DYNAMO: range(18, 24)}
"""Opsets that each exporter writes and onnxtrain reads."""
_HAS_ATTENTION = 14
"""The first opset in which the TorchScript exporter knows PyTorch's scaled_dot_product_attention."""


_WITH_PAST = " with past"
_LAYERS, _LENGTH, _SIZE = 2, 3, 8
"""Of what is in a cache."""


@dataclass(frozen=True)
class Model:
    """An architecture of the zoo of `benchmarks/architectures`, and how it is exported.

    Attributes:
        name: in the zoo, without its family.
        inputs: the names of the inputs that the file has; all others of the zoo's batches are labels.
        optimizer: its `model_type` for onnxruntime's transformer optimizer.
        lengths: the inputs whose second axis is as symbolic as the batch.
        past: the heads of the keys and values that each of two layers has in a cache, which are inputs too.
        not_at: opsets at which onnxruntime does not run what the Dynamo exporter writes.
    """

    name: str
    inputs: Sequence[str]
    optimizer: str = "bert"
    lengths: Sequence[str] = ()
    past: int = 0
    not_at: Sequence[int] = ()

    @property
    def zoo_name(self) -> str:
        """The name in the zoo."""
        return self.name.removesuffix(_WITH_PAST)

    @property
    def file_inputs(self) -> list[str]:
        """All inputs of the file."""
        layers = range(_LAYERS if self.past else 0)
        return [*self.inputs, *(f"past_{layer}_{kind}" for layer in layers for kind in ("key", "value"))]


_TEXT = ("input_ids", "attention_mask")
_PICTURE = ("pixel_values",)
_PAIR = ("input_ids", "attention_mask", "labels")


def _texts(optimizer: str, *names: str) -> list[Model]:
    return [Model(name, _TEXT, optimizer, _TEXT) for name in names]


MODELS = {
    model.name: model
    for model in (
        *_texts(
            "bert", "bert", "distilbert", "roberta", "albert", "electra", "mobilebert", "layoutlm", "deberta"
        ),
        *_texts("gpt2", "gpt2", "gpt_neo", "opt"),
        Model("llama", _TEXT, "gpt2", _TEXT, not_at=(23,)),  # RotaryEmbedding with caches of one row for all
        *_texts("gpt2", "mistral", "qwen2"),
        Model("t5", _PAIR, "t5", _PAIR),
        Model("bart", _PAIR, "bart", _PAIR),
        *(Model(name, _PICTURE, "vit") for name in ("vit", "deit")),
        Model("swin", _PICTURE, "swin"),
        *(Model(name, _PICTURE) for name in ("convnext", "resnet", "segformer")),
        Model("wav2vec2", ("input_values",)),
        Model("whisper", ("input_features", "labels"), "bart"),
        Model("clip", ("input_ids", "attention_mask", "pixel_values"), "clip"),
        *_texts("bert", "deberta-v2", "squeezebert", "mpnet"),
        *_texts("gpt2", "qwen3", "phi", "gpt_neox", "gemma", "bloom", "falcon", "mamba"),
        Model("marian", _PAIR, "bart", _PAIR),
        *(Model(name, _PICTURE, "vit") for name in ("dinov2", "beit")),
        *(Model(name, _PICTURE) for name in ("mobilenet_v2", "mobilevit")),
        Model("hubert", ("input_values",)),
        Model("vilt", ("input_ids", "attention_mask", "pixel_values")),
        Model("patchtst", ("past_values",)),
        Model("gpt2 with past", _TEXT, "gpt2", _TEXT, past=4),
        Model("llama with past", _TEXT, "gpt2", _TEXT, past=2),
    )
}


class Exported(nn.Module):
    """A model of the inputs that are to be the file's, without labels; its first output."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = dict(zip(self.names, values, strict=True))
        past = [given.pop(name) for name in self.names if name.startswith(("past_0", "past_1"))]
        if past:
            cache = given["past_key_values"] = DynamicCache()
            for layer in range(_LAYERS):
                cache.update(past[2 * layer], past[2 * layer + 1], layer)
        if self.model.config.is_encoder_decoder:
            given["decoder_input_ids"] = given.pop("labels")
        result = self.model(**given, return_dict=True)
        return next(v for v in result.values() if isinstance(v, torch.Tensor) and v.is_floating_point())


def made(model: Model, opset: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Returns the network, with parameters as far apart as those of a trained one, and what it is exported with."""
    architecture = load(f"transformers/{model.zoo_name}")[f"transformers/{model.zoo_name}"]
    torch.manual_seed(0)
    batch = dict(architecture.batches()[0])
    net = architecture.make().eval()
    for name in ("use_cache", "return_loss"):
        if hasattr(net.config, name):
            setattr(net.config, name, name == "use_cache" and model.past > 0)
    if model.past:
        count = len(batch["input_ids"])
        batch["attention_mask"] = torch.cat([torch.ones(count, _LENGTH), batch["attention_mask"]], 1).long()
        for name in model.file_inputs[len(model.inputs) :]:
            batch[name] = torch.randn(count, model.past, _LENGTH, _SIZE)
    if opset < _HAS_ATTENTION and hasattr(net, "set_attn_implementation"):
        net.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in net.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
            elif name.endswith("running_mean"):
                buffer.normal_(0, 0.1)
    return Exported(net, model.file_inputs).eval(), tuple(batch[name] for name in model.file_inputs)


def export(model: Model, exporter: str, opset: int, path: Path) -> tuple[dict[str, Any], bool]:
    """Writes the file; returns inputs for it, and whether its batch and lengths are symbolic.

    Raises:
        Exception: what the exporter raises.
    """
    net, example = made(model, opset)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            _write(net, example, model, exporter, opset, path, symbolic=True)
            symbolic = True
        except Exception:
            _write(net, example, model, exporter, opset, path, symbolic=False)
            symbolic = False
    return {name: value.numpy() for name, value in zip(model.file_inputs, example, strict=True)}, symbolic


def _write(
    net: nn.Module,
    example: tuple[torch.Tensor, ...],
    model: Model,
    exporter: str,
    opset: int,
    path: Path,
    *,
    symbolic: bool,
) -> None:
    axes = {n: {0: "batch", **({1: f"{n}_length"} if n in model.lengths else {})} for n in model.file_inputs}
    axes |= {n: {0: "batch", 2: "past_length"} for n in model.file_inputs[len(model.inputs) :]}
    common = {"input_names": model.file_inputs, "output_names": ["y"], "opset_version": opset}
    if exporter == TORCHSCRIPT:
        torch.onnx.export(
            net, example, str(path), dynamo=False, dynamic_axes=axes if symbolic else None, **common
        )
        return
    auto = torch.export.Dim.AUTO
    shapes = (tuple(dict.fromkeys(axes[name], auto) for name in model.file_inputs),) if symbolic else None
    torch.onnx.export(
        net,
        example,
        str(path),
        dynamo=True,
        dynamic_shapes=shapes,
        external_data=False,
        verbose=False,
        **common,
    )
