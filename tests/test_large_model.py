"""A model beyond protobuf's 2 GB, with its weights in a file beside it: artifacts, training, export."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from fresh_process import python

ROWS, WIDTH, CLASSES = 5_500_000, 100, 3
SIZE = ROWS * WIDTH * 4  # bytes: 2.2 GB
ALLOWANCE = 250  # MB beside the weights, libraries included

PEAK = """
def peak():  # VmHWM, MB: unlike ru_maxrss it does not start from what the parent had
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) // 1024
"""

GENERATE = (
    PEAK
    + """
import sys
from onnxtrain.artifacts import generate_artifacts
generate_artifacts(
    sys.argv[1], frozen_params=["table"], loss="cross_entropy", optimizer="adamw", artifact_directory=sys.argv[2]
)
print(peak())
"""
)

TRAIN = (
    PEAK
    + """
import sys
from pathlib import Path
import numpy as np
from onnxtrain.api import CheckpointState, Module, Optimizer
directory = Path(sys.argv[1])
state = CheckpointState.load_checkpoint(directory / "checkpoint")
module = Module(directory / "training_model.onnx", state, directory / "eval_model.onnx")
optimizer = Optimizer(directory / "optimizer_model.onnx", module)
optimizer.set_learning_rate(0.1)
ids, labels = np.array([[0, 5_499_999], [7, 8], [0, 0]]), np.array([0, 1, 2])
losses = []
for _ in range(5):
    losses.append(float(module(ids, labels)))
    optimizer.step()
    module.lazy_reset_grad()
assert losses[-1] < losses[0], losses
print(peak())
module.export_model_for_inferencing(directory / "trained.onnx", ["logits"])
print(peak())
weight, bias = (state.parameters[name].data for name in ("head.weight", "head.bias"))
np.savez(directory / "expected.npz", weight=weight, bias=bias)
"""
)


def run(script: str, *arguments: Path) -> list[int]:
    """Runs a script in a process of its own; returns the numbers that it prints."""
    return [int(line) for line in python("-c", script, *arguments).stdout.split()]


def write_model(path: Path) -> None:
    """ids [n, 2] -> mean of two rows of the table -> linear -> logits [n, 3]; the table is a sparse file."""
    values = {
        "head.weight": np.random.default_rng(0).normal(0, 0.1, (WIDTH, CLASSES)).astype(np.float32),
        "head.bias": np.zeros(CLASSES, np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["rows"]),
            helper.make_node("ReduceMean", ["rows"], ["mean"], axes=[1], keepdims=0),
            helper.make_node("Gemm", ["mean", "head.weight", "head.bias"], ["logits"]),
        ],
        "large",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", 2])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", CLASSES])],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    table = graph.initializer.add(
        name="table", data_type=TensorProto.FLOAT, dims=[ROWS, WIDTH], data_location=TensorProto.EXTERNAL
    )
    table.external_data.add(key="location", value="table.bin")
    data = path.with_name("table.bin")
    data.touch()
    os.truncate(data, SIZE)
    with data.open("r+b") as file:  # the first and the last row, so that reading elsewhere shows
        for row in (0, ROWS - 1):
            file.seek(row * WIDTH * 4)
            file.write(np.full(WIDTH, row + 1, np.float32).tobytes())
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_a_model_over_2_gb_is_trained_and_exported(tmp_path: Path) -> None:
    write_model(tmp_path / "model.onnx")
    artifacts = tmp_path / "run"
    (peak,) = run(GENERATE, tmp_path / "model.onnx", artifacts)
    assert peak < SIZE / 2**20 + ALLOWANCE
    assert (artifacts / "checkpoint").stat().st_size > SIZE
    assert sum(file.stat().st_size for file in artifacts.glob("*.onnx*")) < 1_000_000
    manifest = json.loads((artifacts / "manifest.json").read_text())
    assert {p["name"]: p["trainable"] for p in manifest["parameters"]} == {
        "head.weight": True,
        "head.bias": True,
        "table": False,
    }
    for peak in run(TRAIN, artifacts):
        assert peak < SIZE / 2**20 + ALLOWANCE
    (artifacts / "checkpoint").unlink()
    exported = onnx.load(artifacts / "trained.onnx", load_external_data=False)
    external = [t.name for t in exported.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    assert "table" in external
    with np.load(artifacts / "expected.npz") as content:
        expected = dict(content)
    session = onnxruntime.InferenceSession(artifacts / "trained.onnx")
    (logits,) = session.run(["logits"], {"ids": np.array([[0, ROWS - 1]])})
    mean = np.full(WIDTH, (1 + ROWS) / 2, np.float32)
    np.testing.assert_allclose(logits[0], mean @ expected["weight"] + expected["bias"], rtol=1e-4)
