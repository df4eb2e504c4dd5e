"""Export for inference, checked with onnx's checker and a plain InferenceSession."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import parse_nodes
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.errors import InputError, ModelLoadError
from onnxtrain.runtime import export, onnx_wire
from runtime import handmade


def load(path):
    onnx.checker.check_model(str(path), full_check=True)
    return onnx.load(path), ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_exported_model_is_the_trained_one(mlp_dir, batch):
    state = CheckpointState.load_checkpoint(mlp_dir / "checkpoint")
    module = Module(mlp_dir / "training_model.onnx", state, mlp_dir / "eval_model.onnx")
    optimizer = Optimizer(mlp_dir / "optimizer_model.onnx", module)
    for _ in range(3):
        module(*batch)
        optimizer.step()
    module.export_model_for_inferencing(mlp_dir / "out.onnx", ["logits"])
    model, session = load(mlp_dir / "out.onnx")
    assert [i.name for i in model.graph.input] == ["x"]
    assert [o.name for o in model.graph.output] == ["logits"]
    assert [n.op_type for n in model.graph.node] == ["Gemm", "Relu", "Gemm"]
    assert {p.key: p.value for p in model.metadata_props} == {"author": "hand"}
    assert model.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    np.testing.assert_array_equal(session.run(None, {"x": batch[0]})[0], module.eval()(*batch)[1])
    for initializer in model.graph.initializer:
        np.testing.assert_array_equal(
            numpy_helper.to_array(initializer), state.parameters[initializer.name].data
        )


@pytest.mark.parametrize("seed", range(4))
def test_nodes_that_a_tool_has_moved_are_all_exported_in_order(mlp_dir, batch, seed):
    """ONNX Runtime runs an eval model whose nodes are in any order."""
    state = CheckpointState.load_checkpoint(mlp_dir / "checkpoint")
    evaluation = onnx.load(mlp_dir / "eval_model.onnx")
    nodes = list(evaluation.graph.node)
    del evaluation.graph.node[:]
    order = np.random.default_rng(seed).permutation(len(nodes)) if seed else range(len(nodes))[::-1]
    evaluation.graph.node.extend(nodes[index] for index in order)
    module = Module(mlp_dir / "training_model.onnx", state, evaluation.SerializeToString())
    module.export_model_for_inferencing(mlp_dir / "out.onnx", ["logits", "a"])
    _, session = load(mlp_dir / "out.onnx")
    logits, _ = session.run(None, {"x": batch[0]})
    values = {name: parameter.data for name, parameter in state.parameters}
    np.testing.assert_allclose(logits, handmade.reference_mlp(values, *batch)[1], rtol=1e-4, atol=1e-5)


def test_intermediate_values_and_the_loss_can_be_outputs(mlp_dir, batch):
    state = CheckpointState.load_checkpoint(mlp_dir / "checkpoint")
    module = Module(mlp_dir / "training_model.onnx", state, (mlp_dir / "eval_model.onnx").read_bytes())
    module.export_model_for_inferencing(mlp_dir / "out.onnx", ["a", "h"])
    model, session = load(mlp_dir / "out.onnx")
    assert [o.name for o in model.graph.output] == ["a", "h"]
    assert {i.name for i in model.graph.initializer} == {"fc1.weight", "fc1.bias"}
    h = batch[0] @ state.parameters["fc1.weight"].data.T + state.parameters["fc1.bias"].data
    a_out, h_out = session.run(None, {"x": batch[0]})
    np.testing.assert_allclose(h_out, h, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(a_out, np.maximum(h_out, 0))
    module.export_model_for_inferencing(mlp_dir / "loss.onnx", ["loss"])
    _, session = load(mlp_dir / "loss.onnx")
    assert [i.name for i in session.get_inputs()] == ["x", "labels"]
    np.testing.assert_array_equal(
        session.run(None, dict(zip(("x", "labels"), batch, strict=True)))[0], module.eval()(*batch)[0]
    )


def test_statistics_become_initializers(tmp_path):
    run = handmade.batchnorm()
    module = Module(run.training.SerializeToString(), run.state(), run.evaluation.SerializeToString())
    x = np.random.default_rng(0).standard_normal((4, 3, 2)).astype(np.float32)
    module(x, x)
    module.export_model_for_inferencing(tmp_path / "out.onnx", ["y"])
    model, session = load(tmp_path / "out.onnx")
    assert {i.name for i in model.graph.initializer} == {*run.parameters, *run.statistics}
    loss = np.mean((session.run(None, {"x": x})[0] - x) ** 2)
    np.testing.assert_allclose(loss, module.eval()(x, x), rtol=1e-6)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["nope"], r"unknown names \['nope'\]\. The eval model computes: loss, logits, a, h\."),
        (["x"], r"\['x'\] are inputs or parameters, so the model would compute nothing"),
        (["x", "fc1.weight"], r"\['x', 'fc1.weight'\] are inputs or parameters"),
        ([], "expected distinct names"),
        (["logits", "logits"], "expected distinct names"),
        ("logits", "expected a list of names, received the str 'logits'"),
    ],
)
def test_bad_output_names(mlp_dir, names, message):
    state = CheckpointState.load_checkpoint(mlp_dir / "checkpoint")
    module = Module(mlp_dir / "training_model.onnx", state, mlp_dir / "eval_model.onnx")
    with pytest.raises(InputError, match=message):
        module.export_model_for_inferencing(mlp_dir / "out.onnx", names)
    assert not (mlp_dir / "out.onnx").exists()


def nested_model() -> onnx.ModelProto:
    """If with captured values, local functions that call each other, and embedded initializers."""
    opsets = [helper.make_opsetid("", 21)]
    own = [*opsets, helper.make_opsetid("onnxtrain", 1)]
    f32 = TensorProto.FLOAT
    inner = helper.make_function(
        "onnxtrain", "Double", ["v"], ["r"], [helper.make_node("Add", ["v", "v"], ["r"])], opsets
    )
    outer = helper.make_function(
        "onnxtrain", "Quadruple", ["v"], ["r"],
        parse_nodes("d = onnxtrain.Double(v)  r = onnxtrain.Double(d)"),
        own,
    )  # fmt: skip
    loss = helper.make_function(
        "onnxtrain", "Loss", ["v"], ["r"], [helper.make_node("ReduceSum", ["v"], ["r"], keepdims=0)], opsets
    )

    def branch(name, *nodes):
        return helper.make_graph(
            list(nodes), name, [], [helper.make_tensor_value_info(nodes[-1].output[0], f32, [2])]
        )

    condition = helper.make_node(
        "If",
        ["positive"],
        ["chosen"],
        then_branch=branch("yes", helper.make_node("Mul", ["hidden", "w"], ["yes_out"])),
        else_branch=branch(
            "no",
            helper.make_node("Quadruple", ["b"], ["q"], domain="onnxtrain"),
            helper.make_node("Add", ["x", "q"], ["no_out"]),
        ),
    )
    nodes = [
        helper.make_node("Relu", ["x"], ["hidden"]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        condition,
        helper.make_node("Sub", ["chosen", "t"], ["unneeded"]),
        helper.make_node("Mul", ["unneeded", "big"], ["product"]),
        helper.make_node("Loss", ["product"], ["loss"], domain="onnxtrain"),
    ]
    return handmade.model(
        nodes,
        [helper.make_tensor_value_info(n, f32, [2]) for n in ("x", "t", "w", "b")],
        [helper.make_tensor_value_info("loss", f32, []), helper.make_tensor_value_info("chosen", f32, ["n"])],
        {},
        [handmade.constant("zero", 0.0), numpy_helper.from_array(np.ones(2, np.float32), "big")],
        functions=[inner, outer, loss],
        opsets=own,
    )


def test_scalars_and_unknown_ranks_are_told_apart(tmp_path):
    f32 = TensorProto.FLOAT
    eval_model = handmade.model(
        parse_nodes("scalar = ReduceSum <keepdims = 0> (x)  any = Reshape(x, sizes)  loss = Neg(scalar)"),
        [
            helper.make_tensor_value_info("x", f32, ["n"]),
            helper.make_tensor_value_info("sizes", TensorProto.INT64, ["r"]),
        ],
        [helper.make_tensor_value_info("loss", f32, [])],
        {},
    )
    path = tmp_path / "out.onnx"
    export.export_inference_model(eval_model.SerializeToString(), {}, path, ["scalar", "any"])
    types = {o.name: o.type.tensor_type for o in onnx.load(path).graph.output}
    assert types["scalar"].HasField("shape")
    assert len(types["scalar"].shape.dim) == 0
    assert not types["any"].HasField("shape")
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    x, sizes = np.arange(6, dtype=np.float32), np.array([2, 3])
    total, reshaped = session.run(None, {"x": x, "sizes": sizes})
    np.testing.assert_array_equal(total, 15)
    np.testing.assert_array_equal(reshaped, x.reshape(2, 3))


def buffers(**arrays):
    state = CheckpointState.from_arrays({n: np.array(a, np.float32) for n, a in arrays.items()}, [])
    return state._store.parameters


def test_subgraph_captures_and_functions_survive_and_the_rest_goes(tmp_path):
    eval_model = nested_model().SerializeToString()
    export.export_inference_model(eval_model, buffers(w=[3, 4], b=[1, 2]), tmp_path / "out.onnx", ["chosen"])
    model, session = load(tmp_path / "out.onnx")
    assert [i.name for i in model.graph.input] == ["x"]
    assert sorted(i.name for i in model.graph.initializer) == ["b", "w", "zero"]
    assert sorted(f.name for f in model.functions) == ["Double", "Quadruple"]
    np.testing.assert_array_equal(session.run(None, {"x": np.array([1, 2], np.float32)})[0], [3, 8])
    np.testing.assert_array_equal(session.run(None, {"x": np.array([-1, -2], np.float32)})[0], [3, 6])
    export.export_inference_model(eval_model, buffers(w=[3, 4], b=[1, 2]), tmp_path / "flat.onnx", ["hidden"])
    model, _ = load(tmp_path / "flat.onnx")
    assert not model.functions
    assert [o.domain for o in model.opset_import] == [""]


def test_large_models_keep_their_tensors_beside(mlp_dir, batch, monkeypatch):
    state = CheckpointState.load_checkpoint(mlp_dir / "checkpoint")
    module = Module(mlp_dir / "training_model.onnx", state, mlp_dir / "eval_model.onnx")
    monkeypatch.setattr(export, "MAX_FILE_SIZE", 300)
    module.export_model_for_inferencing(mlp_dir / "out.onnx", ["logits"])
    (data,) = mlp_dir.glob("out.onnx.*.data")
    assert data.stat().st_size > 4 * 4096 - 4096
    model, session = load(mlp_dir / "out.onnx")
    assert len((mlp_dir / "out.onnx").read_bytes()) < 1500
    np.testing.assert_array_equal(session.run(None, {"x": batch[0]})[0], module.eval()(*batch)[1])
    np.testing.assert_array_equal(
        numpy_helper.to_array(model.graph.initializer[0]), state.parameters["fc1.weight"].data
    )


def test_external_data_of_the_eval_model_is_taken_along(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    model = nested_model()
    onnx.save(
        model, tmp_path / "in" / "eval.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    values = buffers(w=[3, 4], b=[1, 2])
    export.export_inference_model(
        tmp_path / "in" / "eval.onnx", values, tmp_path / "out" / "m.onnx", ["product"]
    )
    _, session = load(tmp_path / "out" / "m.onnx")
    feeds = {"x": np.array([1, 2], np.float32), "t": np.array([1, 1], np.float32)}
    np.testing.assert_array_equal(session.run(None, feeds)[0], [2, 7])
    content = (tmp_path / "in" / "eval.onnx").read_bytes()
    with pytest.raises(ModelLoadError, match=r"passed as bytes but refers to the external file 'w.bin'"):
        export.export_inference_model(content, values, tmp_path / "out" / "m.onnx", ["product"])


def test_a_large_export_leaves_the_data_of_the_last_model_only(mlp_dir, batch, monkeypatch):
    state = CheckpointState.load_checkpoint(mlp_dir / "checkpoint")
    module = Module(mlp_dir / "training_model.onnx", state, mlp_dir / "eval_model.onnx")
    (mlp_dir / "out.onnx.data").write_text("the user's own")
    monkeypatch.setattr(export, "MAX_FILE_SIZE", 300)
    module.export_model_for_inferencing(mlp_dir / "out.onnx", ["logits"])
    (first,) = mlp_dir.glob("out.onnx.*.data")
    state.parameters["fc1.weight"].data[...] *= 2
    module.export_model_for_inferencing(mlp_dir / "out.onnx", ["logits"])
    (second,) = mlp_dir.glob("out.onnx.*.data")
    assert first != second
    _, session = load(mlp_dir / "out.onnx")
    np.testing.assert_array_equal(session.run(None, {"x": batch[0]})[0], module.eval()(*batch)[1])
    monkeypatch.undo()
    module.export_model_for_inferencing(mlp_dir / "out.onnx", ["logits"])
    assert not list(mlp_dir.glob("out.onnx.*.data"))
    assert (mlp_dir / "out.onnx.data").read_text() == "the user's own"


def test_wire_format_agrees_with_protobuf():
    tensor = TensorProto(dims=[0, 1, 127, 128, 2**40], data_type=16, name="ä", raw_data=b"\0\xff")
    written = b"".join(
        [
            *(onnx_wire.integer(1, d) for d in tensor.dims),
            onnx_wire.integer(2, 16),
            onnx_wire.text(8, "ä"),
            onnx_wire.embed(9, b"\0", b"\xff"),
        ]
    )
    assert TensorProto.FromString(written) == tensor
    fields = list(
        onnx_wire.parse(
            TensorProto(dims=[3], float_data=[1.5], double_data=[2.5], name="n").SerializeToString()
        )
    )
    assert (
        b"".join(f.raw for f in fields)
        == TensorProto(dims=[3], float_data=[1.5], double_data=[2.5], name="n").SerializeToString()
    )
    assert onnx_wire.string(written, 8) == "ä"


@pytest.mark.parametrize("damaged", [b"\x0a", b"\x0a\x05abc", b"\xff" * 12, b"\x0b", b"\x09\x00"])
def test_wire_format_rejects_what_is_no_message(damaged):
    with pytest.raises(ValueError, match=r"message|varint|wire type"):
        list(onnx_wire.parse(damaged))


def test_a_name_that_is_no_text_is_told(mlp_dir):
    """ONNX Runtime loads the model: it does not look at the keys of metadata."""
    state = CheckpointState.load_checkpoint(mlp_dir / "checkpoint")
    property_ = onnx_wire.embed(14, onnx_wire.embed(1, b"\xff"), onnx_wire.text(2, "value"))
    evaluation = (mlp_dir / "eval_model.onnx").read_bytes() + property_
    module = Module(mlp_dir / "training_model.onnx", state)
    with pytest.raises(ModelLoadError, match=r"reading the eval model .*can't decode byte 0xff"):
        export.export_inference_model(evaluation, module._bound_inputs(), mlp_dir / "out.onnx", ["logits"])


def test_unreadable_eval_model(tmp_path):
    with pytest.raises(ModelLoadError, match=r"reading the eval model"):
        export.export_inference_model(b"\x0a\x05abc", buffers(), tmp_path / "m.onnx", ["y"])
