"""`replace_head` beside the same surgery in PyTorch, on files as both exporters write them by default."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import models
from onnxtrain import Trainer, differentiate, make_batch_dynamic, replace_head
from onnxtrain.errors import InputError, ModelError
from onnxtrain.passes import load_model


def replaced(model: Any, *arguments: Any, **options: Any) -> ir.Model:
    """Call `replace_head`; assert that it returns the kind of model it was given, and load that."""
    result = replace_head(model, *arguments, **options)
    assert isinstance(result, ir.Model if isinstance(model, ir.Model) else onnx.ModelProto)
    return load_model(result)


NEW = 7


@dataclass(frozen=True)
class Case:
    """A network, the shape of a sample, and where its head is."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    head: str
    softmax: str | None = None


def _norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    for tensor in (norm.running_mean, norm.bias):
        nn.init.uniform_(tensor, -0.5, 0.5)
    for tensor in (norm.running_var, norm.weight):
        nn.init.uniform_(tensor, 0.5, 1.5)
    return norm


CASES = {
    "mlp": Case(lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), (5,), "2"),
    "cnn, softmax": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), _norm(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5),
            nn.Linear(4, 3), nn.Softmax(dim=1),
        ), (2, 6, 6), "6", "7",
    ),
    "1x1 convolution before pooling": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ), (2, 6, 6), "2",
    ),
    "no bias, log softmax": Case(
        lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3, bias=False), nn.LogSoftmax(-1)), (5,), "2"
    ),
    "tokens": Case(lambda: nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3)), (6, 5), "2"),
    "pixels": Case(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.Upsample(scale_factor=2)
        ), (2, 4, 4), "2",
    ),
    "reshaped": Case(
        lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3), nn.Unflatten(1, (3, 1, 1)), nn.Flatten()),
        (5,), "2",
    ),
    "sigmoid": Case(
        lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3), nn.Sigmoid()), (5,), "2", "3"
    ),
}  # fmt: skip


def export(net: nn.Module, shape: tuple[int, ...], path: Path, exporter: str, batch: str) -> Path:
    example = torch.randn(1, *shape)
    if exporter == "torchscript":
        axes = {"x": {0: "batch"}, "y": {0: "batch"}} if batch == "dynamic" else None
        torch.onnx.export(
            net, (example,), str(path), dynamo=False, input_names=["x"], output_names=["y"], dynamic_axes=axes
        )
        return path
    shapes = ({0: torch.export.Dim("batch")},) if batch == "dynamic" else None
    if shapes:
        example = torch.randn(2, *shape)
    torch.onnx.export(
        net,
        (example,),
        str(path),
        input_names=["x"],
        output_names=["y"],
        dynamic_shapes=shapes,
        verbose=False,
    )
    return path


def surgery(net: nn.Module, case: Case, values: dict[str, np.ndarray], fused: bool) -> nn.Module:
    """The network with another head in PyTorch, whose weights are the new ones of the model."""
    net = copy.deepcopy(net).eval()
    old = net.get_submodule(case.head)
    wide = isinstance(old, nn.Conv2d)
    new: nn.Module = (
        nn.Conv2d(old.in_channels, NEW, 1) if wide else nn.Linear(old.in_features, NEW, old.bias is not None)
    )
    weight = next(v for v in values.values() if v.ndim > 1 and NEW in v.shape)
    with torch.no_grad():
        new.weight.copy_(torch.tensor(weight if weight.shape[0] == NEW else weight.T))
        if new.bias is not None:
            new.bias.copy_(torch.tensor(next(v for v in values.values() if v.shape == (NEW,))))
    net.set_submodule(case.head, new)
    if case.softmax is not None:
        net.set_submodule(case.softmax, nn.Identity())
    if case.head == "2" and isinstance(net[-1], nn.Flatten) and isinstance(net[-2], nn.Unflatten):
        net[-2] = nn.Unflatten(1, (NEW, 1, 1))
    if fused and isinstance(net[1], nn.BatchNorm2d):
        net[0], net[1] = torch.nn.utils.fusion.fuse_conv_bn_eval(net[0], net[1]), nn.Identity()
    return net


