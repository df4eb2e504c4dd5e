"""Process files as publishers do: by onnxruntime's optimizers and quantisers."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.optimizer import optimize_model

# Behind this folder, which has modules of the same names: `page`, `sweep`.
sys.path.append(str(Path(__file__).parents[1] / "files"))
from variants import VARIANTS as TOOLS

OF_FILES = {
    "level 1": TOOLS["level1"],
    "level 2": TOOLS["level2"],
    "level 3": TOOLS["level3"],
    "static QDQ": TOOLS["qdq"],
    "static QOperator": TOOLS["qoperator"],
}
"""Variants that `benchmarks/files` makes in the same way."""
VARIANTS = (
    *("as exported", "level 1", "level 2", "level 3", "transformer optimizer"),
    *("dynamic", "static QDQ", "static QOperator"),
)


def write(variant: str, source: Path, target: Path, feeds: Mapping[str, Any], model_type: str) -> None:
    """Write a variant of an exported file.

    Raises:
        Exception: what onnxruntime raises.
    """
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "model.onnx"
        if variant == "as exported":
            shutil.copy(source, made)
        elif variant == "transformer optimizer":
            options = FusionOptions(model_type)
            optimizer = optimize_model(str(source), model_type, optimization_options=options, opt_level=1)
            optimizer.save_model_to_file(str(made))
        elif variant == "dynamic":
            quantize_dynamic(source, made)
        else:
            OF_FILES[variant](source, made, dict(feeds))
        if variant.startswith("static"):
            _check_scales(made)
        shutil.move(made, target)


def _check_scales(path: Path) -> None:
    """Raise if the numbers that the quantiser has seen were too large, as sums of masks can be."""
    for tensor in onnx.load(path).graph.initializer:
        if tensor.name.endswith("_scale") and not np.isfinite(onnx.numpy_helper.to_array(tensor)).all():
            raise ValueError(f"the quantiser has written the scale {tensor.name}, which is not finite")


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
