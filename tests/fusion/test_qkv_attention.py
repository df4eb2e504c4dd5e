"""Attention of parts of one tensor becomes attention of the tensor, with the same values and gradients."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from fusion.rewriting import feeds_of, ops, rewritten, with_gradients
from onnxtrain.fusion import AttentionPass, QkvAttentionPass
from onnxtrain.passes import canonicalize, load_model, to_proto
from passes._models import run
from tolerances import norm_relative_error

ATTENTION = """kt = Transpose<perm = [0, 1, 3, 2]>(k)  s = MatMul(q, kt)  {softmax}  z = MatMul(p, v)"""
SPLIT = """a, b, c = Split<axis = 0, num_outputs = 3>(t)  zero = Constant<value_ints = [0]>()
    q = Squeeze(a, zero)  k = Squeeze(b, zero)  v = Squeeze(c, zero)"""
GATHER = """i = Constant<value_int = 0>()  j = Constant<value_int = 1>()  l = Constant<value_int = -1>()
    q = Gather<axis = 0>(t, i)  k = Gather<axis = 0>(t, j)  v = Gather<axis = 0>(t, l)"""
SLICE = """n0 = Constant<value_ints = [0]>()  n1 = Constant<value_ints = [1]>()  n2 = Constant<value_ints = [2]>()
    end = Constant<value_ints = [9223372036854775807]>()
    a = Slice(t, n0, n1)  b = Slice(t, n1, n2, n0)  c = Slice(t, n2, end, n0, n1)
    q = Squeeze(a, n0)  k = Squeeze(b, n0)  v = Squeeze(c, n0)"""
"""As PyTorch's exporter writes an unbind."""
OF_TORCH = """u = Reshape(x, four)  one = Constant<value_ints = [0]>()  w = Unsqueeze(u, one)
    r = Transpose<perm = [3, 1, 2, 0, 4]>(w)  third = Constant<value_ints = [3]>()  t = Squeeze(r, third)
    i = Constant<value_int = 0>()  j = Constant<value_int = 1>()  l = Constant<value_int = 2>()
    q0 = Gather<axis = 0>(t, i)  k0 = Gather<axis = 0>(t, j)  v0 = Gather<axis = 0>(t, l)
    q1 = Reshape(q0, merged)  k1 = Reshape(k0, merged)  v1 = Reshape(v0, merged)
    q2 = Transpose<perm = [1, 0, 2]>(q1)  k2 = Transpose<perm = [1, 0, 2]>(k1)  v2 = Transpose<perm = [1, 0, 2]>(v1)
    q = Reshape(q2, parted)  k = Reshape(k2, parted)  v = Reshape(v2, parted)"""
"""torch.nn.MultiheadAttention of x [positions, batch, 3 * heads * size]."""
OF_COLUMNS = """a, b, c = Split<axis = -1, num_outputs = 3>(x)
    d = Reshape(a, heads)  e = Reshape(b, heads)  f = Reshape(c, heads)
    q = Transpose<perm = [0, 2, 1, 3]>(d)  k = Transpose<perm = [0, 2, 1, 3]>(e)
    v = Transpose<perm = [0, 2, 1, 3]>(f)"""
"""GPT-2's, of x [batch, positions, 3 * heads * size]."""


def ints(**values: list[int]) -> str:
    return "  ".join(f"{name} = Constant<value_ints = {value}>()" for name, value in values.items())


LAYOUTS = {
    "batch first": ("2, 6, 3, 4, 5", f"t = Transpose<perm = [2, 0, 3, 1, 4]>(x)  {SPLIT}"),
    "gathered": ("2, 6, 3, 4, 5", f"t = Transpose<perm = [2, 0, 3, 1, 4]>(x)  {GATHER}"),
    "sliced": ("2, 6, 3, 4, 5", f"t = Transpose<perm = [2, 0, 3, 1, 4]>(x)  {SLICE}"),
    "sliced columns": (
        "2, 6, 60",
        ints(heads=[2, 6, 4, 5], i=[0], j=[20], l=[40], end=[60], last=[-1])
        + "  "
        + OF_COLUMNS.replace(
            "a, b, c = Split<axis = -1, num_outputs = 3>(x)",
            "a = Slice(x, i, j, last)  b = Slice(x, j, l, last)  c = Slice(x, l, end, last)",
        ),
    ),
    "one batch element": ("1, 6, 3, 4, 5", f"t = Transpose<perm = [2, 0, 3, 1, 4]>(x)  {SPLIT}"),
    "one head": ("2, 6, 3, 1, 5", f"t = Transpose<perm = [2, 0, 3, 1, 4]>(x)  {SPLIT}"),
    "heads first": ("2, 4, 3, 6, 5", f"t = Transpose<perm = [2, 0, 1, 3, 4]>(x)  {SPLIT}"),
    "symbolic": ("n, m, 3, 4, 5", f"t = Transpose<perm = [2, 0, 3, 1, 4]>(x)  {SPLIT}"),
    "PyTorch": (
        "6, 2, 60",
        ints(four=[6, 2, 3, 20], merged=[6, 8, 5], parted=[2, 4, 6, 5]) + "  " + OF_TORCH,
    ),
    "columns": ("2, 6, 60", ints(heads=[2, 6, 4, 5]) + "  " + OF_COLUMNS),
    "symbolic columns": ("n, m, 60", ints(heads=[0, 0, 4, 5]) + "  " + OF_COLUMNS),
}
PLAIN = "p = Softmax<axis = -1>(s)"
MASKED = "m = Add(s, mask)  p = Softmax<axis = -1>(m)"


