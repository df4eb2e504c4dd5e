"""Seeds ONNX Runtime's random generator for one run of a training model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnxruntime as ort

from onnxtrain.runtime.lock import ProcessLock

_generator = ProcessLock()
_WORD = (1 << 64) - 1


@contextmanager
def seeded(seed: int, step: int, run: int) -> Iterator[None]:
    """Lets Dropout inside the `with` block draw numbers that follow from these three alone, as after a resume.

    Args:
        seed: the number that the user gives, 64 bits.
        step: number of optimizer steps taken so far.
        run: number of runs of the training model since the last of these steps.
    """
    # A process has one generator, which sessions of all threads draw from. The lock is held from seeding it to the end
    # of the run: otherwise the masks would depend on the other threads.
    with _generator:
        # ONNX Runtime keeps 31 bits of the seed.
        ort.set_seed(_mixed(seed, step, run) >> 33)
        yield


def _mixed(*numbers: int) -> int:
    """Hashes integers into one of 64 bits by the steps of SplitMix64 (Steele, Lea and Flood, 2014)."""
    # Close seeds give close first numbers in ONNX Runtime's generator, a linear one.
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state
