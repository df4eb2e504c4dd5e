from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper

from onnxtrain import Trainer
from onnxtrain.errors import ModelError, ModelLoadError, UnsupportedOpsetError
from onnxtrain.passes import CleanupPass, canonicalize, load_model, to_proto
from passes._models import build, info, mlp, normal, run
from runtimes import runs_opset

X = {"x": normal(5, 3)}


def save_external(path: Path, model: onnx.ModelProto | None = None) -> Path:
    """Write a model whose weights, one of them above the size that is read at once, are in `weights.bin`."""
    model = model or build(
        [helper.make_node("MatMul", ["x", "big"], ["h"]), helper.make_node("Add", ["h", "small"], ["y"])],
        [info("x", ["N", 3])],
        [info("y", ["N", 5000])],
        {"big": normal(3, 5000), "small": normal(5000, seed=1)[:1]},
    )
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def test_path_proto_and_ir_give_the_same_model(tmp_path):
    proto = mlp()
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    expected = run(proto, X)[0]
    for source in (path, str(path), proto, ir.from_proto(proto)):
        np.testing.assert_array_equal(run(to_proto(load_model(source)), X)[0], expected)


def _rewrite_everything(model: ir.Model) -> None:
    """Do to a loaded model what later passes may: rename, retype, reshape, remove."""
    for value in (*model.graph.initializers.values(), *(out for node in model.graph for out in node.outputs)):
        value.name = f"{value.name}_renamed"
        value.dtype = ir.DataType.DOUBLE
        value.shape = ir.Shape([7])
    for node in model.graph:
        node.attributes.add(ir.AttrInt64("changed", 1))
    model.graph.inputs[0].name = "renamed"
    model.graph.opset_imports[""] = 25


@pytest.mark.parametrize("opset", [9, 13, 21])
def test_the_callers_proto_is_not_changed(opset):
    proto = mlp(opset)
    before = proto.SerializeToString(deterministic=True)
    model = load_model(proto)
    CleanupPass()(canonicalize(model))
    _rewrite_everything(model)
    assert proto.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("opset", [9, 13, 21])
def test_the_callers_ir_model_is_not_changed(opset):
    source = ir.from_proto(mlp(opset))
    before = ir.to_proto(source).SerializeToString(deterministic=True)
    model = load_model(source)
    CleanupPass()(canonicalize(model))
    _rewrite_everything(model)
    assert ir.to_proto(source).SerializeToString(deterministic=True) == before


def test_canonicalize_does_not_change_its_argument():
    model = load_model(mlp(13))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    _rewrite_everything(canonicalize(model))
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_missing_file(tmp_path):
    with pytest.raises(ModelLoadError, match=r"absent\.onnx': no such file"):
        load_model(tmp_path / "absent.onnx")


def test_directory(tmp_path):
    with pytest.raises(ModelLoadError, match="it is a directory"):
        load_model(tmp_path)


def test_other_objects():
    with pytest.raises(TypeError, match="from dict; pass a path"):
        load_model({})  # type: ignore[arg-type]


@pytest.mark.parametrize("percent", range(0, 100, 4))
def test_truncated_file(tmp_path, percent):
    data = mlp().SerializeToString()
    path = tmp_path / "m.onnx"
    path.write_bytes(data[: len(data) * percent // 100])
    with pytest.raises(ModelLoadError, match=r"m\.onnx"):
        load_model(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04" + bytes(200), b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"],
    ids=["empty", "zip", "git-lfs pointer"],
)
def test_not_an_onnx_file(tmp_path, content):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"m\.onnx"):
        load_model(path)


def test_corrupt_bytes_never_crash(tmp_path):
    data = bytearray(mlp().SerializeToString())
    rng = np.random.default_rng(0)
    path = tmp_path / "m.onnx"
    refused = 0
    for _ in range(200):
        broken = bytearray(data)
        for position in rng.integers(0, len(data), 8):
            broken[position] = rng.integers(0, 256)
        path.write_bytes(broken)
        try:
            load_model(path)
        except (ModelLoadError, UnsupportedOpsetError):
            refused += 1
    assert refused > 100


def test_external_data_is_found_beside_the_model_whatever_the_working_directory(tmp_path, monkeypatch):
    path = save_external(tmp_path / "m.onnx")
    expected = run(onnx.load(path), X)[0]
    monkeypatch.chdir(tmp_path)
    model = load_model("m.onnx")
    monkeypatch.chdir("/")
    assert isinstance(model.graph.initializers["big"].const_value, ir.ExternalTensor)
    assert not isinstance(model.graph.initializers["small"].const_value, ir.ExternalTensor)
    np.testing.assert_array_equal(run(to_proto(canonicalize(model)), X)[0], expected)


