"""Unpacks and packs integers of 2, 4 or 8 bits, of which several share a byte."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def unpacked(packed: Array, bits: int) -> Array:
    """Unpacks the last axis of bytes, the lowest bits first, as MatMulNBits (onnxruntime 1.32) and ONNX pack integers.

    Args:
        packed: uint8 [..., bytes].
        bits: 2, 4 or 8.

    Returns:
        uint8 [..., bytes * 8 / bits].

    Example:
        >>> unpacked(np.array([0x21, 0x43], np.uint8), 4).tolist()
        [1, 2, 3, 4]
    """
    # Four codes of 2 bits, two of 4, or one of 8 in each byte.
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)


def packed_pairs(codes: Array) -> Array:
    """Packs integers of 4 bits in pairs, without gaps between rows, as a tensor of UINT4 holds them.

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
