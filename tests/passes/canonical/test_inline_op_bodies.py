from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from onnxtrain.passes import canonicalize, has_schema_function, inline_schema_functions, load_model, to_proto
from passes._models import build, info, normal, reference, run
from runtimes import needs_opset

F = normal
POSITIVE = np.abs(F(3, 4)) + 0.1


def labels(classes: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, classes, shape)


# (op, inputs with None for an omitted one, attributes)
CASES = [
    ("AffineGrid", [F(2, 2, 3), np.int64([2, 3, 4, 5])], {}),
    ("Attention", [F(2, 3, 5, 8), F(2, 3, 6, 8), F(2, 3, 6, 8)], {"is_causal": 1}),
    ("Attention", [F(2, 5, 24), F(2, 6, 24), F(2, 6, 24), F(5, 6)], {"q_num_heads": 3, "kv_num_heads": 3}),
    ("BlackmanWindow", [np.int64(6)], {"periodic": 0}),
    ("CastLike", [F(3), labels(3, 3)], {}),
    ("Celu", [F(3, 4)], {"alpha": 0.7}),
    ("CenterCropPad", [F(4, 6), np.int64([6, 4])], {}),
    ("Clip", [F(3, 4), np.float32(-0.5), np.float32(0.5)], {}),
    ("Clip", [F(3, 4), None, np.float32(0.5)], {}),
    ("DynamicQuantizeLinear", [F(3, 4)], {}),
    ("Elu", [F(3, 4)], {}),
    ("Elu", [F(3, 4)], {"alpha": 0.3}),
    ("Gelu", [F(3, 4)], {}),
    ("Gelu", [F(3, 4)], {"approximate": "tanh"}),
    ("GreaterOrEqual", [F(3), F(3, seed=1)], {}),
    ("GroupNormalization", [F(2, 4, 5, 6), F(4), F(4)], {"num_groups": 2}),
    ("HammingWindow", [np.int64(6)], {}),
    ("HannWindow", [np.int64(6)], {}),
    ("HardSigmoid", [F(3, 4)], {}),
    ("HardSwish", [F(3, 4)], {}),
    ("LayerNormalization", [F(3, 4, 5), F(4, 5), F(4, 5)], {"axis": 1}),
    ("LayerNormalization", [F(3, 4, 5), F(5)], {}),
    ("LeakyRelu", [F(3, 4)], {"alpha": 0.2}),
    ("LessOrEqual", [F(3), F(3, seed=1)], {}),
    ("LogSoftmax", [F(3, 4)], {"axis": 0}),
    ("MeanVarianceNormalization", [F(2, 3, 4, 5)], {}),
    ("Mish", [F(3, 4)], {}),
    ("NegativeLogLikelihoodLoss", [F(3, 4), labels(4, 3)], {}),
    ("NegativeLogLikelihoodLoss", [F(3, 4, 2), labels(4, 3, 2), np.abs(F(4))], {"ignore_index": 1}),
    ("PRelu", [F(3, 4), F(4)], {}),
    ("Range", [np.float32(0), np.float32(5), np.float32(2)], {}),
    ("ReduceL1", [F(3, 4), np.int64([1])], {}),
    ("ReduceL2", [F(3, 4)], {"keepdims": 0}),
    ("ReduceLogSum", [POSITIVE, np.int64([1])], {}),
    ("ReduceLogSumExp", [F(3, 4), np.int64([0])], {}),
    ("ReduceSumSquare", [F(3, 4), np.int64([1])], {}),
    ("Relu", [F(3, 4)], {}),
    ("RMSNormalization", [F(3, 4), F(4)], {}),
    ("RotaryEmbedding", [F(2, 3, 4, 8), F(10, 4), F(10, 4), labels(10, 2, 4)], {}),
    ("Selu", [F(3, 4)], {}),
    ("Shrink", [F(3, 4)], {"lambd": 0.3, "bias": 0.1}),
    ("Softmax", [F(3, 4)], {}),
    ("SoftmaxCrossEntropyLoss", [F(3, 4), labels(4, 3)], {}),
    (
        "SoftmaxCrossEntropyLoss",
        [F(3, 4, 2), labels(4, 3, 2), np.abs(F(4))],
        {"reduction": "none", "ignore_index": 0},
    ),
    ("Softplus", [F(3, 4)], {}),
    ("Softsign", [F(3, 4)], {}),
    ("Swish", [F(3, 4)], {"alpha": 1.5}),
    ("ThresholdedRelu", [F(3, 4)], {}),
]
# Bernoulli is random; SequenceMap has a graph attribute, so that it is not expanded.
UNTESTED = {"Bernoulli", "SequenceMap"}


