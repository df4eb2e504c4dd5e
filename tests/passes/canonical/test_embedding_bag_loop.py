"""EmbeddingBag as PyTorch exports it: the loop over bags becomes one sum, with PyTorch's results and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from onnxtrain import differentiate
from onnxtrain.passes import canonicalize, load_model


class Bags(torch.nn.Module):
    def __init__(self, weighted: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = torch.nn.EmbeddingBag(50, 4, **options)
        self.weighted = weighted

    def forward(self, x: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        weights = (x % 3).to(self.bag.weight) if self.weighted else None
        bags: torch.Tensor = self.bag(x, offsets, per_sample_weights=weights)
        return bags


def exported(
    net: Bags, arguments: tuple[torch.Tensor, ...], path: Path, optimize: bool = False, dynamic: bool = True
) -> onnx.ModelProto:
    names = ["x", "offsets"][: len(arguments)]
    sizes = tuple({0: torch.export.Dim(f"size{k}", min=2)} for k in range(len(arguments)))
    shapes = sizes if len(arguments) > 1 else (*sizes, None)
    torch.onnx.export(
        net,
        arguments,
        str(path),
        dynamo=True,
        optimize=optimize,
        external_data=False,
        verbose=False,
        input_names=names,
        output_names=["y"],
        dynamic_shapes=shapes[: len(arguments)] if dynamic else None,
    )
    return onnx.load(path)


@pytest.mark.parametrize(
    ("options", "has_offsets", "form"),
    [
        ({"mode": "sum"}, False, {}),
        ({"mode": "sum"}, True, {}),
        ({"mode": "sum", "weighted": True}, True, {}),
        ({"mode": "mean"}, False, {}),
        ({"mode": "mean"}, True, {}),
        ({"mode": "max"}, False, {}),
        ({"mode": "max"}, True, {}),
        # As the exporter writes it by default: it computes itself what it knows, such as the number of bags.
        ({"mode": "sum"}, False, {"optimize": True, "dynamic": False}),
        ({"mode": "sum", "weighted": True}, True, {"optimize": True, "dynamic": False}),
        ({"mode": "mean"}, True, {"optimize": True, "dynamic": False}),
        ({"mode": "max"}, True, {"optimize": True, "dynamic": False}),
        ({"mode": "mean"}, True, {"optimize": True}),
        ({"mode": "max"}, True, {"optimize": True}),
        ({"mode": "mean"}, True, {"dynamic": False}),
        ({"mode": "max"}, True, {"dynamic": False}),
        ({"mode": "sum", "include_last_offset": True}, True, {}),
        ({"mode": "mean", "include_last_offset": True}, True, {}),
        ({"mode": "max", "include_last_offset": True}, True, {"optimize": True, "dynamic": False}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_gradient_matches_torch(
    options: dict[str, Any], has_offsets: bool, form: dict[str, bool], tmp_path: Path
) -> None:
    net = Bags(**options)
    draw = np.random.default_rng(0)
    calls = [(draw.integers(0, 50, (bags, 5)),) for bags in (2, 7, 7, 30)]
    if has_offsets:
        # Empty bags at the beginning, in the middle and at the end.
        same = [0, 0, 0, 2, 2, 7, 11], [0, 4, 5, 5, 6, 11, 11]
        tables = [[0, 3], *same, [0, 4, 11, 11], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
        end = [11] if "include_last_offset" in options else []
        calls = [(draw.integers(0, 50, 11), np.array([*offsets, *end])) for offsets in tables]
    model = exported(net, tuple(map(torch.from_numpy, calls[1])), tmp_path / "net.onnx", **form)
    if not form.get("dynamic", True):
        calls = calls[1:3]
    model.graph.node.extend(
        [
            onnx.helper.make_node("Mul", ["y", "y"], ["squares"]),
            onnx.helper.make_node("ReduceSum", ["squares"], ["loss"], keepdims=0),
        ]
    )
    model.graph.output.append(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    trained = differentiate(model, of="loss", wrt=["bag.weight"])
    assert all(node.op_type != "Loop" for node in trained.graph.node)
    session = onnxruntime.InferenceSession(trained.SerializeToString())
    for call in calls:
        net.zero_grad()
        y = net(*map(torch.from_numpy, call))
        y.square().sum().backward()
        inputs = dict(zip(["x", "offsets"], call, strict=False))
        inputs |= {
            value.name: net.bag.weight.detach().numpy()
            for value in session.get_inputs()
            if value.name == "bag.weight"
        }
        result, gradient = session.run(["y", "bag.weight_grad"], inputs)
        np.testing.assert_allclose(result, y.detach().numpy(), rtol=1e-5, atol=1e-5)
        assert net.bag.weight.grad is not None
        np.testing.assert_allclose(gradient, net.bag.weight.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_rows_after_the_last_offset(mode: str, dynamic: bool, tmp_path: Path) -> None:
    """The exported loop counts them in the mean and the maximum of the last bag, and so does the scatter."""
    path = tmp_path / "net.onnx"
    x, offsets = np.arange(11) * 7 % 50, np.array([0, 4, 4, 7])
    net = Bags(mode=mode, include_last_offset=True)
    loop = exported(net, (torch.from_numpy(x), torch.from_numpy(offsets)), path, dynamic=dynamic)
    assert not _has_loop(path)
    scatter = onnx_ir.to_proto(canonicalize(load_model(path), ["bag.weight"]))
    # ONNX Runtime 1.32 crashes when it loads the loop of "mean".
    (expected,) = ReferenceEvaluator(loop).run(["y"], {"x": x, "offsets": offsets})
    session = onnxruntime.InferenceSession(scatter.SerializeToString())
    (result,) = session.run(["y"], {"x": x, "offsets": offsets})
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_loop_that_reads_other_rows_is_left_alone(tmp_path: Path) -> None:
    """Each Add, Slice and Equal of the pattern decides: with another number or input, the loop stays."""
    path = tmp_path / "net.onnx"
    exported(Bags(mode="sum"), (torch.zeros(8, 5, dtype=torch.long),), path)
    assert not _has_loop(path)
    for name, op_type in (("int64_2", "Constant"), ("int64_0_1d", "Constant"), ("tmp_19", "Constant")):
        model = onnx.load(path)
        node = next(
            node for node in _nodes(model.graph) if node.output[0] == name and node.op_type == op_type
        )
        attribute = node.attribute[0]
        if attribute.HasField("t"):
            shape = list(attribute.t.dims)
            attribute.t.CopyFrom(
                onnx.numpy_helper.from_array(np.full(shape, 1 if name == "int64_0_1d" else 3))
            )
        else:
            attribute.floats[0] = 1.0
        onnx.save(model, tmp_path / "other.onnx")
        assert _has_loop(tmp_path / "other.onnx"), name


def _has_loop(path: Path) -> bool:
    return any(node.op_type == "Loop" for node in canonicalize(load_model(path), ["bag.weight"]).graph)


def _nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    nodes = []
    for node in graph.node:
        nodes.append(node)
        for attribute in node.attribute:
            nodes += _nodes(attribute.g)
    return nodes
