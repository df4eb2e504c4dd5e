"""Fourier transforms."""

import numpy as np
import torch

from autodiff.case import C, Case, F, R


def _complex(x):
    return torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x[..., 0]


def dft(x, length=None, axis=None, *, inverse=0, onesided=0):
    """By torch.fft; the axis counts the last one of `x`, that of the parts."""
    axis = -2 if axis is None else int(axis)
    axis = axis - x.ndim if axis >= 0 else axis
    length = None if length is None else int(length)
    if inverse and onesided:
        return torch.fft.irfft(_complex(x), length, axis + 1)[..., None]
    names = {(0, 0): torch.fft.fft, (1, 0): torch.fft.ifft, (0, 1): torch.fft.rfft}
    return torch.view_as_real(names[inverse, onesided](_complex(x), length, axis + 1))


def dft_case(name, shape, length=None, axis=None, opset=21, **attrs):
    given = [None if value is None else C(np.array(value)) for value in (length, axis)]
    while given and given[-1] is None:
        given.pop()
    symbolic = {0: tuple(range(len(shape) - 1))}
    return Case(
        "DFT",
        (F(*shape), *given),
        lambda *x: dft(*x, **attrs),
        attrs,
        name=name,
        symbolic=symbolic,
        opset=opset,
    )


CASES = [
    dft_case("complex", (2, 6, 2)),
    dft_case("real", (2, 7, 1)),
    dft_case("axis", (2, 5, 3, 2), axis=1),
    dft_case("negative-axis", (2, 5, 3, 1), axis=-3, opset=22),
    dft_case("longer", (2, 5, 2), length=8),
    dft_case("shorter", (2, 3, 8, 1), length=5, axis=-2),
    dft_case("onesided-even", (2, 8, 1), onesided=1),
    dft_case("onesided-odd", (2, 7, 3, 1), axis=1, onesided=1),
    dft_case("onesided-longer", (2, 5, 1), length=9, onesided=1),
    dft_case("onesided-shorter", (2, 7, 1), length=4, onesided=1),
    dft_case("inverse", (2, 6, 2), inverse=1),
    dft_case("inverse-longer", (2, 3, 4, 2), length=7, axis=1, inverse=1),
    dft_case("inverse-shorter", (2, 6, 2), length=5, inverse=1),
    dft_case("inverse-onesided", (2, 5, 2), inverse=1, onesided=1),
    dft_case("inverse-onesided-odd", (2, 4, 3, 2), length=7, axis=1, inverse=1, onesided=1),
    dft_case("inverse-onesided-shorter", (2, 6, 2), length=6, inverse=1, onesided=1),
    dft_case("inverse-onesided-longer", (2, 3, 2), length=9, inverse=1, onesided=1),
    Case("DFT", (F(2, 5, 3, 1), R(np.array(7)), R(np.array(1))), dft, name="length-and-axis-at-run-time"),
    Case(
        "DFT", (F(2, 4, 3, 2), R(np.array(6)), R(np.array(-3))), lambda *x: dft(*x, inverse=1, onesided=1),
        {"inverse": 1, "onesided": 1}, name="half-at-run-time",
    ),
    Case("DFT", (F(2, 5, 2),), dft, name="symbolic-parts", symbolic={0: (0, 1, 2)}),
    Case("DFT", (F(2, 5, 1),), dft, name="symbolic-part", symbolic={0: (0, 1, 2)}),
    Case(
        "DFT", (F(2, 5, 1), C(np.array(7, np.int32))), lambda *x: dft(*x, onesided=1), {"onesided": 1},
        name="int32-length",
    ),
]  # fmt: skip


def stft(x, step, window=None, length=None, *, onesided=1):
    """Frame by frame."""
    size = x.shape[1] if window is None and length is None else int(len(window) if length is None else length)
    frames = _complex(x).unfold(1, size, int(step))
    frames = frames if window is None else frames * window
    return torch.view_as_real((torch.fft.rfft if onesided else torch.fft.fft)(frames))


def stft_case(name, signal, step, window=None, length=None, **attrs):
    given = [F(*signal), C(np.array(step)), window, None if length is None else C(np.array(length))]
    while given[-1] is None:
        given.pop()
    return Case(
        "STFT",
        tuple(given),
        lambda *x: stft(*x, **attrs),
        attrs,
        name=name,
        symbolic={0: (0, 1), 2: (0,)} if window else {0: (0, 1)},
    )


def flat_stft(x, step, window=None, length=None, **attrs):
    """Of a real signal without the axis of its one part, as PyTorch's TorchScript exporter writes it."""
    return stft(x.unsqueeze(-1), step, window, length, **attrs)


CASES += [
    Case(
        "STFT",
        (F(2, 20), C(np.array(3)), F(6)),
        flat_stft,
        name="two-axes",
        evaluator="onnxruntime",  # onnx's evaluator takes three axes only
        symbolic={0: (0, 1), 2: (0,)},
    ),
    Case(
        "STFT", (F(2, 14), C(np.array(3)), None, C(np.array(5))), lambda *x: flat_stft(*x, onesided=0),
        {"onesided": 0}, name="two-axes-two-sided", evaluator="onnxruntime", symbolic={0: (0, 1)},
    ),
    stft_case("overlapping", (2, 20, 1), 3, F(6)),
    stft_case("odd-two-sided", (2, 17, 1), 4, F(5), onesided=0),
    stft_case("gaps", (2, 17, 1), 5, F(4), 4),
    stft_case("no-window", (2, 16, 1), 4, None, 8),
    stft_case("complex", (1, 12, 2), 2, F(4), onesided=0),
    Case(
        "STFT", (F(2, 14, 1), R(np.array(3)), None, R(np.array(5))), stft, name="step-and-length-at-run-time",
        symbolic={0: (0, 1)},
    ),
    Case("STFT", (F(2, 14, 1), C(np.array(3, np.int32)), None, C(np.array(5, np.int32))), stft, name="int32"),
]  # fmt: skip
