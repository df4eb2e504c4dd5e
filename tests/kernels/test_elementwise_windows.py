"""Windows and reductions of elementwise programs, beside NumPy: columns are slices, sums are float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from kernels.against_body import LEVELS, needs_kernels
from kernels.test_elementwise import (
    CODES,
    MASKS,
    OPERANDS,
    OPERATIONS,
    SPECIAL,
    Instruction,
    alone,
    assert_same_bits,
    level,  # noqa: F401
    model_of,
    session_of,
)
from kernels.test_fuzz import CASES, SEED

pytestmark = needs_kernels

at_every_level = pytest.mark.parametrize("level", LEVELS, indirect=True)
WINDOW = len(OPERATIONS)
NONE, SUM, MEAN, MAX, MIN = range(5)


def run(
    attributes: dict[str, Any], inputs: Sequence[np.ndarray], outputs: int, threads: int = 1
) -> list[np.ndarray]:
    names = [f"y{i}" for i in range(outputs)]
    session = session_of(model_of(attributes, [x.ndim for x in inputs], names), threads)
    return session.run(None, {f"x{i}": x for i, x in enumerate(inputs)})


def code_of(program: Sequence[Instruction]) -> list[int]:
    """Returns the `program` attribute; ("window", value, offset, size) is a window, of size -1 if it is not bounded."""
    every = CODES | {"window": WINDOW}
    return [n for name, *operands in program for n in (every[name], *(*operands, -1, -1)[:3])]


def columns_of(x: np.ndarray, shape: Sequence[int], axis: int, offset: int = 0) -> np.ndarray:
    """Returns an input as all values are: column j of `shape` is the input's column j + offset, or 0."""
    wide = np.zeros([*x.shape[: x.ndim - axis], shape[-axis], *x.shape[x.ndim - axis + 1 :]], np.float32)
    if x.ndim < axis or (x.shape[-axis] == 1 and offset == 0):
        return np.broadcast_to(x, shape).copy()
    for j in range(shape[-axis]):
        if 0 <= j + offset < x.shape[-axis]:
            np.moveaxis(wide, -axis, 0)[j] = np.moveaxis(x, -axis, 0)[j + offset]
    return np.broadcast_to(wide, shape).copy()


