"""Values that are computed again for the gradients: the same gradients, and less that is kept for them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from models import make_model
from onnxtrain.api import CheckpointState, Module
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.lora import LoraConfig, add_lora
from onnxtrain.trainer import Trainer

node = helper.make_node


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(0, 0.3, shape).astype(np.float32)


def blocks(count: int = 3, width: int = 64, *, dropout: bool = False) -> onnx.ModelProto:
    """Layers x + gelu(norm(x) up + bias) down, with wide ones in between."""
    nodes, weights, last = [], {}, "x"
    for i in range(count):
        weights |= {
            f"scale{i}": 1 + weight(width),
            f"shift{i}": weight(width),
            f"up{i}": weight(width, 4 * width),
            f"bias{i}": weight(4 * width),
            f"down{i}": weight(4 * width, width),
        }
        nodes += [
            node("LayerNormalization", [last, f"scale{i}", f"shift{i}"], [f"n{i}"]),
            node("MatMul", [f"n{i}", f"up{i}"], [f"u{i}"]),
            node("Add", [f"u{i}", f"bias{i}"], [f"h{i}"]),
            node("Gelu", [f"h{i}"], [f"g{i}"]),
            node("MatMul", [f"g{i}", f"down{i}"], [f"d{i}"]),
            node("Add", [last, f"d{i}"], [f"y{i}"]),
        ]
        last = f"y{i}"
    if dropout:
        weights |= {"ratio": np.float32(0.5), "on": np.array(True)}
        nodes.append(node("Dropout", [last, "ratio", "on"], ["dropped"], seed=7))
        last = "dropped"
    nodes.append(node("Identity", [last], ["out"]))
    return make_model(nodes, {"x": ["b", 5, width]}, {"out": ["b", 5, width]}, weights)


def gradients(model: onnx.ModelProto, folder: Path, recompute: bool, batch: int = 3) -> dict[str, np.ndarray]:
    generate_artifacts(model, loss="mse", artifact_directory=folder, recompute=recompute)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, error_if_nonfinite=False)
    x = np.random.default_rng(0).normal(size=(batch, 5, 64)).astype(np.float32)
    loss = module(x, np.zeros_like(x))
    return {"loss": np.asarray(loss)} | {name: np.array(p.grad) for name, p in state.parameters}


@pytest.mark.parametrize("batch", [3, 1])
def test_gradients_are_the_same(tmp_path: Path, batch: int) -> None:
    plain, again = (gradients(blocks(), tmp_path / str(flag), flag, batch) for flag in (False, True))
    assert plain.keys() == again.keys()
    for name, reference in plain.items():
        np.testing.assert_array_equal(again[name], reference, err_msg=name)


def test_products_in_bfloat16_are_recomputed_in_bfloat16(tmp_path: Path) -> None:
    """Products of bfloat16 are done again in bfloat16."""
    found = []
    for flag in (False, True):
        folder = tmp_path / str(flag)
        generate_artifacts(blocks(), loss="mse", artifact_directory=folder, recompute=flag, precision="bf16")
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        x = np.random.default_rng(0).normal(size=(3, 5, 64)).astype(np.float32)
        Module(folder / "training_model.onnx", state)(x, np.zeros_like(x))
        found.append({name: np.array(p.grad) for name, p in state.parameters})
    for name, reference in found[0].items():
        np.testing.assert_array_equal(found[1][name], reference, err_msg=name)
    assert not kept_by_gradients(ir.load(folder / "training_model.onnx")) & {"g0", "g1", "g2"}


def test_linear_layers_of_many_rows_are_recomputed(tmp_path: Path) -> None:
    """They become ops of their own before products are chosen."""
    nodes, weights, last = [], {}, "x"
    for i in range(4):
        weights |= {f"w{i}": weight(64, 64), f"b{i}": weight(64)}
        nodes += [node("Gemm", [last, f"w{i}", f"b{i}"], [f"z{i}"]), node("Tanh", [f"z{i}"], [f"t{i}"])]
        last = f"t{i}"
    nodes.append(node("Identity", [last], ["out"]))
    net = make_model(nodes, {"x": [1200, 64]}, {"out": [1200, 64]}, weights)
    x = np.random.default_rng(0).normal(size=(1200, 64)).astype(np.float32)
    counts, found = [], []
    for flag in (False, True):
        folder = tmp_path / str(flag)
        generate_artifacts(net, loss="mse", artifact_directory=folder, recompute=flag)
        model = onnx.load(folder / "training_model.onnx")
        counts.append(Counter(n.op_type for n in model.graph.node)["Linear_float"])
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        Module(folder / "training_model.onnx", state)(x, np.zeros_like(x))
        found.append({name: np.array(p.grad) for name, p in state.parameters})
    assert counts[1] > counts[0] == 4
    for name, reference in found[0].items():
        np.testing.assert_allclose(found[1][name], reference, rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_trainer_that_recomputes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(8, 5, 64)).astype(np.float32)
    histories = []
    for recompute in (False, True):
        trainer = Trainer(blocks(), loss="mse", recompute=recompute, seed=1)
        histories.append(trainer.fit(x, np.zeros_like(x), epochs=2, batch_size=4, verbose=False)["loss"])
    assert histories[0] == histories[1]


def test_an_empty_batch(tmp_path: Path) -> None:
    for name, value in gradients(blocks(), tmp_path, True, batch=0).items():
        assert name == "loss" or not np.abs(value).any(), name


def test_infinite_gradients_pass(tmp_path: Path) -> None:
    """The op that delays a recomputation reads a gradient, which need not be finite."""
    generate_artifacts(blocks(), loss="mse", artifact_directory=tmp_path, recompute=True)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, error_if_nonfinite=False)
    x = np.full((2, 5, 64), np.nan, np.float32)
    assert np.isnan(module(x, np.zeros_like(x)))
    assert all(np.isnan(p.grad).any() for _, p in state.parameters)


def written(model: onnx.ModelProto, folder: Path, recompute: bool) -> ir.Model:
    generate_artifacts(model, loss="mse", artifact_directory=folder, recompute=recompute)
    return ir.load(folder / "training_model.onnx")


def kept_by_gradients(model: ir.Model) -> set[str]:
    """Return the names of values that are computed before the loss and read behind it."""
    nodes = list(model.graph)
    loss = model.graph.outputs[0].producer()
    assert loss is not None
    end = nodes.index(loss) + 1
    before = {value for node in nodes[:end] for value in node.outputs}
    return {str(v.name) for node in nodes[end:] for v in node.inputs if v in before}


def test_what_is_kept(tmp_path: Path) -> None:
    """Of each block its input alone: the products that make it wide are half of all, and done again."""
    plain, again = (
        kept_by_gradients(written(blocks(), tmp_path / str(flag), flag)) for flag in (False, True)
    )
    wide = {"h0", "h1", "h2", "g0", "g1", "g2"}
    assert wide <= plain
    assert not again & (wide | {"n0", "n1", "n2"})
    assert {"y0", "y1"} <= again


def counted(model: ir.Model) -> Counter[str]:
    """The ops of a model and of the bodies of the functions that it calls, once for each call."""
    nodes = [inner for node in model.graph for inner in model.functions.get(node.op_identifier(), [node])]
    return Counter(node.op_type for node in nodes)


def test_random_numbers_are_drawn_once(tmp_path: Path) -> None:
    ops = counted(written(blocks(dropout=True), tmp_path, True))
    assert ops["Dropout"] == 1
    assert ops["Gelu"] == 6


def test_values_that_are_returned_are_kept(tmp_path: Path) -> None:
    generate_artifacts(
        blocks(), loss="mse", artifact_directory=tmp_path, recompute=True, additional_output_names=["g1"]
    )
    assert counted(ir.load(tmp_path / "training_model.onnx"))["Gelu"] == 5


def test_what_a_branch_reads_is_kept(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[b, 70] x, bool c) => (float[b, 70] y) <float[70, 70] w> {
        h = MatMul(x, w)  t = Tanh(h)
        y = If (c) <then_branch = a () => (float[b, 70] p) { p = Mul(t, t) },
                    else_branch = e () => (float[b, 70] q) { q = Exp(t) }> }"""
    )
    del model.graph.value_info[:]
    model.graph.initializer.append(numpy_helper.from_array(weight(70, 70), "w"))
    found = []
    for recompute in (False, True):
        folder = tmp_path / str(recompute)
        generate_artifacts(model, loss="mse", artifact_directory=folder, recompute=recompute)
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        x = np.random.default_rng(0).normal(size=(3, 70)).astype(np.float32)
        Module(folder / "training_model.onnx", state)(x, np.array(True), np.zeros_like(x))
        found.append(np.array(state.parameters["w"].grad))
    np.testing.assert_array_equal(*found)


