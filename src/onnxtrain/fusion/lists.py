"""Which fusions run, and in what order: one list for each place on the way of a graph, for every pipeline."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.fusion._pass import FusionPass
from onnxtrain.fusion.activations import ACTIVATIONS
from onnxtrain.fusion.attention import AttentionPass
from onnxtrain.fusion.bfloat16 import Bfloat16ProductPass
from onnxtrain.fusion.native import NativeOpsPass
from onnxtrain.fusion.norms import NORMS
from onnxtrain.fusion.products import ProductPass
from onnxtrain.fusion.recurrent import RecurrentPass
from onnxtrain.fusion.relu6 import Relu6Pass

FUSIONS = (*NORMS, *ACTIVATIONS)
"""All that forward graphs are searched for."""


def fuse_forward(model: ir.Model) -> None:
    """Rewrite a forward graph, before it is differentiated: chains of ops that have one gradient."""
    ir.passes.Sequential(FusionPass(FUSIONS), RecurrentPass())(model)


def fuse_exported(model: ir.Model) -> None:
    """Rewrite a forward graph that an exporter has written: also what PyTorch has an op for, and ONNX had not."""
    fuse_forward(model)
    ir.passes.Sequential(Relu6Pass(), AttentionPass())(model)


def fuse_kernels(model: ir.Model, *, bfloat16: bool = False) -> None:
    """Rewrite a graph with its gradients, last of all, as the functions that native kernels know.

    Args:
        model: the graph, of known shapes.
        bfloat16: whether products of float32 are computed in bfloat16.
    """
    products = [Bfloat16ProductPass()] if bfloat16 else []
    ir.passes.Sequential(NativeOpsPass(), *products, ProductPass())(model)