def window_of(
    value: np.ndarray, known: np.ndarray, axis: int, offset: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a window, and which of its elements are specified."""
    result, specified = np.zeros_like(value), np.full_like(known, size >= 0)
    sides = [np.moveaxis(side, -axis, 0) for side in (value, known, result, specified)]
    for j in range(value.shape[-axis]):
        if 0 <= j + offset < (value.shape[-axis] if size < 0 else size):
            sides[2][j], sides[3][j] = sides[0][j + offset], sides[1][j + offset]
    return result, specified


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((5, 12), 1), ((3, 700, 9), 1), ((40, 7, 3), 2), ((2, 5, 3, 4), 3), ((11,), 1), ((9, 100), 1), ((6, 40, 33), 2),
     ((2, 300, 1), 1), ((1000, 16), 1), ((1000, 17), 1)],
    ids=str,
)  # fmt: skip
@at_every_level
def test_windows_are_slices_and_pads(shape: tuple[int, ...], axis: int, level: str) -> None:  # noqa: F811
    """Of an input, of what is computed, and of an output that has fewer columns."""
    rng = np.random.default_rng(0)
    width = shape[-axis]
    program: list[Instruction] = [
        ("neg", 0),
        ("window", 1, min(1, width - 1), -1),
        ("window", 1, -1, width - 1),
        ("sub", 2, 3),
        ("window", 4, 0, max(1, width - 1)),
        ("window", 0, width // 2, -1),
    ]
    columns = [max(1, width - 1), width, width, width - width // 2]
    attributes = {
        "program": code_of(program),
        "outputs": [2, 3, 5, 6],
        "row": [axis, width],
        "columns": columns,
    }
    for batch in (1, 2, 50):
        x = rng.standard_normal((batch, *shape)).astype(np.float32)
        moved = np.moveaxis(x, -axis, 0)
        first, padded = np.zeros_like(moved), np.zeros_like(moved)
        first[: width - 1] = -moved[1:] if width > 1 else 0
        if width == 1:
            first = -moved
        padded[1:] = -moved[: width - 1]
        difference = first - padded
        difference[max(1, width - 1) :] = 0
        expected = [first[: columns[0]], padded, difference, moved[width // 2 :]]
        for threads in (1, 2):
            for value, reference in zip(run(attributes, [x], 4, threads), expected, strict=True):
                assert_same_bits(value, np.moveaxis(reference, 0, -axis))


def random_case(
    rng: np.random.Generator,
) -> tuple[dict[str, Any], list[np.ndarray], list[tuple[str, ...]], list[int]]:
    """Returns attributes, inputs, instructions and the shape of all values."""
    rank = int(rng.integers(1, 5))
    shape = [int(rng.choice([1, 2, 3, 5, 8, 12, 17, 40, 130])) for _ in range(rank)]
    while np.prod(shape) > 20_000:
        shape[int(rng.integers(rank))] = 1
    if rng.random() < 0.03:
        shape[int(rng.integers(rank))] = 0
    axis = int(rng.integers(1, rank + 1)) if rng.random() < 0.8 and 0 not in shape else 0
    if np.prod(shape[rank - axis :], dtype=int) > 16384:
        axis = 0
    count = int(rng.integers(1, 5))
    inputs, offsets = [], []
    for place in range(count):
        own = [1 if place and rng.random() < 0.25 else size for size in shape]
        offset = 0
        if axis and own[-axis] != 1:
            own[-axis] = int(rng.integers(1, shape[-axis] + 4)) if rng.random() < 0.6 else shape[-axis]
            offset = int(rng.integers(-3, 4)) if rng.random() < 0.4 else 0
        if place and rng.random() < 0.3:
            own = own[int(rng.integers(rank + 1)) :]
            offset = offset if len(own) >= axis else 0
        inputs.append(rng.standard_normal(own).astype(np.float32))
        some = rng.random(own) < 0.02
        inputs[-1][some] = rng.choice(SPECIAL, int(some.sum()))
        offsets.append(offset)
    attributes: dict[str, Any] = {"inputs": count, "constants": [0x40000000]}
    if axis:
        attributes |= {"row": [axis, shape[-axis]]}
        attributes |= {"offsets": offsets} if any(offsets) or rng.random() < 0.5 else {}
    values = {"n": list(range(count + 1)), "m": list[int]()}
    program: list[Instruction] = []
    shifts = dict.fromkeys(range(count + 1), 0)
    for number in range(count + 1, count + 1 + int(rng.integers(1, 25))):
        recent = values["n"][-1 - min(int(rng.exponential(3)), len(values["n"]) - 1)]
        shifts[number] = 0
        if axis and rng.random() < 0.35:
            width = shape[-axis]
            if rng.random() < 0.5:
                offset = int(rng.integers(0, min(width, 4)))
                if shifts[recent] + offset > width:
                    offset = 0
                shifts[number] = shifts[recent] + offset
                program.append(("window", recent, offset, -1))
            else:
                size = int(rng.integers(0, width + 1))
                program.append(("window", recent, int(rng.integers(-min(width, 4), 1)), size))
            values["n"].append(number)
            continue
        names = [name for name in OPERATIONS if values["m"] or "m" not in OPERANDS[name]]
        name = str(rng.choice(names))
        operands = [
            values[kind][-1 - min(int(rng.exponential(4)), len(values[kind]) - 1)] for kind in OPERANDS[name]
        ]
        program.append((name, *operands))
        values["m" if name in MASKS else "n"].append(number)
    outputs = rng.choice(values["n"][-8:], int(rng.integers(1, 6))).tolist()
    attributes |= {"program": code_of(program), "outputs": outputs}
    return attributes, inputs, program, shape


def expected_values(
    attributes: dict[str, Any], inputs: list[np.ndarray], program: Sequence[Instruction], shape: Sequence[int]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns each output before its reduction, and which of its elements are specified."""
    axis = attributes.get("row", [0])[0]
    offsets = attributes.get("offsets", [0] * len(inputs))
    values = [
        columns_of(x, shape, axis, offset) if axis else np.broadcast_to(x, shape).copy()
        for x, offset in zip(inputs, offsets, strict=True)
    ]
    values.append(np.full(shape, 2, np.float32))
    known = [np.ones(shape, bool) for _ in values]
    for name, *operands in program:
        if name == "window":
            value, specified = window_of(values[operands[0]], known[operands[0]], axis, *operands[1:])
        else:
            value = alone(name, *(values[i] for i in operands))
            specified = np.logical_and.reduce([known[i] for i in operands])
        values.append(value)
        known.append(specified)
    return [(values[i], known[i]) for i in attributes["outputs"]]


@pytest.mark.sample(every=4)
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")
@pytest.mark.parametrize("part", range(4))
def test_random_windows_and_reductions(part: int) -> None:
    for seed in range(SEED + part, SEED + 2 * CASES, 4):
        rng = np.random.default_rng([seed, 24])
        attributes, inputs, program, shape = random_case(rng)
        axis = attributes.get("row", [0])[0]
        outputs = len(attributes["outputs"])
        rank = len(shape)
        last = int(rng.integers(max(1, axis), rank + 1)) if rng.random() < 0.4 else 0
        first = (
            int(rng.integers(1, rank - axis + 1)) if not last and rank > axis and rng.random() < 0.7 else 0
        )
        width = shape[-axis] if axis else 1
        columns = [int(rng.integers(1, width + 1)) if rng.random() < 0.5 else width for _ in range(outputs)]
        kinds = [
            (int(rng.integers(0, 5)) if last or first else NONE, last or -first or 0, int(rng.integers(0, 2)))
            for _ in range(outputs)
        ]
        if axis:
            columns = [width if last and kind else c for c, (kind, *_) in zip(columns, kinds, strict=True)]
            attributes["columns"] = columns
        if any(kind for kind, *_ in kinds):
            attributes["reductions"] = [number for three in kinds for number in three]
        results = [run(attributes, inputs, outputs, threads) for threads in (1, 2)]
        expected = expected_values(attributes, inputs, program, shape)
        for got, again, (value, known), count, (kind, axes, keeps) in zip(
            *results, expected, columns, kinds, strict=True
        ):
            if axis:
                value, known = (
                    np.moveaxis(np.moveaxis(side, -axis, 0)[:count], 0, -axis) for side in (value, known)
                )
            what = f"seed {seed}: {program} {attributes} on {[x.shape for x in inputs]}"
            if kind == NONE:
                assert got.shape == value.shape, what
                assert_same_bits(got[known], value[known], what)
                specified = known
            else:
                over = tuple(range(-axes, 0)) if axes > 0 else tuple(range(-axes))
                specified = known.all(over, keepdims=bool(keeps))
                if kind in (MAX, MIN):
                    extreme = extremes(value, over, kind, bool(keeps))
                    assert got.shape == extreme.shape, what
                    assert_same_bits(got[specified], extreme[specified], what)
                else:
                    assert_sums(got, value, specified, over, kind, what)
            np.testing.assert_array_equal(
                got[specified].view(np.int32), again[specified].view(np.int32), f"{what} on two threads"
            )


def assert_sums(
    got: np.ndarray, value: np.ndarray, specified: np.ndarray, over: tuple[int, ...], kind: int, what: str
) -> None:
    """Sums must be within the rounding of short sums in float."""
    wide, keeps = value.astype(np.float64), specified.ndim == value.ndim
    with np.errstate(all="ignore"):
        expected = wide.sum(over, keepdims=keeps)
        size = np.abs(wide).sum(over, keepdims=keeps)
        large = size > 1e38
        if kind == MEAN:
            count = np.prod([value.shape[axis] for axis in over])
            expected, size = expected / count, size / count
        assert got.shape == expected.shape, what
        # Finite sums near the largest number may overflow in between.
        usual = specified & (~large | np.isnan(expected))
        np.testing.assert_array_equal(np.isnan(got[usual]), np.isnan(expected[usual]), what)
        wrong = usual & ~(np.abs(got - expected) <= 2e-6 * size + 1e-44) & ~np.isnan(expected)
    assert not wrong.any(), what


def extremes(value: np.ndarray, over: tuple[int, ...], kind: int, keeps: bool) -> np.ndarray:
    """Returns maxima or minima: NaN if a number is, infinite of no numbers, never -0."""
    reduce, nothing = (np.max, -np.inf) if kind == MAX else (np.min, np.inf)
    return reduce(value, over, keepdims=keeps, initial=np.float32(nothing)) + np.float32(0)


IN_PLACE: dict[str, tuple[dict[str, Any], list[tuple[int, ...]], tuple[int, ...]]] = {
    "fewer columns": (
        {
            "program": code_of([("mul", 0, 1), ("window", 2, 1, -1)]),
            "outputs": [3],
            "row": [1, 12],
            "columns": [9],
        },
        [(700, 9), (700, 12)],
        (700, 9),
    ),
    "moved columns": (
        {"program": code_of([("window", 0, -1, 12), ("mul", 2, 1)]), "outputs": [3], "row": [1, 12]},
        [(700, 12), (700, 12)],
        (700, 12),
    ),
    "an operand with an offset": (
        {"program": code_of([("mul", 0, 1)]), "outputs": [2], "row": [1, 12], "offsets": [-1, 0]},
        [(700, 12), (700, 12)],
        (700, 12),
    ),
    "sums of rows": (
        {"program": code_of([("mul", 0, 1)]), "outputs": [2], "reductions": [SUM, 1, 1]},
        [(700, 1), (700, 60)],
        (700, 1),
    ),
    "sums of long rows": (
        {"program": code_of([("mul", 0, 1)]), "outputs": [2], "reductions": [SUM, 1, 1]},
        [(3, 1), (3, 20_000)],
        (3, 1),
    ),
    "sums of columns": (
        {"program": code_of([("mul", 0, 1)]), "outputs": [2], "reductions": [SUM, -1, 1]},
        [(1, 60), (700, 60)],
        (1, 60),
    ),
    "maxima of long rows": (
        {"program": code_of([("mul", 0, 1)]), "outputs": [2], "reductions": [MAX, 1, 1]},
        [(3, 1), (3, 20_000)],
        (3, 1),
    ),
    "sums that other rows read": (
        {"program": code_of([("mul", 0, 1)]), "outputs": [2], "reductions": [SUM, 1, 0]},
        [(64, 64), (64, 64, 64)],
        (64, 64),
    ),
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_an_output_in_the_memory_of_an_input(case: str) -> None:
    """As within a graph, where ONNX Runtime reuses an input that nothing reads later."""
    attributes, shapes, shape = IN_PLACE[case]
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(size).astype(np.float32) for size in shapes]
    (expected,) = run(attributes, inputs, 1)
    assert expected.shape == shape
    model = model_of(attributes, [len(size) for size in shapes], ["y0"])
    call = model.graph.node[0]
    for info, size in zip(model.graph.input, shapes, strict=True):
        for dim, number in zip(info.type.tensor_type.shape.dim, size, strict=True):
            dim.dim_value = number
    within = [
        helper.make_tensor_value_info(f"within{i}", TensorProto.FLOAT, size) for i, size in enumerate(shapes)
    ]
    model.graph.value_info.extend(
        [*within, helper.make_tensor_value_info("inside", TensorProto.FLOAT, shape)]
    )
    called = onnx.NodeProto()
    called.CopyFrom(call)
    negated = [helper.make_node("Neg", [f"x{i}"], [f"within{i}"]) for i in range(len(shapes))]
    del called.input[:], called.output[:]
    called.input.extend(f"within{i}" for i in range(len(shapes)))
    called.output.append("inside")
    model.graph.ClearField("node")
    model.graph.node.extend([*negated, called, helper.make_node("Neg", ["inside"], ["y0"])])
    for threads in (1, 2):
        (value,) = session_of(model, threads).run(None, {f"x{i}": -x for i, x in enumerate(inputs)})
        assert_same_bits(-value, expected, case)


ADD = code_of([("add", 0, 0)])
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a window without a row": ({"program": [WINDOW, 0, 0, -1]}, "windows need a row"),
    "a row without a width": ({"row": [1]}, "row must be an axis and a width"),
    "an axis of 0": ({"row": [0, 3]}, "axis of the row"),
    "no columns": ({"row": [1, 0]}, "width of the row"),
    "very many columns": ({"row": [1, 1 << 40]}, "width of the row"),
    "an offset too many": ({"row": [1, 3], "offsets": [0, 0]}, "an offset for each input"),
    "a huge offset": ({"row": [1, 3], "offsets": [1 << 40]}, "offsets must have 32 bits"),
    "offsets without a row": ({"offsets": [1]}, "offsets need a row"),
    "a window of a later value": ({"program": [WINDOW, 1, 0, -1], "row": [1, 3]}, "no earlier value"),
    "a window in front": ({"program": [WINDOW, 0, -1, -1], "row": [1, 3]}, "offset of a window"),
    "a window behind": ({"program": [WINDOW, 0, 4, -1], "row": [1, 3]}, "offset of a window"),
    "a window that is too wide": ({"program": [WINDOW, 0, 0, 4], "row": [1, 3]}, "size of a window"),
    "windows of windows": (
        {"program": [WINDOW, 0, 2, -1, WINDOW, 1, 2, -1], "row": [1, 3]},
        "windows of windows",
    ),
    "a window of a mask": (
        {"program": [CODES["less"], 0, 0, -1, WINDOW, 1, 0, -1], "row": [1, 3]},
        "must be of a number",
    ),
    "columns without a row": ({"columns": [1]}, "columns need a row"),
    "more columns than the row": ({"row": [1, 3], "columns": [4]}, "as many columns as the row"),
    "no columns of an output": ({"row": [1, 3], "columns": [0]}, "as many columns as the row"),
    "part of a reduction": ({"reductions": [1, 1]}, "three numbers per output"),
    "an unknown reduction": ({"reductions": [5, 1, 1]}, "no such reduction"),
    "a reduction over nothing": ({"reductions": [1, 0, 1]}, "between 1 and 64 axes"),
    "a reduction over other axes": (
        {"outputs": [0, 0], "reductions": [1, 1, 1, 1, 2, 1]},
        "over the same axes",
    ),
    "a reduction over both ends": (
        {"outputs": [0, 0], "reductions": [1, 1, 1, 1, -1, 1]},
        "over the same axes",
    ),
    "a sum over some columns": ({"row": [1, 3], "columns": [2], "reductions": [1, 1, 1]}, "has all of them"),
    "a sum behind the columns": ({"row": [2, 3], "reductions": [1, 1, 1]}, "one that is reduced"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_windows(case: str) -> None:
    attributes, message = REFUSED[case]
    with pytest.raises(Exception, match=f"Elementwise_float: .*{message}"):
        session_of(model_of({"program": ADD, "outputs": [0], **attributes}, [1], ["y"]))


@pytest.mark.parametrize(
    ("attributes", "shapes", "message"),
    [
        ({"row": [3, 4]}, [(2, 4)], "no input has the axis"),
        ({"row": [2, 4096]}, [(4096, 5)], "too many elements"),
        ({"reductions": [1, 3, 1]}, [(2, 4)], "fewer axes"),
        ({"row": [2, 3], "reductions": [1, -1, 1]}, [(3, 4)], "one that stays"),
        ({"row": [1, 4]}, [(2, 0)], "no columns"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit(
    attributes: dict[str, Any], shapes: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(Exception, match=f"Elementwise_float: .*{message}"):
        run(
            {"program": ADD, "outputs": [0], **attributes},
            [np.ones(shape, np.float32) for shape in shapes],
            1,
        )


def test_reductions_of_nothing() -> None:
    x = np.ones((0, 5), np.float32)
    kinds = ((SUM, 0), (MEAN, 1), (MAX, 0), (MIN, 1))
    reductions = [number for kind, keeps in kinds for number in (kind, -1, keeps)]
    attributes = {"program": ADD, "outputs": [1] * 4, "reductions": reductions}
    total, mean, most, least = run(attributes, [x], 4)
    np.testing.assert_array_equal(most, np.full(5, -np.inf))
    np.testing.assert_array_equal(least, np.full((1, 5), np.inf))
    np.testing.assert_array_equal(total, np.zeros(5))
    np.testing.assert_array_equal(mean, np.full((1, 5), np.nan))


@pytest.mark.parametrize("shape", [(1_000_003,), (1000, 1009), (3, 400_000), (300_000, 3)], ids=str)
@pytest.mark.parametrize("axes", [1, -1])
@at_every_level
def test_long_sums_are_exact(shape: tuple[int, ...], axes: int, level: str) -> None:  # noqa: F811
    """Sums of equal numbers, which one float would lose, on one thread and on several."""
    x = np.full(shape, 0.1, np.float32)
    attributes = {"program": code_of([("abs", 0)]), "outputs": [1], "reductions": [SUM, axes, 0]}
    results = [run(attributes, [x], 1, threads)[0] for threads in (1, 2, 5)]
    exact = x.sum(-1 if axes > 0 else 0, dtype=np.float64)
    np.testing.assert_allclose(results[0], exact, rtol=5e-7)
    for value in results[1:]:
        np.testing.assert_array_equal(value, results[0])


@pytest.mark.parametrize("shape", [(1, 1), (300, 16), (300, 17), (40, 1009), (3, 9000), (9000, 3)], ids=str)
@pytest.mark.parametrize("axes", [1, -1])
@at_every_level
def test_maxima_and_minima(shape: tuple[int, ...], axes: int, level: str) -> None:  # noqa: F811
    """The numbers themselves, wherever the extreme one is, on one thread and on two."""
    rng = np.random.default_rng(0)
    over = (-1,) if axes > 0 else (0,)
    attributes = {
        "program": code_of([("neg", 0)]),
        "outputs": [1, 1],
        "reductions": [MAX, axes, 0, MIN, axes, 1],
    }
    usual = rng.standard_normal(shape).astype(np.float32)
    with_nan = np.where(rng.random(shape) < 1 / max(shape), np.float32(np.nan), usual)
    zeros = np.where(rng.random(shape) < 0.5, np.float32(-0.0), np.float32(0))
    infinite = np.full(shape, np.inf, np.float32)
    for threads in (1, 2):
        session = session_of(model_of(attributes, [2], ["most", "least"]), threads)
        for x in (usual, usual + 100, usual - 100, with_nan, zeros, infinite, -infinite):
            most, least = session.run(None, {"x0": x})
            assert_same_bits(most, extremes(-x, over, MAX, False))
            assert_same_bits(least, extremes(-x, over, MIN, True))


def test_the_maximum_of_a_value_that_is_one_number() -> None:
    program: list[Instruction] = [("neg", 0), ("add", 0, 1)]
    attributes = {"program": code_of(program), "outputs": [2, 3], "reductions": [MAX, 1, 0, NONE, 0, 0]}
    number, x = np.full((1, 1), 3, np.float32), np.ones((4, 700), np.float32)
    most, total = run(attributes, [number, x], 2)
    assert_same_bits(most, np.full(4, -3, np.float32))
    assert_same_bits(total, x + 3)