@pytest.mark.sample(every=4)
@pytest.mark.filterwarnings("ignore")  # of the exporters
@pytest.mark.parametrize("batch", ["dynamic", "1"])
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_same_surgery_in_torch(
    name: str, exporter: str, batch: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    net = case.make().eval()
    path = export(net, case.shape, tmp_path / "net.onnx", exporter, batch)
    before = path.read_bytes()
    caplog.clear()
    if (name, exporter, batch) == ("reshaped", "torchscript", "dynamic"):
        with pytest.raises(
            ModelError, match=r"Reshape '/3/Reshape.*, does not support another .*: its shape is computed"
        ):
            replaced(path, NEW)
        return
    model = replaced(path, NEW, seed=3)
    assert path.read_bytes() == before
    assert ("now contains the logits" in caplog.text) == (case.softmax is not None)
    values = {
        name: value.const_value.numpy()
        for name, value in model.graph.initializers.items()
        if value.dtype.is_floating_point() and value.const_value.size > 1
    }
    fused = not any(node.op_type == "BatchNormalization" for node in model.graph)
    twin = surgery(net, case, values, fused)

    samples = 1 if batch == "1" else 3
    x = torch.randn(samples, *case.shape)
    y = twin(x)
    output = model.graph.outputs[0]
    assert (output.name, len(model.graph.outputs)) == ("y", 1)
    assert [d if isinstance(d, int) else None for d in output.shape] == [
        1 if batch == "1" else None, *y.shape[1:]
    ]  # fmt: skip
    named = {}
    statistics = {n for node in model.graph if node.op_type == "BatchNormalization" for n in node.inputs[3:5]}
    for name, value in values.items():
        if model.graph.initializers[name] in statistics:
            continue
        for parameter in twin.parameters():
            other = parameter.detach().numpy()
            if value.shape == other.shape and np.allclose(value, other, atol=1e-6):
                named[name] = (parameter, False)
            elif value.ndim == 2 and value.T.shape == other.shape and np.allclose(value.T, other, atol=1e-6):
                named[name] = (parameter, True)
    assert len(named) == len(list(twin.parameters())), (list(values), list(named))
    ct = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [parameter for parameter, _ in named.values()], ct)
    step = differentiate(model, "y", list(named), cotangent="ct")
    got = ort.InferenceSession(ir.to_proto(step).SerializeToString()).run(
        None, {"x": x.numpy(), "ct": ct.numpy()}
    )
    np.testing.assert_allclose(got[0], y.detach(), rtol=1e-4, atol=1e-5)
    for (key, (_, transposed)), value, expected in zip(named.items(), got[1:], gradients, strict=True):
        reference = expected.numpy().T if transposed else expected.numpy()
        np.testing.assert_allclose(value, reference, rtol=1e-4, atol=1e-5, err_msg=key)


def head_values(model: ir.Model) -> dict[str, np.ndarray]:
    return {
        n: v.const_value.numpy() for n, v in model.graph.initializers.items() if v.const_value is not None
    }


def parse(text: str) -> onnx.ModelProto:
    """The model of a text in which `__` stands for the dot of a name."""
    model = onnx.parser.parse_model(text)
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = name.replace("__", ".")
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace("__", ".")
    return model


def gemm(dtype: int = onnx.TensorProto.FLOAT, tail: str = "", transposed: bool = False) -> onnx.ModelProto:
    """`y = fc(relu(x @ w))`, with 3 classes, and what is behind."""
    rng = np.random.default_rng(0)
    kind = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    weight = rng.standard_normal((6, 3)).astype(kind)
    values = {
        "w": rng.standard_normal((4, 6)).astype(kind),
        "fc.weight": weight.T.copy() if transposed else weight,
        "fc.bias": np.zeros(3, kind),
    }
    text = f"""<ir_version: 10, opset_import: ["": 21]> net (float[n, 4] x) => (float[n, 3] y) {{
        h = MatMul(x, w) r = Relu(h)
        {"z" if tail else "y"} = Gemm<transB = {int(transposed)}>(r, fc__weight, fc__bias) {tail} }}"""
    model = parse(text)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = dtype
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items())
    return model


