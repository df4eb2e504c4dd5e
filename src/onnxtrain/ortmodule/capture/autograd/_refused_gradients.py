"""Makes graphs run in PyTorch if backward would raise because an operator has no gradient, e.g. `torch.unique`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule._exceptions import ORTModuleTorchModelException
from onnxtrain.ortmodule._torch import pytree

_MAY_LACK_DERIVATIVE = re.compile(r"(Unique\w*|SpecialZeta|Igammac?|Geqrf|StandardGammaGrad)Backward\d")
"""Backward functions that raise NotImplementedError for some arguments (`derivatives.yaml` of PyTorch 2.13)."""


def refuse_missing_gradients(graph_module: fx.GraphModule) -> None:
    """Raises if an output of a graph depends on an operator without a gradient in PyTorch.

    Raises:
        ORTModuleTorchModelException: an output depends on such an operator. PyTorch must run the graph, so that
            backward raises.
    """
    # ONNX Runtime would treat the operator's result as a constant, and training would continue with a wrong gradient.
    # `dependent` maps each node that depends on such an operator to PyTorch's error message.
    dependent: dict[fx.Node, str] = {}
    for node in graph_module.graph.nodes:
        message = next((dependent[source] for source in node.all_input_nodes if source in dependent), None)
        if node.op == "output":
            if message is not None:
                raise ORTModuleTorchModelException(
                    f"{message} detach() its argument if you do not need its gradient"
                )
            continue
        trained = [v for v in pytree.tree_leaves(node.meta.get("example_value")) if _is_trained(v)]
        missing = next(filter(None, map(_missing_derivative, trained)), message if trained else None)
        if missing is not None:
            dependent[node] = missing


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _missing_derivative(value: Any) -> str | None:
    """Returns PyTorch's error message if a tensor's `grad_fn` is not implemented for these arguments, else None."""
    try:
        step = value.grad_fn
    # PyTorch (2.13) raises for a view that was created under `no_grad` and whose base has been written to.
    except RuntimeError:
        return None
    if step is None or not _MAY_LACK_DERIVATIVE.fullmatch(step.name()):
        return None
    try:
        # Whether the function raises depends on the operator's arguments, so it is called with a fake gradient.
        with value.fake_mode:
            step(torch.zeros_like(value))
    except NotImplementedError as error:
        return str(error)
    return None
