"""Chains of elementwise ops become programs that compute the same numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from fusion.rewriting import ops, rewritten
from onnxtrain.fusion import ElementwisePass
from onnxtrain.fusion._instructions import EXPANSIONS
from onnxtrain.fusion.elementwise import INSTRUCTIONS, MOST_INPUTS, MOST_OUTPUTS
from onnxtrain.passes import to_proto
from onnxtrain.runtime.kernels import kernel_library, register_kernels
from passes._models import run

UNARY = ("Neg", "Abs", "Reciprocal", "Sqrt", "Exp", "Log", "Sigmoid", "Tanh", "Erf", "Relu", "Sign", "Floor", "Ceil",
         "Round", "Softplus", "Sin", "Cos", "LeakyRelu", "Gelu")  # fmt: skip
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow")
COMPARISONS = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")


def net(body: str, inputs: str, outputs: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> net ({inputs}) => ({outputs}) {{ {body} }}'
    )


def feeds(proto: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs; symbolic sizes are 5."""
    rng = np.random.default_rng(seed)
    feed: dict[str, np.ndarray] = {}
    for value in proto.graph.input:
        shape = [dim.dim_value or 5 for dim in value.type.tensor_type.shape.dim]
        numbers = np.asarray(rng.standard_normal(shape))
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feed[value.name] = numbers > 0 if dtype == np.bool_ else numbers.astype(dtype)
    return feed


