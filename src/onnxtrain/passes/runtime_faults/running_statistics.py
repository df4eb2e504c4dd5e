"""Keeps ONNX Runtime from writing running statistics into weights that have the same values."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.parameters.training_mode import STATISTICS, is_training_batch_norm
from onnxtrain.passes.tidy.constants import add_constant
from onnxtrain.passes.tidy.unique_names import fresh_name


class IsolateStatisticsPass(ir.passes.InPlacePass):
    """Gives a training-mode BatchNormalization its own running statistics if nothing reads the updated statistics.

    ONNX Runtime (1.20 to 1.32) merges initializers of equal content, and its BatchNormalization kernel overwrites the
    input statistics if the updated ones are not graph outputs. In a new network, the running mean equals the bias
    (zeros) and the running variance equals the scale (ones), so each run would silently modify the weights. In training
    mode, output Y does not depend on the running statistics, so the new initializers can have any content that no other
    initializer has.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replaces the statistics in place."""
        modified = False
        for node in tuple(model.graph):
            if not is_training_batch_norm(node):
                continue
            for source, target in STATISTICS:
                before = node.inputs[source]
                after = node.outputs[target] if len(node.outputs) > target else None
                unread = after is None or not (after.uses() or after.is_graph_output())
                # Statistics that are graph inputs are never merged, and updated ones that are outputs have their own
                # memory.
                if before is not None and before.is_initializer() and unread:
                    node.replace_input_with(source, _unique_initializer(model, before))
                    modified = True
        return ir.passes.PassResult(model, modified)


def _unique_initializer(model: ir.Model, statistic: ir.Value) -> ir.Value:
    """Adds an initializer with the dtype and shape of `statistic` and content that no other initializer has."""
    initializers = model.graph.initializers
    tensor = statistic.const_value
    assert tensor is not None
    shape, dtype = tuple(tensor.shape.numpy()), tensor.dtype
    # All elements of the new initializer are equal, so comparing one element suffices.
    taken = {
        float(other.const_value.numpy().flat[0])
        for other in initializers.values()
        if other.const_value is not None
        and other.const_value.dtype == dtype
        and tuple(other.shape or ()) == shape
    }
    number = next(n for n in itertools.count(0.5, 0.25) if n not in taken)
    name = fresh_name(model, f"{statistic.name}_unread")
    return add_constant(model.graph, ir.tensor(np.full(shape, number, dtype.numpy()), name=name))