@pytest.mark.parametrize("transposed", [False, True])
def test_initial_values_are_pytorchs(transposed: bool) -> None:
    """Uniform in 1 / sqrt(fan_in), one seed one head, whatever the layout."""
    model = replaced(gemm(transposed=transposed), 2000, seed=1)
    values = head_values(model)
    weight = values["fc.weight"] if transposed else values["fc.weight"].T
    bound = 1 / math.sqrt(6)
    reference = nn.Linear(6, 2000)
    for ours, theirs in ((weight, reference.weight), (values["fc.bias"], reference.bias)):
        assert ours.shape == tuple(theirs.shape)
        assert ours.dtype == np.float32
        assert np.abs(ours).max() <= bound
        assert np.abs(ours).max() > 0.99 * bound
        assert abs(ours.std() / (bound / math.sqrt(3)) - 1) < 0.05
        assert abs(theirs.detach().std().item() / ours.std() - 1) < 0.05
    np.testing.assert_array_equal(
        weight, np.random.default_rng(1).uniform(-bound, bound, (2000, 6)).astype(np.float32)
    )
    again, other = (head_values(replaced(gemm(), 2000, seed=s))["fc.weight"].T for s in (1, 2))
    np.testing.assert_array_equal(again, weight)
    assert not np.array_equal(other, weight)


def test_half_precision_stays_half_precision() -> None:
    model = replaced(gemm(onnx.TensorProto.FLOAT16), 5)
    values = head_values(model)
    assert {n: (v.dtype, v.shape) for n, v in values.items()} == {
        "w": (np.float16, (4, 6)), "fc.weight": (np.float16, (6, 5)), "fc.bias": (np.float16, (5,))
    }  # fmt: skip
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float16)
    got = ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, {"x": x})[0]
    expected = np.maximum(x @ values["w"], 0) @ values["fc.weight"] + values["fc.bias"]
    np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-2)


def test_a_weight_that_serves_elsewhere_stays_there() -> None:
    """A language model whose output layer is its embedding."""
    model = parse(
        """<ir_version: 10, opset_import: ["": 21]>
        net (int64[n, t] x) => (float[n, t, 3] y) <float[3, 2] embed__weight = {1., 2., 3., 4., 5., 6.}>
        { h = Gather(embed__weight, x) w = Transpose<perm = [1, 0]>(embed__weight) y = MatMul(h, w) }"""
    )
    new = replaced(model, 5, bias=True)
    values = head_values(new)
    np.testing.assert_array_equal(values["embed.weight"], [[1, 2], [3, 4], [5, 6]])
    assert (values["head.weight"].shape, values["head.bias"].shape) == ((5, 2), (5,))
    got = ort.InferenceSession(ir.to_proto(new).SerializeToString()).run(None, {"x": np.array([[0, 2]])})[0]
    hidden = values["embed.weight"][[[0, 2]]]
    np.testing.assert_allclose(got, hidden @ values["head.weight"].T + values["head.bias"], rtol=1e-5)


