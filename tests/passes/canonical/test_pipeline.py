from __future__ import annotations

import glob
import os

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from onnxtrain.errors import ModelError, UnsupportedOpsetError
from onnxtrain.passes import canonicalize, is_constant, load_model, to_proto
from passes._models import Array, build, info, mlp, normal, reference, run
from runtimes import needs_opset

LIGHT = sorted(glob.glob(os.path.join(os.path.dirname(onnx.__file__), "backend/test/data/light/*.onnx")))


def names(values) -> list[str]:
    return [value.name for value in values]


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph)]


def canonical(proto: onnx.ModelProto) -> ir.Model:
    return canonicalize(load_model(proto))


def assert_equivalent(
    proto: onnx.ModelProto, feed: dict[str, Array], *, expected: list[Array] | None = None
) -> ir.Model:
    """Assert that the canonical form of `proto` gives what `proto` does, and return it."""
    model = canonical(proto)
    result = to_proto(model)
    for got, want in zip(run(result, feed), expected or run(proto, feed), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert names(result.graph.output) == names(proto.graph.output)
    tensors = set(names(proto.graph.initializer))
    assert names(result.graph.input) == [name for name in names(proto.graph.input) if name not in tensors]
    order = [name for name in names(result.graph.initializer) if name in tensors]
    assert order == [name for name in names(proto.graph.initializer) if name in order]
    return model


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("path", LIGHT, ids=os.path.basename)
def test_networks_of_opset_9(path):
    proto = onnx.load(path)
    proto.graph.ClearField("value_info")
    inputs = [value for value in proto.graph.input if value.name not in names(proto.graph.initializer)]
    shape = [dim.dim_value for dim in inputs[0].type.tensor_type.shape.dim]
    model = assert_equivalent(proto, {inputs[0].name: normal(*shape)})
    assert (model.graph.opset_imports[""], model.ir_version) == (21, 10)
    assert all(
        out.dtype is not None and out.shape is not None for node in model.graph for out in node.outputs
    )


def test_the_networks_are_there():
    assert len(LIGHT) == 9


@pytest.mark.parametrize(
    ("opset", "expected"),
    [pytest.param(opset, max(opset, 21), marks=needs_opset(opset)) for opset in range(9, 27)],
)
def test_opset_and_ir_version(opset, expected):
    proto = mlp(opset)
    model = assert_equivalent(proto, {"x": normal(5, 3)})
    assert model.graph.opset_imports[""] == expected
    assert model.ir_version == {21: 10, 22: 10, 23: 11, 24: 12, 25: 13, 26: 13}[expected]


# Ops whose attributes became inputs, or whose meaning or defaults changed between opsets 9 and 21:
# (op, opset, inputs, constant inputs, attributes)
X4 = normal(2, 4, 6, 6)
CHANGED = [
    ("BatchNormalization", 9, [X4], [normal(4), normal(4), normal(4), np.abs(normal(4))], {}),
    ("BatchNormalization", 13, [X4], [normal(4), normal(4), normal(4), np.abs(normal(4))], {}),
    ("Dropout", 9, [X4], [], {"ratio": 0.3}),
    ("Upsample", 9, [X4], [np.float32([1, 1, 2, 3])], {"mode": "nearest"}),
    ("Upsample", 9, [X4], [np.float32([1, 1, 2, 3])], {"mode": "linear"}),
    ("Upsample", 9, [X4], [np.float32([1, 1, 1.5, 1.5])], {"mode": "nearest"}),
    ("Resize", 10, [X4], [np.float32([1, 1, 0.4, 0.5])], {"mode": "nearest"}),
    ("Resize", 10, [X4], [np.float32([1, 1, 0.4, 0.5])], {"mode": "linear"}),
    ("Resize", 10, [X4], [np.float32([1, 1, 2, 2])], {"mode": "nearest"}),
    ("Resize", 10, [X4], [np.float32([1, 1, 1.5, 2])], {"mode": "linear"}),
    ("Resize", 11, [X4], [np.float32([]), np.float32([1, 1, 1.5, 2])], {"mode": "linear"}),
    ("Slice", 9, [X4], [], {"starts": [0, 1], "ends": [2, -1], "axes": [1, 3]}),
    ("Clip", 9, [X4], [], {"min": -0.5, "max": 0.25}),
    ("Pad", 9, [X4], [], {"pads": [0, 0, 1, 2, 0, 0, 2, 1], "value": 0.5}),
    ("Pad", 10, [X4], [], {"pads": [0, 0, 1, 2, 0, 0, 2, 1], "mode": "reflect"}),
    ("TopK", 9, [X4], [], {"k": 2, "axis": 1}),
    ("Softmax", 9, [X4], [], {}),
    ("Softmax", 12, [X4], [], {"axis": 2}),
    ("LogSoftmax", 11, [X4], [], {"axis": -1}),
    ("Hardmax", 11, [X4], [], {}),
    ("Hardmax", 12, [X4], [], {"axis": 3}),
    ("Squeeze", 11, [normal(2, 1, 3, 1)], [], {"axes": [1]}),
    ("Unsqueeze", 11, [X4], [], {"axes": [0, 2]}),
    ("Split", 11, [X4], [], {"axis": 1, "split": [1, 3]}),
    ("Split", 12, [X4], [], {"axis": 1}),
    ("Split", 17, [X4], [], {"axis": 2}),
    ("ReduceSum", 11, [X4], [], {"axes": [1, 3], "keepdims": 0}),
    ("ReduceSum", 11, [X4], [], {}),
    ("ReduceMean", 17, [X4], [], {"axes": [1, -1]}),
    ("ReduceMax", 12, [X4], [], {"axes": [2], "keepdims": 0}),
    ("ReduceL2", 13, [X4], [], {"axes": [2]}),
    ("ReduceLogSumExp", 13, [X4], [], {}),
    ("AveragePool", 9, [X4], [], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    ("MaxPool", 9, [X4], [], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ("LpPool", 11, [X4], [], {"kernel_shape": [2, 2], "p": 2}),
    ("ArgMax", 11, [X4], [], {"axis": 1}),
    ("Gather", 9, [X4], [np.int64([0, 1])], {"axis": 1}),
    ("Scatter", 9, [X4], [np.zeros((1, 1, 1, 1), np.int64), normal(1, 1, 1, 1)], {"axis": 1}),
    ("CumSum", 11, [X4], [np.int64(1)], {"reverse": 1}),
    ("GroupNormalization", 18, [X4], [normal(2), normal(2)], {"num_groups": 2}),
    ("GroupNormalization", 20, [X4], [normal(2), normal(2)], {"num_groups": 2}),
    ("MeanVarianceNormalization", 9, [X4], [], {"axes": [0, 2, 3]}),
    ("InstanceNormalization", 9, [X4], [normal(4), normal(4)], {}),
    ("ThresholdedRelu", 10, [X4], [], {}),
    ("HardSwish", 14, [X4], [], {}),
    ("PRelu", 9, [X4], [np.abs(normal(4, 1, 1))], {}),
    ("Flatten", 9, [X4], [], {"axis": 2}),
    ("Gemm", 9, [normal(3, 4)], [normal(4, 2), normal(2)], {}),
    ("Where", 9, [X4 > 0, X4], [np.float32(7)], {}),
    ("Conv", 9, [X4], [normal(2, 4, 3, 3)], {"pads": [1, 1, 1, 1]}),
    ("ConvTranspose", 10, [X4], [normal(4, 2, 3, 3)], {"strides": [2, 2]}),
    ("LSTM", 9, [normal(3, 2, 4)], [normal(1, 20, 4), normal(1, 20, 5)], {"hidden_size": 5}),
    ("GRU", 13, [normal(3, 2, 4)], [normal(1, 15, 4), normal(1, 15, 5)], {"hidden_size": 5}),
]


@pytest.mark.parametrize(
    ("op", "opset", "inputs", "constants", "attributes"),
    CHANGED,
    ids=[f"{c[0]}-{c[1]}-{i}" for i, c in enumerate(CHANGED)],
)
def test_ops_that_changed_between_opsets(op, opset, inputs, constants, attributes):
    schema = onnx.defs.get_schema(op, opset, "")
    feed = {f"x{i}": array for i, array in enumerate(inputs)}
    tensors = {f"c{i}": array for i, array in enumerate(constants)}
    outputs = ["y", "z"] if op in ("Split", "TopK") else ["", "y"] if op in ("LSTM", "GRU") else ["y"]
    proto = build(
        [helper.make_node(op, [*feed, *tensors], outputs, **attributes)],
        [
            info(name, ["N", *a.shape[1:]], helper.np_dtype_to_tensor_dtype(a.dtype))
            for name, a in feed.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in outputs if name],
        tensors,
        opset=opset,
    )
    assert schema.since_version <= opset
    proto = onnx.shape_inference.infer_shapes(proto)
    model = assert_equivalent(proto, feed)
    assert all(out.dtype is not None and out.shape is not None for out in model.graph.outputs)


def test_an_average_counts_nothing_beyond_the_padding():
    """onnxruntime 1.20 does at opset 11, so that the model itself is no reference."""
    attributes = {"kernel_shape": [3, 3], "ceil_mode": 1, "strides": [2, 2], "count_include_pad": 1}
    proto = build(
        [helper.make_node("AveragePool", ["x"], ["y"], **attributes)],
        [info("x", ["N", 4, 6, 6])],
        [helper.make_empty_tensor_value_info("y")],
        {},
        opset=11,
    )
    windows = [slice(0, 3), slice(2, 5), slice(4, 6)]
    expected = np.stack([np.stack([X4[:, :, a, b].mean((2, 3)) for b in windows], -1) for a in windows], -2)
    assert_equivalent(proto, {"x": X4}, expected=[expected])


def test_initializers_among_the_inputs_become_parameters_in_order():
    proto = mlp(8)
    proto.ir_version = 3
    for tensor in reversed(proto.graph.initializer):
        proto.graph.input.insert(0, info(tensor.name, list(tensor.dims)))
    model = canonical(proto)
    assert names(model.graph.inputs) == ["x"]
    assert list(model.graph.initializers) == ["w1", "b1", "w2", "b2"]
    assert not any(map(is_constant, model.graph.initializers.values()))


def test_symbolic_dimensions_reach_every_value():
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Concat", ["n", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["r"]),
        helper.make_node("MatMul", ["r", "w"], ["y"]),
    ]
    constants = {"zero": np.int64([0]), "rest": np.int64([6]), "w": normal(6, 4)}
    model = canonical(build(nodes, [info("x", ["batch", 2, 3])], [info("y", None)], constants, opset=17))
    shapes = {out.name: str(out.shape) for node in model.graph for out in node.outputs}
    assert shapes["r"] == "[batch,6]"
    assert shapes["y"] == "[batch,4]"


def test_constants_are_initializers_and_known_as_such():
    nodes = [
        helper.make_node("Constant", [], ["half"], value_float=0.5),
        helper.make_node("Constant", [], ["table"], value=numpy_helper.from_array(normal(3, 5000))),
        helper.make_node("MatMul", ["x", "table"], ["h"]),
        helper.make_node("Mul", ["h", "half"], ["s"]),
        helper.make_node("Mul", ["s", "w"], ["y"]),
    ]
    proto = build(nodes, [info("x", ["N", 3])], [info("y", ["N", 5000])], {"w": normal(5000)}, opset=13)
    model = assert_equivalent(proto, {"x": normal(2, 3)})
    assert "Constant" not in ops(model)
    marks = {name: is_constant(value) for name, value in model.graph.initializers.items()}
    assert marks == {"w": False, "half": True, "table": True}
    again = load_model(to_proto(model))
    assert {name: is_constant(value) for name, value in again.graph.initializers.items()} == marks


def test_canonical_form_is_a_fixed_point():
    model = canonical(onnx.load(LIGHT[0]))
    assert ir.to_proto(canonicalize(model)) == ir.to_proto(model)


def test_subgraphs_are_converted_with_the_rest():
    then_branch = helper.make_graph(
        [helper.make_node("Squeeze", ["u"], ["t"], axes=[1])], "then", [], [info("t", ["N", 3])]
    )
    else_branch = helper.make_graph(
        [
            helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.float32([2]))),
            helper.make_node("Squeeze", ["u"], ["q"], axes=[1]),
            helper.make_node("Mul", ["q", "k"], ["e"]),
        ],
        "else",
        [],
        [info("e", ["N", 3])],
    )
    proto = build(
        [
            helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
            helper.make_node("Greater", ["s", "zero"], ["c"]),
            helper.make_node("Unsqueeze", ["x"], ["u"], axes=[1]),
            helper.make_node("If", ["c"], ["y"], then_branch=then_branch, else_branch=else_branch),
        ],
        [info("x", ["N", 3])],
        [info("y", ["N", 3])],
        {"zero": np.float32(0)},
        opset=11,
    )
    for x in (np.ones((2, 3), np.float32), -np.ones((2, 3), np.float32)):
        assert_equivalent(proto, {"x": x})


