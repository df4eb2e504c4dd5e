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
import numpy as np
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


@dataclass(frozen=True)
class Rounding:
    """Holds how the quantizer rounds weights.

    Attributes:
        bits: 2, 4 or 8.
        block: number of rows of a weight that share a scale, e.g. 32.
        is_symmetric: False for zero points.
        is_ordered: True to let each row have the scale of any block, as files of GPTQ do.
    """

    bits: int
    block: int
    is_symmetric: bool
    is_ordered: bool = False

    def __str__(self) -> str:
        kind = "symmetric" if self.is_symmetric else "with zero points"
        return f"{self.bits} bits, blocks of {self.block}, {kind}" + (", ordered" if self.is_ordered else "")


USUAL = [
    Rounding(bits, block, is_symmetric)
    for bits in (4, 8)
    for block in (32, 128)
    for is_symmetric in (True, False)
]
OTHERS = [
    *(Rounding(2, block, is_symmetric) for block, is_symmetric in ((16, False), (32, True), (64, False), (128, True))),
    *(Rounding(4, block, is_symmetric) for block in (16, 64) for is_symmetric in (True, False)),
    *(Rounding(8, block, is_symmetric) for block, is_symmetric in ((16, False), (64, True))),
    *(Rounding(4, block, True, is_ordered=True) for block in (32, 128)),
]  # fmt: skip
# Files of other nets than those of the models in use, in few ways.
ROUNDINGS = {
    "llama": [*USUAL, *OTHERS],
    "llama tied": [Rounding(8, 32, True), Rounding(8, 128, False)],
    "qwen2": [Rounding(2, 32, False), Rounding(4, 32, False), Rounding(8, 128, True)],
}


def exported(name: str, folder: Path) -> Iterator[File]:
    """Writes the files of PyTorch's exporter, with weights that onnxruntime's quantizer has rounded."""
    float_path = folder / "float.onnx"
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(_export(nets.make(name)), float_path)
    for rounding in ROUNDINGS.get(name, USUAL):
        # An accuracy level of 4, which genai's builder writes, too, rounds activations to int8.
        settings = DefaultWeightOnlyQuantConfig(
            block_size=rounding.block,
            is_symmetric=rounding.is_symmetric,
            bits=rounding.bits,
            accuracy_level=4,
        )
        quantizer = MatMulNBitsQuantizer(onnx.load(float_path), algo_config=settings)
        quantizer.process()
        model = copy_module_names(quantizer.model.model, float_path)
        if rounding.is_ordered:
            _reorder(model)
        path = folder / f"{rounding}.onnx"
        onnx.save(model, path)
        yield File(f"{name}, exported, {rounding}", name, path, float_path, False)


def _reorder(model: onnx.ModelProto) -> None:
    """Gives each row of all quantized weights the scale of any block, in place."""
    rng = np.random.default_rng(0)
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            sizes = {a.name: a.i for a in node.attribute}
            order = rng.permutation(np.arange(sizes["K"]) // sizes["block_size"]).astype(np.int32)
            name = f"{node.output[0]}.order"
            model.graph.initializer.append(onnx.numpy_helper.from_array(order, name))
            # Inputs: A, B, scales, zero_points, g_idx.
            node.input.extend(["", name])


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
