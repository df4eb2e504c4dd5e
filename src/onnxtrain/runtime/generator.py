"""Seeds ONNX Runtime's random generator for a run of a training model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnxruntime as ort

from onnxtrain.runtime.lock import ProcessLock

_generator = ProcessLock()
_WORD = (1 << 64) - 1


@contextmanager
def seeded(seed: int, step: int, run: int) -> Iterator[None]:
    """Context manager that seeds ONNX Runtime's random number generator for one call to the training model.

    The seed is a hash of the arguments, so training that is resumed from a checkpoint draws the same random numbers as
    uninterrupted training. Other threads that use this context manager wait until the `with` block ends.

    Args:
        seed: the user's seed, 64 bits.
        step: number of optimizer steps so far.
        run: number of runs of the training model since the last step.
    """
    # A process has one generator for the sessions of all threads. The lock is held from seeding to the end of the run;
    # otherwise the masks would depend on other threads.
    with _generator:
        # ONNX Runtime uses 31 bits of the seed.
        ort.set_seed(_mixed(seed, step, run) >> 33)
        yield


def _mixed(*numbers: int) -> int:
    """Hashes integers to 64 bits with the mixing function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    # In ONNX Runtime's generator, which is linear, similar seeds give similar first numbers.
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state
