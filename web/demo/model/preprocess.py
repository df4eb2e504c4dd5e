"""Turns ink into the input of the demo's model: 16x16 pixels, of one size, centred on the centre of mass.

The page does the same in `src/preprocess.ts`; `web/demo/test/preprocess.test.mjs` compares the two.
"""

from __future__ import annotations

import numpy as np

SIZE = 16
"""Width and height of the model's input."""
EXTENT = 12
"""Size of the digit's longer side within the input, in pixels."""
# Fainter ink, such as the blur around a stroke, does not count for the size of a digit.
THRESHOLD = 0.1
LEVELS = 256


def _weights(length: int, centre: float, scale: float) -> np.ndarray:
    """Computes how much each of `length` source pixels contributes to each output pixel along one axis."""
    # Output pixel i covers the source from `begin[i]` to `begin[i] + width`: the mean over it is what an area-averaging
    # resize computes.
    width = 1 / scale
    begin = centre + (np.arange(SIZE) - SIZE / 2) * width
    source = np.arange(length)
    overlap = np.minimum(begin[:, None] + width, source + 1) - np.maximum(begin[:, None], source)
    return np.maximum(overlap, 0) / width


def preprocess(ink: np.ndarray) -> np.ndarray:
    """Preprocesses one drawing.

    Args:
        ink: [height, width], 0 (paper) to 1 (ink), of any size.

    Returns:
        [16, 16] float32 in multiples of 1/256; zeros if there is no ink.
    """
    rows, columns = np.nonzero(ink > THRESHOLD)
    if not len(rows):
        return np.zeros((SIZE, SIZE), np.float32)
    longer = max(np.ptp(rows), np.ptp(columns)) + 1
    scale = EXTENT / longer
    total = ink.sum()
    # Pixel k lies from k to k + 1, so that its centre is at k + 1/2.
    y = (ink.sum(1) * (np.arange(ink.shape[0]) + 0.5)).sum() / total
    x = (ink.sum(0) * (np.arange(ink.shape[1]) + 0.5)).sum() / total
    small = _weights(ink.shape[0], y, scale) @ ink @ _weights(ink.shape[1], x, scale).T
    # The darkest pixel becomes 1: thin strokes would be faint after the averaging.
    return (np.round(small / max(small.max(), 1e-6) * LEVELS) / LEVELS).astype(np.float32)
