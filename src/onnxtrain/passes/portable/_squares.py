"""Writes random integers that follow from a counter and a key: the generator Squares."""

from __future__ import annotations

import functools

import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import WriterBefore

HOLDS = ("seed", "step", "run")
"""Elements of the input that hosts feed: the run's seed, the optimizer steps taken so far, and the runs of the training
model since the last of these steps."""

# Odd numbers with irregular digits in base 2: their multiples of small seeds, steps and runs share no value. The first
# three multiply seed, step and run; the last is the key by which the sum is hashed.
_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
_KEY = 0x548C9DECBCE65297

# Numbers of one node are counted from a multiple of this number, so no two nodes share a counter.
ELEMENTS = 1 << 33


class Squares:
    """Write random integers: the generator Squares of B. Widynski, "Squares: A Fast Counter-Based RNG", 2020.

    Number i of it is four or five rounds of squaring of (counter i) * key in 64 bits, each of which exchanges the upper
    and the lower 32 bits. Products are of int64, which wrap around in every build of ONNX Runtime; 1.20 cannot multiply
    uint64. Shifts are of uint64, as BitShift takes unsigned integers only.

    Args:
        node: The node to write before.
    """

    def __init__(self, node: ir.Node) -> None:
        self._write = WriterBefore(node)
        self._half = self._write.number(32, ir.DataType.UINT64)

    def key(self, source: ir.Value) -> ir.Value:
        """Hash seed, step and run into the key of a run of the model, an odd int64 scalar."""
        terms = self._write("Mul", source, list(_FACTORS))
        # Not by ReduceSum, which adds int64 up in floating point (ONNX Runtime 1.32) and so loses the lower bits.
        first, *others = (self._write("Gather", terms, place) for place in range(len(HOLDS)))
        counter = functools.reduce(lambda total, term: self._write("Add", total, term), others, first)
        mixed, y = self._rounds(counter, self._write("Identity", _KEY))
        # One round more than for the words below: the key uses all 64 bits.
        mixed = self._square_plus(self._swap_halves(mixed), y)
        return self._write("Add", self._write("Mul", mixed, 2), 1)

    def words(self, count: ir.Value, first: int, key: ir.Value) -> ir.Value:
        """Write integers from 0 to 2³² - 1, int64, for the `count` (int64 [1]) counters from `first` on."""
        mixed, _ = self._rounds(self._write.range(first, count), key)
        return self._signed(self._shifted(mixed, "RIGHT"))

    def _rounds(self, counters: ir.Value, key: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Write four rounds; return the sum of the last one, and counters * key."""
        y = self._write("Mul", counters, key)
        z = self._write("Add", y, key)
        x = self._square_plus(y, y)
        for term in (z, y, z):
            x = self._square_plus(self._swap_halves(x), term)
        return x, y

    def _square_plus(self, x: ir.Value, term: ir.Value) -> ir.Value:
        return self._write("Add", self._write("Mul", x, x), term)

    def _swap_halves(self, x: ir.Value) -> ir.Value:
        # The halves have no bit in common, so that Xor joins them.
        return self._signed(self._write("BitwiseXor", self._shifted(x, "RIGHT"), self._shifted(x, "LEFT")))

    def _shifted(self, x: ir.Value, direction: str) -> ir.Value:
        unsigned = self._write("Cast", x, to=ir.DataType.UINT64)
        return self._write("BitShift", unsigned, self._half, direction=direction)

    def _signed(self, x: ir.Value) -> ir.Value:
        return self._write("Cast", x, to=ir.DataType.INT64)

    def uniform(self, count: ir.Value, first: int, key: ir.Value, *, positive: bool = False) -> ir.Value:
        """Write float32 numbers from [0, 1), or from (0, 1] if `positive`; arguments as for :meth:`words`."""
        # 24 bits, which float32 holds exactly.
        bits = self._write("Div", self.words(count, first, key), 1 << 8)
        if positive:
            bits = self._write("Add", bits, 1)
        scale = self._write.number(2.0**-24, ir.DataType.FLOAT)
        return self._write("Mul", self._write("Cast", bits, to=ir.DataType.FLOAT), scale)
