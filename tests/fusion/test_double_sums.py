"""Sums in float64 become functions, and the other forms of them stay ONNX's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import parser

from fusion.rewriting import ops, rewritten, with_gradients
from kernels.against_body import needs_kernels
from models import make_model, parse_nodes
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.fusion import DoubleSumPass
from onnxtrain.ortmodule import ORTModule
from onnxtrain.passes import LongSumsPass, canonicalize, load_model, to_proto
from onnxtrain.passes.portable import find_obstacles, make_portable
from passes._models import run

RNG = np.random.default_rng(5)
PASSES = ir.passes.Sequential(LongSumsPass(), DoubleSumPass())


def model(body: str, inputs: str = "float[n,m,40] x", dtype: str = "float") -> onnx.ModelProto:
    return parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({dtype}[n,m,40] y)
        <int64 last = {{-1}}, int64 second = {{1}}> {{ {body} }}"""
    )


@pytest.mark.parametrize("flags", ["", "<exclusive=1>", "<reverse=1>", "<exclusive=1, reverse=1>"])
@pytest.mark.parametrize("axis", ["last", "second"])
def test_a_running_sum_becomes_the_function(axis: str, flags: str) -> None:
    proto = model(f"y = CumSum{flags}(x, {axis})")
    fused = rewritten(proto, PASSES)
    assert ops(fused) == {"RunningSum_float": 1}
    x = RNG.standard_normal((3, 50, 40)).astype(np.float32)
    (y,), (plain,) = run(to_proto(fused), {"x": x}), run(to_proto(rewritten(proto, LongSumsPass())), {"x": x})
    np.testing.assert_array_equal(y, plain)


def test_readers_and_name_stay() -> None:
    fused = rewritten(model("a = Neg(x) b = CumSum(a, last) y = Mul(b, b)"), PASSES)
    assert ops(fused) == {"Neg": 1, "RunningSum_float": 1, "Mul": 1}
    assert next(node for node in fused.graph if node.domain).outputs[0].name == "b"


STAY = {
    "float64": model("y = CumSum(x, last)", "double[n,m,40] x", "double"),
    "integers": model("y = CumSum(x, last)", "int64[n,m,40] x", "int64"),
    "float16": model("y = CumSum(x, last)", "float16[n,m,40] x", "float16"),
    "a computed axis": model("y = CumSum(x, axis)", "float[n,m,40] x, int64 axis"),
    "a float64 sum of the file": model("a = Cast<to=11>(x) b = CumSum(a, last) y = Cast<to=1>(b)"),
}


@pytest.mark.parametrize("case", STAY)
def test_what_the_function_does_not_compute_stays(case: str) -> None:
    fused = rewritten(STAY[case], PASSES)
    assert ops(fused)["CumSum"] == 1
    assert not fused.functions


@pytest.mark.parametrize("which", [0, 1])
def test_float64_values_that_others_read_stay(which: int) -> None:
    """Value 0 is the Cast to float64, value 1 the sum."""

    def read(model: ir.Model) -> None:
        cast, total, _ = (node for node in model.graph if node.op_type != "Constant")
        model.graph.outputs.append((cast, total)[which].outputs[0])

    fused = rewritten(
        model("y = CumSum(x, last)"),
        ir.passes.Sequential(LongSumsPass(), _Reading(read), DoubleSumPass()),
    )
    assert ops(fused)["CumSum"] == 1


class _Reading(ir.passes.InPlacePass):
    def __init__(self, read: Callable[[ir.Model], None]) -> None:
        super().__init__()
        self._read = read

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self._read(model)
        return ir.passes.PassResult(model, True)


def test_a_kept_sum_stays() -> None:
    kept = ir.passes.Sequential(LongSumsPass(), DoubleSumPass({"y"}))
    assert "RunningSum_float" not in ops(rewritten(model("y = CumSum(x, last)"), kept))


def test_without_float64_for_browsers() -> None:
    portable = make_portable(rewritten(model("y = CumSum<exclusive=1, reverse=1>(x, last)"), PASSES))
    assert find_obstacles(portable) == []
    x = RNG.integers(-9, 9, (2, 3, 40)).astype(np.float32)
    (y,) = run(to_proto(portable), {"x": x})
    np.testing.assert_array_equal(y, x.sum(-1, keepdims=True) - x.cumsum(-1))


