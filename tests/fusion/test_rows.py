"""Gathers and scatters of whole rows become ops on rows; others, and those that are not proved to be whole, stay."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest

from fusion.rewriting import ops
from onnxtrain.fusion import RowsPass
from onnxtrain.passes import infer_shapes, load_model, to_proto
from passes._models import normal, run

RNG = np.random.default_rng(3)
INDEX = {"i": np.array([1, -1, 0, 1, 2, 1]), "j": np.array([[1, -1, 0], [2, 1, 1]])}


def rewritten(
    text: str,
    shapes: Mapping[str, Sequence[int]],
    feeds: Mapping[str, np.ndarray] | None = None,
    *,
    passed: RowsPass | None = None,
) -> Counter[str]:
    """Returns the ops of the rewritten model, which must compute what the model computed."""
    proto = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]>\n' + text)
    inputs = {name: normal(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    inputs |= feeds or {}
    model = infer_shapes(load_model(proto))
    (passed or RowsPass())(model)
    for got, want in zip(run(to_proto(model), inputs), run(proto, inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    return Counter(re.sub(r"\d*_(float|double)", "", name) for name in ops(model).elements())


ROWS = "s = Shape(u)  k = Unsqueeze(i, one)  e = Expand(k, s)"


@pytest.mark.parametrize("reduction", ["none", "add", "max", "min"])
def test_a_scatter_of_rows(reduction: str) -> None:
    text = f"""net (float[n, w] x, int64[m] i, float[m, w] u) => (float[n, w] y) <int64[1] one = {{1}}> {{
        {ROWS}  y = ScatterElements<axis = 0, reduction = "{reduction}">(x, e, u) }}"""
    index = np.array([1, 0, -1]) if reduction == "none" else INDEX["i"]
    found = rewritten(text, {"x": (4, 3), "u": (len(index), 3)}, {"i": index})
    assert found["ScatterRows"] == 1
    assert not found & Counter(["ScatterElements", "Expand", "Shape"])


def test_a_gather_of_rows() -> None:
    text = f"""net (float[n, w] x, int64[m] i, float[m, w] u) => (float[m, w] y) <int64[1] one = {{1}}> {{
        {ROWS}  y = GatherElements<axis = 0>(x, e) }}"""
    shapes = {"x": (4, 3), "u": (6, 3)}
    assert rewritten(text, shapes, {"i": INDEX["i"]})["Gather"] == 1
    assert rewritten(text.replace("[n, w]", "[n, 3]").replace("[m, w]", "[m, 3]"), shapes, {"i": INDEX["i"]})[
        "GatherRows"
    ]


@pytest.mark.parametrize("op", ["gather", "scatter"])
@pytest.mark.parametrize("axis", [1, -2])
def test_rows_of_a_batch(op: str, axis: int) -> None:
    """Each entry of the batch has indices of its own."""
    call = f"GatherElements<axis = {axis}>(x, e)" if op == "gather" else (
        f'ScatterElements<axis = {axis}, reduction = "add">(x, e, u)'
    )  # fmt: skip
    text = f"""net (float[b, n, w] x, int64[b, m] j, float[b, m, w] u) => (float[b, p, w] y) <int64[1] last = {{2}}> {{
        s = Shape(u)  k = Unsqueeze(j, last)  e = Expand(k, s)  y = {call} }}"""
    found = rewritten(text, {"x": (2, 4, 3), "u": (2, 3, 3)}, {"j": INDEX["j"]})
    assert found["GatherRows" if op == "gather" else "ScatterRows"] == 1
    assert found["Expand"] == 0


def test_rows_that_a_batch_shares() -> None:
    text = """net (float[b, n, w] x, int64[m] i, float[b, m, w] u) => (float[b, n, w] y) <int64[1] last = {1}> {
        s = Shape(u)  k = Unsqueeze(i, last)  e = Expand(k, s)
        y = ScatterElements<axis = 1, reduction = "add">(x, e, u) }"""
    assert rewritten(text, {"x": (2, 4, 3), "u": (2, 6, 3)}, {"i": INDEX["i"]})["ScatterRows"] == 1


def test_checked_and_wrapped_indices() -> None:
    """PyTorch's exporter wraps indices after it has expanded them."""
    text = f"""net (float[n, w] x, int64[m] i, float[m, w] u) => (float[n, w] y)
        <int64[1] one = {{1}}, int64 four = {{4}}, int64 none = {{0}}, int64 far = {{4}}> {{
        {ROWS}  r = Mod(e, four)  c = Less(r, none)  g = Where(c, far, r)
        y = ScatterElements<axis = 0, reduction = "add">(x, g, u) }}"""
    found = rewritten(text, {"x": (4, 3), "u": (6, 3)}, {"i": INDEX["i"]})
    assert found["ScatterRows"] == found["Mod"] == found["Where"] == 1
    assert found["Expand"] == 0