def with_kernels(proto: onnx.ModelProto, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    register_kernels(options, [function.name for function in proto.functions])
    return ort.InferenceSession(proto.SerializeToString(), options).run(None, dict(feed))


def check(proto: onnx.ModelProto, seed: int = 0) -> ir.Model:
    """Rewrites a model, and compares its outputs, by the bodies and by the kernels, with those of the model."""
    model = rewritten(proto, ElementwisePass())
    new, feed = to_proto(model), feeds(proto, seed)
    expected = run(proto, feed)
    onnx.checker.check_model(new)
    for got, want in zip(run(new, feed), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    if kernel_library() is not None:
        for got, want in zip(with_kernels(new, feed), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    return model


def calls(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type.startswith("Elementwise")]


def test_a_chain_is_one_call() -> None:
    body = "a = Add(x, b) t = Tanh(a) y = Mul(t, x)"
    model = check(net(body, "float[n, 4] x, float[4] b", "float[n, 4] y"))
    assert ops(model) == {"Elementwise0_float": 1}
    (call,) = calls(model)
    assert [value.name for value in call.outputs] == ["y"]


def test_values_that_others_read_are_returned() -> None:
    body = "a = Add(x, b) t = Tanh(a) p = MatMul(t, w) y = Mul(p, t) z = Neg(y)"
    model = check(net(body, "float[n, 4] x, float[4] b, float[4, 4] w", "float[n, 4] y, float[n, 4] z"))
    assert [[value.name for value in call.outputs] for call in calls(model)] == [["t"], ["y", "z"]]


def test_no_call_depends_on_itself() -> None:
    """`c` reads `a`, and `p`, which is computed from `a`: `a` and `c` are in two calls."""
    body = "a = Exp(x) d = Neg(a) p = Softmax(d) c = Add(a, p) y = Mul(c, c)"
    model = check(net(body, "float[3, 4] x", "float[3, 4] y"))
    assert [call.inputs[0].name for call in calls(model)] == ["x", "a"]


def test_two_chains_that_meet_become_one() -> None:
    body = "a = Exp(x) b = Neg(a) c = Tanh(z) d = Mul(c, c) y = Add(b, d)"
    model = check(net(body, "float[3, 4] x, float[3, 4] z", "float[3, 4] y"))
    assert ops(model) == {"Elementwise0_float": 1}


def test_chains_that_depend_on_each_other_do_not_become_one() -> None:
    body = "a = Exp(x) b = Neg(a) s = Softmax(b) c = Tanh(s) d = Mul(c, c) y = Add(b, d)"
    model = check(net(body, "float[3, 4] x", "float[3, 4] y"))
    assert len(calls(model)) == 2


def test_a_comparison_is_part_of_its_readers() -> None:
    body = "c = Greater(x, b) n = IsNaN(x) o = Or(c, n) m = Not(o) a = Where(m, x, b) y = Mul(a, x)"
    model = check(net(body, "float[n, 4] x, float[4] b", "float[n, 4] y"))
    assert ops(model) == {"Elementwise0_float": 1}


def test_what_only_comparisons_of_the_chain_read_is_not_returned() -> None:
    body = "a = Abs(x) c = Less(a, b) n = Not(c) h = Mul(a, a) s = Sub(a, b) y = Where(n, s, h)"
    model = check(net(body, "float[n, 4] x, float[4] b", "float[n, 4] y"))
    assert ops(model) == {"Elementwise0_float": 1}
    assert [value.name for value in calls(model)[0].outputs] == ["y"]


@pytest.mark.parametrize(
    ("more", "outputs"),
    [
        ("p = MatMul(y, w)", "float[n, 4] p, bool[n, 4] c"),
        ("i = Cast<to = 7>(c) p = MatMul(y, w)", "float[n, 4] p, int64[n, 4] i"),
        ("q = MatMul(y, w) p = Where(c, q, x)", "float[n, 4] p"),
    ],
)
def test_what_comparisons_outside_of_the_chain_read_is_returned(more: str, outputs: str) -> None:
    body = f"a = Abs(x) c = Less(a, b) h = Mul(a, a) y = Where(c, h, x) {more}"
    model = check(net(body, "float[n, 4] x, float[4] b, float[4, 4] w", outputs))
    assert [value.name for value in calls(model)[0].outputs] == ["a", "y"]


def test_a_comparison_that_others_read_remains() -> None:
    body = "c = Greater(x, z) f = Cast<to = 1>(c) y = Mul(f, x)"
    model = check(net(body, "float[n, 4] x, float[4] z", "float[n, 4] y, bool[n, 4] c"))
    assert ops(model) == {"Elementwise0_float": 1, "Greater": 1}


MASKED = "f = Where({mask}, x, zero) y = Exp(f)"


def with_initializers(proto: onnx.ModelProto, **arrays: np.ndarray | np.generic) -> onnx.ModelProto:
    """Adds the initializers zero and minus, and those given."""
    for name, array in {"zero": np.float32(0), "minus": np.float32(-np.inf), **arrays}.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return proto


@pytest.mark.parametrize(
    ("before", "mask", "inputs", "left"),
    [
        pytest.param("", "b", "bool[n, 4, 4] b", {}, id="input"),
        pytest.param("", "b", "bool[4, 1] b", {"Cast": 1}, id="input that broadcasts"),
        pytest.param("", "causal", "", {"Cast": 1}, id="initializer"),
        pytest.param("", "yes", "", {"Cast": 1}, id="scalar initializer"),
        pytest.param("c = Less(i, j)", "c", "int64[n, 4, 1] i, int64[4] j", {"Less": 1}, id="integers"),
        pytest.param("c = Less(u, u)", "c", "double[n, 4, 4] u", {"Less": 1}, id="float64"),
        pytest.param("c = Equal(b, causal)", "c", "bool[n, 4, 4] b", {"Equal": 1}, id="bools"),
        pytest.param("c = Gather(b, k)", "c", "bool[9, 4] b, int64[4] k", {"Cast": 1, "Gather": 1}, id="gathered"),
        pytest.param("c = Trilu<upper=0>(b)", "c", "bool[4, 4] b", {"Cast": 1, "Trilu": 1}, id="triangle"),
        pytest.param("c = Slice(b, i0, i4, i1)", "c", "bool[4, 5] b", {"Cast": 1, "Slice": 1}, id="slice"),
        pytest.param("c = Not(b)", "c", "bool[n, 4, 4] b", {}, id="negated"),
        pytest.param("g = Greater(x, z) c = And(g, b)", "c", "bool[4] b, float[4, 1] z", {"Cast": 1},
                     id="and a comparison"),
        pytest.param("g = IsNaN(x) n = Not(b) c = Or(n, g)", "c", "bool[4] b", {"Cast": 1}, id="or a comparison"),
        pytest.param("g = Greater(x, x) e = Equal(g, b) ", "e", "bool[n, 4, 4] b", {"Greater": 1, "Equal": 1},
                     id="of a comparison and a bool"),
    ],
)  # fmt: skip
def test_a_program_reads_masks(before: str, mask: str, inputs: str, left: dict[str, int]) -> None:
    proto = net(
        f"{before} {MASKED.format(mask=mask)}", f"float[n, 4, 4] x, {inputs}".rstrip(", "), "float[n, 4, 4] y"
    )
    indices = {"i0": np.array([0]), "i1": np.array([1]), "i4": np.array([4])}
    model = check(with_initializers(proto, causal=np.tri(4, dtype=bool), yes=np.bool_(True), **indices))
    assert ops(model) == {"Elementwise0_float": 1, **left}


def test_a_program_reads_the_bool_values_of_casts() -> None:
    body = "f = Cast<to = 1>(mask) g = Div(f, z) y = Mul(x, g)"
    model = check(net(body, "float[n, 4] x, float z, bool[n, 4] mask", "float[n, 4] y"))
    (call,) = calls(model)
    assert ops(model) == {"Elementwise0_float": 1}
    assert [value.name for value in call.inputs if value is not None] == ["z", "x", "mask"]
    assert call.attributes.get_ints("bools") == (1,)


def test_a_program_casts_more_masks_than_it_has_places_for() -> None:
    masks = [f"m{i}" for i in range(6)]
    steps = [f"a{i + 1} = Where({mask}, a{i}, zero)" for i, mask in enumerate(masks)]
    inputs = ", ".join(f"bool[n, 4] {mask}" for mask in masks)
    body = " ".join(["a0 = Exp(x)", *steps, "y = Neg(a6)"])
    model = check(with_initializers(net(body, f"float[n, 4] x, {inputs}", "float[n, 4] y")))
    assert ops(model) == {"Cast": 2, "Elementwise0_float": 1}


def test_programs_share_the_cast_of_a_mask() -> None:
    body = """n = Not(mask) a = Where(n, zero, x) b = Exp(a) p = Softmax(b)
        c = Where(mask, p, minus) d = Where(n, minus, c) y = Exp(d)"""
    proto = net(body, "float[n, 4, 4] x, bool[4, 4] mask", "float[n, 4, 4] y")
    model = check(with_initializers(proto))
    assert ops(model) == {"Cast": 1, "Elementwise0_float": 1, "Softmax": 1, "Elementwise1_float": 1}
    assert model.graph[0].op_type == "Cast"
    assert all(model.graph[0].outputs[0] in call.inputs for call in calls(model))


def test_programs_read_a_cast_that_the_graph_has() -> None:
    proto = net(f"{MASKED.format(mask='b')} v = Cast<to = 1>(b) w = Softmax(v)", "float[n, 4] x, bool[n, 4] b",
                "float[n, 4] y, float[n, 4] w")  # fmt: skip
    assert ops(check(with_initializers(proto))) == {"Cast": 1, "Softmax": 1, "Elementwise0_float": 1}


def test_the_cast_of_a_mask_that_broadcasts_remains() -> None:
    proto = net("f = Cast<to = 1>(b) g = Mul(f, x) y = Exp(g)", "float[n, 4] x, bool[4] b", "float[n, 4] y")
    model = check(proto)
    assert ops(model) == {"Cast": 1, "Elementwise0_float": 1}
    assert calls(model)[0].attributes["program"].as_ints()[0] == INSTRUCTIONS.index("Mul")


@pytest.mark.parametrize(
    ("body", "inputs", "shape", "others"),
    [
        ("y = Where(b, x, zero)", "float[n, 64] x, bool[n, 64] b", "n, 64", {}),
        ("y = Where(b, x, zero)", "float[n, 4, 64] x, bool[4, 64] b", "n, 4, 64", {"Cast": 1}),
        ("c = Not(b) y = Where(c, zero, x)", "float[n, 64] x, bool[64] b", "n, 64", {"Cast": 1}),
        # Of two shapes.
        ("a = Exp(x) y = Where(b, a, zero)", "float[64] x, bool[n, 64] b", "n, 64", {"Exp": 1}),
    ],
)
def test_one_where_becomes_a_call(body: str, inputs: str, shape: str, others: dict[str, int]) -> None:
    model = check(with_initializers(net(body, inputs, f"float[{shape}] y")))
    assert ops(model) == {"Elementwise0_float": 1, **others}


def test_a_where_of_numbers_stays() -> None:
    """ONNX Runtime folds it if the mask is constant."""
    body = "a = Where(b, zero, minus) y = Add(a, x)"
    proto = with_initializers(net(body, "float[n, 64] x, bool[n, 64] b", "float[n, 64] y"))
    assert ops(check(proto)) == {"Where": 1, "Add": 1}


def test_one_op_whose_operand_broadcasts_in_short_runs_reads_a_mask() -> None:
    proto = with_initializers(
        net("y = Where(b, x, zero)", "float[n, 8, 1] x, bool[8, 32] b", "float[n, 8, 32] y")
    )
    assert ops(check(proto)) == {"Cast": 1, "Elementwise0_float": 1}


def test_a_mask_that_depends_on_the_chain_is_read_by_another_call() -> None:
    body = "a = Exp(x) g = Greater(a, x) c = Xor(g, b) d = Where(c, a, x) y = Neg(d)"
    model = check(net(body, "float[n, 4] x, bool[n, 4] b", "float[n, 4] y"))
    assert ops(model) == {"Exp": 1, "Greater": 1, "Xor": 1, "Elementwise0_float": 1}


def test_masks_count_as_inputs() -> None:
    count = 2 * MOST_INPUTS
    inputs = ", ".join(["float[3] s0", *(f"bool[3] b{i}" for i in range(1, count))])
    body = " ".join(f"s{i} = Where(b{i}, s{i - 1}, minus)" for i in range(1, count))
    model = check(with_initializers(net(body, inputs, f"float[3] s{count - 1}")))
    assert len(calls(model)) > 1
    assert all(sum(v is not None for v in call.inputs) <= MOST_INPUTS for call in calls(model))


def test_the_branch_that_a_mask_does_not_select_may_be_any_number() -> None:
    """The results of segment sums, `x.masked_fill(~mask, -inf).exp()`, and products with NaN and infinity."""
    body = """n = Not(mask) a = Where(n, minus, x) e = Exp(a) z = Where(n, zero, e) p = Mul(x, x)
        q = Where(mask, p, zero) y = Add(q, z)"""
    proto = with_initializers(
        net(body, "float[n, 4, 4] x, bool[4, 4] mask", "float[n, 4, 4] y, float[n, 4, 4] z")
    )
    new = to_proto(rewritten(proto, ElementwisePass()))
    assert [node.op_type for node in new.graph.node] == ["Cast", "Elementwise0_float"]
    mask = np.tri(4, dtype=bool)
    for special in (np.nan, np.inf, -np.inf):
        feed = {"x": np.where(mask, np.float32(2), np.float32(special))[None], "mask": mask}
        expected = run(proto, feed)
        assert np.isfinite(expected).all()
        for got, want in zip(run(new, feed), expected, strict=True):
            np.testing.assert_array_equal(got, want)
        if kernel_library() is not None:
            y, z = with_kernels(new, feed)
            np.testing.assert_allclose([y, z], expected, rtol=1e-6)


def test_masks_of_fewer_columns() -> None:
    body = """a = Exp(x) l = Slice(a, zeros, last, axes) n = Not(b) d = Where(n, l, zero) r = ReduceSum(d, axes)
        p = Pad(d, pads) q = Where(c, p, x) s = Slice(b, zeros, one, axes) y = Where(s, q, a)"""
    outputs = "float[n, 3, 12] y, float[n, 3, 1] r"
    proto = with_initializers(net(body, "float[n, 3, 12] x, bool[n, 3, 11] b, bool[12] c", outputs))
    numbers = {"zeros": [0], "last": [-1], "one": [1], "axes": [2], "pads": [0, 0, 1, 0, 0, 0]}
    model = check_closely(constants(proto, **numbers))
    assert ops(model) == {"Slice": 1, "Cast": 3, "Elementwise0_float": 1}


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("y = Exp(x)", "float[n, 4] x"),
        # Of two shapes.
        ("a = Exp(x) y = Add(a, z)", "float[64] x, float[n, 64] z"),
        # Integers and booleans that are not computed from float32.
        ("c = Equal(i, j) y = Where(c, x, x)", "float[n, 4] x, int64[n, 4] i, int64[n, 4] j"),
        # ONNX Runtime fuses these to Gelu.
        (
            "half = Constant<value = float {0.5}>() root = Constant<value = float {1.41421356}>() "
            "one = Constant<value = float {1}>() h = Mul(x, half) d = Div(x, root) e = Erf(d) p = Add(e, one) "
            "y = Mul(h, p)",
            "float[n, 4] x",
        ),
        # Three operands.
        ("a = Max(x, x, x) y = Sum(a, x)", "float[n, 4] x"),
    ],
)
def test_what_is_no_chain_stays(body: str, inputs: str) -> None:
    proto = net(body, inputs, "float[n, 64] y" if "64" in inputs else "float[n, 4] y")
    assert not ElementwisePass()(ir.from_proto(onnx.shape_inference.infer_shapes(proto))).modified


def test_unknown_shapes_stay() -> None:
    proto = net("s = NonZero(x) t = Cast<to = 1>(s) a = Exp(t) y = Neg(a)", "float[n] x", "float[p, q] y")
    assert not calls(rewritten(proto, ElementwisePass()))


def test_values_that_must_be_kept_stay() -> None:
    proto = net("a = Exp(x) b = Neg(a) c = Tanh(b) y = Mul(c, b)", "float[n] x", "float[n] y")
    assert ops(rewritten(proto, ElementwisePass(["a", "b"]))) == {"Exp": 1, "Neg": 1, "Elementwise0_float": 1}


def test_many_inputs_and_outputs() -> None:
    count = 40
    inputs = ", ".join(f"float[3] x{i}" for i in range(count))
    body = "s0 = Neg(x0) " + " ".join(f"s{i} = Add(s{i - 1}, x{i})" for i in range(1, count))
    model = check(net(body, inputs, f"float[3] s{count - 1}"))
    assert 1 < len(calls(model)) <= 2 * count // MOST_INPUTS
    outputs = ", ".join(f"float[3] s{i}" for i in range(count))
    model = check(net(body, inputs, outputs))
    assert all(len(call.outputs) <= MOST_OUTPUTS for call in calls(model))


def test_numbers_that_constants_determine_stay_outside() -> None:
    body = "d = Div(k, two) c = Identity(x) y = Mul(d, c) z = Neg(y)"
    proto = net(body, "float[3] x", "float[3] z")
    for name, number in (("k", 1.0), ("two", 2.0)):
        proto.graph.initializer.append(numpy_helper.from_array(np.float32(number), name))
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    assert ElementwisePass()(model).modified
    assert ops(model) == {"Div": 1, "Identity": 1, "Elementwise0_float": 1}
    feed = {"x": np.array([1, -2, 3], np.float32)}
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    np.testing.assert_array_equal(session.run(None, feed)[0], -feed["x"] / 2)


def test_equal_chains_share_one_function() -> None:
    body = "a = Exp(x) b = Neg(a) m = MatMul(b, b) c = Exp(m) y = Neg(c)"
    model = check(net(body, "float[4, 4] x", "float[4, 4] y"))
    assert ops(model) == {"Elementwise0_float": 2, "MatMul": 1}


def test_a_value_that_a_branch_reads_is_returned() -> None:
    body = """a = Exp(x) b = Neg(a)
        s = If(c) <
            then_branch = t () => (float[3] p) { p = Softmax(a) }, else_branch = e () => (float[3] q) { q = Neg(x) }
        >
        y = Add(b, s)"""
    proto = net(body, "float[3] x, bool c", "float[3] y")
    model = rewritten(proto, ElementwisePass())
    feed = {"x": np.array([1, -2, 3], np.float32), "c": np.array(True)}
    np.testing.assert_array_equal(run(to_proto(model), feed)[0], run(proto, feed)[0])


def test_the_opcodes_are_those_of_the_kernel() -> None:
    table = Path(__file__).parents[2] / "kernels" / "csrc" / "elementwise" / "operations.h"
    names = re.findall(r"^  X\((\w+), \d", table.read_text(), re.MULTILINE)
    assert [name if name != "ToFloat" else "Cast" for name in names[: len(INSTRUCTIONS)]] == list(
        INSTRUCTIONS
    )


def random_net(seed: int) -> onnx.ModelProto:
    """A random net of elementwise ops, comparisons, products, sums and softmax, with broadcasting inputs."""
    rng = np.random.default_rng(seed)
    shapes = {"full": "n, 4, 6", "last": "6", "rows": "n, 1, 1", "middle": "4, 1", "one": "1", "scalar": ""}
    inputs = [f"float[{shape}] {name}" if shape else f"float {name}" for name, shape in shapes.items()]
    full, masks, lines = ["full"], [], []
    other = list(shapes)

    def pick(names: list[str]) -> str:
        # Most often a recent value, so that chains are long.
        return names[max(0, len(names) - 1 - int(rng.exponential(3)))]

    for number in range(int(rng.integers(4, 40))):
        name, kind = f"v{number}", rng.random()
        operand = pick(full) if rng.random() < 0.6 else other[rng.integers(len(other))]
        if kind < 0.04:
            bounds = [f"{name}_{place}" for place in range(rng.integers(1, 3))]
            lines += [f"{bound} = Constant<value = float {{{rng.normal():.2f}}}>()" for bound in bounds]
            lines.append(f"{name} = Clip({', '.join([pick(full), *bounds])})")
        elif kind < 0.35:
            lines.append(f"{name} = {UNARY[rng.integers(len(UNARY))]}({pick(full)})")
        elif kind < 0.75:
            pair = [pick(full), operand] if rng.random() < 0.5 else [operand, pick(full)]
            lines.append(f"{name} = {BINARY[rng.integers(len(BINARY))]}({', '.join(pair)})")
        elif kind < 0.85:
            lines.append(
                f"m{number} = {COMPARISONS[rng.integers(len(COMPARISONS))]}({pick(full)}, {operand})"
            )
            masks.append(f"m{number}")
            lines.append(f"{name} = Where({pick(masks)}, {pick(full)}, {operand})")
        elif kind < 0.9 and masks:
            lines.append(f"{name} = Cast<to = 1>({pick(masks)})")
        elif kind < 0.95:
            lines.append(f"{name} = Softmax({pick(full)})")
        else:
            lines.append(f"{name} = ReduceSum<keepdims = 1>({pick(full)})")
            other.append(name)
            continue
        full.append(name)
    results = sorted({full[-1], *(pick(full[1:] or full) for _ in range(3))} - {"full"})
    outputs = ", ".join(f"float[n, 4, 6] {name}" for name in results)
    return net(" ".join(lines), ", ".join(inputs), outputs)


@pytest.mark.sample(every=3)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("seed", range(150))
def test_random_nets(seed: int) -> None:
    proto = random_net(seed)
    feed = feeds(proto, seed)
    model = rewritten(proto, ElementwisePass())
    expected = run(proto, feed)
    for got, want in zip(run(to_proto(model), feed), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_every_instruction_is_drawn() -> None:
    drawn = {node.op_type for seed in range(150) for node in random_net(seed).graph.node}
    assert drawn >= EXPANSIONS
    assert set(INSTRUCTIONS) - drawn == {"IsNaN", "And", "Or", "Not", "Log1p", "Window"}


def constants(proto: onnx.ModelProto, **values: list[int]) -> onnx.ModelProto:
    """Adds int64 initializers."""
    for name, numbers in values.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.array(numbers, np.int64), name))
    return proto