def test_missing_external_data(tmp_path):
    path = save_external(tmp_path / "m.onnx")
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelLoadError, match=r"'big' should be in .*weights\.bin', which does not exist"):
        load_model(path)


def test_external_data_of_a_proto_without_directory(tmp_path, monkeypatch):
    path = save_external(tmp_path / "m.onnx")
    monkeypatch.chdir("/")
    with pytest.raises(ModelLoadError, match=r"weights\.bin', which does not exist"):
        load_model(onnx.load(path, load_external_data=False))


def test_external_data_too_short(tmp_path):
    path = save_external(tmp_path / "m.onnx")
    os.truncate(tmp_path / "weights.bin", 30_000)
    with pytest.raises(ModelLoadError, match="the file has only 30000 bytes: it is truncated"):
        load_model(path)


def test_external_data_outside_the_directory(tmp_path):
    path = save_external(tmp_path / "m.onnx")
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        tensor.external_data[0].value = "../weights.bin"
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelLoadError, match="outside the model's directory"):
        load_model(path)


NEWEST = onnx.defs.onnx_opset_version()


@pytest.mark.parametrize("opset", [27, 28])
@pytest.mark.skipif(NEWEST < 28, reason="this onnx has not heard of these opsets")
def test_an_opset_that_changes_nothing_for_the_model(opset):
    """As onnxruntime's optimizer writes it into models of other domains, which it loads."""
    proto = mlp()
    proto.opset_import[0].version = opset
    x = {"x": normal(2, 3)}
    model = to_proto(canonicalize(load_model(proto)))
    assert model.opset_import[0].version == 26
    np.testing.assert_array_equal(run(model, x)[0], run(mlp(), x)[0])


@pytest.mark.parametrize("opset", [29, 99])
def test_opset_too_new(opset):
    proto = mlp()
    proto.opset_import[0].version = opset
    with pytest.raises(
        UnsupportedOpsetError, match=f"opset {opset}, but stock ONNX Runtime accepts at most 28"
    ):
        load_model(proto)


def test_an_annotation_of_another_dtype_than_its_tensor():
    """As converters to float16 leave it behind of the scales of a Resize."""
    proto = mlp()
    expected = run(proto, X)[0]
    proto.graph.value_info.append(info("w1", [3, 4], onnx.TensorProto.FLOAT16))
    np.testing.assert_array_equal(run(to_proto(canonicalize(load_model(proto))), X)[0], expected)


@pytest.mark.parametrize("opset", [0, -1])
def test_opset_that_never_was(opset):
    proto = mlp()
    proto.opset_import[0].version = opset
    with pytest.raises(ModelLoadError, match=f"opset {opset}, but opsets start at 1"):
        load_model(proto)


