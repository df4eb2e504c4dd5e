"""A model beyond protobuf's 2 GB passes through, and its weights are never read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import helper

import onnxtrain
from passes._models import build, info

ELEMENTS = 550_000_000  # 2.2 GB of float32

SCRIPT = """
import sys
import onnx_ir as ir
from onnxtrain.passes import canonicalize, inline_schema_functions, load_model
from onnxtrain.passes import promote_initializers, save_model
def peak():  # VmHWM, MB: unlike ru_maxrss it does not start from what the parent had
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) // 1024
before = peak()
model = canonicalize(load_model(sys.argv[1]))
tensor = model.graph.initializers["table"].const_value
assert isinstance(tensor, ir.ExternalTensor), tensor
assert model.graph.opset_imports[""] == 21
assert all(out.dtype is not None and out.shape is not None for node in model.graph for out in node.outputs)
model = inline_schema_functions(model, lambda node: False)
save_model(model, sys.argv[2])
again = load_model(sys.argv[2])
assert isinstance(again.graph.initializers["table"].const_value, ir.ExternalTensor)
assert list(promote_initializers(again, ["table"])) == ["table"]
print(peak() - before)
"""


@pytest.mark.thorough
def test_a_model_over_2_gb_is_loaded_converted_and_saved_without_reading_it(tmp_path: Path):
    model = build(
        [
            helper.make_node("Gather", ["table", "ids"], ["rows"]),
            helper.make_node("HardSwish", ["rows"], ["active"]),
            helper.make_node("ReduceMean", ["active"], ["y"], axes=[1], keepdims=0),
        ],
        [info("ids", ["N"], onnx.TensorProto.INT64)],
        [info("y", ["N"])],
        opset=17,
    )
    table = model.graph.initializer.add(
        name="table", data_type=onnx.TensorProto.FLOAT, dims=[ELEMENTS // 100, 100], data_location=1
    )
    table.external_data.add(key="location", value="table.bin")
    (tmp_path / "table.bin").touch()
    os.truncate(tmp_path / "table.bin", ELEMENTS * 4)  # sparse: takes no space
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())

    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "m.onnx"), str(tmp_path / "saved.onnx")],
        env={**os.environ, "PYTHONPATH": str(Path(onnxtrain.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 300, f"grew by {result.stdout} MB"
    assert (tmp_path / "saved.onnx").stat().st_size < 100_000
    (data,) = tmp_path.glob("saved.onnx.*.data")
    assert data.stat().st_size == ELEMENTS * 4
