"""Draw Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from autodiff.fuzz.builder import Builder
from autodiff.fuzz.draw import Draw

Drawer = Callable[[Builder, Draw], None]


def dft(b: Builder, d: Draw) -> None:
    """Of real and complex numbers, forward and back, whole spectra and half ones, padded and cut."""
    inverse, onesided = d.chance(45), d.chance(45)
    parts = 2 if inverse else 1 if onesided else d.choice([1, 2])
    x = b.tensor(
        range(2, 6),
        fits=lambda a: a.shape[-1] == parts,
        shape=lambda: [*b.sizes(d.integer(1, 3), most=5), parts],
    )
    rank = len(b.shape(x))
    older = b.supports("DFT", "axis")  # where its default is the axis behind the batch
    axis = d.choice([*range(rank - 1), *range(-rank, -1), *([] if older and rank == 2 else [None] * rank)])
    length = ""
    if d.chance(50):
        size = b.shape(x)[-2 if axis is None and not older else 1 if axis is None else axis]
        # Of half a spectrum, ONNX Runtime (1.32) makes no more and no fewer numbers than the whole one has.
        least = max(2 * size - 2, 1) if inverse and onesided else 1
        number = d.integer(least, least + 1 if inverse and onesided else 6)
        # To the result of a run-time length, shape inference gives the size that there was before.
        fixed = None if b.graph.shapes == "unranked" else True
        length = b.data(np.array(number, d.choice([np.int64, np.int32])), fixed=fixed)
    attrs: dict[str, Any] = {
        "inverse": int(inverse) if inverse or d.chance(30) else None,
        "onesided": int(onesided) if onesided or d.chance(30) else None,
    }
    if older:
        b.node("DFT", [x, length], axis=axis, **attrs)
    else:
        b.node("DFT", [x, length, "" if axis is None else b.data(np.array(axis))], **attrs)


def stft(b: Builder, d: Draw) -> None:
    """Frames that overlap or leave gaps, by a window, by their length, or by both."""
    parts = d.choice([1, 1, 2])
    signal = b.tensor(
        [3],
        fits=lambda a: a.shape[-1] == parts and a.shape[1] > 0,
        shape=lambda: [*b.sizes(1), d.integer(1, 8), parts],
    )
    size = d.integer(1, b.shape(signal)[1])
    window = b.like([size]) if d.chance(60) else ""
    dtype = d.choice([np.int64, np.int32])
    step = b.data(np.array(d.integer(1, 3), dtype))
    length = b.data(np.array(size, dtype)) if not window or d.chance(40) else ""
    onesided = 0 if parts == 2 else d.choice([None, 0, 1])
    b.node("STFT", [signal, step, window, length], onesided=onesided)


DRAWERS: dict[str, Drawer] = {"DFT": dft, "STFT": stft}