def gated(count: int = 2, width: int = 32) -> onnx.ModelProto:
    """Layers x + (silu(n gate) * (n up)) down with n = norm(x), as generation models have them, with adapters."""
    nodes, weights, last, total = [], {}, "x", "x"
    for i in range(count):
        layer = f"layers.{i}.mlp"
        weights |= {
            f"scale{i}": 1 + weight(width),
            f"{layer}.gate_proj.weight": weight(width, 3 * width),
            f"{layer}.up_proj.weight": weight(width, 3 * width),
            f"{layer}.down_proj.weight": weight(3 * width, width),
        }
        nodes += [
            node(
                "SkipSimplifiedLayerNormalization",
                [total, last, f"scale{i}"],
                [f"n{i}", "", "", f"t{i}"],
                domain="com.microsoft",
                epsilon=1e-5,
            ),
            node("MatMul", [f"n{i}", f"{layer}.gate_proj.weight"], [f"g{i}"]),
            node("MatMul", [f"n{i}", f"{layer}.up_proj.weight"], [f"u{i}"]),
            node("Sigmoid", [f"g{i}"], [f"s{i}"]),
            node("Mul", [f"g{i}", f"s{i}"], [f"a{i}"]),
            node("Mul", [f"a{i}", f"u{i}"], [f"p{i}"]),
            node("MatMul", [f"p{i}", f"{layer}.down_proj.weight"], [f"d{i}"]),
        ]
        last, total = f"d{i}", f"t{i}"
    nodes.append(node("Add", [total, last], ["out"]))
    model = make_model(nodes, {"x": ["b", 5, width]}, {"out": ["b", 5, width]}, weights)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return add_lora(model, LoraConfig(r=2, init_lora_weights="gaussian"))


