"""Sums over many numbers: as exact as PyTorch's, and what they were for few."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import parser

from onnxtrain.passes import LongSumsPass, infer_shapes, inline_functions, load_model, to_proto
from onnxtrain.passes.portable import find_obstacles, make_portable
from passes._models import run

# One unit in the last place of float32: more than half of it is lost when the exact result is rounded.
UNIT = 2.0**-23

REDUCTIONS = {
    "ReduceL1": lambda x, axes: np.abs(x).sum(axes),
    "ReduceL2": lambda x, axes: np.sqrt((x * x).sum(axes)),
    "ReduceLogSum": lambda x, axes: np.log(x.sum(axes)),
    "ReduceLogSumExp": lambda x, axes: np.log(np.exp(x).sum(axes)),
    "ReduceMean": lambda x, axes: x.mean(axes),
    "ReduceSum": lambda x, axes: x.sum(axes),
    "ReduceSumSquare": lambda x, axes: (x * x).sum(axes),
}
TWINS = {
    "ReduceL1": lambda x, axes: torch.linalg.vector_norm(x, 1, axes),
    "ReduceL2": lambda x, axes: torch.linalg.vector_norm(x, 2, axes),
    "ReduceLogSum": lambda x, axes: x.sum(axes).log(),
    "ReduceLogSumExp": lambda x, axes: x.logsumexp(axes),
    "ReduceMean": lambda x, axes: x.mean(axes),
    "ReduceSum": lambda x, axes: x.sum(axes),
    "ReduceSumSquare": lambda x, axes: x.square().sum(axes),
}


def reduction(
    op: str, dims: tuple[int | str, ...], axes: tuple[int, ...], keepdims: int = 0, dtype: str = "float"
) -> onnx.ModelProto:
    """Returns the model `y = op(x, axes)`."""
    sizes = [f"e{i}" for i in range(len(dims) if keepdims else len(dims) - len(axes))]
    model: onnx.ModelProto = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g ({dtype}[{",".join(map(str, dims))}] x) =>
        ({dtype}{f"[{','.join(sizes)}]" if sizes else ""} y) {{ y = {op}<keepdims={keepdims}>(x, a) }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(axes, np.int64), "a"))
    return model


def rewritten(model: onnx.ModelProto, modified: bool = True) -> onnx.ModelProto:
    loaded = infer_shapes(load_model(model))
    assert LongSumsPass()(loaded).modified == modified
    proto = to_proto(loaded)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def error(value: Any, exact: np.ndarray) -> float:
    """Returns the largest error, relative to the largest result."""
    return float(np.abs(np.asarray(value, np.float64) - exact).max() / np.abs(exact).max())


def values(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(0)
    made = {
        "equal": lambda: np.full(shape, 0.1),
        "growing": lambda: (np.arange(np.prod(shape)) / np.prod(shape)).reshape(shape),
        "random": lambda: rng.random(shape),
    }
    return made[kind]().astype(np.float32)


# Sizes, those that the model knows as symbols only, and reduced axes.
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "few": ((1000,), (), (0,)),
    "all": ((40, 3, 5000), (), (0, 1, 2)),
    "all, unknown batch": ((300_000, 4), (0,), (0, 1)),
    "all, unknown sizes": ((7, 311, 300), (0, 1, 2), (0, 1, 2)),
    "prime": ((100_003,), (), (0,)),
    "twice a prime": ((2 * 100_003,), (0,), (0,)),
    "pixels": ((8, 5, 96, 97), (0,), (0, 2, 3)),
    "pixels of unknown number": ((8, 5, 96, 101), (0, 2, 3), (0, 2, 3)),
    "rows": ((5, 40_000), (0,), (1,)),
    "rows of unknown length": ((5, 40_000), (0, 1), (1,)),
    "columns": ((60_000, 7), (), (0,)),
    "tokens": ((64, 512, 6), (0,), (0, 1)),
    "wide layer": ((6000, 512), (0,), (0,)),
    "middle": ((3, 20_000, 4), (0, 2), (1,)),
    "apart": ((500, 2, 400, 3), (0, 3), (0, 2)),
}


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_error_is_at_most_twice_that_of_torch(op: str, case: str) -> None:
    shape, symbolic, axes = SHAPES[case]
    dims = tuple(f"d{axis}" if axis in symbolic else size for axis, size in enumerate(shape))
    session = ort.InferenceSession(rewritten(reduction(op, dims, axes)).SerializeToString())
    for kind in ("equal", "growing", "random"):
        x = values(kind, shape)
        (y,) = session.run(None, {"x": x})
        exact = REDUCTIONS[op](x.astype(np.float64), axes)
        eager = TWINS[op](torch.from_numpy(x), axes)
        assert y.shape == exact.shape
        assert error(y, exact) <= 2 * max(error(eager, exact), UNIT), kind


def test_onnxruntime_adds_one_by_one() -> None:
    """If this fails, a new ONNX Runtime adds as PyTorch does, and LongSumsPass may go."""
    x = values("equal", (4_000_000,))
    (y,) = run(reduction("ReduceSum", ("n",), (0,)), {"x": x})
    assert error(y, x.astype(np.float64).sum()) > 1e-4


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_shape_and_dtype_stay(dtype: str, keepdims: int) -> None:
    """With sizes that occur at run time only: 0, 1, and such without a small divisor."""
    numpy = np.float32 if dtype == "float" else np.float16
    for axes in ((0,), (2,), (0, 2), (0, 1, 2)):
        model = reduction("ReduceSum", ("n", "m", "k"), axes, keepdims, dtype)
        new, old = (ort.InferenceSession(m.SerializeToString()) for m in (infer_and_rewrite(model), model))
        for shape in itertools.product((0, 1, 131), (2, 0), (1, 600)):
            x = np.ones(shape, numpy)
            (y,), (want,) = new.run(None, {"x": x}), old.run(None, {"x": x})
            assert (y.shape, y.dtype) == (want.shape, want.dtype)
            np.testing.assert_array_equal(y, want)


def infer_and_rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    loaded = infer_shapes(load_model(model))
    LongSumsPass()(loaded)
    return to_proto(loaded)


@pytest.mark.parametrize(
    ("dims", "axes"), [((512,), (0,)), (("n", 300), (1,)), (("n", 128), (0,)), (("n", 200, 3), (1,))], ids=str
)
def test_short_sums_stay(dims: tuple[int | str, ...], axes: tuple[int, ...]) -> None:
    """The additional nodes would take longer, and nothing is gained."""
    proto = rewritten(reduction("ReduceSum", dims, axes), modified=False)
    assert [node.op_type for node in proto.graph.node] == ["ReduceSum"]


def test_infinity_and_nan_pass_through() -> None:
    for op in REDUCTIONS:
        session = ort.InferenceSession(rewritten(reduction(op, (2000,), (0,))).SerializeToString())
        for bad in (np.inf, np.nan):
            x = np.ones(2000, np.float32)
            x[7] = bad
            (y,) = session.run(None, {"x": x})
            assert np.isnan(y) if np.isnan(bad) else y == np.inf, op
    (y,) = run(
        rewritten(reduction("ReduceLogSumExp", (2000,), (0,))), {"x": np.full(2000, -np.inf, np.float32)}
    )
    assert y == -np.inf


def test_sums_of_one_batch_size_share_its_blocks() -> None:
    """The gradients of all biases of wide layers find the length of their blocks once."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[n,512] x, float[n,1024] y) => (float[512] a, float[1024] b)
        <int64[1] z = {0}> { a = ReduceSum<keepdims=0>(x, z) b = ReduceSum<keepdims=0>(y, z) }"""
    )
    ops = [node.op_type for node in rewritten(model).graph.node]
    assert (ops.count("ArgMin"), ops.count("ReduceSum")) == (1, 4)


def test_kept_nodes_stay() -> None:
    loaded = infer_shapes(load_model(reduction("ReduceSum", (2000,), (0,))))
    assert not LongSumsPass(kept={"y"})(loaded).modified


def test_sums_in_subgraphs() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[100000] x, bool c) => (float y) {
        s = ReduceSum<keepdims=0>(x)
        y = If(c) <then_branch = t () => (float a) { a = ReduceSum<keepdims=0>(x) }, else_branch = e () => (float b) {
        b = Add(s, s) }> }"""
    )
    proto, x = rewritten(model), values("equal", (100_000,))
    for flag, factor in ((True, 1), (False, 2)):
        (y,) = run(proto, {"x": x, "c": np.array(flag)})
        assert error(y, factor * x.astype(np.float64).sum()) < 2 * UNIT


