"""Finds all nodes of an ATen graph that cannot be lowered."""

from __future__ import annotations

import operator
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from onnxtrain.ortmodule.lowering._graph_lowering import GraphLowering
from onnxtrain.ortmodule.lowering._table import COMPONENTS, DTYPES, Complex, UnsupportedATenOp


def unsupported_nodes(graph_module: fx.GraphModule) -> dict[fx.Node, str]:
    """Returns the nodes that cannot be lowered, each with the reason.

    Raises:
        UnsupportedATenOp: the graph contains in-place ops, so no part of it can be lowered.
    """
    return _TrialLowering(graph_module, "trial").unsupported_nodes()


class _TrialLowering(GraphLowering):
    """Lowers a graph without stopping at unsupported nodes. Each of their results becomes a new ONNX input."""

    def unsupported_nodes(self) -> dict[fx.Node, str]:
        """Returns the nodes that cannot be lowered, each with the reason."""
        unsupported: dict[fx.Node, str] = {}
        self._check_mutations()
        for node in self.placeholders:
            self.env[node] = self.original[node] = self._unknown(node.meta["val"])
        for node in self.graph_module.graph.nodes:
            if node.op not in ("call_function", "get_attr") or str(node.target) == "aten.copy_.default":
                continue
            source = node.args[0] if node.target is operator.getitem else None
            if source in unsupported:
                unsupported[node] = unsupported[source]
                self.env[node] = self._unknown(node.meta.get("val"))
                continue
            try:
                without_type = [n for n in node.all_input_nodes if self.env[n] is _NO_ONNX_TYPE]
                if without_type:
                    fake = without_type[0].meta.get("val")
                    dtype = getattr(fake, "dtype", type(fake).__name__)
                    raise UnsupportedATenOp(
                        f"{node.target} has an argument of type {dtype}, which ONNX lacks"
                    )
                self.env[node] = self._constant(node) if node.op == "get_attr" else self._lower_call(node)
            except UnsupportedATenOp as error:
                self.env[node] = self._unknown(node.meta.get("val"))
                if node.op == "call_function":
                    unsupported[node] = str(error)
        return unsupported

    def _unknown(self, fake: Any) -> Any:
        """Adds an ONNX input that stands in for a placeholder or for the result of an unsupported node.

        Args:
            fake: the traced value, e.g. a fake tensor, a symbolic size, or a list or tuple of such values.

        Returns:
            The input, with the dtype and shape of `fake`. For a complex tensor, a `Complex` of two inputs: the real and
            the imaginary part. For a list or tuple, a tuple with one result per element. Python numbers are returned
            unchanged, without adding an input. If ONNX lacks the type, `_NO_ONNX_TYPE`.
        """
        if isinstance(fake, tuple | list):
            return tuple(self._unknown(part) for part in fake)
        if isinstance(fake, torch.SymInt | torch.SymFloat | torch.SymBool):
            kinds = {torch.SymInt: ir.DataType.INT64, torch.SymFloat: ir.DataType.DOUBLE}
            return self._add_input("unknown", ir.Shape([]), kinds.get(type(fake), ir.DataType.BOOL))
        if isinstance(fake, torch.Tensor) and fake.dtype in COMPONENTS:
            return Complex(self._unknown(fake.real), self._unknown(fake.real))
        if isinstance(fake, torch.Tensor) and fake.dtype in DTYPES and fake.layout == torch.strided:
            return self._add_input("unknown", self.low.shape(fake), DTYPES[fake.dtype])
        return fake if isinstance(fake, int | float) else _NO_ONNX_TYPE


_NO_ONNX_TYPE = object()
"""Stands in `env` for a value whose type ONNX lacks, e.g. a sparse tensor."""
