"""Operators whose gradient PyTorch does not have, and refuses when backward comes to them."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from onnxtrain.ortmodule._exceptions import ORTModuleTorchModelException
from onnxtrain.ortmodule._torch import pytree

_SUSPECTS = re.compile(r"(Unique\w*|SpecialZeta|Igammac?|Geqrf|StandardGammaGrad)Backward\d")
"""Steps of PyTorch's backward (`derivatives.yaml` of 2.13) that raise NotImplementedError, for some arguments."""


def refuse_missing_gradients(graph_module: fx.GraphModule) -> None:
    """Refuses a graph that returns what depends on an operator without a gradient, e.g. `torch.unique`.

    Its backward raises in eager PyTorch. ONNX Runtime would take the operator's result for a constant.

    Raises:
        ORTModuleTorchModelException: PyTorch is to run the graph, and to raise where a gradient is asked for.
    """
    dependent: dict[fx.Node, str] = {}  # with the message of the operator
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
    """Returns the message with which the last step of a tensor's history refuses its gradient, or None."""
    try:
        step = value.grad_fn
    except (
        RuntimeError
    ):  # PyTorch does not say it of a view made under no_grad whose base has been written to
        return None
    if step is None or not _SUSPECTS.fullmatch(step.name()):
        return None
    try:
        with value.fake_mode:
            step(torch.zeros_like(value))
    except NotImplementedError as error:
        return str(error)
    return None