@pytest.mark.parametrize("opset", range(1, 7))
def test_oldest_opsets(opset):
    """Some of them belong to no release of ONNX, hence to no IR version."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    proto = build(nodes, [info("x", ["N", 3])], [info("y", ["N", 2])], {"w": np.ones((3, 2), np.float32)})
    proto.opset_import[0].version, proto.ir_version = opset, 3
    proto.graph.input.append(info("w", [3, 2]))
    model = canonicalize(load_model(proto))
    assert model.graph.opset_imports[""] == 21
    assert run(to_proto(model), {"x": np.ones((5, 3), np.float32)})[0].tolist() == [[3.0, 3.0]] * 5


@pytest.mark.parametrize(("opset", "expected"), [(17, 10), (21, 10), (24, 12), (26, 13)])
def test_ir_version_too_new_is_rewritten(opset, expected):
    proto = mlp(opset)
    proto.ir_version = 14
    model = canonicalize(load_model(proto))
    assert model.ir_version == expected
    if runs_opset(opset):
        assert run(to_proto(model), X)[0].shape == (5, 2)


def test_both_spellings_of_the_standard_domain():
    proto = mlp()
    proto.opset_import[0].domain = "ai.onnx"
    assert load_model(proto).graph.opset_imports == {"": 21}


def test_no_standard_opset():
    proto = mlp()
    proto.opset_import[0].domain = "com.example"
    with pytest.raises(ModelLoadError, match="imports no opset of the standard ONNX domain"):
        load_model(proto)


def test_model_without_standard_ops_need_not_import_them():
    proto = build(
        [helper.make_node("Op", ["x"], ["y"], domain="com.example")], [info("x", [1])], [info("y", [1])]
    )
    del proto.opset_import[:]
    proto.opset_import.add(domain="com.example", version=1)
    assert load_model(proto).graph.opset_imports == {"com.example": 1, "": 21}


def test_empty_graph():
    with pytest.raises(ModelLoadError, match="its graph has no nodes"):
        load_model(build([], [info("x", [1])], [info("x", [1])]))


def test_no_graph():
    with pytest.raises(ModelLoadError, match="it holds no graph"):
        load_model(onnx.ModelProto())


def test_no_outputs():
    with pytest.raises(ModelLoadError, match="its graph has no outputs"):
        load_model(build([helper.make_node("Relu", ["x"], ["y"])], [info("x", [1])], []))


def test_output_that_nothing_defines():
    proto = mlp()
    proto.graph.output[0].name = "nowhere"
    with pytest.raises(ModelLoadError, match="its graph uses 'nowhere', which nothing defines"):
        load_model(proto)


@pytest.mark.parametrize("text", [b"Gemm", b"x"])
def test_text_that_is_no_utf8(text):
    content = build([helper.make_node("Gemm", ["x", "x"], ["y"])], [info("x", [2, 2])], [info("y", [2, 2])])
    proto = onnx.ModelProto.FromString(content.SerializeToString().replace(text, b"\xff" * len(text)))
    with pytest.raises(ModelLoadError, match=r"contains the string b'(\\xff)+', which is not valid UTF-8"):
        load_model(proto)


def test_sparse_initializers():
    proto = mlp()
    proto.graph.sparse_initializer.add().values.name = "sparse"
    with pytest.raises(ModelLoadError, match="sparse initializers \\('sparse'\\) are not supported"):
        load_model(proto)


def test_nodes_in_any_order():
    proto = mlp()
    expected = run(proto, X)[0]
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend(reversed(nodes))
    np.testing.assert_array_equal(run(to_proto(canonicalize(load_model(proto))), X)[0], expected)


def test_undefined_value_in_an_ir_model():
    absent = ir.Value(name="absent")
    node = ir.node("Relu", [absent])
    model = ir.Model(ir.Graph([], node.outputs, nodes=[node], opset_imports={"": 21}), ir_version=10)
    with pytest.raises(ModelLoadError, match="uses a value that is not defined before it"):
        load_model(model)


def test_undefined_value_in_a_function():
    proto = build(
        [helper.make_node("Twice", ["x"], ["y"], domain="local")], [info("x", [1])], [info("y", [1])]
    )
    proto.opset_import.add(domain="local", version=1)
    body = [helper.make_node("Add", ["a", "absent"], ["b"])]
    function = helper.make_function("local", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", 21)])
    proto.functions.append(function)
    with pytest.raises(ModelLoadError, match="its graph uses 'absent', which nothing defines"):
        load_model(proto)


def test_tensor_without_a_dtype():
    proto = mlp()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("data_type")
    with pytest.raises(ModelLoadError, match=f"'{tensor.name}' has no dtype"):
        load_model(proto)


def test_strings_in_external_data(tmp_path):
    path = save_external(tmp_path / "m.onnx")
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].data_type = onnx.TensorProto.STRING
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(
        ModelLoadError, match="'big' contains strings, which cannot be stored as external data"
    ):
        load_model(path)


def test_an_initializer_of_another_shape_than_declared():
    inputs = [info("x", [1]), info("w", [0])]
    proto = build([helper.make_node("Add", ["x", "w"], ["y"])], inputs, [info("y", [1])], {"w": normal(1)})
    with pytest.raises(ModelError, match=r"Cannot infer the shapes of the model: .*differ in dimension 0"):
        canonicalize(load_model(proto))


def test_cyclic_graph():
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    with pytest.raises(ModelLoadError, match="cycle"):
        load_model(build(nodes, [info("x", [1])], [info("b", [1])]))


@pytest.mark.parametrize(
    ("op", "name", "value", "kinds"),
    [
        ("Constant", "value", 3, "INT, but the ONNX standard specifies TENSOR"),
        ("Constant", "value_floats", 2.0, "FLOAT, but the ONNX standard specifies FLOATS"),
        ("Constant", "value_float", "text", "STRING, but the ONNX standard specifies FLOAT"),
        ("Flatten", "axis", 1.0, "FLOAT, but the ONNX standard specifies INT"),
    ],
)
@pytest.mark.parametrize("opset", [11, 21])  # 11 has a Constant without value_int, value_float and the like
def test_an_attribute_of_another_kind_is_an_error(op, name, value, kinds, opset):
    inputs = [] if op == "Constant" else ["x"]
    node = helper.make_node(op, inputs, ["y"])
    node.attribute.append(helper.make_attribute(name, value))
    graph = helper.make_graph([node], "g", [info("x", ["N", 3])], [info("y", None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    with pytest.raises(ModelLoadError, match=f"'{name}' of {op} .*{kinds}"):
        load_model(model)


@pytest.mark.parametrize("domain", ["", "com.microsoft", "own"])
def test_an_attribute_without_a_type_is_an_error(domain):
    nodes = [helper.make_node("If", ["c"], ["y"]), helper.make_node("Gelu", ["x"], ["y"], domain=domain)]
    nodes[1].attribute.add(name="cut")
    branch = helper.make_graph([nodes[1]], "branch", [], [info("y", None)])
    nodes[0].attribute.extend(helper.make_attribute(f"{name}_branch", branch) for name in ("then", "else"))
    inputs = [info("c", [], onnx.TensorProto.BOOL), info("x", [2])]
    model = build(nodes[:1], inputs, [info("y", None)], domains=["com.microsoft", "own"])
    with pytest.raises(ModelLoadError, match=r"'cut' of Gelu .* has no type"):
        load_model(model)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"the graph", b"the\xffgraph"),
        (b"the node", b"the\xffnode"),
        (b"described", b"descri\xffed"),
        (b"producer", b"pro\xffucer"),
        (b"a key", b"a\xffkey"),
    ],
)
def test_texts_that_are_no_utf_8_are_errors(tmp_path, old, new):
    node = helper.make_node("Relu", ["x"], ["y"], name="the node", doc_string="described")
    graph = helper.make_graph([node], "the graph", [info("x", ["N", 3])], [info("y", ["N", 3])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], producer_name="producer")
    helper.set_model_props(model, {"a key": "value"})
    content = model.SerializeToString()
    assert content.count(old) == 1
    (tmp_path / "net.onnx").write_bytes(content.replace(old, new))
    with pytest.raises(ModelLoadError):
        load_model(tmp_path / "net.onnx")


def test_a_graph_without_a_name_is_trained(tmp_path: Path) -> None:
    """onnx's checker wants a name of the graph, ONNX Runtime does not."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 3] x) => (float[n, 3] y) <float[3] w = {1, 2, 3}> { y = Mul(x, w) }""")
    model.graph.name = ""
    x = np.ones((2, 3), np.float32)
    given = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    trainer = Trainer(model, "mse")
    np.testing.assert_array_equal(trainer.predict(x), given)
    trainer.export(tmp_path / "out.onnx")
    np.testing.assert_array_equal(ort.InferenceSession(tmp_path / "out.onnx").run(None, {"x": x})[0], given)
    assert model.graph.name == ""