def test_slices_and_pads_join_the_chain() -> None:
    body = """a = Exp(x) l = Slice(a, zero, last, axes) r = Slice(a, one, end, axes) d = Sub(r, l)
        p = Pad(d, pads) y = Mul(p, x)"""
    proto = constants(
        net(body, "float[n, 3, 12] x", "float[n, 3, 12] y"),
        zero=[0], last=[-1], one=[1], end=[12], axes=[2], pads=[0, 0, 1, 0, 0, 0],
    )  # fmt: skip
    model = check(proto)
    assert ops(model) == {"Elementwise0_float": 1}
    (call,) = calls(model)
    assert call.attributes["row"].as_ints() == (1, 12)


def test_slices_of_an_input_are_read_in_place() -> None:
    """Of a longer row each slice is an input of its own; the slices remain if others read them."""
    body = "l = Slice(x, zero, half, axes) r = Slice(x, half, end, axes) s = Sigmoid(r) y = Mul(l, s)"
    numbers = {"zero": [0], "half": [64], "end": [128], "axes": [1]}
    model = check(constants(net(body, "float[n, 128] x", "float[n, 64] y"), **numbers))
    assert ops(model) == {"Elementwise0_float": 1}
    (call,) = calls(model)
    assert call.attributes["offsets"].as_ints() == (0, 64)
    outputs = "float[n, 64] y, float[n, 64] r"
    assert ops(check(constants(net(body, "float[n, 128] x", outputs), **numbers)))["Slice"] == 1