def test_tiled_indices() -> None:
    text = """net (float[4, 3] x, int64[6, 1] i) => (float[6, 3] y) <int64[2] r = {1, 3}> {
        e = Tile(i, r)  y = GatherElements<axis = 0>(x, e) }"""
    assert rewritten(text, {"x": (4, 3)}, {"i": INDEX["i"][:, None]}) == {"Reshape": 1, "Gather": 1}


def test_indices_of_int32() -> None:
    text = """net (float[n, 8] x, int32[m, 1] i, float[m, 8] u) => (float[n, 8] y) {
        s = Shape(u)  e = Expand(i, s)  y = ScatterElements<axis = 0, reduction = "add">(x, e, u) }"""
    found = rewritten(text, {"x": (4, 8), "u": (6, 8)}, {"i": INDEX["i"][:, None].astype(np.int32)})
    assert found == {"Reshape": 1, "Cast": 1, "ScatterRows": 1}


@pytest.mark.parametrize("what", ["int64", "double", "float16"])
def test_other_dtypes(what: str) -> None:
    """Gather takes any dtype. float64 has no kernel, but rows are faster on a stock runtime, too."""
    text = f"""net ({what}[n, w] x, int64[m] i, {what}[m, w] u) => ({what}[m, w] y, {what}[n, w] z)
        <int64[1] one = {{1}}> {{ {ROWS}  y = GatherElements<axis = 0>(x, e)
        z = ScatterElements<axis = 0>(x, e, u) }}"""
    dtype = {"int64": np.int64, "double": np.float64, "float16": np.float16}[what]
    x, u = (10 * normal(4, 3)).astype(dtype), (10 * normal(3, 3, seed=1)).astype(dtype)
    found = rewritten(text, {}, {"x": x, "u": u, "i": np.array([1, 0, -1])})
    assert found["Gather"] == 1
    assert found["ScatterRows" if what == "double" else "ScatterElements"] == 1


def test_nd_ops_with_one_index() -> None:
    text = """net (float[n, 8, 9] x, int64[m] i, float[m, 8, 9] u) => (float[m, 8, 9] y, float[n, 8, 9] z)
        <int64[1] last = {-1}> { k = Unsqueeze(i, last)  y = GatherND(x, k)
        z = ScatterND<reduction = "add">(x, k, u) }"""
    found = rewritten(text, {"x": (4, 8, 9), "u": (6, 8, 9)}, {"i": INDEX["i"]})
    assert found == {"GatherRows": 1, "ScatterRows": 1}


