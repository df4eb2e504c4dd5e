"""Write variants of files by tools: onnxruntime's optimizers and quantizers, and conversion to float16.

Usage: python variants.py FOLDER [PART ...]    (of all files in it, or of those whose paths contain a part)
Writes NAME@VARIANT.onnx beside NAME.onnx. What a tool cannot do with a file is said, and there is no file.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import onnxruntime as ort
from files import Array, feeds_of, said
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process

__all__ = ["VARIANTS", "write"]

Feeds = dict[str, Array]
ATTENTION = {"Softmax", "Attention"}


class NothingToDo(Exception):
    """A tool leaves the file as it is."""


class Samples(CalibrationDataReader):  # type: ignore[misc]
    """The inputs of a file, once."""

    def __init__(self, feeds: Feeds) -> None:
        self._left: Iterator[Feeds] = iter([feeds])

    def get_next(self) -> Feeds | None:
        """The inputs, then None."""
        return next(self._left, None)


def _level(name: str) -> Callable[[Path, Path, Feeds], None]:
    def optimized(source: Path, target: Path, feeds: Feeds) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{name}")
        options.optimized_model_filepath = str(target)
        ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    return optimized


def _transformers(source: Path, target: Path, feeds: Feeds) -> None:
    from onnxruntime.transformers import optimizer

    if not any(node.op_type in ATTENTION for node in onnx.load(source).graph.node):
        raise NothingToDo("no attention")
    optimized = optimizer.optimize_model(
        str(source), model_type="bert", num_heads=2, hidden_size=8, opt_level=0
    )
    optimized.save_model_to_file(str(target))
    before, after = (sorted(n.op_type for n in onnx.load(path).graph.node) for path in (source, target))
    if before == after:
        raise NothingToDo("it fuses nothing")


def _half(keep_io: bool) -> Callable[[Path, Path, Feeds], None]:
    def halved(source: Path, target: Path, feeds: Feeds) -> None:
        from onnxruntime.transformers.float16 import convert_float_to_float16

        onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=keep_io), target)

    return halved


def _dynamic(source: Path, target: Path, feeds: Feeds) -> None:
    quantize_dynamic(source, target, weight_type=QuantType.QUInt8)
    _check_quantized(target)


def _static(
    form: QuantFormat, activations: QuantType, per_channel: bool
) -> Callable[[Path, Path, Feeds], None]:
    def quantized(source: Path, target: Path, feeds: Feeds) -> None:
        ready = target.with_suffix(".ready")
        quant_pre_process(source, ready, skip_symbolic_shape=True)
        quantize_static(
            ready, target, Samples(feeds), quant_format=form, activation_type=activations, weight_type=QuantType.QInt8,
            per_channel=per_channel,
        )  # fmt: skip
        _check_quantized(target)

    return quantized


def _check_quantized(target: Path) -> None:
    if not any(
        "Quantize" in n.op_type or "Integer" in n.op_type or "QLinear" in n.op_type
        for n in onnx.load(target).graph.node
    ):
        raise NothingToDo("it quantizes nothing")


VARIANTS: dict[str, Callable[[Path, Path, Feeds], None]] = {
    "level1": _level("BASIC"),
    "level2": _level("EXTENDED"),
    "level3": _level("ALL"),
    "transformers": _transformers,
    "float16": _half(False),
    "float16-inside": _half(True),
    "dynamic": _dynamic,
    "qdq": _static(QuantFormat.QDQ, QuantType.QUInt8, False),
    "qdq-channels": _static(QuantFormat.QDQ, QuantType.QInt8, True),
    "qoperator": _static(QuantFormat.QOperator, QuantType.QUInt8, False),
}


def write(path: Path) -> None:
    """Writes the variants of a file that are not there."""
    model = onnx.load(path)
    try:
        feeds = feeds_of(path, model)
    except ValueError:
        return
    for name, make in VARIANTS.items():
        target = path.with_name(f"{path.stem}@{name}.onnx")
        if target.exists():
            continue
        with tempfile.TemporaryDirectory() as directory:
            made = Path(directory) / "model.onnx"
            try:
                with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                    make(path, made, feeds)
            except NothingToDo:
                continue
            except Exception as error:
                print(f"{path.stem} {name}: {type(error).__name__}: {said(error)[:150]}", flush=True)
                continue
            shutil.move(made, target)
        beside = path.with_suffix(".npz")
        if beside.exists():
            shutil.copyfile(beside, target.with_suffix(".npz"))


def main() -> None:
    """Writes variants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for path in sorted(arguments.folder.rglob("*.onnx")):
        if "@" not in path.name and (
            not arguments.parts or any(part in str(path) for part in arguments.parts)
        ):
            write(path)


if __name__ == "__main__":
    main()