def test_slices_of_a_broadcast_input_are_computed_again() -> None:
    body = """l = Slice(g, zero, last, axes) r = Slice(g, one, end, axes) w = Sub(r, l) a = Sub(x, l) y = Div(a, w)"""
    numbers = {"zero": [0], "last": [-1], "one": [1], "end": [9], "axes": [-1]}
    model = check(constants(net(body, "float[n, 4, 1] x, float[4, 9] g", "float[n, 4, 8] y"), **numbers))
    assert ops(model) == {"Elementwise0_float": 1}


@pytest.mark.parametrize(
    ("op", "axes", "keep", "shape"),
    [("ReduceSum", [2], 1, "n, 3, 1"), ("ReduceSum", [-1, 1], 0, "n"), ("ReduceSum", [0], 0, "3, 7"),
     ("ReduceMean", [0, 1], 1, "1, 1, 7"), ("ReduceMean", [0, 1, 2], 0, ""), ("ReduceSum", [], 0, ""),
     ("ReduceMax", [2], 1, "n, 3, 1"), ("ReduceMin", [-1, 1], 0, "n"), ("ReduceMax", [0], 0, "3, 7"),
     ("ReduceMin", [], 0, "")],
)  # fmt: skip
def test_a_reduction_ends_a_chain(op: str, axes: list[int], keep: int, shape: str) -> None:
    given = "a, axes" if axes else "a"
    body = f"a = Mul(x, z) b = Neg(a) r = {op}<keepdims = {keep}>({given}) y = Tanh(b)"
    result = f"float[{shape}] r" if shape else "float r"
    proto = net(body, "float[n, 3, 7] x, float[n, 3, 7] z", f"float[n, 3, 7] y, {result}")
    model = check_closely(constants(proto, axes=axes) if axes else proto)
    assert ops(model) == {"Elementwise0_float": 1}


