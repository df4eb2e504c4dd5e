"""Ops that move, repeat or drop elements."""

import numpy as np
import torch

from autodiff.case import C, Case, F, R


def i64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


MAX, MIN = np.iinfo(np.int64).max, np.iinfo(np.int64).min


def _reshape(shape, twin, sizes=(2, 3, 4), **attrs) -> Case:
    return Case("Reshape", (F(*sizes), C(i64(*shape))), twin, attrs, name=f"{shape}-{attrs}".replace(" ", ""))


CASES = [
    _reshape((6, 4), lambda x, s: x.reshape(6, 4)),
    _reshape((0, -1), lambda x, s: x.reshape(2, 12)),
    _reshape((-1,), lambda x, s: x.reshape(-1)),
    _reshape((24, 1), lambda x, s: x.reshape(24, 1), allowzero=1),
    Case("Reshape", (F(2, 3, 4), R(i64(4, -1))), lambda x, s: x.reshape(4, 6), name="runtime_shape"),
    Case("Reshape", (F(1), C(np.zeros(0, np.int64))), lambda x, s: x.reshape(()), name="to_scalar"),
    *[
        Case("Flatten", (F(2, 3, 4),), twin, {"axis": axis})
        for axis, twin in {
            0: lambda x: x.reshape(1, 24),
            1: lambda x: x.reshape(2, 12),
            3: lambda x: x.reshape(24, 1),
            -1: lambda x: x.reshape(6, 4),
        }.items()
    ],
    Case("Transpose", (F(2, 3, 4),), lambda x: x.permute(2, 1, 0)),
    Case("Transpose", (F(2, 3, 4),), lambda x: x.permute(1, 2, 0), {"perm": [1, 2, 0]}),
    Case("Transpose", (F(2, 3, 1, 4),), lambda x: x.permute(2, 0, 3, 1), {"perm": [2, 0, 3, 1]}),
    Case("Squeeze", (F(2, 1, 3, 1), C(i64(1, -1))), lambda x, a: x.squeeze(3).squeeze(1), name="axes"),
    # Which axes to drop must be known for the output to have a rank, so the ones of size 1 stay static.
    Case("Squeeze", (F(2, 1, 3, 1),), torch.squeeze, symbolic={0: (0, 2)}, name="all"),
    Case("Squeeze", (F(2, 1, 3), R(i64(1))), lambda x, a: x.squeeze(1), name="runtime_axes"),
    Case("Unsqueeze", (F(2, 3), C(i64(0, -1))), lambda x, a: x[None, :, :, None]),
    Case("Unsqueeze", (F(), C(i64(0))), lambda x, a: x[None]),
    Case("Concat", (F(2, 3), F(2, 1), F(2, 4)), lambda *xs: torch.cat(xs, 1), {"axis": 1}),
    Case("Concat", (F(2, 3), F(2, 1, wrt=False), F(2, 4)), lambda *xs: torch.cat(xs, 1), {"axis": -1}),
    Case(
        "Concat", (F(2, 3), C(np.ones((1, 3)))), lambda *xs: torch.cat(xs, 0), {"axis": 0},
        name="constant_part",
    ),
    Case("Concat", (F(2, 3),), lambda x: x, {"axis": 0}, name="one"),
    Case("Split", (F(2, 7),), lambda x: x.split([3, 3, 1], 1), {"axis": 1, "num_outputs": 3}, 3),
    Case("Split", (F(5, 2), C(i64(1, 4))), lambda x, s: x.split([1, 4], 0), {}, 2, name="sizes"),
    Case(
        "Split", (F(5, 4), R(i64(1, 2, 1))), lambda x, s: x.split([1, 2, 1], 1), {"axis": -1}, 3,
        name="runtime_sizes",
    ),
    Case("Expand", (F(3, 1), C(i64(2, 3, 4))), lambda x, s: x.expand(2, 3, 4)),
    Case("Expand", (F(2, 3), C(i64(1, 1))), lambda x, s: x.expand(2, 3), name="smaller_target"),
    Case("Expand", (F(), R(i64(2, 3))), lambda x, s: x.expand(2, 3), name="runtime_scalar"),
    Case("Expand", (F(3, 1), R(i64(2, 1, 4))), lambda x, s: x.expand(2, 3, 4), name="runtime"),
    Case("Tile", (F(2, 3), C(i64(2, 3))), lambda x, r: x.tile(2, 3)),
    Case("Tile", (F(2, 3, 1), R(i64(1, 2, 4))), lambda x, r: x.tile(1, 2, 4), name="runtime"),
    Case("Trilu", (F(3, 4),), torch.triu),
    Case("Trilu", (F(2, 4, 3), C(np.array(-1, np.int64))), lambda x, k: x.tril(-1), {"upper": 0}),
    Case(
        "Trilu", (F(4, 4), R(np.array(1, np.int64))), lambda x, k: x.triu(1), {"upper": 1}, name="runtime_k"
    ),
    Case(
        "Range", (F(low=0.5, high=0.6), C(np.array(3.0)), F(low=0.4, high=0.45)), lambda s, _,
        d: s + d * torch.arange(6),
    ),
]  # fmt: skip


def _reverse_sequence(batch_axis: int) -> Case:
    lens = i64(1, 4, 3)

    def twin(x, _):
        x = x.movedim(batch_axis, 0)
        rows = [torch.cat([row[:k].flip(0), row[k:]]) for row, k in zip(x, lens.tolist(), strict=True)]
        return torch.stack(rows).movedim(0, batch_axis)

    shape = (4, 3, 2) if batch_axis else (3, 4, 2)
    return Case(
        "ReverseSequence", (F(*shape), R(lens)), twin, {"batch_axis": batch_axis, "time_axis": 1 - batch_axis}
    )