def test_contrib_ops_pass_through():
    proto = build(
        [
            helper.make_node("FusedGemm", ["x", "w"], ["h"], domain="com.microsoft", activation="Relu"),
            helper.make_node("SimplifiedLayerNormalization", ["h", "g"], ["n"], axis=-1),
            helper.make_node("Squeeze", ["n"], ["y"], axes=[0]),
        ],
        [info("x", [1, 3])],
        [info("y", [4])],
        {"w": normal(3, 4), "g": normal(4)},
        opset=12,
        domains=["com.microsoft"],
    )
    model = assert_equivalent(proto, {"x": normal(1, 3)})
    assert [(node.domain, node.op_type) for node in model.graph] == [
        ("com.microsoft", "FusedGemm"),
        ("", "SimplifiedLayerNormalization"),
        ("", "Squeeze"),
    ]
    assert model.graph.opset_imports == {"": 21, "com.microsoft": 1}


def test_metadata_survives_conversion():
    proto = mlp(17)
    proto.graph.node[1].metadata_props.add(key="note", value="aten.detach.default")
    proto.metadata_props.add(key="author", value="me")
    model = canonical(proto)
    assert model.graph.node("act").metadata_props["note"] == "aten.detach.default"
    assert model.metadata_props["author"] == "me"


def test_all_digit_names_survive_conversion():
    proto = build(
        [helper.make_node("MatMul", ["0", "1"], ["2"]), helper.make_node("Relu", ["2"], ["3"])],
        [info("0", ["N", 3])],
        [info("3", ["N", 3])],
        {"1": normal(3, 3)},
        opset=11,
    )
    model = assert_equivalent(proto, {"0": normal(2, 3)})
    assert [out.name for node in model.graph for out in node.outputs] == ["2", "3"]


