"""Find the nodes of an ATen graph that cannot be lowered, all at once."""

from __future__ import annotations

import operator
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from onnxtrain.ortmodule.lowering._graph_lowering import GraphLowering
from onnxtrain.ortmodule.lowering._table import COMPONENTS, DTYPES, Complex, UnsupportedATenOp


def refused_nodes(graph_module: fx.GraphModule) -> dict[fx.Node, str]:
    """Returns the nodes that cannot be lowered, each with the reason.

    Raises:
        UnsupportedATenOp: the graph cannot be lowered, whatever its nodes are.
    """
    return _Survey(graph_module, "survey").refusals()


class _Survey(GraphLowering):
    """Lowers each node it can, with a new input in place of every other result, to collect all refusals at once."""

    def refusals(self) -> dict[fx.Node, str]:
        """Returns the nodes that cannot be lowered, each with the reason."""
        refused: dict[fx.Node, str] = {}
        self._refuse_mutations()
        for node in self.placeholders:
            self.env[node] = self.original[node] = self._unknown(node.meta["val"])
        for node in self.graph_module.graph.nodes:
            if node.op not in ("call_function", "get_attr") or str(node.target) == "aten.copy_.default":
                continue
            source = node.args[0] if node.target is operator.getitem else None
            # One of the results of a node that stays in PyTorch.
            if source in refused:
                refused[node] = refused[source]
                self.env[node] = self._unknown(node.meta.get("val"))
                continue
            try:
                foreign = [n for n in node.all_input_nodes if self.env[n] is _FOREIGN]
                if foreign:
                    # A node that reads such a value runs in PyTorch, too.
                    fake = foreign[0].meta.get("val")
                    raise UnsupportedATenOp(f"{node.target} of {getattr(fake, 'dtype', type(fake).__name__)}")
                self.env[node] = self._attribute(node) if node.op == "get_attr" else self._call(node)
            except UnsupportedATenOp as error:
                self.env[node] = self._unknown(node.meta.get("val"))
                if node.op == "call_function":
                    refused[node] = str(error)
        return refused

    def _unknown(self, fake: Any) -> Any:
        """Returns a new input of the type of `fake`."""
        if isinstance(fake, tuple | list):
            return tuple(self._unknown(part) for part in fake)
        if isinstance(fake, torch.SymInt | torch.SymFloat | torch.SymBool):
            kinds = {torch.SymInt: ir.DataType.INT64, torch.SymFloat: ir.DataType.DOUBLE}
            return self._input("unknown", ir.Shape([]), kinds.get(type(fake), ir.DataType.BOOL))
        if isinstance(fake, torch.Tensor) and fake.dtype in COMPONENTS:
            return Complex(self._unknown(fake.real), self._unknown(fake.real))
        if isinstance(fake, torch.Tensor) and fake.dtype in DTYPES and fake.layout == torch.strided:
            return self._input("unknown", self.low.shape(fake), DTYPES[fake.dtype])
        return fake if isinstance(fake, int | float) else _FOREIGN


_FOREIGN = object()
"""Stands for a value that ONNX has no type for, e.g. a sparse tensor."""
