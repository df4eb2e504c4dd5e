"""Parses and formats memory sizes, e.g. "512MB"."""

from __future__ import annotations

import re

from onnxtrain._words import argument
from onnxtrain.errors import InputError

# Decimal units are those of the SI, binary ones those of IEC 80000-13. A single letter is decimal.
_UNITS = {"": 1, "B": 1} | {
    unit: base**power
    for power, letter in enumerate("KMGT", start=1)
    for unit, base in ((letter, 1000), (f"{letter}B", 1000), (f"{letter}IB", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_memory(size: str | int) -> int:
    """Converts a memory size to bytes.

    Args:
        size: number of bytes, or a string with a number and a unit: B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB
            or TiB (powers of 1024). Case is ignored, and a space before the unit is allowed.

    Raises:
        InputError: the string is not a size, or the size is not positive.

    Example:
        >>> parse_memory("512MB"), parse_memory("1.5 GiB")
        (512000000, 1610612736)
    """
    found = _SIZE.fullmatch(str(size).strip())
    unit = None if found is None else _UNITS.get(found[2].upper())
    result = 0 if found is None or unit is None else int(float(found[1]) * unit)
    # True is an int, but not a number of bytes.
    if result < 1 or isinstance(size, bool):
        raise InputError(
            f"{argument('memory')} is {size!r}; write a number and a unit, e.g. 512MB, 1.5GB or 800MiB"
        )
    return result


def memory_text(size: int) -> str:
    """Formats a number of bytes, e.g. as "370 MB" or "1.25 GB"; units are powers of 1000."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