CASES += [_reverse_sequence(0), _reverse_sequence(1)]


def _slice(name, sizes, starts, ends, axes=None, steps=None, *, where=C) -> Case:
    """The twin flips and indexes with numpy's own slice positions."""

    def twin(x, *_):
        for start, end, axis, step in zip(
            starts, ends, axes or range(len(starts)), steps or [1] * len(starts), strict=True
        ):
            # ONNX clamps a start before the first element; Python's slices do the same.
            picked = range(x.shape[axis])[slice(start, None if end == MIN else end, step)]
            x = x.index_select(axis, torch.tensor(list(picked), dtype=torch.int64))
        return x

    arguments = [where(i64(*starts)), where(i64(*ends))]
    arguments += [C(i64(*axes)) if axes else None] if axes or steps else []
    arguments += [C(i64(*steps))] if steps else []
    return Case("Slice", (F(*sizes), *arguments), twin, name=name)


CASES += [
    _slice("leading", (5, 4), (1,), (3,)),
    _slice("two_axes", (5, 4), (1, -3), (MAX, -1), (0, -1)),
    _slice("clamped", (5, 4), (-9, 2), (9, MAX), (0, 1)),
    _slice("empty_part", (5, 4), (2,), (2,), (1,)),
    _slice("strided", (7, 4), (1,), (MAX,), (0,), (2,)),
    _slice("strided_short", (9, 6), (0, 1), (8, 5), (0, 1), (4, 3)),
    _slice("reversed", (5, 4), (-1,), (MIN,), (1,), (-1,)),
    _slice("reversed_strided", (8, 5), (6, 99), (0, MIN), (0, 1), (-3, -2)),
    _slice("reversed_empty", (4, 3), (0,), (2,), (0,), (-2,)),
    _slice("mixed", (2, 6, 7), (4, 0), (MIN, MAX), (1, 2), (-2, 3)),
    _slice("runtime", (6, 4), (1, -3), (-1, MAX), (0, 1), where=R),
    _slice("runtime_strided", (6, 5), (-1, 1), (MIN, MAX), (0, 1), (-2, 2), where=R),
    Case(
        "Slice",
        (F(6, 5), R(i64(5, 1)), R(i64(MIN, 5)), R(i64(0, -1)), R(i64(-2, 3))),
        lambda x, *_: x.flip(0)[::2][:, 1::3],
        name="all_runtime",
    ),
]


def _pad(name, sizes, pads, mode="constant", value=None, axes=None, *, where=C) -> Case:
    """`pads` as ONNX lists them; the twin goes axis by axis."""
    axes_list = list(axes) if axes else list(range(len(sizes)))

    def extend(x, axis, before, after, fill):
        size = x.shape[axis]
        index = np.arange(-before, size + after)
        if mode == "constant":
            x = x.movedim(axis, 0)
            rows = [x[i] if 0 <= i < size else torch.ones_like(x[0]) * fill for i in index]
            return torch.stack(rows).movedim(0, axis)
        if mode == "reflect":
            index = np.where(index < 0, -index, index)
            index = np.where(index >= size, 2 * (size - 1) - index, index)
        index = index % size if mode == "wrap" else np.clip(index, 0, size - 1)
        return x.index_select(axis, torch.from_numpy(index))

    def twin(x, _, fill=None, *__):
        count = len(axes_list)
        for i, axis in enumerate(axes_list):
            x = extend(x, axis, pads[i], pads[count + i], 0.0 if fill is None else fill.reshape(()))
        return x

    arguments = [where(i64(*pads))]
    arguments += [value] if value or axes else []
    arguments += [C(i64(*axes))] if axes else []
    attrs = {} if mode == "constant" else {"mode": mode}
    # The reference evaluator refuses negative pads.
    evaluator = "onnxruntime" if min(pads) < 0 else "reference"
    return Case("Pad", (F(*sizes), *arguments), twin, attrs, name=name, evaluator=evaluator)


CASES += [
    _pad("constant", (2, 3), (1, 0, 0, 2)),
    _pad("negative", (5, 4), (-1, 2, 0, -1)),
    _pad("all_negative", (5, 4), (-1, 0, -2, -1)),
    _pad("constant_value", (2, 3), (1, 0, 2, 1), value=F(low=0.5)),
    _pad("constant_value_vector", (4, 3), (1, -1, 0, 2), value=F(1, low=0.5)),
    _pad("axes", (2, 3, 2), (1, 0, 2, 1), axes=(-1, 1)),
    _pad("runtime", (2, 3), (1, 0, 0, 2), where=R),
    _pad("runtime_negative", (4, 3), (-1, 1, 2, -1), where=R),
    _pad("nothing", (2, 3), (0, 0, 0, 0)),
    _pad("reflect", (4, 5), (1, 3, 2, 0), "reflect"),
    _pad("reflect_runtime", (4, 5), (1, 3, 2, 0), "reflect", where=R),
    _pad("edge", (2, 3), (2, 0, 1, 3), "edge"),
    _pad("edge_axes", (2, 3, 2), (1, 2), "edge", axes=(1,)),
    _pad("wrap", (3, 4), (2, 1, 1, 3), "wrap"),
]
CASES += [
    Case("CenterCropPad", (F(4, 5), C(i64(2, 7))), lambda x, s: torch.nn.functional.pad(x[1:3], (1, 1))),
    Case(
        "CenterCropPad",
        (F(2, 6, 3), C(i64(4))),
        lambda x, s: x[:, 1:5],
        {"axes": [1]},
    ),
]