def opset_import(version: int):
    return [helper.make_opsetid("", version)]


def test_functions_are_inlined():
    square = helper.make_function(
        "f", "Square", ["a"], ["b"], [helper.make_node("Mul", ["a", "a"], ["b"])], opset_import(13)
    )
    twice = helper.make_function(
        "f",
        "Twice",
        ["a"],
        ["b"],
        [
            helper.make_node("Square", ["a"], ["t"], domain="f"),
            helper.make_node("Square", ["t"], ["b"], domain="f"),
        ],
        [*opset_import(13), helper.make_opsetid("f", 1)],
    )
    proto = build(
        [
            helper.make_node("Twice", ["x"], ["h"], domain="f"),
            helper.make_node("Square", ["h"], ["y"], domain="f"),
        ],
        [info("x", ["N", 3])],
        [info("y", ["N", 3])],
        opset=13,
        ir_version=8,
        functions=[square, twice],
        domains=["f"],
    )
    model = assert_equivalent(proto, {"x": normal(2, 3)})
    assert ops(model) == ["Mul"] * 3
    assert not model.functions


def test_function_that_hands_its_input_through_keeps_names():
    function = helper.make_function(
        "f",
        "Pass",
        ["a"],
        ["a", "b", "c"],
        [helper.make_node("Neg", ["a"], ["b"]), helper.make_node("Abs", ["b"], ["c"])],
        opset_import(18),
    )
    proto = build(
        [
            helper.make_node("Relu", ["x"], ["r"]),
            helper.make_node("Pass", ["r"], ["p", "", "q"], domain="f"),
            helper.make_node("Add", ["p", "q"], ["y"]),
        ],
        [info("x", ["N", 3])],
        [info("y", ["N", 3]), info("r", ["N", 3]), info("p", ["N", 3])],
        opset=18,
        functions=[function],
        domains=["f"],
    )
    x = normal(2, 3)
    relu = np.maximum(x, 0)
    assert_equivalent(
        proto, {"x": x}, expected=[2 * relu, relu, relu]
    )  # ONNX Runtime rejects the function itself


