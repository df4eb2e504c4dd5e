"""Keep ONNX Runtime from writing running statistics into weights that happen to be equal to them."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir

from onnxtrain.passes.parameters.training_mode import STATISTICS, is_training_batch_norm
from onnxtrain.passes.tidy.constants import mark_constant


class IsolateStatisticsPass(ir.passes.InPlacePass):
    """Give a training BatchNormalization whose updated statistics nobody reads statistics of its own.

    ONNX Runtime merges initializers of equal content, and its BatchNormalization kernel writes updated statistics that
    are no graph output in place of the old ones. In a fresh network the running mean equals the bias (zeros) and the
    running variance the scale (ones), so that each run would silently change the weights (seen with 1.31.1). As the
    output Y does not depend on them in training mode, any content that no other initializer has will do.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace the statistics in place."""
        modified = False
        for node in tuple(model.graph):
            if not is_training_batch_norm(node):
                continue
            for source, target in STATISTICS:
                before = node.inputs[source]
                after = node.outputs[target] if len(node.outputs) > target else None
                unread = after is None or not (after.uses() or after.is_graph_output())
                if before is not None and before.is_initializer() and unread:
                    node.replace_input_with(source, _unlike_any(model, before))
                    modified = True
        return ir.passes.PassResult(model, modified)


def _unlike_any(model: ir.Model, statistic: ir.Value) -> ir.Value:
    """Returns a new initializer of the dtype and shape of `statistic` whose content no other one has."""
    initializers = model.graph.initializers
    tensor = statistic.const_value
    assert tensor is not None
    shape, dtype = tuple(tensor.shape.numpy()), tensor.dtype
    taken = {
        float(other.const_value.numpy().flat[0])
        for other in initializers.values()
        if other.const_value is not None
        and other.const_value.dtype == dtype
        and tuple(other.shape or ()) == shape
    }
    number = next(n for n in itertools.count(0.5, 0.25) if n not in taken)
    name = next(
        n for i in itertools.count() if (n := f"{statistic.name}_unread{i or ''}") not in initializers
    )
    content = ir.tensor(np.full(shape, number, dtype.numpy()), name=name)
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape), const_value=content)
    mark_constant(value)
    model.graph.register_initializer(value)
    return value