def test_reductions_that_stay_outside() -> None:
    """A reduction of an axis in the middle, of other axes than the chain's, or of an input is not fused."""
    body = """a = Mul(x, x) m = ReduceSum(a, middle) r = ReduceSum(a, first) t = ReduceSum(a, last)
        i = ReduceSum(x, last)"""
    outputs = "float[n, 1, 7] m, float[1, 3, 7] r, float[n, 3, 1] t, float[n, 3, 1] i"
    proto = constants(net(body, "float[n, 3, 7] x", outputs), middle=[1], first=[0], last=[2])
    assert ops(check_closely(proto)) == {"Elementwise0_float": 1, "ReduceSum": 3}


def test_what_reads_a_sum_is_another_chain() -> None:
    body = "a = Exp(x) s = ReduceSum(a, last) q = Div(a, s) y = Mul(q, q)"
    model = check_closely(constants(net(body, "float[n, 7] x", "float[n, 7] y"), last=[1]))
    assert ops(model) == {"Elementwise0_float": 1, "Elementwise1_float": 1}


def test_sums_are_added_before_they_are_summed() -> None:
    body = """a = Exp(x) b = Slice(a, zero, last, axes) r = ReduceSum(a, axes) s = ReduceSum(b, axes)
        t = ReduceSum(b, axes) u = Add(r, s) y = Add(u, t)"""
    proto = constants(net(body, "float[n, 9] x", "float[n, 1] y"), zero=[0], last=[-1], axes=[1])
    model = check_closely(proto)
    assert ops(model) == {"Elementwise0_float": 1}
    assert calls(model)[0].attributes["outputs"].as_ints() == (
        calls(model)[0].attributes["outputs"].as_ints()[0],
    )