def graph(
    layout: str, softmax: str = PLAIN, after: str = "y = Transpose<perm = [0, 2, 1, 3]>(z)"
) -> onnx.ModelProto:
    shape, parts = LAYOUTS[layout]
    mask = ", float[6, 6] mask" if softmax == MASKED else ""
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> net (float[{shape}] x{mask}) => (float[b, h, q, w] y) {{
        {parts}  {ATTENTION.format(softmax=softmax)}  {after} }}"""
    )


def check(proto: onnx.ModelProto, name: str) -> ir.Model:
    """The rewritten model has the op, and the values and gradients of the one that was not rewritten."""
    model = rewritten(proto, ir.passes.Sequential(AttentionPass(), QkvAttentionPass()))
    assert f"{name}_float" in ops(model), ops(model)
    assert not ops(model).keys() & {"Softmax", "Split", "Gather", "Slice"}
    feeds = feeds_of(proto, {"n": 2, "m": 6})
    plain = canonicalize(load_model(proto))
    value = run(proto, feeds)[0]
    assert norm_relative_error(run(to_proto(model), feeds)[0], value) <= 2e-6
    pulled = feeds | {"ct": np.random.default_rng(1).standard_normal(value.shape).astype(np.float32)}
    results = [run(with_gradients(each, list(feeds)), pulled) for each in (model, plain)]
    for own, reference in zip(*results, strict=True):
        assert norm_relative_error(own, reference) <= 2e-6
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_one_tensor_become_one_op(layout: str) -> None:
    assert "Transpose" not in ops(check(graph(layout), "QkvAttention")) or layout in (
        "PyTorch",
        "heads first",
    )


def test_with_a_mask() -> None:
    check(graph("batch first", MASKED), "QkvMaskedAttention")


def test_pytorch_s_own_order_of_the_output() -> None:
    proto = graph("PyTorch", after="y = Transpose<perm = [2, 0, 1, 3]>(z)")
    assert "Transpose" not in ops(check(proto, "QkvAttention"))


@pytest.mark.parametrize(
    ("after", "transposes"),
    [
        ("y = Relu(z)", 1),
        ("y = Transpose<perm = [0, 1, 3, 2]>(z)", 2),
        ("a0 = Transpose<perm = [0, 2, 1, 3]>(z)  u = Transpose<perm = [0, 2, 1, 3]>(a0)  y = Add(u, z)", 3),
    ],
)
def test_other_readers_of_the_output(after: str, transposes: int) -> None:
    assert ops(check(graph("batch first", after=after), "QkvAttention"))["Transpose"] == transposes


def test_an_output_of_the_graph() -> None:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> net (float[2, 6, 3, 4, 5] x) => (float[b, h, q, w] y) {{
        t = Transpose<perm = [2, 0, 3, 1, 4]>(x)  {SPLIT}
        {ATTENTION.format(softmax=PLAIN).replace("z = ", "y = ")} }}"""
    )
    assert ops(check(proto, "QkvAttention"))["Transpose"] == 1


OTHERS = {
    "another order": "2, 6, 3, 4, 5; t = Transpose<perm = [2, 0, 3, 1, 4]>(x)  "
    + SPLIT.replace("a, b, c", "b, a, c"),
    "queries twice": "2, 6, 3, 4, 5; t = Transpose<perm = [2, 0, 3, 1, 4]>(x)  "
    + GATHER.replace("(t, j)", "(t, i)"),
    "four parts": "2, 6, 4, 4, 5; t = Transpose<perm = [2, 0, 3, 1, 4]>(x)  " + GATHER.replace("-1", "2"),
    "slices that overlap": "2, 6, 3, 4, 5; t = Transpose<perm = [2, 0, 3, 1, 4]>(x)  "
    + SLICE.replace("(t, n1, n2, n0)", "(t, n0, n1, n0)"),
    "size not last": f"2, 6, 3, 5, 4; t = Transpose<perm = [2, 0, 4, 1, 3]>(x)  {SPLIT}",
    "in order already": "3, 2, 4, 6, 5; " + SPLIT.replace("(t)", "(x)"),
    "a ReLU in between": f"2, 6, 3, 4, 5; r = Transpose<perm = [2, 0, 3, 1, 4]>(x)  t = Relu(r)  {SPLIT}",
    "no elements": f"0, 6, 3, 4, 5; t = Transpose<perm = [2, 0, 3, 1, 4]>(x)  {SPLIT}",
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_attention_stays(case: str) -> None:
    shape, parts = OTHERS[case].split("; ", 1)
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> net (float[{shape}] x) => (float[b, h, q, w] y) {{
        {parts}  {ATTENTION.format(softmax=PLAIN).replace("z = ", "y = ")} }}"""
    )
    model = rewritten(proto, ir.passes.Sequential(AttentionPass(), QkvAttentionPass()))
    assert "Attention_float" in ops(model)
    assert "QkvAttention_float" not in ops(model)
