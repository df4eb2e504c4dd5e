"""Quantization."""

import numpy as np
import torch

from autodiff.case import C, Case, F, R

X = np.arange(-12, 12, dtype=np.int8).reshape(4, 6)
SCALE = {"low": 0.1, "high": 0.5}


def _dequantize(scale: F, zero, twin_scale, *, name, opset=21, where=R, **attrs) -> Case:
    def twin(x, s, z=None):
        return (x.to(torch.float64) - (0 if z is None else twin_scale(z.to(torch.float64)))) * twin_scale(s)

    arguments = (where(X), scale, *([C(np.asarray(zero, np.int8))] if zero is not None else []))
    return Case("DequantizeLinear", arguments, twin, attrs, opset=opset, name=name)


CASES = [
    _dequantize(F(**SCALE), None, lambda s: s, name="tensor"),
    _dequantize(F(**SCALE), 3, lambda s: s, name="tensor_zero_point", where=C),
    _dequantize(F(1, **SCALE), None, lambda s: s, name="vector_of_one"),
    _dequantize(F(6, **SCALE), [1, 2, 3, -1, 0, 5], lambda s: s, name="axis_default", axis=1),
    _dequantize(F(4, **SCALE), None, lambda s: s[:, None], name="axis_0", axis=0),
    _dequantize(F(6, **SCALE), None, lambda s: s, name="axis_negative", axis=-1),
    _dequantize(
        F(4, 3, **SCALE), np.ones((4, 3)), lambda s: s.repeat_interleave(2, 1), name="blocks", axis=1,
        block_size=2,
    ),
    _dequantize(
        F(2, 6, **SCALE), None, lambda s: s.repeat_interleave(3, 0)[:4], name="uneven_blocks", axis=0,
        block_size=3,
    ),
]  # fmt: skip
