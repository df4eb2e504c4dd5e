"""Wrong uses of what changes a model before training, and of patterns."""

from __future__ import annotations

import onnx

import models
from bad_input.bench import Bench, case, node
from onnxtrain import replace_head, restore_dropout


def headless() -> onnx.ModelProto:
    model = models.mlp()
    model.graph.node.append(node("ArgMax", ["logits"], ["best"]))
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("best", onnx.TensorProto.INT64, None))
    return model


@case("new head for a model that does not end in a linear layer")
def _(bench: Bench) -> None:
    replace_head(headless(), 5)


@case("new head without classes")
def _(bench: Bench) -> None:
    replace_head(models.mlp(), 0)


@case("name of the layer to replace is unknown")
def _(bench: Bench) -> None:
    replace_head(models.mlp(), 5, head="fc")


@case("Dropout to restore has left no trace")
def _(bench: Bench) -> None:
    restore_dropout(models.mlp(), 0.5)


@case("pattern in `requires_grad` matches nothing")
def _(bench: Bench) -> None:
    bench.generate(requires_grad=["conv*"])


@case("pattern in `frozen_params` matches nothing")
def _(bench: Bench) -> None:
    bench.generate(frozen_params=["conv*"])


@case("pattern in `batch_norm` matches nothing")
def _(bench: Bench) -> None:
    bench.generate(models.conv_bn(), batch_norm={"body.*": "training"})
