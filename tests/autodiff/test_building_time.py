"""Building takes time in proportion to the number of nodes, and the collector does not look on."""

from __future__ import annotations

import gc
import time

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxtrain.autodiff import _differentiate, differentiate
from onnxtrain.errors import DifferentiationError
from onnxtrain.passes import canonicalize, load_model
from onnxtrain.recipe import Recipe
from onnxtrain.training.training_graph import build_training_graphs


def chain(nodes: int, named: bool) -> onnx.ModelProto:
    """y = sum(tanh(w_k tanh(... w_0 x))), a Mul and a Tanh for each of the parameters."""
    items, last, weights = [], "x", []
    for index in range(nodes // 2):
        weights.append(numpy_helper.from_array(np.full(4, 1.0, np.float32), f"w{index}"))
        for op_type, inputs in (("Mul", [last, f"w{index}"]), ("Tanh", [f"Mul{index}"])):
            last = f"{op_type}{index}"
            items.append(helper.make_node(op_type, inputs, [last], name=f"/{last}" if named else ""))
    items.append(helper.make_node("ReduceSum", [last], ["y"], keepdims=0))
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [])
    graph = helper.make_graph(items, "chain", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def seconds(nodes: int, named: bool) -> float:
    """Processor time, and not the clock's, of building the training graphs, the better of two."""
    times = []
    for _ in range(2):
        model = load_model(chain(nodes, named))
        start = time.process_time()
        graphs = build_training_graphs(canonicalize(model), "y", Recipe())
        times.append(time.process_time() - start)
        assert len(graphs.trainable) == nodes // 2
    return min(times)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("named", [True, False])
def test_eight_times_the_nodes_take_about_eight_times_as_long(named: bool) -> None:
    # 64 times where it is quadratic. What else the processor does may slow down either of the two once.
    assert any(seconds(1600, named) < 20 * seconds(200, named) for _ in range(5))


def test_the_collector_rests_while_a_graph_is_built_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> square (float x) => (float y) { y = Mul(x, x) }'
    )
    seen = []
    monkeypatch.setattr(
        _differentiate, "apply_workarounds", lambda model: seen.append(gc.isenabled()) or model
    )
    differentiate(model, of="y", wrt=["x"])
    with pytest.raises(DifferentiationError):
        differentiate(model, of="z", wrt=["x"])
    assert gc.isenabled()
    gc.disable()  # as the user wants it
    try:
        differentiate(model, of="y", wrt=["x"])
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert seen == [False, False]