@pytest.mark.parametrize("indices", ["i", "j"])
def test_an_nd_op_between_transposes(indices: str) -> None:
    k = INDEX[indices].ndim
    there = [*range(1, 1 + k), 0, 1 + k]
    back = [k, *range(k), k + 1]
    names = ["p", "q"][:k]
    rows = ", ".join(["b", *names, "w"])
    text = f"""net (float[b, n, w] x, int64[{", ".join(names)}, 1] k, float[{rows}] u)
        => (float[b, n, w] z, float[{rows}] y) {{
        t = Transpose<perm = [1, 0, 2]>(x)  v = Transpose<perm = {there}>(u)
        r = ScatterND<reduction = "add">(t, k, v)  z = Transpose<perm = [1, 0, 2]>(r)
        a = Transpose<perm = [1, 0, 2]>(z)  g = GatherND(a, k)  y = Transpose<perm = {back}>(g) }}"""
    feeds = {"k": INDEX[indices][..., None]}
    found = rewritten(text, {"x": (2, 4, 3), "u": (2, *INDEX[indices].shape, 3)}, feeds)
    assert found == {"ScatterRows": 1, "Gather": 1, "Squeeze": 2}


def test_a_table_of_zeros_between_transposes() -> None:
    text = """net (int64[p, 1] k, float[2, p, 3] u) => (float[2, 4, 3] z) <float zero = {0}, int64[3] s = {4, 2, 3}> {
        t = Expand(zero, s)  v = Transpose<perm = [1, 0, 2]>(u)
        r = ScatterND<reduction = "add">(t, k, v)  z = Transpose<perm = [1, 0, 2]>(r) }"""
    found = rewritten(text, {"u": (2, 6, 3)}, {"k": INDEX["i"][:, None]})
    assert found["Transpose"] == 0
    assert found["ScatterRows"] == 1


@pytest.mark.parametrize(
    "perms", [([1, 0, 2], [0, 2, 1]), ([0, 2, 1], [1, 0, 2]), ([2, 1, 0], [1, 0, 2])], ids=str
)
def test_other_transposes_stay(perms: tuple[list[int], list[int]]) -> None:
    text = f"""net (float[4, 2, 3] x, int64[p, 1] k, float[a, b, c] u) => (float[d, e, f] z) {{
        v = Transpose<perm = {perms[0]}>(u)
        r = ScatterND<reduction = "add">(x, k, v)  z = Transpose<perm = {perms[1]}>(r) }}"""
    shape = np.array([6, 2, 3])[np.argsort(perms[0])].tolist()
    found = rewritten(text, {"x": (4, 2, 3), "u": shape}, {"k": INDEX["i"][:, None]})
    assert found["Transpose"] == 2