def test_maxima_are_not_added_before_they_are_found() -> None:
    body = "a = Exp(x) b = Neg(a) r = ReduceMax(a, axes) s = ReduceMax(b, axes) y = Add(r, s)"
    model = check_closely(constants(net(body, "float[n, 9] x", "float[n, 1] y"), axes=[1]))
    assert ops(model) == {"Elementwise0_float": 1, "Add": 1}


def test_rows_of_a_maximum_have_no_further_columns() -> None:
    """The zeros behind a shorter row would be its maximum."""
    body = """a = Neg(x) b = Slice(a, zero, last, axes) c = Exp(a) r = ReduceMax(b, axes)"""
    proto = constants(
        net(body, "float[n, 9] x", "float[n, 1] r, float[n, 9] c"), zero=[0], last=[-1], axes=[1]
    )
    model = rewritten(proto, ElementwisePass())
    x = np.abs(feeds(proto)["x"]) + np.float32(1)
    for got, want in zip(run(to_proto(model), {"x": x}), run(proto, {"x": x}), strict=True):
        np.testing.assert_array_equal(got, want)
    if kernel_library() is not None:
        r, _ = with_kernels(to_proto(model), {"x": x})
        np.testing.assert_array_equal(r, (-x[:, :-1]).max(1, keepdims=True))


