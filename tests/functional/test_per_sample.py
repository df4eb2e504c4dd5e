"""`per_sample_gradients` beside `vmap(grad(loss))` of PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch.func import grad, vmap

import onnxtrain
from functional.nets import ATTENTION, MLP, NETS, Net
from onnxtrain.errors import DifferentiationError
from tolerances import NORM_RELATIVE, norm_relative_error


def parse(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> net {body}')


def per_sample_in_torch(net: Net, arrays: dict[str, np.ndarray], wrt: list[str]) -> list[np.ndarray]:
    def loss(leaves: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> torch.Tensor:
        values = leaves | others
        return net.twin({k: v.unsqueeze(0) if k in net.batched else v for k, v in values.items()})[1]

    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    leaves = {name: given.pop(name) for name in wrt}
    dims = tuple({name: 0 if name in net.batched else None for name in group} for group in (leaves, given))
    found = vmap(grad(loss), in_dims=dims)(leaves, given)
    return [found[name].numpy() for name in wrt]


@pytest.mark.parametrize("name", NETS)
def test_gradients_of_each_sample_match_torch(name: str) -> None:
    net = NETS[name]
    dtype = np.float64 if net.float64 else np.float32
    arrays, wrt = net.arrays(dtype), list(net.shapes)
    model = onnxtrain.per_sample_gradients(net.model(dtype), "loss", wrt, batched=net.batched)
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.input] == [v.name for v in net.model(dtype).graph.input]
    names = [value.name for value in model.graph.output]
    assert names == ["loss", *(f"{leaf}_grad" for leaf in wrt)]
    losses, *gradients = ort.InferenceSession(model.SerializeToString()).run(names, arrays)
    assert losses.shape == (3,)
    for got, want in zip(gradients, per_sample_in_torch(net, arrays, wrt), strict=True):
        assert got.dtype == dtype
        assert got.shape == want.shape
        assert norm_relative_error(got, want) <= NORM_RELATIVE[np.dtype(dtype)]


def test_any_number_of_samples_and_none() -> None:
    model = onnxtrain.per_sample_gradients(ATTENTION.model(np.float64), "loss", ["wq"], batched=["tokens"])
    shape = model.graph.output[1].type.tensor_type.shape
    assert [dim.dim_param or dim.dim_value for dim in shape.dim] == ["n", 4, 4]
    session = ort.InferenceSession(model.SerializeToString())
    arrays = ATTENTION.arrays(np.float64)
    for size in (0, 1, 5):
        losses, gradients = session.run(None, arrays | {"tokens": np.zeros((size, 2), np.int64)})
        assert losses.shape == (size,)
        assert gradients.shape == (size, 4, 4)


def test_loss_of_every_sample_and_what_no_sample_changes() -> None:
    """A loss [batch] has one element for one sample; what weights alone decide is computed once."""
    model = parse("""(double[batch, 3] x) => (double[batch] loss) <double[3] w = {1.0, 2.0, 3.0}, int64[1] last = {1}> {
        e = Exp(w)  p = Mul(x, e)  loss = ReduceSum<keepdims = 0>(p, last) }""")
    step = onnxtrain.per_sample_gradients(model, "loss", ["w", "x"])
    (loop,) = [node for node in step.graph.node if node.op_type == "Loop"]
    assert "Exp" in [node.op_type for node in step.graph.node]
    assert "Exp" not in [node.op_type for node in loop.attribute[0].g.node]
    x, w = np.arange(6.0).reshape(2, 3), np.array([1.0, 2.0, 3.0])
    losses, of_w, of_x = ort.InferenceSession(step.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(losses, (x * np.exp(w)).sum(1), rtol=1e-14)
    np.testing.assert_allclose(of_w, x * np.exp(w), rtol=1e-14)
    np.testing.assert_allclose(of_x, np.broadcast_to(np.exp(w), (2, 3)), rtol=1e-14)


def test_model_for_one_sample_takes_many() -> None:
    model = parse("""(float[1, 2] x) => (float loss) <float[2] w = {3.0, 4.0}> {
        to = Constant<value_ints = [1, 2]>()  r = Reshape(x, to)  p = Mul(r, w)
        s = Mul(p, p)  loss = ReduceSum<keepdims = 0>(s) }""")
    step = onnxtrain.per_sample_gradients(model, "loss", ["w"])
    x = np.array([[1, 2], [0, 1], [2, 2]], np.float32)
    got = ort.InferenceSession(step.SerializeToString()).run(["w_grad"], {"x": x})[0]
    np.testing.assert_allclose(got, 2 * x**2 * [3, 4])


def test_every_sample_draws_its_own_numbers() -> None:
    model = parse("""(float[n, 64] x, float[64] w) => (float loss) {
        ratio = Constant<value_float = 0.5>()  on = Constant<value = bool {1}>()
        p = Mul(x, w)  d = Dropout(p, ratio, on)  loss = ReduceSum<keepdims = 0>(d) }""")
    step = onnxtrain.per_sample_gradients(model, "loss", ["w"], batched=["x"])
    feeds = {"x": np.ones((8, 64), np.float32), "w": np.ones(64, np.float32)}
    losses, kept = ort.InferenceSession(step.SerializeToString()).run(None, feeds)
    assert set(np.unique(kept)) == {0.0, 2.0}
    assert len({row.tobytes() for row in kept}) == 8
    np.testing.assert_allclose(losses, kept.sum(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batched": ["w0"]},
            "input 'w0' has shape .4,5., i.e. a fixed batch size; make it dynamic with onnxtrain.make_batch_dynamic",
        ),
        ({"batched": ["y"]}, "batched names 'y', which is not an input"),
        ({"batched": []}, "no input has a batch axis"),
        ({"batched": ["x"]}, "the batch size n is also the size of another axis or input"),
        ({"batched": ["x", "labels"], "of": "y"}, "not a scalar"),
        ({"batched": ["x", "labels"], "wrt": ["hidden"]}, "wrt names 'hidden', which the model computes"),
        ({"batched": ["x", "labels"], "of": "x"}, "of names 'x', which the model does not compute"),
    ],
)
def test_requests_that_make_no_sense(options: dict[str, object], message: str) -> None:
    request = {"of": "loss", "wrt": ["w0"], **options}
    with pytest.raises(DifferentiationError, match=message):
        onnxtrain.per_sample_gradients(MLP.model(np.float32), **request)


def test_inputs_with_different_numbers_of_samples() -> None:
    model = onnxtrain.per_sample_gradients(MLP.model(np.float32), "loss", ["w0"], batched=["x", "labels"])
    session = ort.InferenceSession(model.SerializeToString())
    for size in (2, 4):
        with pytest.raises(Exception, match="cannot be reshaped"):
            session.run(None, MLP.arrays(np.float32) | {"labels": np.zeros(size, np.int64)})


def test_names_that_are_no_list() -> None:
    with pytest.raises(TypeError, match="batched is the str 'x'"):
        onnxtrain.per_sample_gradients(MLP.model(np.float32), "loss", ["w0"], batched="x")
