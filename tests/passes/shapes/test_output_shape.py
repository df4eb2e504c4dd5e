"""A ConvTranspose whose output is smaller than its input: its shape, its values and its gradients."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import torch

from onnxtrain import differentiate
from onnxtrain.passes import canonicalize, load_model, to_proto
from passes._models import normal, run


@pytest.mark.parametrize("auto_pad", ["NOTSET", "SAME_UPPER"])
def test_shrinking_transposed_convolution(auto_pad: str) -> None:
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[2, 2, 5, 4] x, float[2, 3, 3, 2] w) => (float loss) {{
            a = ConvTranspose<strides = [3, 1], output_shape = [13, 2], auto_pad = "{auto_pad}">(x, w)
            b = Sin(a)  loss = ReduceSum<keepdims = 0>(b)
        }}""")
    canonical = canonicalize(load_model(model))
    (shape,) = (node.outputs[0].shape for node in canonical.graph if node.op_type == "ConvTranspose")
    assert shape == (2, 3, 13, 2)
    given = {"x": normal(2, 2, 5, 4), "w": normal(2, 3, 3, 2, seed=1)}
    np.testing.assert_allclose(run(to_proto(canonical), given)[0], run(model, given)[0], rtol=1e-5)
    step = differentiate(model, "loss", ["x", "w"])
    onnx.checker.check_model(step, full_check=True)
    session = ort.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    got = session.run(["loss", "x_grad", "w_grad"], given)
    x, w = (torch.tensor(given[name], dtype=torch.float64, requires_grad=True) for name in "xw")
    whole = torch.nn.functional.conv_transpose2d(x, w, stride=(3, 1))  # 15 by 5: 2 and 3 are cut off
    begin = (1, 1) if auto_pad == "SAME_UPPER" else (1, 2)
    loss = torch.sin(whole[..., begin[0] : begin[0] + 13, begin[1] : begin[1] + 2]).sum()
    np.testing.assert_allclose(got[0], loss.item(), rtol=1e-4)
    for array, expected in zip(got[1:], torch.autograd.grad(loss, [x, w]), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5)
