"""Kernels of recurrent layers beside their bodies; with autograd they are compared in `fusion/test_recurrent.py`."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest

from kernels.against_body import Inputs, needs_kernels, run
from tolerances import NORM_RELATIVE, norm_relative_error

pytestmark = needs_kernels

# time, batch, input, hidden
SIZES = [(1, 1, 1, 1), (4, 2, 16, 16), (3, 17, 5, 33), (2, 30, 3, 70), (3, 2, 7, 260)]
FUZZ = int(os.environ.get("ONNXTRAIN_KERNEL_FUZZ", "4"))
drawn = [tuple(np.random.default_rng(seed).integers(1, 24, 4).tolist()) for seed in range(FUZZ)]
each_size = pytest.mark.parametrize("sizes", [*SIZES, *drawn], ids=str)
each_direction = pytest.mark.parametrize("direction", ["", "Reverse"])


def compare(name: str, inputs: Inputs, **attributes: int) -> None:
    """Kernel and body, and the kernel on one thread with itself on two.

    In float32 both, as ONNX's reference evaluator has no Scan that goes backwards: each may be off by rounding.
    """
    body = run(name, inputs, attributes, native=False)
    kernel = run(name, inputs, attributes, native=True)
    again = run(name, inputs, attributes, native=True, threads=1)
    for standard, own, one in zip(body, kernel, again, strict=True):
        assert own.shape == standard.shape
        np.testing.assert_array_equal(own, one)
        assert norm_relative_error(own, standard) <= 2 * NORM_RELATIVE[np.dtype(np.float32)]


def draw(seed: int, *shapes: Sequence[int], scale: float = 1.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [scale * rng.standard_normal(shape) for shape in shapes]


@pytest.mark.sample(every=2)
@each_direction
@each_size
def test_lstm(direction: str, sizes: Sequence[int]) -> None:
    time, batch, width, hidden = sizes
    x, b, h, c = draw(0, (time, batch, width), (1, 8 * hidden), (1, batch, hidden), (1, batch, hidden))
    w, r = draw(1, (1, 4 * hidden, width), (1, 4 * hidden, hidden), scale=hidden**-0.5)
    inputs = {"x": x, "w": w, "r": r, "b": b, "initial_h": h, "initial_c": c}
    compare(f"LSTM{direction}", inputs, hidden_size=hidden)


@each_direction
@each_size
def test_lstm_gradient(direction: str, sizes: Sequence[int]) -> None:
    time, batch, _, hidden = sizes
    state = (1, batch, hidden)
    ct_y, ct_h, ct_c, cells, c0 = draw(
        0, (time, 1, batch, hidden), state, state, (time, batch, hidden), state
    )
    (r,) = draw(1, (1, 4 * hidden, hidden), scale=hidden**-0.5)
    gates = np.tanh(draw(2, (time, batch, 4 * hidden))[0])
    inputs = {
        "ct_y": ct_y,
        "ct_h": ct_h,
        "ct_c": ct_c,
        "gates": gates,
        "cells": cells,
        "initial_c": c0,
        "r": r,
    }
    compare(f"LSTM{direction}Gradient", inputs)


@each_direction
@each_size
def test_gru(direction: str, sizes: Sequence[int]) -> None:
    time, batch, width, hidden = sizes
    x, b, h = draw(0, (time, batch, width), (1, 6 * hidden), (1, batch, hidden))
    w, r = draw(1, (1, 3 * hidden, width), (1, 3 * hidden, hidden), scale=hidden**-0.5)
    compare(f"GRU{direction}", {"x": x, "w": w, "r": r, "b": b, "initial_h": h}, hidden_size=hidden)


@each_direction
@each_size
def test_gru_gradient(direction: str, sizes: Sequence[int]) -> None:
    time, batch, _, hidden = sizes
    state, steps = (1, batch, hidden), (time, 1, batch, hidden)
    ct_y, ct_h, inner, y, h0 = draw(0, steps, state, (time, batch, hidden), steps, state)
    (r,) = draw(1, (1, 3 * hidden, hidden), scale=hidden**-0.5)
    gates = np.tanh(draw(2, (time, batch, 3 * hidden))[0])
    inputs = {"ct_y": ct_y, "ct_h": ct_h, "gates": gates, "inner": inner, "y": y, "initial_h": h0, "r": r}
    compare(f"GRU{direction}Gradient", inputs)


@each_direction
@each_size
def test_weight_gradient(direction: str, sizes: Sequence[int]) -> None:
    time, batch, width, hidden = sizes
    gates = (time, batch, 3 * hidden)
    shapes = (gates, gates, (time, batch, width), (time, 1, batch, hidden), (1, batch, hidden))
    inputs = dict(zip(("ct_input", "ct_hidden", "x", "y", "initial_h"), draw(0, *shapes), strict=True))
    compare(f"RecurrentWeight{direction}Gradient", inputs)
