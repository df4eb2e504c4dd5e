"""ScatterND with a reduction, whose updates ONNX Runtime 1.32 divides between threads without a lock."""

from __future__ import annotations

import os

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxtrain
from onnxtrain.passes.runtime_faults import racing_scatter
from onnxtrain.passes.runtime_faults.racing_scatter import RacingScatterPass

MODEL = """<ir_version: 10, opset_import: ["": 21]>
net (float[t, w] table, int64[n, k, 1] places, float[n, k, w] rows) => (float[t, w] sums) {
    sums = ScatterND<reduction = "add">(table, places, rows) }"""
TWO_INDICES = """<ir_version: 10, opset_import: ["": 21]>
net (int64[n, 2] places, float[n] rows) => (float[3, 4] sums) {
    zero = Constant<value = float {0.0}>()  shape = Constant<value_ints = [3, 4]>()
    table = Expand(zero, shape)
    sums = ScatterND<reduction = "add">(table, places, rows) }"""
IN_A_FUNCTION = """<ir_version: 10, opset_import: ["": 21, "own": 1]>
net (float[t, w] table, int64[n, k, 1] places, float[n, k, w] rows) => (float[t, w] sums) {
    sums = own.add_rows(table, places, rows) }
<domain: "own", opset_import: ["": 21]>
add_rows (table, places, rows) => (sums) { sums = ScatterND<reduction = "add">(table, places, rows) }"""


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], threads: int = 1) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    (result,) = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"]).run(
        None, feeds
    )
    return result


def rewritten(text: str) -> onnx.ModelProto:
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert RacingScatterPass()(model).modified
    assert not RacingScatterPass()(model).modified
    result = ir.to_proto(model)
    onnx.checker.check_model(result, full_check=True)
    return result


def many(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Feeds for MODEL with integers, whose sums are exact in any order; every update is to one of a few rows."""
    places = (2000 * rng.random((100, 1000, 1)) ** 8).astype(np.int64)
    rows = rng.integers(-8, 9, (100, 1000, 8)).astype(np.float32)
    return {"table": np.zeros((2000, 8), np.float32), "places": places, "rows": rows}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_updates_are_lost_on_several_threads() -> None:
    """If this fails, ONNX Runtime no longer has the fault: remove the pass."""
    feeds, model = many(np.random.default_rng(0)), onnx.parser.parse_model(MODEL)
    expected = run(model, feeds)

    assert any(run(model, feeds, threads=4).tobytes() != expected.tobytes() for _ in range(200))


def test_no_update_is_lost() -> None:
    feeds, model = many(np.random.default_rng(0)), rewritten(MODEL)
    expected = np.zeros((2000, 8))
    np.add.at(expected, feeds["places"].reshape(-1), feeds["rows"].reshape(-1, 8))

    for _ in range(20):
        assert np.array_equal(run(model, feeds, threads=4), expected)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("text", [MODEL, IN_A_FUNCTION], ids=["graph", "function"])
@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
@pytest.mark.parametrize(
    ("n", "k", "width"), [(3, 4, 5), (0, 4, 5), (7, 1, 1), (100, 3, 2), (1, 1, 500), (2, 3, 0)]
)
@pytest.mark.parametrize("most", [1, 7, 100])
def test_blocks_compute_the_same_bits(
    text: str, reduction: str, n: int, k: int, width: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(racing_scatter, "MOST_ELEMENTS", most)
    rng = np.random.default_rng(0)
    feeds = {
        "table": rng.normal(size=(9, width)).astype(np.float32),
        "places": rng.integers(-9, 9, (n, k, 1)),
        "rows": rng.normal(size=(n, k, width)).astype(np.float32),
    }
    text = text.replace('"add"', f'"{reduction}"')

    assert run(rewritten(text), feeds).tobytes() == run(onnx.parser.parse_model(text), feeds).tobytes()


def test_several_indices_and_a_table_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(racing_scatter, "MOST_ELEMENTS", 7)
    rng = np.random.default_rng(0)
    places = np.stack([rng.integers(0, 3, 50), rng.integers(0, 4, 50)], 1)
    feeds = {"places": places, "rows": rng.normal(size=50).astype(np.float32)}

    expected = run(onnx.parser.parse_model(TWO_INDICES), feeds)
    assert run(rewritten(TWO_INDICES), feeds).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[n, k, w] rows", "[10, 2000, 10] rows"),  # few
        (' = "add"', ' = "none"'),
    ],
)
def test_nodes_that_cannot_race_are_not_modified(old: str, new: str) -> None:
    model = ir.from_proto(onnx.parser.parse_model(MODEL.replace(old, new)))
    assert not RacingScatterPass()(model).modified


def test_many_updates_of_static_shape_are_split() -> None:
    rewritten(MODEL.replace("[n, k, w] rows", "[10, 2001, 10] rows"))


def test_the_gradient_of_an_embedding_loses_no_update() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    net (float[t, w] table, int64[n] places, float[n, w] weights) => (float loss) {
        read = Gather(table, places)  product = Mul(read, weights)  loss = ReduceSum<keepdims = 0>(product) }""")
    gradient = onnxtrain.differentiate(model, "loss", ["table"])
    feeds = many(np.random.default_rng(1))
    feeds = {
        "table": feeds["table"],
        "places": feeds["places"].reshape(-1),
        "weights": feeds["rows"].reshape(-1, 8),
    }
    expected = np.zeros((2000, 8))
    np.add.at(expected, feeds["places"], feeds["weights"])
    options = ort.SessionOptions()
    options.intra_op_num_threads = 4
    session = ort.InferenceSession(gradient.SerializeToString(), options, ["CPUExecutionProvider"])

    for _ in range(20):
        assert np.array_equal(session.run(["table_grad"], feeds)[0], expected)


@pytest.mark.parametrize("text", [MODEL, IN_A_FUNCTION], ids=["graph", "function"])
def test_rows_without_elements(text: str) -> None:
    """ONNX Runtime infers shapes, and folds constants, in the branch that is not taken, too."""
    text = text.replace("[n, k, w] rows", "[n, k, 0] rows").replace("[t, w]", "[t, 0]")
    feeds = {
        "table": np.zeros((4, 0), np.float32),
        "places": np.zeros((2, 3, 1), np.int64),
        "rows": np.zeros((2, 3, 0), np.float32),
    }
    assert run(rewritten(text), feeds).shape == (4, 0)