def test_adapters_recompute_what_is_cheap(tmp_path: Path) -> None:
    """Norms, activations and their products are computed again unasked; gradients are the same bits."""
    model = gated()
    assert sum(".lora_" in tensor.name for tensor in model.graph.initializer) == 12
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    # Without the note of its adapters the model is like any other, whose frozen weights are not known to be most of it.
    del plain.metadata_props[:]
    names = [tensor.name for tensor in model.graph.initializer if ".lora_" in tensor.name]
    results = []
    for which, proto in (("plain", plain), ("adapters", model)):
        folder = tmp_path / which
        generate_artifacts(proto, requires_grad=names, loss="mse", artifact_directory=folder)
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        for name, parameter in state.parameters:
            parameter.data = (
                np.random.default_rng(len(name)).normal(size=parameter.data.shape).astype(np.float32)
            )
        x = np.random.default_rng(0).normal(size=(3, 5, 32)).astype(np.float32)
        loss = Module(folder / "training_model.onnx", state)(x, np.zeros_like(x))
        results.append({"loss": np.asarray(loss)} | {name: np.array(p.grad) for name, p in state.parameters})
    for name, reference in results[0].items():
        np.testing.assert_array_equal(results[1][name], reference, err_msg=name)
        assert np.abs(reference).any()
    kept = [_kept_wide(ir.load(tmp_path / which / "training_model.onnx")) for which in ("plain", "adapters")]
    # The first norm lies before all adapters, where the file's op stays.
    cheap = {"n1", "a0", "a1", "p0", "p1"}
    assert cheap | {"n0"} <= kept[0]
    assert kept[1] & (cheap | {"n0"}) == {"n0"}


def _kept_wide(model: ir.Model) -> set[str]:
    """Returns the names of activations of a layer's width or more that gradients read."""
    widths = {
        str(v.name): v.shape[-1]
        for n in model.graph
        for v in n.outputs
        if v.shape is not None and v.shape.rank()
    }
    return {name for name in kept_by_gradients(model) if widths.get(name) in (32, 96)}