def one_node(op, inputs, attributes, opset) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return a model of one node; all but the first of its integer vectors are constants."""
    feed = {
        f"x{i}": a
        for i, a in enumerate(inputs)
        if a is not None and (a.dtype == np.float32 or a.ndim > 1 or i == 0)
    }
    tensors = {f"x{i}": a for i, a in enumerate(inputs) if a is not None and f"x{i}" not in feed}
    names = ["" if a is None else f"x{i}" for i, a in enumerate(inputs)]
    outputs = [f"y{i}" for i in range(3 if op == "DynamicQuantizeLinear" else 1)]
    proto = build(
        [helper.make_node(op, names, outputs, name="node", **attributes)],
        [info(name, a.shape, helper.np_dtype_to_tensor_dtype(a.dtype)) for name, a in feed.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        tensors,
        opset=opset,
    )
    return proto, feed


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("opset", [pytest.param(n, marks=needs_opset(n)) for n in (21, 23, 26)])
@pytest.mark.parametrize(
    ("op", "inputs", "attributes"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)]
)
def test_body_gives_what_the_op_gives(op, inputs, attributes, opset):
    if not has_schema_function(op, opset):
        assert op in {"Attention", "RMSNormalization", "RotaryEmbedding", "Swish"}  # newer than this opset
        return
    proto, feed = one_node(op, inputs, attributes, opset)
    model = canonicalize(load_model(proto))
    # AffineGrid's body hands Range arrays of one element; Range's kernel takes them, its body does not.
    keep = {"Range"} if op == "AffineGrid" else set()
    expanded = inline_schema_functions(model, lambda node: node.op_type in keep)
    left = {node.op_type for node in ir.traversal.RecursiveGraphIterator(expanded.graph)}
    assert {name for name in left if has_schema_function(name, opset)} == keep
    # ONNX Runtime has no kernel for Swish.
    expected = (reference if op == "Swish" else run)(to_proto(model), feed)
    result = to_proto(expanded)
    onnx.checker.check_model(result, full_check=True)
    for got, want in zip(run(result, feed), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


def test_every_function_op_has_a_case():
    ops = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    functions = {op for op in ops for opset in range(21, 27) if has_schema_function(op, opset)}
    assert functions - UNTESTED == {case[0] for case in CASES}


def test_keep_is_respected_and_the_argument_is_not_changed():
    nodes = [
        helper.make_node("Gelu", ["x"], ["h"], name="a"),
        helper.make_node("Gelu", ["h"], ["y"], name="b"),
    ]
    model = canonicalize(load_model(build(nodes, [info("x", ["N", 3])], [info("y", ["N", 3])])))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    expanded = inline_schema_functions(model, lambda node: node.name == "b")
    assert [node.name for node in expanded.graph if node.op_type == "Gelu"] == ["b"]
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    assert all(out.shape is not None for node in expanded.graph for out in node.outputs)


def test_omitted_outputs_in_the_middle():
    nodes = [helper.make_node("LayerNormalization", ["x", "s"], ["y", "", "inv"], name="ln")]
    proto = build(
        nodes, [info("x", ["N", 4])], [info("y", ["N", 4]), info("inv", ["N", 1])], {"s": normal(4)}
    )
    model = canonicalize(load_model(proto))
    expanded = to_proto(inline_schema_functions(model, lambda node: False))
    feed = {"x": normal(3, 4)}
    for got, want in zip(run(expanded, feed), run(proto, feed), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_ops_in_subgraphs_are_expanded():
    body = helper.make_graph([helper.make_node("Mish", ["x"], ["m"])], "then", [], [info("m", ["N", 3])])
    other = helper.make_graph([helper.make_node("Selu", ["x"], ["e"])], "else", [], [info("e", ["N", 3])])
    proto = build(
        [helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=other)],
        [info("x", ["N", 3]), info("c", [], onnx.TensorProto.BOOL)],
        [info("y", ["N", 3])],
    )
    expanded = inline_schema_functions(canonicalize(load_model(proto)), lambda node: False)
    left = {node.op_type for node in ir.traversal.RecursiveGraphIterator(expanded.graph)}
    assert not left & {"Mish", "Selu"}
    for c in (True, False):
        feed = {"x": normal(2, 3), "c": np.array(c)}
        np.testing.assert_allclose(
            run(to_proto(expanded), feed)[0], run(proto, feed)[0], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(("op", "opset"), [("LayerNormalization", 17), ("RMSNormalization", 23)])
def test_symbolic_shapes_stay_known_inside_bodies(op, opset):
    proto = build(
        [helper.make_node(op, ["x", "s"], ["y"])],
        [info("x", ["batch", "seq", 8])],
        [info("y", ["batch", "seq", 8])],
        {"s": normal(8)},
        opset=opset,
    )
    expanded = inline_schema_functions(canonicalize(load_model(proto)), lambda node: False)
    assert all(
        out.shape is not None and out.dtype is not None for node in expanded.graph for out in node.outputs
    )
    assert "Loop" not in {node.op_type for node in expanded.graph}
