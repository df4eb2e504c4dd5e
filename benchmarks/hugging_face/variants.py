"""Process files as publishers do: by onnxruntime's optimizers and quantisers."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.optimizer import optimize_model

LEVELS = {
    "level 1": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "level 2": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "level 3": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
VARIANTS = ("as exported", *LEVELS, "transformer optimizer", "dynamic", "static QDQ", "static QOperator")


def write(variant: str, source: Path, target: Path, feeds: Mapping[str, Any], model_type: str) -> None:
    """Writes a variant of an exported file.

    Raises:
        Exception: what onnxruntime raises.
    """
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        between = Path(folder) / "between.onnx"
        if variant == "as exported":
            shutil.copy(source, target)
        elif variant in LEVELS:
            _optimize(source, target, LEVELS[variant])
        elif variant == "transformer optimizer":
            _fuse(source, target, model_type)
        elif variant == "dynamic":
            quantize_dynamic(source, target)
        else:
            quant_pre_process(source, between, skip_symbolic_shape=True)
            kind = QuantFormat.QDQ if variant == "static QDQ" else QuantFormat.QOperator
            quantize_static(
                between, target, _Samples(feeds), quant_format=kind,
                activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
            )  # fmt: skip
            _check_scales(target)


def _check_scales(path: Path) -> None:
    """Raises where the numbers that the quantiser has seen were too large, as sums of masks can be."""
    for tensor in onnx.load(path).graph.initializer:
        if tensor.name.endswith("_scale") and not np.isfinite(onnx.numpy_helper.to_array(tensor)).all():
            raise ValueError(f"the quantiser has written the scale {tensor.name}, which is not finite")


def _optimize(source: Path, target: Path, level: ort.GraphOptimizationLevel) -> None:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(target)
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _fuse(source: Path, target: Path, model_type: str) -> None:
    options = FusionOptions(model_type)
    optimizer = optimize_model(str(source), model_type, optimization_options=options, opt_level=1)
    optimizer.save_model_to_file(str(target))


class _Samples(CalibrationDataReader):
    def __init__(self, feeds: Mapping[str, Any]) -> None:
        self._left = iter([dict(feeds)])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._left, None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def fingerprint(path: Path) -> str:
    """Equal for files that have the same graph."""
    model = onnx.load(path)
    model.ClearField("metadata_props")
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def ops(path: Path) -> dict[str, list[str]]:
    """The ops of a file, by domain."""
    found: dict[str, set[str]] = {}
    for node in onnx.load(path, load_external_data=False).graph.node:
        found.setdefault(node.domain or "ai.onnx", set()).add(node.op_type)
    return {domain: sorted(names) for domain, names in sorted(found.items())}
