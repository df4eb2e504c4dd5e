"""Leave graphs to PyTorch whose backward it refuses, e.g. that of `torch.unique`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule._exceptions import ORTModuleTorchModelException
from onnxtrain.ortmodule._torch import pytree

_SUSPECTS = re.compile(r"(Unique\w*|SpecialZeta|Igammac?|Geqrf|StandardGammaGrad)Backward\d")
"""Backward functions that raise NotImplementedError for some arguments (`derivatives.yaml` of PyTorch 2.13)."""


def refuse_missing_gradients(graph_module: fx.GraphModule) -> None:
    """Raises if an output of a graph depends on an operator that PyTorch has no gradient for.

    Raises:
        ORTModuleTorchModelException: PyTorch is to run the graph, whose backward raises there.
    """
    # ONNX Runtime would treat the operator's result as a constant, and training would go on with a wrong gradient.
    # Here: the message of the operator that each node depends on.
    dependent: dict[fx.Node, str] = {}
    for node in graph_module.graph.nodes:
        message = next((dependent[source] for source in node.all_input_nodes if source in dependent), None)
        if node.op == "output":
            if message is not None:
                raise ORTModuleTorchModelException(
                    f"{message} detach() its argument if no gradient of it is wanted"
                )
            continue
        trained = [v for v in pytree.tree_leaves(node.meta.get("example_value")) if _is_trained(v)]
        missing = next(filter(None, map(_missing, trained)), message if trained else None)
        if missing is not None:
            dependent[node] = missing


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _missing(value: Any) -> str | None:
    """Returns the message with which the `grad_fn` of a tensor refuses to run, or None."""
    try:
        step = value.grad_fn
    # PyTorch (2.13) raises for a view that was made under `no_grad` and whose base has been written to.
    except RuntimeError:
        return None
    if step is None or not _SUSPECTS.fullmatch(step.name()):
        return None
    try:
        # It depends on the arguments whether they raise: asked with a gradient without data.
        with value.fake_mode:
            step(torch.zeros_like(value))
    except NotImplementedError as error:
        return str(error)
    return None
