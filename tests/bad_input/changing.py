"""Wrong uses of what changes a model before training, and of patterns."""

from __future__ import annotations

import onnx

import models
from bad_input.bench import cases, node
from onnxtrain import replace_head, restore_dropout


def headless() -> onnx.ModelProto:
    model = models.mlp()
    model.graph.node.append(node("ArgMax", ["logits"], ["best"]))
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("best", onnx.TensorProto.INT64, None))
    return model


cases(
    {
        "model does not end in a linear layer": lambda b: replace_head(headless(), 5),
        "new head has no classes": lambda b: replace_head(models.mlp(), 0),
        "name of the layer to replace is unknown": lambda b: replace_head(models.mlp(), 5, head="fc"),
        "no trace of Dropout to restore": lambda b: restore_dropout(models.mlp(), 0.5),
        "pattern in `requires_grad` matches nothing": lambda b: b.generate(requires_grad=["conv*"]),
        "pattern in `frozen_params` matches nothing": lambda b: b.generate(frozen_params=["conv*"]),
        "pattern in `batch_norm` matches nothing": lambda b: b.generate(
            models.conv_bn(), batch_norm={"body.*": "training"}
        ),
    }
)