LEFT_ALONE = {
    "indices of elements": (
        """net (float[4, 3] x, int64[6, 3] e, float[6, 3] u) => (float[4, 3] y) {
        y = ScatterElements<axis = 0, reduction = "add">(x, e, u) }""",
        {"x": (4, 3), "u": (6, 3)},
        {"e": RNG.integers(-4, 4, (6, 3))},
    ),
    "a part of each row": (
        """net (float[4, 3] x, int64[6, 1] i, float[6, 2] u) => (float[4, 3] y) <int64[2] s = {6, 2}> {
        e = Expand(i, s)  y = ScatterElements<axis = 0, reduction = "add">(x, e, u) }""",
        {"x": (4, 3), "u": (6, 2)},
        {"i": INDEX["i"][:, None]},
    ),
    "rows that may be a part": (
        """net (float[4, v] x, int64[6, 1] i, float[6, w] u) => (float[4, v] y) {
        s = Shape(u)  e = Expand(i, s)  y = ScatterElements<axis = 0, reduction = "add">(x, e, u) }""",
        {"x": (4, 3), "u": (6, 2)},
        {"i": INDEX["i"][:, None]},
    ),
    "fewer tables": (
        """net (float[3, 4, 2] x, int64[2, 3, 1] i, float[2, 3, 2] u) => (float[3, 4, 2] y) {
        s = Shape(u)  e = Expand(i, s)  y = ScatterElements<axis = 1, reduction = "add">(x, e, u) }""",
        {"x": (3, 4, 2), "u": (2, 3, 2)},
        {"i": INDEX["j"][..., None]},
    ),
    "indices that repeat along the axis": (
        """net (float[4, 3] x, int64[1, 3] i, float[6, 3] u) => (float[4, 3] y) {
        s = Shape(u)  e = Expand(i, s)  y = ScatterElements<axis = 0, reduction = "add">(x, e, u) }""",
        {"x": (4, 3), "u": (6, 3)},
        {"i": np.array([[0, 1, -1]])},
    ),
    "a product": (
        """net (float[4, 3] x, int64[6, 1] i, float[6, 3] u) => (float[4, 3] y) {
        s = Shape(u)  e = Expand(i, s)  y = ScatterElements<axis = 0, reduction = "mul">(x, e, u) }""",
        {"x": (4, 3), "u": (6, 3)},
        {"i": INDEX["i"][:, None]},
    ),
    "two indices per row": (
        """net (float[4, 3, 2] x, int64[6, 2] i, float[6, 2] u) => (float[4, 3, 2] y) {
        y = ScatterND<reduction = "add">(x, i, u) }""",
        {"x": (4, 3, 2), "u": (6, 2)},
        {"i": RNG.integers(0, 3, (6, 2))},
    ),
    "batches of GatherND": (
        """net (float[2, 4, 3] x, int64[2, 6, 1] i) => (float[2, 6, 3] y) { y = GatherND<batch_dims = 1>(x, i) }""",
        {"x": (2, 4, 3)},
        {"i": RNG.integers(0, 4, (2, 6, 1))},
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_left_alone(case: str) -> None:
    text, shapes, feeds = LEFT_ALONE[case]
    found = rewritten(text, shapes, feeds)
    assert found & Counter(["ScatterElements", "ScatterND", "GatherND"])
    assert not found & Counter(["ScatterRows", "GatherRows"])


def test_a_scatter_that_is_kept_stays() -> None:
    text = f"""net (float[n, w] x, int64[m] i, float[m, w] u) => (float[n, w] y) <int64[1] one = {{1}}> {{
        {ROWS}  y = ScatterElements<axis = 0, reduction = "add">(x, e, u) }}"""
    found = rewritten(text, {"x": (4, 3), "u": (6, 3)}, {"i": INDEX["i"]}, passed=RowsPass({"y"}))
    assert found["ScatterElements"] == 1


def test_an_expand_that_is_an_output_stays() -> None:
    text = f"""net (float[n, w] x, int64[m] i, float[m, w] u) => (float[m, w] y, int64[m, w] e)
        <int64[1] one = {{1}}> {{ {ROWS}  y = GatherElements<axis = 0>(x, e) }}"""
    found = rewritten(text, {"x": (4, 3), "u": (6, 3)}, {"i": INDEX["i"]})
    assert found["Expand"] == found["Gather"] == 1


def test_gathers_with_native_kernels() -> None:
    """Long rows, few numbers and other dtypes are left to ONNX Runtime."""

    def gather(data: str, indices: str = "float[4, 8] x, int64[m] i") -> str:
        return f"net ({data}, {indices.split(', ')[-1]}) => (float[p, q] y) {{ y = Gather<axis = 0>(x, i) }}"

    index = {"i": INDEX["i"]}
    assert rewritten(gather("float[4, 8] x"), {"x": (4, 8)}, index) == {"GatherRows": 1}
    assert rewritten(gather("float[4, 8] x"), {"x": (4, 8)}, index, passed=RowsPass(gathers=False)) == {
        "Gather": 1
    }
    assert rewritten(gather("float[4, 1000] x"), {"x": (4, 1000)}, index) == {"Gather": 1}
    assert rewritten(gather("float[4, w] x"), {"x": (4, 8)}, index) == {"Gather": 1}
    few = "net (float[4, 8] x, int64[6] i) => (float[6, 8] y) { y = Gather<axis = 0>(x, i) }"
    assert rewritten(few, {"x": (4, 8)}, index) == {"Gather": 1}
    one = "net (float[4, 8] x, int64 i) => (float[8] y) { y = Gather<axis = 0>(x, i) }"
    assert rewritten(one, {"x": (4, 8)}, {"i": np.array(2)}) == {"Gather": 1}
