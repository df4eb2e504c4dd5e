from __future__ import annotations

import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtrain.errors import ModelError
from onnxtrain.passes import embed_parameters, load_model, promote_initializers, save_model, to_proto
from onnxtrain.passes.io import save as save_module
from passes._models import mlp, normal, run

X = {"x": normal(5, 3)}


def wide() -> onnx.ModelProto:
    """Return an MLP whose first weight is large enough to go to an external file."""
    proto = mlp()
    model = ir.from_proto(proto)
    model.graph.node("fc1").outputs[0].shape = None
    promote_initializers(model, ["w1", "b1", "w2"])
    for value, shape in zip(model.graph.inputs[1:], [(3, 500), (500,), (500, 2)], strict=True):
        value.shape = ir.Shape(shape)
    model.graph.node("act").outputs[0].shape = None
    embed_parameters(model, {"w1": normal(3, 500), "b1": normal(500, seed=1), "w2": normal(500, 2, seed=2)})
    return ir.to_proto(model)


def files(path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_one_file_where_it_fits(tmp_path):
    proto = wide()
    save_model(load_model(proto), tmp_path / "m.onnx")
    assert files(tmp_path) == {"m.onnx"}
    np.testing.assert_array_equal(run(onnx.load(tmp_path / "m.onnx"), X)[0], run(proto, X)[0])


def test_data_beside_the_model_where_it_does_not(tmp_path):
    proto = wide()
    model = load_model(proto)
    before = to_proto(model)
    save_model(model, str(tmp_path / "m.onnx"), external_data_threshold=1000)
    (data,) = files(tmp_path) - {"m.onnx"}
    assert re.fullmatch(r"m\.onnx\.[0-9a-f]{12}\.data", data)
    assert to_proto(model) == before
    lean = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    assert {t.name: t.data_location for t in lean.graph.initializer} == {"w1": 1, "b1": 1, "w2": 1, "b2": 0}
    np.testing.assert_array_equal(run(onnx.load(tmp_path / "m.onnx"), X)[0], run(proto, X)[0])
    again = load_model(tmp_path / "m.onnx")
    np.testing.assert_array_equal(run(to_proto(again), X)[0], run(proto, X)[0])


def test_a_model_can_be_saved_over_the_files_it_is_read_from(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "onnxtrain.passes.io.load._EAGER_BYTES", 100
    )  # so that these small tensors stay on disk
    proto = wide()
    path = tmp_path / "m.onnx"
    save_model(load_model(proto), path, external_data_threshold=1000)
    model = load_model(path)
    assert isinstance(model.graph.initializers["w1"].const_value, ir.ExternalTensor)
    # Another first initializer moves the others to other offsets in the new file.
    promote_initializers(model, ["w1"])
    embed_parameters(model, {"w1": np.zeros((3, 500), np.float32)})
    save_model(model, path, external_data_threshold=1000)
    assert len(files(tmp_path)) == 2
    expected = run(proto, {"x": np.zeros((5, 3), np.float32)})[0]
    np.testing.assert_array_equal(run(to_proto(model), X)[0], expected)
    np.testing.assert_array_equal(run(to_proto(load_model(path)), X)[0], expected)


@pytest.mark.parametrize("threshold", [1000, 10**9])
def test_a_failing_save_leaves_the_old_files(tmp_path, monkeypatch, threshold):
    proto = wide()
    path = tmp_path / "m.onnx"
    save_model(load_model(proto), path, external_data_threshold=threshold)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    model = load_model(mlp())

    def explode() -> ir.TensorProtocol:
        raise OSError("disk on fire")

    tensor = model.graph.initializers["w1"].const_value
    assert tensor is not None
    model.graph.initializers["w1"].const_value = ir.LazyTensor(
        explode, dtype=tensor.dtype, shape=ir.Shape([3, 500]), name="w1"
    )
    with pytest.raises((OSError, ir.serde.SerdeError)):
        save_model(model, path, external_data_threshold=threshold)
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_a_proto_has_its_external_data_in_it(tmp_path):
    proto = wide()
    save_model(load_model(proto), tmp_path / "m.onnx", external_data_threshold=1000)
    result = to_proto(load_model(tmp_path / "m.onnx"))
    assert all(tensor.data_location == 0 for tensor in result.graph.initializer)


def test_a_proto_has_a_limit(monkeypatch):
    monkeypatch.setattr(save_module, "DEFAULT_EXTERNAL_DATA_THRESHOLD", 1000)
    with pytest.raises(ModelError, match="Use save_model"):
        to_proto(load_model(wide()))


def test_values_without_names_are_named_in_the_file(tmp_path):
    """In the graph and in functions; the model itself is not changed."""
    x, y = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2])) for name in "xy")
    square = ir.node("Mul", [x, x])
    call = ir.Node("test", "Twice", [square.outputs[0]], outputs=[y])
    graph = ir.Graph([x], [y], nodes=[square, call], opset_imports={"": 21, "test": 1}, name="g")
    a = ir.Value(name="a")
    negative = ir.node("Neg", [a])
    total = ir.node("Add", [negative.outputs[0], negative.outputs[0]])
    body = ir.Graph([a], [total.outputs[0]], nodes=[negative, total], opset_imports={"": 21})
    model = ir.Model(
        graph, ir_version=10, functions=[ir.Function("test", "Twice", graph=body, attributes=[])]
    )
    square.outputs[0].name = negative.outputs[0].name = None
    save_model(model, tmp_path / "m.onnx")
    for proto in (onnx.load(tmp_path / "m.onnx"), to_proto(model)):
        onnx.checker.check_model(proto)
        (result,) = run(proto, {"x": np.array([2, 3], np.float32)})
        assert result.tolist() == [-8, -18]
    assert square.outputs[0].name is None


def test_a_model_in_memory_is_written_without_a_copy(tmp_path, monkeypatch):
    model = ir.from_proto(mlp())
    monkeypatch.setattr(ir.Model, "clone", lambda *_, **__: pytest.fail("the model was cloned"))
    save_model(model, tmp_path / "m.onnx")
    assert onnx.load(tmp_path / "m.onnx") == to_proto(model) == ir.to_proto(model)