def check_closely(proto: onnx.ModelProto, seed: int = 0) -> ir.Model:
    """Rewrites a model whose sums are added in another order, and compares its outputs with float64."""
    model = rewritten(proto, ElementwisePass())
    new, feed = to_proto(model), feeds(proto, seed)
    onnx.checker.check_model(new)
    expected = run(proto, feed)
    results = [run(new, feed)]
    if kernel_library() is not None:
        results.append(with_kernels(new, feed))
    for values in results:
        for got, want in zip(values, expected, strict=True):
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    return model


def random_windows(seed: int) -> onnx.ModelProto:
    """A random net of elementwise ops, slices, pads and sums, most of them along the last axis."""
    rng = np.random.default_rng(seed)
    width = int(rng.integers(3, 14))
    values: list[tuple[str, int]] = [("x", width), ("z", width)]
    lines, used, ends = [], {"first": [0], "last": [2]}, []

    def named(numbers: list[int]) -> str:
        name = "k" + "_".join(map(str, numbers)).replace("-", "m")
        used[name] = numbers
        return name

    for number in range(int(rng.integers(4, 40))):
        name, kind = f"v{number}", rng.random()
        source, size = values[max(0, len(values) - 1 - int(rng.exponential(3)))]
        alike = [other for other, count in values if count == size]
        if kind < 0.3:
            lines.append(f"{name} = {('Neg', 'Abs', 'Tanh', 'Sigmoid', 'Relu')[rng.integers(5)]}({source})")
        elif kind < 0.65:
            other = (
                alike[rng.integers(len(alike))]
                if rng.random() < 0.7
                else ("rows", "one", "b")[rng.integers(3)]
            )
            if other == "b":
                lines.append(f"{name}b = Slice(b, {named([0])}, {named([size])}, {named([-1])})")
                other = f"{name}b"
            lines.append(f"{name} = {('Add', 'Sub', 'Mul', 'Max')[rng.integers(4)]}({source}, {other})")
        elif kind < 0.8 and size > 1:
            start = int(rng.integers(0, 2))
            stop = size - int(rng.integers(0, 2)) if size - start > 1 else size
            lines.append(f"{name} = Slice({source}, {named([start])}, {named([stop])}, {named([2])})")
            size = stop - start
        elif kind < 0.92 and size < 14:
            before, after = (1, 0) if rng.random() < 0.5 else (0, 1)
            lines.append(f"{name} = Pad({source}, {named([0, 0, before, 0, 0, after])})")
            size += 1
        else:
            axes = "last" if rng.random() < 0.6 else "first"
            reduction = ("ReduceSum", "ReduceSum", "ReduceMax", "ReduceMin")[rng.integers(4)]
            lines.append(f"{name} = {reduction}({source}, {axes})")
            ends.append((name, "n, 4, 1" if axes == "last" else f"1, 4, {size}"))
            same = [end for end, shape in ends if shape == ends[-1][1]]
            if len(same) > 1:
                lines.append(f"{name}s = Add({same[-2]}, {same[-1]})")
                ends.append((f"{name}s", ends[-1][1]))
            continue
        values.append((name, size))
    results = {values[-1][0]: values[-1][1]} | dict(
        [values[int(rng.integers(2, len(values)))]] if len(values) > 2 else []
    )
    results = {name: size for name, size in results.items() if name not in ("x", "z")}
    outputs = [f"float[n, 4, {size}] {name}" for name, size in results.items()]
    outputs += [f"float[{shape}] {name}" for name, shape in ends]
    inputs = f"float[n, 4, {width}] x, float[n, 4, {width}] z, float[n, 1, 1] rows, float one, float[4, 20] b"
    if not outputs:
        lines.append("v = Neg(x)")
        outputs.append(f"float[n, 4, {width}] v")
    return constants(net(" ".join(lines), inputs, ", ".join(outputs)), **used)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("seed", range(120))
def test_random_windows(seed: int) -> None:
    check_closely(random_windows(seed), seed)


def test_random_windows_are_fused() -> None:
    models = [rewritten(random_windows(seed), ElementwisePass()) for seed in range(120)]
    used = [call for model in models for call in calls(model)]
    assert sum("row" in call.attributes for call in used) > 60
    assert sum("reductions" in call.attributes for call in used) > 40


@pytest.mark.parametrize(
    ("other", "fused"),
    [("n, 4, 1", True), ("n, 1, 8", True), ("4, 8", True), ("4, 1", True), ("1", False), ("8", True),
     ("n, 4, 8", False)],
)  # fmt: skip
def test_one_op_that_broadcasts_in_short_runs(other: str, fused: bool) -> None:
    model = check(net("y = Mul(x, z)", f"float[n, 4, 8] x, float[{other}] z", "float[n, 4, 8] y"))
    assert bool(calls(model)) == fused
