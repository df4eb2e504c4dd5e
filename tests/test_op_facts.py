"""The table of facts about ops: each fact is true of the op, and readers that want a variation say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from autodiff.test_rules import CASES as GRADIENT_CASES
from models import make_model
from onnxtrain import op_facts
from onnxtrain.autodiff import differentiate
from onnxtrain.op_facts import FACTS, SHAPING_INPUTS, Fact, ops_with
from onnxtrain.ortmodule.sessions import _forward_backward
from onnxtrain.passes import FoldConstantsPass, infer_shapes
from onnxtrain.passes.runtime_faults import reduction_axes
from onnxtrain.passes.shapes import implied_ranks, outdated_sizes
from onnxtrain.trainer._run import build
from onnxtrain.training import recompute

OPSET = 24
X = np.random.default_rng(0).permutation(np.arange(1.0, 9.0)).reshape(1, 4, 2, 1).astype(np.float32)
I = np.int64  # noqa: E741
# Inputs behind X, and attributes, of ops that need any.
CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "AveragePool": ([], {"kernel_shape": [2, 1]}),
    "CastLike": ([np.float64(0)], {}),
    "Cast": ([], {"to": onnx.TensorProto.DOUBLE}),
    "CenterCropPad": ([I([1, 2, 2, 1])], {}),
    "Compress": ([np.array([True, False, True, True])], {"axis": 1}),
    "Concat": ([X[:, 1:]], {"axis": 1}),
    "CumProd": ([I(1)], {}),
    "CumSum": ([I(1)], {}),
    "DepthToSpace": ([], {"blocksize": 2}),
    "DequantizeLinear": ([np.float32(0.5)], {}),
    "Expand": ([I([2, 1, 1, 3])], {}),
    "Gather": ([I([2, 0])], {"axis": 1}),
    "GatherElements": ([I([[[[1], [2]], [[0], [3]]]])], {"axis": 1}),
    "GatherND": ([I([[0, 2]])], {}),
    "GridSample": ([np.zeros((1, 3, 2, 2), np.float32)], {}),
    "GroupNormalization": ([np.ones(4, np.float32)] * 2, {"num_groups": 2}),
    "InstanceNormalization": ([np.ones(4, np.float32)] * 2, {}),
    "BatchNormalization": ([np.ones(4, np.float32)] * 4, {}),
    "LRN": ([], {"size": 3}),
    "LayerNormalization": ([np.ones(1, np.float32)], {}),
    "MaxPool": ([], {"kernel_shape": [2, 1]}),
    "PRelu": ([np.float32([0.5])], {}),
    "Pad": ([I([0, 1, 0, 0, 0, 0, 0, 1])], {}),
    "QuantizeLinear": ([np.float32(0.5)], {}),
    "RMSNormalization": ([np.ones(1, np.float32)], {}),
    "Reshape": ([I([2, 4])], {}),
    "ReverseSequence": ([I([3])], {"time_axis": 1, "batch_axis": 0}),
    "ScatterElements": ([I([[[[1]]]]), X[:, :1, :1]], {"axis": 1}),
    "ScatterND": ([I([[0, 2]]), X[:, 1]], {}),
    "Slice": ([I([1]), I([3]), I([1])], {}),
    "SpaceToDepth": ([], {"blocksize": 1}),
    "Split": ([I([1, 3])], {"axis": 1}),
    "Squeeze": ([I([0])], {}),
    "TensorScatter": ([X[:, :, :1]], {}),
    "Tile": ([I([1, 2, 1, 1])], {}),
    "TopK": ([I([2])], {"axis": 1}),
    "Transpose": ([], {"perm": [0, 2, 3, 1]}),
    "Unsqueeze": ([I([0])], {}),
    "Where": ([X, X - 20], {}),
}
FIRST: dict[str, np.ndarray] = {
    "BitwiseNot": X.astype(np.int64), "Not": X > 4, "Where": X > 4, "DFT": X, "Acos": X / 10, "Asin": X / 10,
    "Atanh": X / 10, "DequantizeLinear": X.astype(np.int8),
}  # fmt: skip


def computed(op_type: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the inputs of a small node, and its first output."""
    more, attributes = CASES.get(op_type, ([], {}))
    if (
        not more
        and FACTS[op_type] & (Fact.ELEMENTWISE | Fact.COMMUTATIVE)
        and Fact.SAME_RANK not in FACTS[op_type]
    ):
        kind = (
            np.int64 if op_type.startswith("Bit") else bool if op_type in ("And", "Or", "Xor") else np.float32
        )
        attributes = {"BitShift": {"direction": "LEFT"}, "Mod": {"fmod": 1}}.get(op_type, {})
        kind = np.uint32 if op_type == "BitShift" else kind
        inputs = [X.astype(kind), X[:, ::-1].astype(kind)]
    else:
        inputs = [FIRST.get(op_type, X), *map(np.asarray, more)]
    names = [f"x{index}" for index in range(len(inputs))]
    outputs = ["y", "z"] if op_type in ("Split", "TopK") else ["y"]
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in zip(names, inputs, strict=True)
    ]
    graph = helper.make_graph(
        [helper.make_node(op_type, names, outputs, **attributes)],
        "g", infos, [helper.make_empty_tensor_value_info("y")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    return inputs, ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))[0]