def _defined_twice(*, inner: bool) -> onnx.ModelProto:
    """A model in which Relu and Neg give one name to their results, in the graph itself or in a branch."""
    described = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Relu", ["x"], ["relu"], name="first"),
        helper.make_node("Neg", ["x"], ["relu"]),
    ]
    inputs, outputs = [described("x", 1, [1])], [described("relu", 1, [1])]
    if inner:
        branch = helper.make_graph(nodes, "branch", [], outputs)
        choice = helper.make_node("If", ["c"], ["relu"], then_branch=branch, else_branch=branch)
        nodes, inputs = [choice], [*inputs, described("c", 9, [])]
    return helper.make_model(onnx.helper.make_graph(nodes, "main_graph", inputs, outputs))


@pytest.mark.parametrize("inner", [False, True])
def test_a_value_that_is_defined_twice_is_named(inner: bool) -> None:
    with pytest.raises(ModelLoadError) as error:
        load_model(_defined_twice(inner=inner))
    assert "the value 'relu' is defined twice, by Relu 'first' and by Neg" in str(error.value)
    assert "export it again with other output_names" in str(error.value)


@pytest.mark.torch
@pytest.mark.thorough
def test_the_exporter_writes_a_value_twice(tmp_path: Path) -> None:
    """PyTorch 2.13 does. If a newer one renames the value, the sentence of the message can go."""
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[name-defined, misc]
        def forward(self, x: Any) -> Any:
            return torch.relu(x) + 1

    path = tmp_path / "twice.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Net().eval(), (torch.ones(2),), path, output_names=["relu"], optimize=False, verbose=False
        )
    with pytest.raises(ModelLoadError, match="the value 'relu' is defined twice"):
        load_model(path)
