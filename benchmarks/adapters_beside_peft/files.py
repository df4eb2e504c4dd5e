"""Writes the files: by the builder of onnxruntime-genai, and by PyTorch's exporter and onnxruntime's quantizer."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nets
import onnx
import torch
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)
from onnxruntime_genai.models.builder import create_model, parse_extra_options

from onnxtrain.lora import copy_module_names


@dataclass(frozen=True)
class File:
    """A file to train adapters on.

    Attributes:
        name: as it is printed, e.g. "qwen3, exported, 4 bits, blocks of 32, symmetric".
        net: name of the net in `nets.NETS`.
        path: the file.
        float_path: the file of the same graph in float32.
        is_built: True if the builder of genai has written it, in a folder that genai can load.
    """

    name: str
    net: str
    path: Path
    float_path: Path
    is_built: bool


def built(name: str, folder: Path) -> Iterator[File]:
    """Writes the files of genai's builder for a net, in int4 and in float32."""
    nets.save(nets.make(name), folder / "transformers")
    paths = {}
    for precision in ("fp32", "int4"):
        place = (
            "", str(folder / "transformers"), str(folder / precision), precision, "cpu", str(folder / "cache"),
        )  # fmt: skip
        # The builder prints a line per layer.
        with contextlib.redirect_stdout(io.StringIO()), quiet():
            create_model(*place, **parse_extra_options(*place, []))
        paths[precision] = folder / precision / "model.onnx"
    for precision, path in paths.items():
        yield File(f"{name}, built, {precision}", name, path, paths["fp32"], True)


def exported(name: str, folder: Path) -> Iterator[File]:
    """Writes the files of PyTorch's exporter, with weights that onnxruntime's quantizer has rounded."""
    float_path = folder / "float.onnx"
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(_export(nets.make(name)), float_path)
    for bits in (4, 8):
        for block in (32, 128):
            for symmetric in (True, False):
                # An accuracy level of 4, which genai's builder writes, too, rounds activations to int8.
                settings = DefaultWeightOnlyQuantConfig(
                    block_size=block, is_symmetric=symmetric, bits=bits, accuracy_level=4
                )
                quantizer = MatMulNBitsQuantizer(onnx.load(float_path), algo_config=settings)
                quantizer.process()
                path = folder / f"{bits}-{block}-{symmetric}.onnx"
                onnx.save(copy_module_names(quantizer.model.model, float_path), path)
                kind = "symmetric" if symmetric else "with zero points"
                yield File(
                    f"{name}, exported, {bits} bits, blocks of {block}, {kind}", name, path, float_path, False
                )


class _Logits(torch.nn.Module):
    """A language model of tokens and logits alone."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        # Registered under the name of nothing: paths of modules are those of the net.
        self.__dict__["net"] = net
        for name, module in net.named_children():
            self.add_module(name, module)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.net(input_ids=input_ids, use_cache=False).logits


def _export(net: Any) -> onnx.ModelProto:
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=nets.LENGTH)}
    with quiet(), contextlib.redirect_stdout(io.StringIO()):
        program = torch.onnx.export(
            _Logits(net).eval(),
            (torch.ones(2, 7, dtype=torch.int64),),
            dynamo=True,
            verbose=False,
            input_names=["input_ids"],
            output_names=["logits"],
            dynamic_shapes=(sizes,),
        )
    assert program is not None
    model: onnx.ModelProto = program.model_proto
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides warnings of other packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
