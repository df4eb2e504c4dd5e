"""Emits random integers computed from a counter and a key with the Squares generator."""

from __future__ import annotations

import functools

import onnx_ir as ir

from onnxtrain.passes.tidy.replace_value import WriterBefore

HOLDS = ("seed", "step", "run")
"""Elements of the input that hosts provide: the seed, the number of optimizer steps so far, and the number of runs of
the training model since the last step."""

# Odd numbers with irregular binary digits, so that multiples for small seeds, steps and runs don't coincide. The first
# three multiply seed, step and run; the last one is the key for hashing their sum.
_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
_KEY = 0x548C9DECBCE65297

# Counters of a node start at a multiple of this number, so that no two nodes share a counter.
ELEMENTS = 1 << 33


class Squares:
    """Emits nodes that compute random numbers with the Squares generator, so that every host draws the same numbers.

    Each number is computed from its own counter: x = counter * key passes through four rounds, or five for the key of
    a run. A round squares x, adds a term and swaps the upper and the lower 32 bits, in 64-bit arithmetic. Products are
    int64, which wraps around in every build of ONNX Runtime; 1.20 cannot multiply uint64. Shifts are uint64, because
    BitShift only supports unsigned integers.

    Source: B. Widynski, "Squares: A Fast Counter-Based RNG", 2020.

    Args:
        node: the node before which the new nodes are inserted.
    """

    def __init__(self, node: ir.Node) -> None:
        self._write = WriterBefore(node)
        self._half = self._write.number(32, ir.DataType.UINT64)

    def key(self, source: ir.Value) -> ir.Value:
        """Emits the generator's key for one run of the model, an odd int64 scalar: a hash of `source`.

        Args:
            source: seed, step and run, as in :data:`HOLDS`; int64 [3].
        """
        terms = self._write("Mul", source, list(_FACTORS))
        # ReduceSum would add int64 in floating point (ONNX Runtime 1.32) and lose the lower bits.
        first, *others = (self._write("Gather", terms, place) for place in range(len(HOLDS)))
        counter = functools.reduce(lambda total, term: self._write("Add", total, term), others, first)
        mixed, y = self._rounds(counter, self._write("Identity", _KEY))
        # One more round than for the words below: the key uses all 64 bits.
        mixed = self._square_plus(self._swap_halves(mixed), y)
        return self._write("Add", self._write("Mul", mixed, 2), 1)

    def words(self, count: ir.Value, first: int, key: ir.Value) -> ir.Value:
        """Emits `count` random int64 integers in [0, 2³²).

        Args:
            count: number of integers, int64 [1].
            first: the first counter. Each integer is computed from its own counter.
            key: the key that :meth:`key` returns.
        """
        mixed, _ = self._rounds(self._write.range(first, count), key)
        return self._signed(self._shifted(mixed, "RIGHT"))

    def _rounds(self, counters: ir.Value, key: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Emits the first four rounds of the Squares generator.

        x starts as y = counters * key. Each round squares x and adds a term: y in rounds 1 and 3, y + key in rounds 2
        and 4. The upper and the lower 32 bits of x are swapped between rounds.

        Returns:
            x after the fourth round, with its halves not yet swapped, and y.
        """
        y = self._write("Mul", counters, key)
        z = self._write("Add", y, key)
        x = self._square_plus(y, y)
        for term in (z, y, z):
            x = self._square_plus(self._swap_halves(x), term)
        return x, y

    def _square_plus(self, x: ir.Value, term: ir.Value) -> ir.Value:
        return self._write("Add", self._write("Mul", x, x), term)

    def _swap_halves(self, x: ir.Value) -> ir.Value:
        # The halves have no common bits, so Xor combines them.
        return self._signed(self._write("BitwiseXor", self._shifted(x, "RIGHT"), self._shifted(x, "LEFT")))

    def _shifted(self, x: ir.Value, direction: str) -> ir.Value:
        unsigned = self._write("Cast", x, to=ir.DataType.UINT64)
        return self._write("BitShift", unsigned, self._half, direction=direction)

    def _signed(self, x: ir.Value) -> ir.Value:
        return self._write("Cast", x, to=ir.DataType.INT64)

    def uniform(self, count: ir.Value, first: int, key: ir.Value, *, positive: bool = False) -> ir.Value:
        """Emits `count` random float32 numbers in [0, 1), or in (0, 1] if `positive`.

        Args:
            count: length of the result, int64 [1].
            first: the first counter. Each number is computed from its own counter.
            key: the key that :meth:`key` returns.
            positive: True to exclude 0 and include 1.
        """
        # 24 bits, which float32 represents exactly.
        bits = self._write("Div", self.words(count, first, key), 1 << 8)
        if positive:
            bits = self._write("Add", bits, 1)
        scale = self._write.number(2.0**-24, ir.DataType.FLOAT)
        return self._write("Mul", self._write("Cast", bits, to=ir.DataType.FLOAT), scale)
