"""bfloat16 and float16 on the CPU: computed in float32, rounded after each op, as PyTorch does."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from onnxtrain.passes import canonicalize, has_narrow_floats, load_model, widen_narrow_floats


def network(dtype: int = TensorProto.BFLOAT16) -> ir.Model:
    """float32 x -> narrow tanh(x @ w) * 3 -> float32, the weight a narrow input."""
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=dtype),
        helper.make_node("MatMul", ["h", "w"], ["m"]),
        helper.make_node("Tanh", ["m"], ["t"]),
        helper.make_node("Mul", ["t", "three"], ["s"]),
        helper.make_node("Cast", ["s"], ["y"], to=TensorProto.FLOAT),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4]),
            helper.make_tensor_value_info("w", dtype, [4, 3]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor("three", dtype, [], [3.0])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return canonicalize(load_model(proto))


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_those_of_pytorch(dtype: torch.dtype) -> None:
    element_type = {torch.bfloat16: TensorProto.BFLOAT16, torch.float16: TensorProto.FLOAT16}[dtype]
    model = widen_narrow_floats(network(element_type))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    torch.manual_seed(0)
    x, w = torch.randn(5, 4), torch.randn(4, 3).to(dtype)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    weight = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(w.view(torch.uint16).numpy(), element_type)
    feeds = {"x": ort.OrtValue.ortvalue_from_numpy(x.numpy()), "w": weight}
    (got,) = session.run_with_ort_values(["y"], feeds)
    expected = (torch.tanh(x.to(dtype) @ w) * 3).float().numpy()
    # The same roundings, so the same numbers, but for products that are summed in another order.
    assert np.mean(got.numpy() == expected) >= 0.8
    np.testing.assert_allclose(got.numpy(), expected, rtol=torch.finfo(dtype).eps)


def test_the_interface_and_the_argument_stay() -> None:
    model = network()
    wide = widen_narrow_floats(model)
    assert [v.dtype for v in wide.graph.inputs] == [v.dtype for v in model.graph.inputs]
    assert [v.name for v in wide.graph.outputs] == ["y"]
    assert has_narrow_floats(model)
    assert model.graph.num_nodes() == 5
