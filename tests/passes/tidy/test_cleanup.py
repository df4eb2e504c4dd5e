from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from onnxtrain.passes import (
    CleanupPass,
    canonicalize,
    is_constant,
    load_model,
    promote_initializers,
    to_proto,
)
from passes._models import build, info, normal, run

X = normal(2, 3)
IN = [info("x", ["N", 3])]


def out(*names: str):
    return [info(name, ["N", 3]) for name in names]


def cleaned(proto: onnx.ModelProto, keep=None) -> ir.Model:
    """Return the cleaned canonical form of `proto`, having checked that it computes the same."""
    model = canonicalize(load_model(proto))
    CleanupPass(keep)(model)
    result = to_proto(model)
    onnx.checker.check_model(result, full_check=True)
    assert [value.name for value in result.graph.output] == [value.name for value in proto.graph.output]
    for got, want in zip(run(result, {"x": X}), run(proto, {"x": X}), strict=True):
        np.testing.assert_array_equal(got, want)
    return model


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph)]


def test_dead_nodes_identities_and_repetitions_go():
    nodes = [
        helper.make_node("Identity", ["x"], ["i"]),
        helper.make_node("Relu", ["i"], ["a"]),
        helper.make_node("Relu", ["x"], ["b"]),
        helper.make_node("Exp", ["x"], ["dead"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    assert ops(cleaned(build(nodes, IN, out("y")))) == ["Relu", "Add"]


def test_equal_constants_are_merged_and_let_expressions_merge():
    nodes = [
        helper.make_node("Constant", [], ["two"], value_float=2.0),
        helper.make_node("Constant", [], ["also_two"], value_float=2.0),
        helper.make_node("Mul", ["x", "two"], ["a"]),
        helper.make_node("Mul", ["x", "also_two"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    model = cleaned(build(nodes, IN, out("y")))
    assert ops(model) == ["Mul", "Add"]
    assert list(map(is_constant, model.graph.initializers.values())) == [True]


def test_output_names_stay_where_one_value_feeds_several():
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Identity", ["r"], ["y1"]),
        helper.make_node("Identity", ["r"], ["y2"]),
        helper.make_node("Identity", ["x"], ["y3"]),
        helper.make_node("Relu", ["x"], ["y4"]),
        helper.make_node("Exp", ["x"], ["e"]),
        helper.make_node("Identity", ["e"], ["y5"]),
        helper.make_node("Identity", ["e"], ["y6"]),
    ]
    cleaned(build(nodes, IN, out("r", "y1", "y2", "y3", "y4", "y5", "y6")))


def test_subgraph_outputs_stay_in_their_subgraph():
    same = helper.make_graph([helper.make_node("Identity", ["r"], ["t"])], "then", [], out("t"))
    other = helper.make_graph([helper.make_node("Neg", ["r"], ["e"])], "else", [], out("e"))
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("If", ["c"], ["y"], then_branch=same, else_branch=other),
    ]
    cleaned(build(nodes, IN, out("y"), {"c": np.array(True)}))


PARAMETERS = {"w": np.ones(3, np.float32), "w2": np.ones(3, np.float32), "unused": np.ones(3, np.float32)}
TWO_SCALES = [
    helper.make_node("Mul", ["x", "w"], ["a"]),
    helper.make_node("Identity", ["w2"], ["v"]),
    helper.make_node("Mul", ["x", "v"], ["b"]),
    helper.make_node("Add", ["a", "b"], ["y"]),
]


def test_equal_and_unused_parameters_stay():
    model = cleaned(build(TWO_SCALES, IN, out("y"), PARAMETERS))
    assert list(model.graph.initializers) == ["w", "w2", "unused"]
    assert ops(model) == ["Mul", "Mul", "Add"]
    assert [node.inputs[1].name for node in model.graph if node.op_type == "Mul"] == ["w", "w2"]


def test_keep_names_the_initializers_that_stay():
    model = cleaned(build(TWO_SCALES, IN, out("y"), PARAMETERS), keep={"unused"})
    assert list(model.graph.initializers) == ["w", "unused"]
    assert ops(model) == ["Mul", "Add"]


def test_a_parameter_that_is_an_output_keeps_its_name():
    nodes = [helper.make_node("Identity", ["w"], ["y"]), helper.make_node("Add", ["x", "w"], ["z"])]
    model = cleaned(build(nodes, IN, [info("y", [3]), *out("z")], {"w": np.ones(3, np.float32)}))
    assert list(model.graph.initializers) == ["w"]
    promote_initializers(model, ["w"])
    CleanupPass()(model)
    assert [value.name for value in model.graph.inputs] == ["x", "w"]


@pytest.mark.parametrize(
    ("op", "inputs", "attributes"),
    [
        ("Dropout", ["x", "ratio", "on"], {}),
        ("Bernoulli", ["p"], {}),
        ("RandomNormalLike", ["x"], {}),
        ("RandomUniformLike", ["x"], {}),
    ],
)
def test_random_ops_are_not_merged(op, inputs, attributes):
    nodes = [
        helper.make_node(op, inputs, ["a"], **attributes),
        helper.make_node(op, inputs, ["b"], **attributes),
        helper.make_node("Sub", ["a", "b"], ["y"]),
    ]
    tensors = {"ratio": np.float32(0.5), "on": np.array(True), "p": np.full((50, 3), 0.5, np.float32)}
    tensors = {name: tensors[name] for name in inputs if name in tensors}
    model = canonicalize(load_model(build(nodes, IN, out("y"), tensors)))
    CleanupPass()(model)
    assert ops(model) == [op, op, "Sub"]
    assert np.any(run(to_proto(model), {"x": normal(50, 3)})[0])


def test_calls_of_random_or_unknown_functions_are_not_merged():
    imports = [helper.make_opsetid("", 21)]
    noisy = helper.make_function(
        "f", "Noise", ["a"], ["b"], [helper.make_node("RandomNormalLike", ["a"], ["b"])], imports
    )
    plain = helper.make_function(
        "f", "Square", ["a"], ["b"], [helper.make_node("Mul", ["a", "a"], ["b"])], imports
    )
    names = {"Noise": "f", "Square": "f", "Custom": "elsewhere"}
    nodes = [
        helper.make_node(op, ["x"], [f"{op}{i}"], domain=domain)
        for op, domain in names.items()
        for i in range(2)
    ]
    nodes.append(helper.make_node("Sum", [f"{op}{i}" for op in names for i in range(2)], ["y"]))
    proto = build(nodes, IN, out("y"), functions=[noisy, plain], domains=["f", "elsewhere"])
    model = load_model(proto)
    CleanupPass()(model)
    assert sorted(ops(model)) == ["Custom", "Custom", "Noise", "Noise", "Square", "Sum"]
    assert model.graph.opset_imports.keys() == {"", "f", "elsewhere"}


def test_stop_of_gradients_stays():
    detach = helper.make_node("Identity", ["r"], ["d"])
    detach.metadata_props.add(
        key="pkg.torch.onnx.fx_node", value="%d = call_function[target=torch.ops.aten.detach.default]"
    )
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        detach,
        helper.make_node("Identity", ["r"], ["i"]),
        helper.make_node("Sub", ["d", "i"], ["y"]),
    ]
    model = cleaned(build(nodes, IN, out("y")))
    assert ops(model) == ["Relu", "Identity", "Sub"]
    assert [value.name for value in model.graph.node(2).inputs] == ["d", "r"]


def test_outputs_that_one_of_two_equal_nodes_omits():
    scale = {"s": normal(3)}
    nodes = [
        helper.make_node("LayerNormalization", ["x", "s"], ["a", "", "i"]),
        helper.make_node("LayerNormalization", ["x", "s"], ["b", "m", "j"]),
        helper.make_node("Sum", ["a", "i", "b", "m", "j"], ["y"]),
    ]
    cleaned(build(nodes, IN, out("y"), scale))


def test_training_batch_norm_keeps_its_statistics():
    tensors = {name: np.abs(normal(3, seed=i)) for i, name in enumerate(("scale", "bias", "mean", "var"))}
    nodes = [helper.make_node("BatchNormalization", ["x", *tensors], ["y", "m", "v"], training_mode=1)]
    model = cleaned(build(nodes, IN, [*out("y"), info("m", [3]), info("v", [3])], tensors))
    assert len(model.graph.node(0).outputs) == 3


def test_clean_graph_is_left_alone():
    model = canonicalize(load_model(build([helper.make_node("Relu", ["x"], ["y"])], IN, out("y"))))
    assert not CleanupPass()(model).modified


def test_one_value_stays_two_results_of_a_loop_in_a_function():
    """Else a runtime writes both results to one place."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "local": 1]>
        net (float[N, 3] x) => (float[N, 3] y, float[3] last) { last, y = local.sums(x) }
        <domain: "local", opset_import: ["": 21]>
        sums (x) => (last, y) {
            zero = Constant<value = float[3] {0.0, 0.0, 0.0}>()
            last, y = Scan<num_scan_inputs = 1, body = step (float[3] s, float[3] v) => (float[3] a, float[3] b) {
                t = Add(s, v)
                a = Identity(t)
                b = Identity(t)
            }>(zero, x)
        }"""
    )
    loaded = ir.from_proto(model)
    CleanupPass()(loaded)
    (function,) = loaded.functions.values()
    (body,) = (node.attributes["body"].as_graph() for node in function if node.op_type == "Scan")
    assert len({value.name for value in body.outputs}) == 2
    got = run(to_proto(loaded), {"x": X})
    np.testing.assert_allclose(got[0], np.cumsum(X, axis=0), rtol=1e-6)


def test_a_loop_keeps_the_place_of_its_condition() -> None:
    """Without it onnx's shape inference fails; onnx_ir's pass drops all absent inputs at the end."""
    model = ir.from_proto(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (int64 trips, float[2] x) => (float[n, 2] y) {
            y = Loop(trips, "") <body = b (int64 i, bool c) => (bool d, float[2] o) { d = Identity(c)  o = Sin(x) }>
        }""")
    )
    CleanupPass()(model)
    (loop,) = ir.to_proto(model).graph.node
    assert list(loop.input) == ["trips", ""]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_two_identities_of_an_outer_value_are_no_output_of_a_branch_without_a_node() -> None:
    """Without the first, the second one's source is a value of the graph around, which both branches would return."""
    model = ir.from_proto(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[2] x, bool c) => (float[2] y) {
            s = Sin(x)
            r = If(c) <then_branch = t () => (float[2] b) { a = Identity(s)  b = Identity(a) },
                       else_branch = e () => (float[2] q) { p = Identity(s)  q = Identity(p) }>
            y = Cos(r) }""")
    )
    CleanupPass()(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    x = np.array([0.5, 1.0], np.float32)
    (y,) = run(ir.to_proto(model), {"x": x, "c": np.array(True)})
    np.testing.assert_allclose(y, np.cos(np.sin(x)), rtol=1e-6)
