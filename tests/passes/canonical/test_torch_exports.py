"""Models of both PyTorch exporters reach the canonical form and compute the same."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import pytest

from onnxtrain.errors import UnsupportedOpsetError
from onnxtrain.passes import (
    CleanupPass,
    TrainingModePass,
    canonicalize,
    is_stop_gradient,
    load_model,
    to_proto,
)
from passes._models import run, running_statistics
from runtimes import needs_opset

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
nn = torch.nn


class Normed(nn.Module):
    """Convolutions with each kind of normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.gn = nn.GroupNorm(2, 4)
        self.ln = nn.LayerNorm(6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = torch.relu(self.bn(self.conv(x)))
        x = nn.functional.interpolate(self.drop(self.ln(nn.functional.gelu(self.gn(x)))), scale_factor=2)
        return nn.functional.log_softmax(x.flatten(1), dim=-1)


def mlp():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Softmax(-1))


class Encoder(nn.Module):
    """One transformer block with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.feed_forward = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.feed_forward(self.norm2(x))


CASES = {
    "mlp": (mlp, (2, 5)),
    "normed": (Normed, (2, 2, 6, 6)),
    "encoder": (Encoder, (2, 4, 8)),
}


def export(module, shape, opset: int, dynamo: bool, training: bool = False) -> onnx.ModelProto:
    module.train(training)
    buffer = io.BytesIO()
    options = {"dynamic_axes": {"x": {0: "batch"}}}
    if dynamo:
        options = {"dynamic_shapes": ({0: torch.export.Dim("batch")},)}
    if training and not dynamo:
        options |= {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (torch.randn(shape),),
            buffer,
            opset_version=opset,
            dynamo=dynamo,
            input_names=["x"],
            output_names=["y"],
            **options,
        )
    return onnx.load_from_string(buffer.getvalue())


EXPORTERS = [
    (False, 13),
    (False, 14),
    (False, 17),
    (False, 20),
    (True, 18),
    (True, 20),
    (True, 22),
    (True, 23),
]


BETWEEN = [(False, 17), (True, 20), (True, 22)]
"""Between the opsets of which more changes; the one network with ops of each kind goes through them."""


@pytest.mark.parametrize(
    ("name", "dynamo", "opset"),
    # torch exports scaled_dot_product_attention from opset 14 on.
    [
        pytest.param(name, dynamo, opset, marks=needs_opset(opset))
        for name in CASES
        for dynamo, opset in EXPORTERS
        if (name != "encoder" or opset > 13) and (name == "normed" or (dynamo, opset) not in BETWEEN)
    ],
)
def test_exported_module(name, dynamo, opset):
    build_module, shape = CASES[name]
    torch.manual_seed(0)
    module = build_module()
    proto = export(module, shape, opset, dynamo)
    model = canonicalize(load_model(proto))
    CleanupPass()(model)
    result = to_proto(model)
    onnx.checker.check_model(result, full_check=True)
    assert model.graph.opset_imports[""] == max(21, opset)
    values = [out for node in model.graph for out in node.outputs if out.name]
    assert not [value.name for value in values if value.dtype is None or value.shape is None]
    parameters = {parameter for parameter, _ in module.named_parameters()}
    assert parameters & {tensor.name for tensor in proto.graph.initializer} <= set(model.graph.initializers)
    x = torch.randn(5, *shape[1:])  # another batch size than at export
    got = run(result, {"x": x.numpy()})[0]
    np.testing.assert_allclose(got, run(proto, {"x": x.numpy()})[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got, module.eval()(x).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("opset", [9, 13, 17])
def test_batch_norm_of_an_export_trains_as_in_torch(opset):
    """Up to opset 13 it has five outputs, of which nothing reads two."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    proto = export(module, (2, 2, 6, 6), opset, dynamo=False, training=True)
    assert len(proto.graph.node[1].output) == (5 if opset < 14 else 3)
    model = canonicalize(load_model(proto))
    assert [node.attributes.get_int("training_mode", 0) for node in model.graph][1] == 1
    TrainingModePass(batch_norm="training")(model)
    pairs = list(running_statistics(model))
    model.graph.outputs.extend(after for _, after in pairs)
    # Exporting in training mode runs the module, which moves its statistics; the file has the ones before.
    for before, _ in pairs:
        module.get_buffer(before.name).copy_(torch.from_numpy(before.const_value.numpy().copy()))
    x = torch.randn(3, 2, 6, 6)
    y, mean, _var = run(to_proto(model), {"x": x.numpy()})
    np.testing.assert_allclose(y, module.train()(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mean, module[1].running_mean.numpy(), rtol=1e-5, atol=1e-6)


def test_saved_statistics_that_are_read_are_named():
    proto = export(
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), (2, 2, 6, 6), 13, dynamo=False, training=True
    )
    saved = proto.graph.node[1].output[3]
    proto.graph.output.append(onnx.helper.make_tensor_value_info(saved, onnx.TensorProto.FLOAT, [4]))
    with pytest.raises(UnsupportedOpsetError, match=f"'{saved}' of the BatchNormalization .* ReduceMean"):
        canonicalize(load_model(proto))


def test_detach_survives_conversion_and_cleanup():
    class Detached(nn.Module):
        def forward(self, x):
            return (x * 2).detach() * x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Detached(), (torch.randn(3),), opset_version=18, dynamo=True, optimize=False
        )
    model = canonicalize(load_model(program.model_proto))
    CleanupPass()(model)
    assert sum(is_stop_gradient(node) for node in model.graph) == 1
