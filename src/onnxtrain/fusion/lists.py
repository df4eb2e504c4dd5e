"""Defines which fusions run, and in which order, with one function for each place in the pipelines."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onnxtrain.fusion._pass import FusionPass
from onnxtrain.fusion.activations import ACTIVATIONS
from onnxtrain.fusion.attention import AttentionPass
from onnxtrain.fusion.bfloat16 import Bfloat16ProductPass
from onnxtrain.fusion.mean_loss import MeanLossPass
from onnxtrain.fusion.native import NativeOpsPass
from onnxtrain.fusion.norms import NORMS
from onnxtrain.fusion.products import ProductPass
from onnxtrain.fusion.qkv_attention import QkvAttentionPass
from onnxtrain.fusion.quantized import PackedProductPass
from onnxtrain.fusion.recurrent import RecurrentPass
from onnxtrain.fusion.relu6 import Relu6Pass
from onnxtrain.fusion.rotary import ROTARY
from onnxtrain.fusion.vocabulary import VocabularyLossPass

FUSIONS = (*NORMS, *ACTIVATIONS, ROTARY)
"""The fusions whose patterns are searched for in forward graphs."""


def fuse_forward(model: ir.Model) -> None:
    """Replaces normalizations, SiLU, rotary position embeddings, LSTM and GRU in a forward graph with composite ops.

    The composite ops have their own gradient rules, so this runs before the graph is differentiated.
    """
    ir.passes.Sequential(FusionPass(FUSIONS), RecurrentPass())(model)


def fuse_exported(model: ir.Model) -> None:
    """Fuses chains of ops in an exported forward graph, before the graph is differentiated.

    In addition to the fusions of :func:`fuse_forward`, this fuses ReLU6 and attention, which exporters decompose into
    standard ops.
    """
    fuse_forward(model)
    # ORTModule captures PyTorch's own hardtanh, and runs the passes for attention itself.
    ir.passes.Sequential(Relu6Pass(), AttentionPass(), QkvAttentionPass())(model)


def fuse_kernels(model: ir.Model, *, bfloat16: bool = False, kept: Collection[str] = ()) -> None:
    """Replaces ops of a training graph with functions that have native kernels; run this last.

    Args:
        model: the model, with inferred shapes.
        bfloat16: True to round the factors of float32 matrix products and convolutions to bfloat16.
        kept: names of values that ONNX Runtime's own kernels must compute, e.g. the values of the forward graph.
            MaxPool and training-mode BatchNormalization are replaced even if they compute such values.
    """
    # NativeOpsPass runs first: it emits the convolution functions that Bfloat16ProductPass rewrites. ProductPass
    # handles the products that remain in float32.
    products = [Bfloat16ProductPass()] if bfloat16 else []
    others = ProductPass(kept), PackedProductPass(kept), MeanLossPass(kept), VocabularyLossPass(kept)
    rewrites = NativeOpsPass(kept), *products, *others
    ir.passes.Sequential(*rewrites)(model)
