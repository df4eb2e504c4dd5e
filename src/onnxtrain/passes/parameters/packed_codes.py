"""Unpacks and packs integers of 2, 4 or 8 bits, several of which share a byte."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def unpacked(packed: Array, bits: int) -> Array:
    """Unpacks the last axis of bytes, lowest bits first, as packed by MatMulNBits (onnxruntime 1.32) and ONNX.

    Args:
        packed: uint8 [..., bytes].
        bits: 2, 4 or 8.

    Returns:
        uint8 [..., bytes * 8 / bits].

    Example:
        >>> unpacked(np.array([0x21, 0x43], np.uint8), 4).tolist()
        [1, 2, 3, 4]
    """
    # Four 2-bit codes, two 4-bit codes, or one 8-bit code per byte.
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def packed_pairs(codes: Array) -> Array:
    """Packs 4-bit integers in pairs, without gaps between rows, like a tensor of UINT4.

    Args:
        codes: uint8 of any shape, each below 16.

    Returns:
        uint8 [(size + 1) / 2].

    Example:
        >>> packed_pairs(np.array([1, 2, 3], np.uint8)).tolist()
        [33, 3]
    """
    flat = codes.reshape(-1)
    flat = np.pad(flat, (0, len(flat) % 2))
    pairs: Array = flat[0::2] | (flat[1::2] << np.uint8(4))
    return pairs.astype(np.uint8)
