"""Chains of standard ops that become one composite op, with one for the gradient.

A fusion is a pattern, written as the computation that it recognises, and the op: see `norms.py`. These are passes that
know `onnxtrain.functions`, which `onnxtrain.passes` does not. Which of them run where is said in `lists.py`.
"""

from __future__ import annotations

from onnxtrain.fusion._pass import Fusion, FusionPass
from onnxtrain.fusion.attention import AttentionPass
from onnxtrain.fusion.bfloat16 import Bfloat16ProductPass, Bfloat16RoundingPass, WideCompositesPass
from onnxtrain.fusion.lists import FUSIONS, fuse_exported, fuse_forward, fuse_kernels
from onnxtrain.fusion.native import NativeOpsPass
from onnxtrain.fusion.norms import NORMS
from onnxtrain.fusion.products import ProductPass
from onnxtrain.fusion.recurrent import RecurrentPass
from onnxtrain.fusion.relu6 import Relu6Pass

__all__ = [
    "FUSIONS",
    "NORMS",
    "AttentionPass",
    "Bfloat16ProductPass",
    "Bfloat16RoundingPass",
    "Fusion",
    "FusionPass",
    "NativeOpsPass",
    "ProductPass",
    "RecurrentPass",
    "Relu6Pass",
    "WideCompositesPass",
    "fuse_exported",
    "fuse_forward",
    "fuse_kernels",
]