@pytest.mark.parametrize(
    ("bias", "names"), [(True, {"w", "fc.weight", "fc.bias"}), (False, {"w", "fc.weight"})]
)
@pytest.mark.parametrize("product", ["Gemm", "MatMul"])
def test_bias_is_added_or_dropped(bias: bool, names: set[str], product: str) -> None:
    model = gemm()
    if product == "MatMul":
        text = onnx.printer.to_text(model.graph)
        assert "Gemm" in text
        node = model.graph.node[-1]
        node.op_type, node.output[0] = "MatMul", "z"
        del node.input[2:], node.attribute[:]
        model.graph.node.append(onnx.helper.make_node("Add", ["fc.bias", "z"], ["y"]))
    for start in (model, replaced(model, 4, bias=not bias)):
        new = replaced(start, 5, bias=bias)
        values = head_values(new)
        assert set(values) == names
        x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
        got = ort.InferenceSession(ir.to_proto(new).SerializeToString()).run(["y"], {"x": x})[0]
        expected = np.maximum(x @ values["w"], 0) @ values["fc.weight"] + values.get("fc.bias", 0)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_a_bias_of_zeros_that_the_exporter_has_dropped_is_back(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    nn.init.zeros_(net[2].bias)
    path = export(net, (4,), tmp_path / "net.onnx", "dynamo", "1")
    model = onnx.load(path)
    assert not [t.name for t in model.graph.initializer if list(t.dims) == [3]]
    values = head_values(replaced(path, 5))
    assert values["2.bias"].shape == (5,)
    assert "2.bias" not in head_values(replaced(path, 5, bias=False))


def test_softmax_is_kept_if_asked_for() -> None:
    model = replaced(gemm(tail="s = Softmax(z) y = Identity(s)"), 5, logits=False)
    got = ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(
        None, {"x": np.ones((2, 4), np.float32)}
    )
    np.testing.assert_allclose(got[0].sum(1), 1, rtol=1e-5)
    assert got[0].shape == (2, 5)


def test_several_outputs_need_a_choice(caplog: pytest.LogCaptureFixture) -> None:
    model = gemm(tail="y = Identity(z) p = Softmax(z) c = ArgMax(z)")
    for name, kind in (("p", 1), ("c", 7), ("h", 1)):
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    with pytest.raises(
        ModelError, match=r"several outputs \('y' computed by Identity 'y', Gemm .*output=NAME.*head=NAME"
    ):
        replaced(model, 5)
    with pytest.raises(ModelError, match="no output 'q'; its outputs are y, p, c, h"):
        replaced(model, 5, output="q")
    with pytest.raises(ModelError, match=r"'c' comes from ArgMax .* is neither a linear layer nor known"):
        replaced(model, 5, output="c")
    for options in ({"output": "y"}, {"head": "fc"}, {"head": "fc.weight"}):
        caplog.clear()
        new = replaced(model, 5, **options)
        assert [value.name for value in new.graph.outputs] == ["y", "h"]
        assert "The outputs 'p', 'c' are removed: they were computed from the replaced head" in caplog.text
    logits = replaced(model, 5, output="p")
    assert [value.name for value in logits.graph.outputs] == ["p", "h"]
    assert "Softmax" not in {node.op_type for node in logits.graph}


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ("y = ArgMax(z)", "ArgMax 'y' is neither a linear layer nor known to keep classes apart"),
        ("y = ReduceMean<keepdims=0>(z)", "it takes the mean over the classes"),
        ("a = Constant<value_ints=[1]>() y = ReduceMean(z, a)", "it takes the mean over the classes"),
        ("y = Squeeze(z)", "it removes the class axis if its size is 1"),
        ("s = Shape(x) y = Reshape(z, s)", "its shape is computed"),
        ("s = Constant<value_ints=[-1]>() y = Reshape(z, s)", "not a separate axis"),
        ("q = Constant<value_float=0.1>() u = Constant<value = uint8 {3}>() k = QuantizeLinear(z, q, u) "
         "y = DequantizeLinear(k, q, u)", "is quantized: replace the head of the float model"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(tail: str, message: str) -> None:
    model = gemm(tail=tail)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    if "ArgMax" in tail:
        model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    with pytest.raises(ModelError, match=message):
        replaced(model, 5)


def test_a_quantized_weight_is_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[n, 2] x) => (float[n, 3] y)
        <int8[2, 3] q = {1, 2, 3, 4, 5, 6}, float s = {0.5}>
        { w = DequantizeLinear(q, s) y = MatMul(x, w) }"""
    )
    with pytest.raises(ModelError, match="so it is quantized: replace the head of the float model"):
        replaced(model, 5)


def test_a_dynamically_quantized_head_is_refused(tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    onnx.save(gemm(), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx")
    with pytest.raises(
        ModelError, match=r"MatMulInteger '.*' is quantized: replace the head of the float model"
    ):
        replaced(tmp_path / "int8.onnx", 5)


def test_no_head_names_the_last_ops_and_the_layers() -> None:
    backbone = models.conv_bn()
    del backbone.graph.node[-1]
    backbone.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("f", 1, ["batch", 4]))
    with pytest.raises(
        ModelError, match=r"comes from Flatten 'f', GlobalAveragePool 'p', .* the last layers are conv.weight"
    ):
        replaced(backbone, 5)
    with pytest.raises(ModelError, match="does not end in a linear layer 'fc2'"):
        replaced(gemm(), 5, head="fc2")


@pytest.mark.parametrize("classes", [0, -1, 2.0, True, "5"])
def test_classes_are_a_positive_integer(classes: Any) -> None:
    with pytest.raises(InputError, match="classes must be a positive integer"):
        replaced(gemm(), classes)


def test_the_new_head_trains() -> None:
    """Fixed batch made dynamic, head replaced, all but the head frozen."""
    rng = np.random.default_rng(0)
    model = gemm()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1
    x = rng.standard_normal((200, 4)).astype(np.float32)
    y = x.argmax(axis=1)
    trainer = Trainer(
        replaced(make_batch_dynamic(model), 4), "cross_entropy", "adam", 0.05, requires_grad="fc.*"
    )
    trainer.fit(x, y, epochs=30, verbose=False)
    assert [name for name, p in trainer.parameters if p.requires_grad] == ["fc.weight", "fc.bias"]
    assert trainer.evaluate(x, y)["accuracy"] > 0.75
