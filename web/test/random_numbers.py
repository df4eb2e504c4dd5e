"""Prints the first numbers of the generator of onnxtrain-web: python random_numbers.py SEED COUNT."""

from __future__ import annotations

import json
import sys

import numpy as np


def mix(x: np.ndarray) -> np.ndarray:
    """Hashes 32-bit integers."""
    x = x + np.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * np.uint32(0x735A2D97)
    return x ^ (x >> 15)


seed, count = map(int, sys.argv[1:])
numbers = mix(np.arange(count, dtype=np.uint32) ^ mix(np.array([seed], np.uint32)))
print(json.dumps(numbers.tolist()))
