"""Lists which fusions run, and in which order: one function for each place in the pipelines."""

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
from onnxtrain.fusion.quantized import PackedProductPass
from onnxtrain.fusion.recurrent import RecurrentPass
from onnxtrain.fusion.relu6 import Relu6Pass
from onnxtrain.fusion.vocabulary import VocabularyLossPass

FUSIONS = (*NORMS, *ACTIVATIONS)
"""All patterns that forward graphs are searched for."""


def fuse_forward(model: ir.Model) -> None:
    """Rewrite a forward graph, before it is differentiated: chains of ops with a composite gradient."""
    ir.passes.Sequential(FusionPass(FUSIONS), RecurrentPass())(model)


def fuse_exported(model: ir.Model) -> None:
    """Rewrite a forward graph from an exporter: also ops of PyTorch that the exporter had to decompose."""
    fuse_forward(model)
    # ORTModule needs neither: it sees PyTorch's own hardtanh and attention.
    ir.passes.Sequential(Relu6Pass(), AttentionPass())(model)


def fuse_kernels(model: ir.Model, *, bfloat16: bool = False, kept: Collection[str] = ()) -> None:
    """Rewrite a graph with its gradients, as the last step, with the functions that native kernels know.

    Args:
        model: the graph, with shapes inferred.
        bfloat16: whether to compute products of float32 in bfloat16.
        kept: names of values that ONNX Runtime's own kernels have to compute, e.g. those of the forward graph.
    """
    # NativeOpsPass first: it makes the functions of convolutions, which Bfloat16ProductPass rewrites. ProductPass takes
    # the products that are left in float32.
    products = [Bfloat16ProductPass()] if bfloat16 else []
    others = ProductPass(kept), PackedProductPass(kept), MeanLossPass(kept), VocabularyLossPass(kept)
    rewrites = NativeOpsPass(kept), *products, *others
    ir.passes.Sequential(*rewrites)(model)
