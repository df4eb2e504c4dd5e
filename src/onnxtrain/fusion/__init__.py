"""Replaces chains of standard ops with composite ops whose gradients are composite ops too.

A fusion consists of a pattern, written as the computation that it recognizes, and a composite op (see `norms.py`).
`lists.py` defines which fusions run in which pipeline, and in which order.
"""

from __future__ import annotations

# These passes use `onnxtrain.functions`, which `onnxtrain.passes` must not import.
from onnxtrain.fusion._pass import Fusion, FusionPass
from onnxtrain.fusion.attention import AttentionPass
from onnxtrain.fusion.bfloat16 import Bfloat16ProductPass, Bfloat16RoundingPass, WideCompositesPass
from onnxtrain.fusion.double_sums import DoubleSumPass
from onnxtrain.fusion.elementwise import ElementwisePass
from onnxtrain.fusion.lists import FUSIONS, fuse_exported, fuse_forward, fuse_kernels
from onnxtrain.fusion.mean_loss import MeanLossPass
from onnxtrain.fusion.native import NativeOpsPass
from onnxtrain.fusion.norms import NORMS
from onnxtrain.fusion.products import ProductPass
from onnxtrain.fusion.qkv_attention import QkvAttentionPass
from onnxtrain.fusion.quantized import PackedProductPass
from onnxtrain.fusion.recomputed_chains import RecomputedChainsPass, recomputed_nodes
from onnxtrain.fusion.recurrent import RecurrentPass
from onnxtrain.fusion.relu6 import Relu6Pass
from onnxtrain.fusion.rows import ROW_OPS, RowsPass
from onnxtrain.fusion.transposes import TransposePass

__all__ = [
    "FUSIONS",
    "NORMS",
    "ROW_OPS",
    "AttentionPass",
    "Bfloat16ProductPass",
    "Bfloat16RoundingPass",
    "DoubleSumPass",
    "ElementwisePass",
    "Fusion",
    "FusionPass",
    "MeanLossPass",
    "NativeOpsPass",
    "PackedProductPass",
    "ProductPass",
    "QkvAttentionPass",
    "RecomputedChainsPass",
    "RecurrentPass",
    "Relu6Pass",
    "RowsPass",
    "TransposePass",
    "WideCompositesPass",
    "fuse_exported",
    "fuse_forward",
    "fuse_kernels",
    "recomputed_nodes",
]