def test_without_float64_for_browsers() -> None:
    """WebGPU has none: both levels are in float32, which is still better than one."""
    model = infer_shapes(load_model(reduction("ReduceSum", ("n", 40, 40), (0, 1, 2))))
    LongSumsPass()(model)
    model = infer_shapes(model)
    model = make_portable(model)
    assert find_obstacles(infer_shapes(model)) == []
    x = values("equal", (1000, 40, 40))
    exact = x.astype(np.float64).sum()
    plain = run(reduction("ReduceSum", ("n", 40, 40), (0, 1, 2)), {"x": x})[0]
    assert error(run(to_proto(model), {"x": x})[0], exact) < error(plain, exact) / 20


LOSSES = list(
    itertools.product(
        ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"),
        ("mean", "sum", "none"),
        (False, True),
        (None, -100, 1),
    )
)


@pytest.mark.parametrize(("op", "how", "weighted", "ignored"), LOSSES)
def test_losses_of_labels_match_torch(op: str, how: str, weighted: bool, ignored: int | None) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, (100, 333))
    if ignored == -100:
        labels[::3] = -100
    x, weight = rng.standard_normal((100, 3, 333)).astype(np.float32), np.array([0.5, 2, 1], np.float32)
    settings = f'reduction="{how}"' + ("" if ignored is None else f", ignore_index={ignored}")
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[n,3,m] x, int64[n,m] t, float[3] w) =>
        (float{"[n,m]" if how == "none" else ""} y) {{ y = {op}<{settings}>(x, t{", w" if weighted else ""}) }}"""
    )
    (y,) = run(rewritten(model, modified=how != "none"), {"x": x, "t": labels, "w": weight})
    loss = torch.nn.functional.nll_loss if op.startswith("Neg") else torch.nn.functional.cross_entropy
    exact = loss(
        torch.from_numpy(x).double(),
        torch.from_numpy(labels),
        torch.from_numpy(weight).double() if weighted else None,
        reduction=how,
        ignore_index=-100 if ignored is None else ignored,
    ).numpy()
    np.testing.assert_allclose(y, exact, rtol=4 * UNIT, atol=4 * UNIT)


def test_mean_loss_of_many_equal_terms() -> None:
    """The function that training graphs call; its body is inlined as ONNX Runtime does."""
    from onnxtrain.emitter import Emitter
    from onnxtrain.functions import mean_negative_log_likelihood

    log_prob = ir.Value(name="p", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 2]))
    labels = ir.Value(name="t", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["n"]))
    graph = ir.Graph([log_prob, labels], [], nodes=[], opset_imports={"": 21}, name="g")
    model = ir.Model(graph, ir_version=10)
    op = Emitter(graph, functions=model.functions)
    loss = op.call(mean_negative_log_likelihood, log_prob, labels, ignore_index=-100)
    loss.name, loss.type, loss.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(())
    graph.outputs.append(loss)
    count = 3_000_000
    x, t = np.full((count, 2), -0.1, np.float32), np.arange(count) % 2
    t[::4] = -100
    (y,) = run(to_proto(inline_functions(model)), {"p": x, "t": t})
    assert error(y, np.array(float(np.float32(0.1)))) <= UNIT
