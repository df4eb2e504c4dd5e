"""Windows and reductions of elementwise programs, beside NumPy: columns are slices, sums are float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

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
NONE, SUM, MEAN = range(3)


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
            (int(rng.integers(0, 3)) if last or first else NONE, last or -first or 0, int(rng.integers(0, 2)))
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
