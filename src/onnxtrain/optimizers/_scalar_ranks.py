"""Reshapes scalars in optimizer steps to the parameter's rank, where ONNX Runtime broadcasts them slowly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import Emitter, Operand
from onnxtrain.functions import DOMAIN
from onnxtrain.functions.optimizer import ELEMENTWISE_STEPS
from onnxtrain.op_facts import ELEMENTWISE, SAME_RANK

# Ops that broadcast their inputs. An elementwise op of one tensor may have scalar settings, as Clip has, which must
# keep their shape.
_BROADCASTING = ELEMENTWISE - SAME_RANK


class ScalarRanks:
    """Reshapes scalars from [] to [1, ..., 1] where an op combines them with a tensor whose last axis has size 1.

    ONNX Runtime (1.20 to 1.32) broadcasts a scalar of shape [] to such a tensor, e.g. the weight of a 1x1 convolution,
    one element at a time, which takes 60 times as long as for a vector with the same number of elements. With a scalar
    of shape [1, ..., 1], it skips the last axis, because the axis has size 1 in both operands.

    Optimizers can use scalars of shape [], because the nodes that they append are rewritten afterwards.

    Args:
        op: emitter of the optimizer model.
    """

    def __init__(self, op: Emitter) -> None:
        self._op = op
        self._reshaped: dict[tuple[ir.Value, int], ir.Value] = {}

    @contextmanager
    def within(
        self, shape: ir.Shape | None, tensors: Sequence[ir.Value], scalars: Sequence[Operand]
    ) -> Iterator[None]:
        """Context manager that reshapes the scalars of all nodes that its `with` block appends to the graph.

        Args:
            shape: shape of the parameter, e.g. [64, 32, 1, 1].
            tensors: tensors that the nodes read: the parameter, its gradient and its moments. The shape of a moment may
                differ from `shape`.
            scalars: numbers and values of shape [] that the nodes read.
        """
        last = self._op.graph[-1] if len(self._op.graph) else None
        yield
        if shape is None or shape.rank() < 2 or shape[-1] != 1:
            return
        added = list(takewhile(lambda node: node is not last, reversed(self._op.graph)))
        rank = shape.rank()
        full = {value for value in tensors if value.shape is None or value.shape.rank() == rank}
        small = {value for value in scalars if isinstance(value, ir.Value)}
        small |= {value for value in tensors if value.shape is not None and value.shape.rank() == 0}
        self._rewrite(added[::-1], full, small, rank)

    def _rewrite(
        self, nodes: Iterable[ir.Node], full: set[ir.Value], small: set[ir.Value], rank: int
    ) -> None:
        """Reshapes scalars to `rank` axes in the elementwise nodes that combine them with a larger tensor.

        `full` contains values of rank `rank`, `small` values of shape []; outputs of `nodes` are added to them.
        """
        for node in nodes:
            inputs = [value for value in node.inputs if value is not None]
            is_call = node.domain == DOMAIN and node.op_type.rpartition("_")[0] in ELEMENTWISE_STEPS
            if not is_call and not (node.domain == "" and node.op_type in ELEMENTWISE):
                continue
            if not full.isdisjoint(inputs):
                if is_call or node.op_type in _BROADCASTING:
                    for index, value in enumerate(node.inputs):
                        if value is not None and (value in small or _is_scalar_constant(value)):
                            node.replace_input_with(index, self._ranked(value, rank, node))
                full.update(node.outputs)
            elif all(value in small or _is_scalar_constant(value) for value in inputs) and not is_call:
                small.update(node.outputs)

    def _ranked(self, scalar: ir.Value, rank: int, before: ir.Node) -> ir.Value:
        """Returns a scalar reshaped to `rank` axes of size one.

        If a Reshape is needed, it is inserted before the node `before`; later calls for the same scalar reuse it.
        """
        ones = [1] * rank
        if scalar.const_value is not None:
            return self._op.const(scalar.const_value.numpy().reshape(ones), like=scalar)
        key = scalar, rank
        if key not in self._reshaped:
            node = ir.node("Reshape", [scalar, self._op.const(np.array(ones))])
            node.outputs[0].name = self._op.unique_name(f"{scalar.name}/ranked")
            node.outputs[0].type = scalar.type
            before.prepend(node)
            self._reshaped[key] = node.outputs[0]
        return self._reshaped[key]


def _is_scalar_constant(value: ir.Value) -> bool:
    """True for a constant of shape []."""
    return value.const_value is not None and value.const_value.shape.rank() == 0