def test_function_of_an_older_opset_is_converted():
    function = helper.make_function(
        "f", "Old", ["a"], ["b"], [helper.make_node("Unsqueeze", ["a"], ["b"], axes=[1])], opset_import(12)
    )
    proto = build(
        [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Old", ["r"], ["y"], domain="f")],
        [info("x", ["N", 3])],
        [info("y", ["N", 1, 3])],
        opset=18,
        functions=[function],
        domains=["f"],
    )
    x = normal(2, 3)
    assert_equivalent(proto, {"x": x}, expected=[np.maximum(x, 0)[:, None]])


def test_recursive_function_is_an_error():
    function = helper.make_function(
        "f",
        "Loop",
        ["a"],
        ["b"],
        [helper.make_node("Loop", ["a"], ["b"], domain="f")],
        [*opset_import(18), helper.make_opsetid("f", 1)],
    )
    proto = build(
        [helper.make_node("Loop", ["x"], ["y"], domain="f")],
        [info("x", [1])],
        [info("y", [1])],
        opset=18,
        functions=[function],
        domains=["f"],
    )
    with pytest.raises(ModelError, match="Cannot inline the model's functions: Cyclic dependency"):
        canonical(proto)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (helper.make_node("Relu", ["absent"], ["y"]), "its graph uses 'absent', which nothing defines"),
        (helper.make_node("Add", ["x"], ["y"]), "input size 1"),
        (helper.make_node("Transpose", ["x"], ["y"], perm="10"), "perm"),
    ],
)
def test_invalid_graph(node, message):
    with pytest.raises(ModelError, match=message):
        canonical(build([node], [info("x", [2, 3])], [info("y", [2, 3])]))