def evaluated(fact: Fact) -> list[str]:
    return sorted(ops_with(fact) - ops_with(Fact.RANDOM))


def test_every_op_exists() -> None:
    standard = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    assert FACTS.keys() | SHAPING_INPUTS.keys() <= standard


@pytest.mark.parametrize("op_type", evaluated(Fact.EXACT))
def test_each_element_is_one_of_an_input_its_negative_or_zero(op_type: str) -> None:
    inputs, y = computed(op_type)
    assert y.size
    numbers = np.concatenate([v.ravel() for v in inputs if v.dtype == np.float32] + [np.zeros(1, np.float32)])
    assert np.isin(np.abs(y), np.abs(numbers)).all()


@pytest.mark.parametrize("op_type", evaluated(Fact.FINITE_COTANGENT))
def test_cotangents_of_finite_cotangents_are_finite(op_type: str) -> None:
    inputs, _ = computed(op_type)
    values = (X - 5).copy()
    values.ravel()[:3] = 3.0, -3.0, 90.0
    names = [f"x{i}" for i in range(len(inputs))]
    outputs = ["y", "z"] if op_type == "Split" else ["y"]
    node = helper.make_node(op_type, names, outputs, **CASES.get(op_type, ([], {}))[1])
    constants = dict(zip(names[1:], map(np.asarray, inputs[1:]), strict=True))
    model = make_model([node], {names[0]: list(X.shape)}, {"y": None}, constants, opset=22)
    session = ort.InferenceSession(
        differentiate(model, of="y", wrt=[names[0]], cotangent="ct").SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    shape = [d if isinstance(d, int) else 1 for d in session.get_inputs()[-1].shape]
    feeds = {names[0]: values, "ct": np.full(shape, 1e30, np.float32)}
    assert np.isfinite(session.run([f"{names[0]}_grad"], feeds)[0]).all()


@pytest.mark.parametrize("op_type", evaluated(Fact.MOVES))
def test_moves_copy_elements_of_the_first_input(op_type: str) -> None:
    assert np.isin(computed(op_type)[1], X).all()


@pytest.mark.parametrize("op_type", evaluated(Fact.VIEW))
def test_views_have_each_element_once(op_type: str) -> None:
    y = computed(op_type)[1]
    assert sorted(y.ravel()) == sorted(X.ravel())
    assert (y.ravel() == X.ravel()).all() == (Fact.RESHAPE in FACTS[op_type] or op_type == "SpaceToDepth")


@pytest.mark.parametrize("op_type", evaluated(Fact.ELEMENTWISE))
def test_elementwise_ops_broadcast(op_type: str) -> None:
    inputs, y = computed(op_type)
    assert y.shape == np.broadcast_shapes(*(v.shape for v in inputs))


# ONNX's reference evaluator lacks GlobalLpPool, LpNormalization of opset 22, and ops of opsets after `OPSET`.
NOT_EVALUATED = {"GlobalLpPool", "LpNormalization", "SwiGLU"}


@pytest.mark.parametrize("op_type", sorted(set(evaluated(Fact.SAME_RANK)) - NOT_EVALUATED))
def test_same_rank_and_dtype(op_type: str) -> None:
    inputs, y = computed(op_type)
    assert y.ndim == X.ndim
    assert (y.dtype != inputs[0].dtype) == (Fact.OWN_DTYPE in FACTS[op_type])


def test_every_op_that_keeps_the_rank_is_declared() -> None:
    """By the shapes in the gradient cases; elementwise ops of several tensors and reductions have other facts."""
    keep: dict[str, bool] = {}
    for case in GRADIENT_CASES:
        first, *_ = case.arrays(np.dtype(np.float64))
        if first is not None:
            keep[case.op] = keep.get(case.op, True) and first.ndim == len(case.output_shapes()[0])
    by_other_rules = (
        op_facts.REDUCTIONS | implied_ranks._RULES.keys() | op_facts.ELEMENTWISE - op_facts.SAME_RANK
    )
    kept = {op_type for op_type, keeps in keep.items() if keeps} - by_other_rules
    assert kept - op_facts.SAME_RANK == set(), (
        "in all gradient cases of these ops, the output has the rank of the first input: add them to a line with "
        "SAME_RANK in FACTS (src/onnxtrain/op_facts.py), or a rule to src/onnxtrain/passes/shapes/implied_ranks.py"
    )
    assert op_facts.SAME_RANK & keep.keys() - by_other_rules == kept


@pytest.mark.parametrize("op_type", evaluated(Fact.COMMUTATIVE))
def test_commutative_ops(op_type: str) -> None:
    (a, b), y = computed(op_type)
    header = f'<ir_version: 10, opset_import: ["": {OPSET}]>'
    model = ir.from_onnx_text(f"{header} g (a, b) => (y) {{ y = {op_type}(b, a) }}")
    np.testing.assert_array_equal(ReferenceEvaluator(ir.to_proto(model)).run(None, {"a": a, "b": b})[0], y)


def test_facts_that_schemas_tell() -> None:
    schemas = {schema.name: schema for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    assert {name for name in schemas if name.startswith("Reduce")} == op_facts.REDUCTIONS
    assert {n for n, s in schemas.items() if "hidden_size" in s.attributes} == op_facts.RECURRENT
    assert {
        name for name, s in schemas.items() if {"kernel_shape", "ceil_mode"} <= s.attributes.keys()
    } == op_facts.POOLINGS
    seeded = {name for name, schema in schemas.items() if "seed" in schema.attributes}
    assert seeded == op_facts.RANDOM_OPS
    for name, indices in SHAPING_INPUTS.items():
        assert max(indices) < len(schemas[name].inputs), name


def test_what_readers_add_and_leave_out() -> None:
    """Differences between rooms that are meant."""
    # A checkpoint holds the state of the session's generator, from which Dropout draws, and no state of a node.
    assert op_facts.RANDOM_OPS - {"Dropout"} == build._STATEFUL
    # The result of ConstantOfShape has no element of its input, but the shape that these elements say.
    assert {"ConstantOfShape"} == outdated_sizes._SHAPE_ONLY - op_facts.SHAPE_READERS
    # A part of a large tensor, computed again, would keep the large one.
    assert {"Slice", "Split"}.isdisjoint(_forward_backward._RECOMPUTED)
    assert {"Slice", "Split"} <= recompute._CHEAP
    # By one name a Squeeze of no axes, which is no reduction, is written as a reduction over no axes.
    assert reduction_axes._OF_ONE_ELEMENT.keys() == op_facts.REDUCTIONS | {"Squeeze"}
    assert not recompute._CHEAP & op_facts.RANDOM_OPS


def test_moves_are_folded_where_other_sizes_are_symbolic() -> None:
    """A Reshape moves elements, known or not: the static size behind it is found."""
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["": {OPSET}]>
        g (float[n, 4] x) => (int64[1] y)
        <int64[2] column = {{2, 1}}, int64[1] last = {{1}}, int64[1] zero = {{0}}> {{
            s = Shape(x)  c = Reshape(s, column)  l = Gather(c, last)  f = Reshape(l, last)  y = Add(f, zero) }}""")
    infer_shapes(model)
    FoldConstantsPass()(model)
    assert [node.op_type for node in model.graph] == ["Add"]
