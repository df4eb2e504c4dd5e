"""Recurrent layers with layout=1, which ONNX Runtime lacks, compute what ONNX's reference says."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest

from onnxtrain.passes import canonicalize, load_model, to_proto
from passes._models import normal, reference, run

LAYERS = """<ir_version: 10, opset_import: ["": 21]>
    net (float[batch,time,2] x, float[2,20,2] w, float[2,20,5] r, float[batch,2,5] h0, bool upper)
        => (float[batch,time,2,5] y, float[batch,2,5] c) {
        y, h, last = LSTM<hidden_size=5, direction="bidirectional", layout=1>(x, w, r, , , h0)
        c = If (upper) <
            then_branch = upper () => (float[batch,2,5] a) {
                , , a = LSTM<hidden_size=5, direction="bidirectional", layout=1>(x, w, r)
            },
            else_branch = lower () => (float[batch,2,5] b) { b = Add(h, last) }
        >
    }"""


def test_layers_in_branches_and_omitted_outputs() -> None:
    model = onnx.parser.parse_model(LAYERS)
    rewritten = to_proto(canonicalize(load_model(model)))
    assert [value.name for value in rewritten.graph.output] == ["y", "c"]
    feeds = {
        name: normal(*shape, seed=seed)
        for seed, (name, shape) in enumerate(
            {"x": (3, 4, 2), "w": (2, 20, 2), "r": (2, 20, 5), "h0": (3, 2, 5)}.items()
        )
    }
    for upper in (False, True):
        given = {**feeds, "upper": np.array(upper)}
        for got, want in zip(run(rewritten, given), reference(model, given), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_onnxruntime_has_no_batch_first_kernel() -> None:
    """If this fails, a new ONNX Runtime has one: the pass may go."""
    model = onnx.parser.parse_model(LAYERS).SerializeToString()
    with pytest.raises(Exception, match="Batchwise recurrent operations"):
        ort.InferenceSession(model, providers=["CPUExecutionProvider"])