def test_unconvertible_opset():
    node = helper.make_node("Add", ["x", "b"], ["y"], axis=1, broadcast=1)  # needs static shapes
    proto = build([node], [info("x", ["N", 3])], [info("y", ["N", 3])], {"b": normal(3)}, opset=6)
    with pytest.raises(UnsupportedOpsetError, match="Cannot convert the model from opset 6 to 21"):
        canonical(proto)


def test_inputs_and_outputs_without_shapes():
    proto = build(
        [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("ReduceSum", ["r"], ["y"], keepdims=0)],
        [info("x", None)],
        [helper.make_empty_tensor_value_info("y")],
        opset=12,
    )
    x = normal(2, 3)
    model = canonical(proto)
    np.testing.assert_allclose(run(to_proto(model), {"x": x})[0], np.maximum(x, 0).sum(), rtol=1e-6)


def test_reference_evaluator_agrees_on_a_converted_network():
    proto = mlp(9)
    x = {"x": normal(4, 3)}
    np.testing.assert_allclose(
        reference(to_proto(canonical(proto)), x)[0], run(proto, x)[0], rtol=1e-5, atol=1e-6
    )


def test_a_scan_of_batches_is_refused() -> None:
    """Before opset 9; onnx's converter leaves the batch out of the model's inputs."""
    model = onnx.parser.parse_model("""<ir_version: 3, opset_import: ["": 8]>
        g (float[1, 2] start, float[1, 3, 2] x) => (float[1, 2] y, float[1, 3, 2] z) {
            y, z = Scan ("", start, x) <num_scan_inputs = 1,
              body = b (float[2] s, float[2] row) => (float[2] t, float[2] o) {
                t = Add(s, row)  o = Identity(t) }> }""")
    with pytest.raises(UnsupportedOpsetError, match=r"changed the shape of 'start' from \[1,2\] to \[2\]"):
        canonicalize(load_model(model))


def test_an_attribute_that_a_call_gives_another_type_is_an_error() -> None:
    """The types of the file are those of the standard until the function is inlined, before the checker runs."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21, "local": 1]>
        g (float[2] x) => (float[2] y) { y = local.scaled<k=2.0>(x) }
        <domain: "local", opset_import: ["": 21]>
        scaled <k> (x) => (y) { c = Constant<value_int: int = @k>() f = Cast<to=1>(c) y = Mul(x, f) }
    """)
    with pytest.raises(ModelError, match=r"The model is not valid ONNX.*value_int"):
        canonical(model)
