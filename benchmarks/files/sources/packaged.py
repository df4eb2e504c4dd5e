"""Files that ship with packages: the nets and layers of onnx's own tests, and the examples of onnxruntime."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

__all__ = ["make"]

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"


def make(folder: Path) -> None:
    """Copies the files, and writes the nine nets of `light` once more with weights that are no constants."""
    for group in ("pytorch-converted", "pytorch-operator", "simple"):
        for path in sorted((DATA / group).glob("*/model.onnx")):
            _copy(path, folder / group / f"{path.parent.name.removeprefix('test_')}.onnx")
    for path in sorted((Path(onnxruntime.__file__).parent / "datasets").glob("*.onnx")):
        _copy(path, folder / "onnxruntime" / path.name)
    for path in sorted((DATA / "light").glob("*.onnx")):
        _copy(path, folder / "light" / path.name)
        onnx.save(with_weights(onnx.load(path)), folder / "light" / f"{path.stem}-weights.onnx")


def _copy(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


def with_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model with random weights where it has ConstantOfShape nodes, and in place of equal weights."""
    rng = np.random.default_rng(0)
    graph = model.graph
    known = {tensor.name: tensor for tensor in graph.initializer}
    statistics = {
        name for node in graph.node if node.op_type == "BatchNormalization" for name in node.input[4:5]
    }
    for node in [node for node in graph.node if node.op_type == "ConstantOfShape"]:
        graph.node.remove(node)
        shape = onnx.numpy_helper.to_array(known.pop(node.input[0]))
        known[node.output[0]] = onnx.numpy_helper.from_array(np.zeros(shape, np.float32), node.output[0])
    for name, tensor in known.items():
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims):
            shape = tuple(tensor.dims)
            spread = np.sqrt(2.0 / max(1, int(np.prod(shape[1:])))) if len(shape) > 1 else 0.1
            values = rng.standard_normal(shape, np.float32) * np.float32(spread)
            values = np.abs(values) + 0.5 if name in statistics else values
            tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), name))
    del graph.initializer[:]
    graph.initializer.extend(known.values())
    kept = [value for value in graph.input if value.name not in known and not value.name.endswith("__SHAPE")]
    del graph.input[:]
    graph.input.extend(kept)
    model.ir_version = 4  # from there on initializers are no inputs
    return model