@pytest.mark.parametrize("flags", ["", "<exclusive=1>", "<reverse=1>"])
@pytest.mark.parametrize("axis", ["last", "second"])
def test_the_gradient_is_that_of_pytorch(axis: str, flags: str) -> None:
    joint = canonicalize(load_model(model(f"y = CumSum{flags}(x, {axis})")))
    fused = rewritten(with_gradients(joint, ["x"]), PASSES)
    assert ops(fused) == {"RunningSum_float": 2}
    x, ct = (RNG.standard_normal((3, 50, 40)).astype(np.float32) for _ in range(2))
    y, gradient = run(to_proto(fused), {"x": x, "ct": ct})
    leaf, dim = torch.from_numpy(x).requires_grad_(), -1 if axis == "last" else 1
    want = torch.flip(leaf, [dim]).cumsum(dim).flip([dim]) if "reverse" in flags else leaf.cumsum(dim)
    want = want - leaf if "exclusive" in flags else want
    want.backward(torch.from_numpy(ct))
    assert leaf.grad is not None
    np.testing.assert_allclose(y, want.detach(), rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(gradient, leaf.grad, rtol=1e-6, atol=1e-5)


def test_only_the_training_model_calls_the_function(tmp_path: Path) -> None:
    nodes = parse_nodes("h = Mul(x, w)  y = CumSum(h, axis)")
    values = {"w": np.ones(40, np.float32), "axis": np.array(1)}
    net = make_model(nodes, {"x": ["batch", 40]}, {"y": ["batch", 40]}, values)
    generate_artifacts(net, loss="mse", artifact_directory=tmp_path)
    calls = {
        name: sum(node.op_type == "RunningSum_float" for node in model.graph.node)
        for name in ("training", "eval", "inference")
        if (model := onnx.load(tmp_path / f"{name}_model.onnx"))
    }
    assert calls == {"training": 2, "eval": 0, "inference": 0}


@needs_kernels
@pytest.mark.parametrize("dim", [-1, 1])
def test_of_an_ortmodule(dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXTRAIN_KERNELS", "auto")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 40))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).cumsum(dim)

    x, eager = torch.from_numpy(RNG.standard_normal((3, 50, 40)).astype(np.float32)), Net()
    ours = ORTModule(Net())
    for net in (eager, ours):
        net(x).square().mean().backward()
    torch.testing.assert_close(ours.weight.grad, eager.weight.grad)
    ours.export_training_graph(tmp_path)
    nodes = [node.op_type for path in tmp_path.glob("*.onnx") for node in onnx.load(path).graph.node]
    assert nodes.count("RunningSum_float") == 2
    assert "CumSum" not in nodes


def sums(inputs: str, axes: list[int], result: str, flags: str = "<keepdims=0>") -> onnx.ModelProto:
    numbers = ", ".join(map(str, axes))
    return parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g (float[{inputs}] x) => (float[{result}] y)
        <int64[{len(axes)}] axes = {{{numbers}}}> {{ y = ReduceSum{flags}(x, axes) }}"""
    )


@pytest.mark.parametrize(
    ("inputs", "axes", "result"),
    [
        ("4096, 40", [0], "40"),
        ("n, 12, 40", [0, 1], "40"),
        ("n, 100, 40", [0, 1], "40"),
        ("n, m, 40", [0, 1], "40"),
        ("n, 1024", [0], "1024"),
        ("8, 700, 5, 4", [0, 1], "5, 4"),
        ("3, 4, 500, 16", [0, 1, 2], "16"),
    ],
)
def test_a_long_sum_over_the_first_axes_becomes_the_function(
    inputs: str, axes: list[int], result: str
) -> None:
    proto = sums(inputs, axes, result)
    fused = rewritten(proto, PASSES)
    assert ops(fused)["ColumnSum_float"] == 1
    assert not {"ReduceSum", "Cast"} & set(ops(fused))
    for sizes in ({"n": 700, "m": 9}, {"n": 1, "m": 1}, {"n": 0, "m": 3}):
        shape = [sizes.get(size, 0) or (0 if size in sizes else int(size)) for size in inputs.split(", ")]
        x = RNG.standard_normal(shape).astype(np.float32)
        (y,), (plain,) = (
            run(to_proto(fused), {"x": x}),
            run(to_proto(rewritten(proto, LongSumsPass())), {"x": x}),
        )
        np.testing.assert_array_equal(y, plain)
        scale = np.abs(x).astype(np.float64).sum(tuple(axes))
        assert np.all(np.abs(y - x.astype(np.float64).sum(tuple(axes))) <= 1e-6 * scale)


@pytest.mark.parametrize(
    ("inputs", "axes", "result", "flags"),
    [
        ("4096, 40", [0], "1, 40", ""),
        ("40, 4096", [1], "40", "<keepdims=0>"),
        ("16, 1024, 40", [1], "16, 40", "<keepdims=0>"),
        ("4096, 40", [0, 1], "", "<keepdims=0>"),
        ("4096, 3", [0], "3", "<keepdims=0>"),
        ("1021, 40", [0], "40", "<keepdims=0>"),
        ("n, 12, m", [0, 1], "m", "<keepdims=0>"),
        ("64, 12, 1000", [0, 2], "12", "<keepdims=0>"),
    ],
)
def test_other_sums_stay(inputs: str, axes: list[int], result: str, flags: str) -> None:
    fused = rewritten(sums(inputs, axes, result, flags), PASSES)
    assert "ReduceSum" in ops(fused)
    assert not fused.functions


def test_the_gradient_of_a_bias_is_that_of_pytorch() -> None:
    body = "h = MatMul(x, w) y = Add(h, b)"
    proto = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[n,60,8] x, float[8,40] w, float[40] b) => (float[n,60,40] y) {{ {body} }}"""
    )
    fused = rewritten(with_gradients(canonicalize(load_model(proto)), ["b"]), PASSES)
    assert ops(fused)["ColumnSum_float"] == 1
    x, w, b, ct = (
        RNG.standard_normal(s).astype(np.float32) for s in ((9, 60, 8), (8, 40), (40,), (9, 60, 40))
    )
    (_, gradient) = run(to_proto(fused), {"x": x, "w": w, "b": b, "ct": ct})
    leaf = torch.from_numpy(b).requires_grad_()
    (torch.from_numpy(x) @ torch.from_numpy(w) + leaf).backward(torch.from_numpy(ct))
    assert leaf.grad is not None
    np.testing.assert_allclose(gradient, leaf.grad, rtol=1e-5, atol=1e-5)


SHORT_SUMS = {
    "rows": ("float[30, 20]", "[0]", "float[20]", True),
    "two axes": ("float[5, 6, 20]", "[1, 0]", "float[20]", True),
    "two axes of columns": ("float[30, 4, 5]", "[0]", "float[4, 5]", True),
    "negative axes": ("float[30, 20]", "[-2]", "float[20]", True),
    "few rows": ("float[10, 20]", "[0]", "float[20]", False),
    "few columns": ("float[30, 4]", "[0]", "float[4]", False),
    "all axes": ("float[30, 20]", "[0, 1]", "float", False),
    "the last axis": ("float[30, 20]", "[1]", "float[30]", False),
    "an unknown size": ("float[n, 20]", "[0]", "float[20]", False),
    "float64": ("double[30, 20]", "[0]", "double[20]", False),
}


@pytest.mark.parametrize("case", SHORT_SUMS)
def test_a_short_sum_over_the_first_axes_becomes_the_function(case: str) -> None:
    given, axes, result, becomes = SHORT_SUMS[case]
    proto = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> g ({given} x) => ({result} y)
        <int64[{axes.count(",") + 1}] axes = {{{axes[1:-1]}}}> {{ y = ReduceSum<keepdims=0>(x, axes) }}"""
    )
    fused = rewritten(proto, PASSES)
    assert ops(fused)["ColumnSum_float"] == becomes
    shape = [30 if size == "n" else int(size) for size in given.split("[")[1][:-1].split(", ")]
    x = RNG.standard_normal(shape).astype(np.float64 if case == "float64" else np.float32)
    (y,), want = (
        run(to_proto(fused), {"x": x}),
        x.astype(np.float64).sum(tuple(map(int, axes[1:-1].split(",")))),
    )
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


def test_a_short_sum_that_keeps_its_axes_stays() -> None:
    proto = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[30, 20] x) => (float[1, 20] y)
        <int64[1] axes = {0}> { y = ReduceSum(x, axes) }"""
    )
    assert ops(rewritten(proto, PASSES)) == {"ReduceSum": 1}
