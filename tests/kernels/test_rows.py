"""Rows that are read or written at one index each: kernels beside NumPy, and bodies beside kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from kernels.against_body import LEVELS, best_level, needs_kernels
from kernels.test_fuzz import CASES, SEED
from onnxtrain.functions import REDUCTIONS, CompositeOp, gather_rows, scatter_rows
from onnxtrain.runtime.kernels import LEVEL, register_kernels

pytestmark = needs_kernels
Array = np.ndarray


def _model(op: CompositeOp, ranks: Sequence[int], attributes: dict[str, int], body: bool) -> onnx.ModelProto:
    name = f"{op.name}0_float"
    function = op.function_for(ir.DataType.FLOAT, 21)
    function.name = name
    types = [TensorProto.INT64 if key == "indices" else TensorProto.FLOAT for key in op.inputs]
    graph = helper.make_graph(
        [helper.make_node(name, list(op.inputs), ["y"], domain="onnxtrain", **attributes)],
        "rows",
        [
            helper.make_tensor_value_info(key, type_, [None] * rank)
            for key, type_, rank in zip(op.inputs, types, ranks, strict=True)
        ],
        [helper.make_empty_tensor_value_info("y")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("onnxtrain", 1)]
    functions = [ir.to_proto(function)] if body else []
    return helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=10)


@functools.cache
def _session(
    axis: int, batch_dims: int, reduction: str, ranks: tuple[int, ...], native: bool, threads: int, level: str
) -> ort.InferenceSession:
    attributes = {"axis": axis, "batch_dims": batch_dims}
    if reduction == "gather":
        op = gather_rows(axis, batch_dims)
    else:
        op = scatter_rows(axis, batch_dims, reduction, ranks[1])
        attributes["reduction"] = REDUCTIONS.index(reduction)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if native:
        register_kernels(options, [f"{op.name}0_float"])
    model = _model(op, ranks, attributes, body=not native).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(
    data: Array,
    indices: Array,
    updates: Array | None = None,
    reduction: str = "gather",
    *,
    axis: int = 0,
    batch_dims: int = 0,
    native: bool = True,
    threads: int = 1,
    level: str = "",
) -> Array:
    """Returns the gathered rows, or the table with the updates."""
    feeds = {"data": data, "indices": indices} | ({} if updates is None else {"updates": updates})
    ranks = tuple(value.ndim for value in feeds.values())
    session = _session(axis, batch_dims, reduction, ranks, native, threads, level)
    return session.run(None, feeds)[0]


_UFUNCS = {"add": np.add, "max": np.maximum, "min": np.minimum}


def expected(
    data: Array, indices: Array, updates: Array | None, reduction: str, axis: int, batch_dims: int
) -> Array:
    """Returns the same by NumPy: one row after the other, in float32."""
    lead = data.shape[:axis]
    tables = data.reshape(-1 if data.size else int(np.prod(lead)), *data.shape[axis:]).copy()
    reads = indices.shape[batch_dims:]
    each = (
        indices.reshape(len(tables), *reads)
        if batch_dims
        else np.broadcast_to(indices, (len(tables), *reads))
    )
    if updates is None:
        rows = [table[index] for table, index in zip(tables, each, strict=True)]
        return np.array(rows, np.float32).reshape(*lead, *reads, *data.shape[axis + 1 :])
    parts = updates.reshape(len(tables), *reads, *data.shape[axis + 1 :])
    for table, index, part in zip(tables, each, parts, strict=True):
        for place in np.ndindex(*reads):
            row = index[place]
            table[row] = part[place] if reduction == "none" else _UFUNCS[reduction](table[row], part[place])
    return tables.reshape(data.shape)


def _bits(value: Array) -> Array:
    """Returns the bits of the numbers; those of any NaN are the same."""
    return np.where(np.isnan(value), np.float32(np.nan), value).astype(np.float32).view(np.int32)


def _numbers(rng: np.random.Generator, shape: Sequence[int], special: float = 0.0) -> Array:
    values = rng.standard_normal(shape).astype(np.float32)
    numbers = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, -1e-42, 3e38], np.float32)
    return np.where(rng.random(shape) < special, rng.choice(numbers, shape), values).astype(np.float32)


def check(
    lead: Sequence[int],
    rows: int,
    rest: Sequence[int],
    reads: Sequence[int],
    batched: bool,
    *,
    seed: int = 0,
    special: float = 0.0,
    level: str = "",
) -> None:
    """Compares all ops on tables `[*lead, rows, *rest]`, and each with itself on more threads."""
    rng = np.random.default_rng(seed)
    axis, batch_dims = len(lead), len(lead) if batched else 0
    data = _numbers(rng, (*lead, rows, *rest), special)
    indices = rng.integers(-rows, max(rows, 1), (*lead[:batch_dims], *reads))
    updates = _numbers(rng, (*lead, *reads, *rest), special)
    for reduction in ("gather", *REDUCTIONS):
        given = None if reduction == "gather" else updates
        where = {"axis": axis, "batch_dims": batch_dims, "level": level}
        with np.errstate(invalid="ignore", over="ignore"):
            want = expected(data, indices, given, reduction, axis, batch_dims)
        for threads in (1, 2, 4):
            got = run(data, indices, given, reduction, threads=threads, **where)
            what = f"{reduction} of {data.shape} at {indices.shape}, {where}, {threads} threads"
            assert got.shape == want.shape, what
            if reduction in ("max", "min"):  # of 0.0 and -0.0 either
                np.testing.assert_array_equal(got, want, err_msg=what)
            else:
                np.testing.assert_array_equal(_bits(got), _bits(want), err_msg=what)
        if special == 0 and (reduction != "none" or np.prod(reads) < 2):
            body = run(data, indices, given, reduction, native=False, **where)
            np.testing.assert_allclose(body, want, rtol=1e-5, atol=1e-5, err_msg=what)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "rest", [(), (1,), (2,), (3,), (4,), (5,), (8,), (16,), (17,), (32,), (8, 8), (100,)], ids=str
)
@pytest.mark.parametrize("lead", [(), (3,), (2, 4)], ids=str)
def test_widths(lead: tuple[int, ...], rest: tuple[int, ...], batched: bool) -> None:
    check(lead, 7, rest, (30,), batched)
    check(lead, 5, rest, (2, 3), batched, seed=1)


@pytest.mark.parametrize(
    ("lead", "rows", "rest", "reads"),
    [
        ((), 3000, (40,), (3000,)),  # sorted by ranges of rows
        ((), 70, (1100,), (300,)),  # sorted, wide rows
        ((), 3, (2100,), (90,)),  # few wide rows: blocks of columns
        ((2,), 2, (1100,), (100,)),
        ((), 20_000, (1,), (70_000,)),  # narrow rows: one after the other
        ((), 1, (64,), (2000,)),  # all of them to one row
        ((9,), 50, (33,), (400,)),  # tables
        ((2,), 600, (33,), (2000,)),
    ],
    ids=str,
)
def test_every_way_to_share_the_work(
    lead: Sequence[int], rows: int, rest: Sequence[int], reads: Sequence[int]
) -> None:
    check(lead, rows, rest, reads, False)
    check(lead, rows, rest, reads, True, seed=1, special=0.01)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    ("lead", "rows", "rest", "reads"),
    [
        ((), 4, (3,), (0,)),
        ((), 0, (3,), (0,)),
        ((), 4, (0,), (5,)),
        ((0,), 4, (3,), (5,)),
        ((2,), 0, (), (0, 3)),
    ],
    ids=str,
)
def test_nothing(
    lead: Sequence[int], rows: int, rest: Sequence[int], reads: Sequence[int], batched: bool
) -> None:
    check(lead, rows, rest, reads, batched)


@pytest.mark.parametrize("special", [0.05, 0.7])
def test_numbers_that_are_not_finite(special: float) -> None:
    for seed, width in enumerate([1, 3, 8, 50]):
        check((), 6, (width,), (40,), False, seed=seed, special=special)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("reduction", ["gather", *REDUCTIONS])
@pytest.mark.parametrize("index", [5, -6, 2**31, 2**62, -(2**63), 2**63 - 1])
def test_an_index_that_is_no_row_is_an_error(index: int, reduction: str, native: bool) -> None:
    data, updates = np.ones((2, 5, 3), np.float32), np.ones((2, 4, 3), np.float32)
    for axis, batch_dims, shape in ((1, 0, (4,)), (1, 1, (2, 4))):
        indices = np.zeros(shape, np.int64)
        indices.flat[-1] = index
        given = None if reduction == "gather" else updates
        with pytest.raises(Exception, match="an index is not one of the rows" if native else None):
            run(data, indices, given, reduction, axis=axis, batch_dims=batch_dims, native=native)


@pytest.mark.parametrize(
    ("shapes", "axis", "batch_dims", "message"),
    [
        (((5, 3), (4,), (3, 3)), 0, 0, "a row of updates for each index"),
        (((5, 3), (4,), (4, 2)), 0, 0, "a row of updates for each index"),
        (((5, 3), (4,), (4,)), 0, 0, "a row of updates for each index"),
        (((2, 5, 3), (3, 4), (2, 4, 3)), 1, 1, "must have the batch axes"),
        (((2, 5, 3), (), (2, 4, 3)), 1, 1, "must have the batch axes"),
        (((5,), (4,), (4,)), 1, 0, "must have the axis"),
        (((), (4,), (4,)), 0, 0, "must have the axis"),
        (((5, 3), (4,), (4, 3)), -1, 0, "an axis"),
        (((2, 5, 3), (2, 4), (2, 4, 3)), 2, 1, "an axis"),
    ],
)
def test_shapes_that_do_not_fit_are_errors(
    shapes: Sequence[Sequence[int]], axis: int, batch_dims: int, message: str
) -> None:
    data, indices, updates = shapes
    with pytest.raises(Exception, match=message):
        run(np.ones(data, np.float32), np.zeros(indices, np.int64), np.ones(updates, np.float32), "add",
            axis=axis, batch_dims=batch_dims)  # fmt: skip


def test_the_result_may_take_the_memory_of_the_table() -> None:
    op = scatter_rows(0, 0, "add", 1)
    proto = _model(op, (2, 1, 2), {"axis": 0, "batch_dims": 0, "reduction": 1}, body=False)
    first = helper.make_node("Neg", ["x"], ["data"])
    proto.graph.node.insert(0, first)
    proto.graph.input[0].name = "x"
    options = ort.SessionOptions()
    register_kernels(options, ["ScatterRows0_float"])
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    x, updates, indices = _numbers(rng, (50, 70)), _numbers(rng, (200, 70)), rng.integers(0, 50, 200)
    (got,) = session.run(None, {"x": x, "indices": indices, "updates": updates})
    np.testing.assert_array_equal(got, expected(-x, indices, updates, "add", 0, 0))


@pytest.mark.parametrize("level", LEVELS)
def test_levels(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if best_level(level) != level:
        pytest.skip(f"no kernels of level {level}")
    monkeypatch.setenv(LEVEL, level)
    for width in (1, 3, 8, 13, 40):
        check((2,), 9, (width,), (60,), False, level=level, special=0.02)
    check((), 900, (40,), (3000,), False, level=level)


def test_random_rows() -> None:
    for seed in range(SEED, SEED + CASES):
        rng = np.random.default_rng([seed, 5])
        lead = rng.integers(0, 5, int(rng.integers(3))).tolist()
        rest = rng.integers(0, 20, int(rng.integers(3))).tolist()
        reads = rng.integers(0, 12, int(rng.integers(1, 3))).tolist()
        rows = int(rng.integers(1, 30))
        try:
            check(
                lead, rows, rest, reads, bool(rng.integers(2)), seed=seed, special=float(rng.choice([0, 0.1]))
            )
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


def test_pytorch_adds_in_the_same_order() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    data, updates = _numbers(rng, (300, 24)), _numbers(rng, (5000, 24))
    indices = rng.integers(0, 300, 5000)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        want = (
            torch.from_numpy(data).index_add(0, torch.from_numpy(indices), torch.from_numpy(updates)).numpy()
        )
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(run(data, indices, updates, "add"), want)
