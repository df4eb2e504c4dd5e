"""Unpacks and packs weights of MatMulNBits: 2, 4 or 8 bits, with a scale for each block of a column."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnxruntime.capi import _pybind_state

from onnxtrain._words import argument
from onnxtrain.errors import GraphBuildError
from onnxtrain.lora._description import Array
from onnxtrain.passes.parameters.packed_codes import unpacked

# onnxruntime's own quantizers, as called by its MatMulNBitsQuantizer.
_ROUNDERS = {2: "quantize_matmul_2bits", 4: "quantize_matmul_4bits", 8: "quantize_matmul_8bits"}


@dataclass(frozen=True)
class BlockWeights:
    """The weight of a MatMulNBits, as defined by com.microsoft (onnxruntime 1.32).

    Attributes:
        packed: codes, uint8 [N, blocks, block_size * bits / 8], lowest bits first.
        scales: [N * blocks], floating point.
        zero_points: packed uint8 [N * ceil(blocks * bits / 8)] or floating point [N * blocks]; None if all are
            2^(bits-1).
        order: index of the block of each row (`g_idx`), int32 [K]; None if the rows of a block are consecutive.
        bits: 2, 4 or 8.
        block_size: number of rows that share a scale, e.g. 32.
        shape: (K, N), the numbers of input and output features.
    """

    packed: Array
    scales: Array
    zero_points: Array | None
    order: Array | None
    bits: int
    block_size: int
    shape: tuple[int, int]

    @classmethod
    def of(cls, node: ir.Node) -> BlockWeights:
        """Reads the weight of a node.

        Raises:
            GraphBuildError: an input is computed by the graph, or the weights are prepacked.
        """
        arrays: list[Array | None] = []
        # Inputs: A, B, scales, zero_points, g_idx, bias.
        for value in node.inputs[1:5]:
            tensor = value.const_value if value is not None else None
            if value is not None and tensor is None:
                raise GraphBuildError(
                    f"merging adapters: the weight of MatMulNBits '{node.name}' is computed by the graph; "
                    "merge before that change to the model"
                )
            arrays.append(None if tensor is None else tensor.numpy())
        packed, scales, zero_points, order = (*arrays, None, None)[:4]
        attributes = node.attributes
        bits: int = attributes.get_int("bits", 4)
        if (
            bits not in _ROUNDERS
            or attributes.get_int("weight_prepacked", 0) != 0
            or packed is None
            or scales is None
        ):
            raise GraphBuildError(
                f"merging adapters: MatMulNBits '{node.name}' has {bits}-bit or prepacked weights; only 2, "
                "4 and 8 bits in the standard layout are supported"
            )
        size, shape = attributes["block_size"].as_int(), (attributes["K"].as_int(), attributes["N"].as_int())
        return cls(packed, scales, zero_points, order, bits, size, shape)

    @property
    def blocks(self) -> int:
        """Number of blocks per column."""
        return math.ceil(self.shape[0] / self.block_size)

    def matrix(self) -> Array:
        """Dequantizes the weight to float32 [K, N]: scale · (code - zero point)."""
        rows, columns = self.shape
        # The last block of a column is padded: with 40 rows in blocks of 32, codes 40 to 63 are unused.
        codes = _floats(self.packed.reshape(columns, -1), self.bits)[:, : self.blocks * self.block_size]
        scales = self.scales.reshape(columns, self.blocks).astype(np.float32)
        if self.zero_points is None:
            zeros = np.full((columns, self.blocks), 2.0 ** (self.bits - 1), np.float32)
        elif self.zero_points.dtype == np.uint8:
            # Each column begins at a byte boundary.
            zeros = _floats(self.zero_points.reshape(columns, -1), self.bits)[:, : self.blocks]
        else:
            zeros = self.zero_points.reshape(columns, self.blocks).astype(np.float32)
        block = self.order if self.order is not None else np.arange(rows) // self.block_size
        return ((codes[:, :rows] - zeros[:, block]) * scales[:, block]).T.copy()

    def quantized_again(self, matrix: Array) -> dict[int, Array]:
        """Quantizes a new weight with the bits and the block size of this weight.

        Args:
            matrix: float32 [K, N].

        Returns:
            New arrays by input index of the node: codes, scales, and zero points if there are any.

        Raises:
            GraphBuildError: the weight has `g_idx` or floating-point zero points.
        """
        if self.order is not None or (self.zero_points is not None and self.zero_points.dtype != np.uint8):
            raise GraphBuildError(
                "merging adapters: a weight of MatMulNBits with g_idx or floating-point zero points "
                f"cannot be quantized again; pass {argument('requantize', False)}"
            )
        rows, columns = self.shape
        packed = np.zeros((columns, self.blocks, self.block_size * self.bits // 8), np.uint8)
        scales = np.zeros(columns * self.blocks, np.float32)
        zero_points = np.zeros(columns * math.ceil(self.blocks * self.bits / 8), np.uint8)
        # The quantizer reads whole blocks.
        whole = np.zeros((self.blocks * self.block_size, columns), np.float32)
        whole[:rows] = matrix
        rounder = getattr(_pybind_state, _ROUNDERS[self.bits])
        rounder(packed, whole, scales, zero_points, self.block_size, columns, rows, self.zero_points is None)
        result = {
            1: packed.reshape(self.packed.shape),
            2: scales.astype(self.scales.dtype).reshape(self.scales.shape),
        }
        if self.zero_points is not None:
            result[3] = zero_points.reshape(self.zero_points.shape)
        return result


def _floats(packed: Array, bits: int) -> Array:
    """Unpacks codes to float32 instead of uint8, so that a code minus its zero point can be negative."""
    return unpacked(packed, bits).astype(np.float32)
