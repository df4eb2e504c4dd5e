"""Discrete Fourier transforms."""

from functools import partial
from typing import Any

import torch
from torch import fft

from ortmodule.aten_case import Case, T

Z = torch.view_as_complex
R = torch.view_as_real


def _complex(fn: Any, **options: Any) -> Any:
    return lambda a: R(fn(Z(a), **options))


def _real(fn: Any, **options: Any) -> Any:
    return lambda x: R(fn(x, **options))


def _back(fn: Any, **options: Any) -> Any:
    return lambda a: fn(Z(a), **options)


CASES = [
    Case("rfft", lambda x: (R(fft.rfft(x)), R(fft.rfft(x, norm="ortho"))), (T(3, 6),)),
    Case("rfft_odd", _real(fft.rfft, dim=0), (T(5, 3),)),
    Case("rfft_padded", _real(fft.rfft, n=8), (T(3, 5),), dynamic=False),
    Case("rfft2", _real(fft.rfft2, norm="forward"), (T(2, 4, 6),)),
    Case("fft", _complex(fft.fft), (T(3, 5, 2),)),
    Case("fft_of_real", _real(fft.fft), (T(3, 5),)),
    Case("ifft", _complex(fft.ifft, norm="ortho"), (T(3, 6, 2),)),
    Case("fft2", _complex(fft.fft2), (T(3, 4, 2),)),
    Case("irfft", _back(fft.irfft), (T(3, 4, 2),)),
    Case("irfft_odd", _back(fft.irfft, n=7, norm="ortho"), (T(3, 4, 2),), dynamic=False),
    Case("irfft2", _back(fft.irfft2, s=(4, 6)), (T(2, 4, 4, 2),), dynamic=False),
    Case("hfft", _back(fft.hfft), (T(3, 4, 2),), dynamic=False),
    Case("fft_long", _complex(fft.fft), (T(2, 360, 2),), dynamic=False),
    Case("rfft_long", _real(fft.rfft), (T(2, 256),), dynamic=False),
    Case("irfft_long", _back(fft.irfft), (T(2, 181, 2),), dynamic=False),
    Case("irfft_long_odd", _back(fft.irfft, n=225), (T(2, 113, 2),), dynamic=False),
    Case("fft_long_prime", _complex(fft.fft), (T(2, 131, 2),), dynamic=False),
    Case("fft_long_large_prime", _complex(fft.fft), (T(2, 1031, 2),)),
    Case("rfft_long_large_prime", _real(fft.rfft), (T(2, 2062),), dynamic=False),
    Case("irfft_long_large_prime", _back(fft.irfft, n=1031), (T(2, 516, 2),), dynamic=False),
    # 32,768 = 128 * 256, of which the second factor is factored again.
    Case("fft_very_long", _complex(fft.fft), (T(2, 32768, 2),), dynamic=False),
    Case("ifft_lengths", _complex(fft.ifft), (T(2, 300, 2),)),
    Case("rfft_lengths", _real(fft.rfft), (T(2, 129),)),
    Case("irfft_lengths", _back(fft.irfft), (T(2, 129, 2),)),
    Case("irfft_of_one", _back(fft.irfft, n=1), (T(3, 1, 2),), dynamic=False),
    Case("rfft_of_two_axes", _real(fft.rfft2, dim=(0, 1)), (T(5, 7, 2),)),
    Case("fftshift", lambda x: fft.fftshift(fft.fft(x)).abs(), (T(3, 4),)),
    Case(
        "convolution_by_fft", lambda x, k: fft.irfft(fft.rfft(x, n=10) * fft.rfft(k, n=10), n=10)[..., :5],
        (T(2, 3, 5), T(3, 5)), dynamic=False,
    ),
    Case(
        "stft", lambda x, w: torch.stft(x, 8, 4, window=w, return_complex=True).abs(),
        (T(2, 24), T(8, low=0.1)), dynamic=False,
    ),
    Case(
        "frames", lambda x: partial(torch.as_strided, size=(3, 4), stride=(2, 1))(x * 2), (T(8),),
        dynamic=False,
    ),
    Case(
        "windows", lambda x: x * torch.hann_window(8, dtype=x.dtype) + torch.hamming_window(8, dtype=x.dtype),
        (T(8),),
    ),
    Case(
        "windows_of_other_shapes", lambda x: x
        * sum(make(8, dtype=x.dtype) for make in (torch.bartlett_window, torch.blackman_window, torch.kaiser_window)),
        (T(8),),
    ),
]  # fmt: skip
