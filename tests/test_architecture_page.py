"""The example of notes/architecture.md, "The life of one model": the figures that the page gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pages import read_blocks, run_block

PAGE = (Path(__file__).parents[1] / "notes" / "architecture.md").read_text()


def mlp() -> onnx.ModelProto:
    shapes = {"fc1.weight": (4, 8), "fc1.bias": (8,), "fc2.weight": (8, 3), "fc2.bias": (3,)}
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(random.normal(size=s).astype(np.float32), name) for name, s in shapes.items()
    ]
    nodes = [
        helper.make_node("Gemm", ["x", "fc1.weight", "fc1.bias"], ["h"]),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("Gemm", ["a", "fc2.weight", "fc2.bias"], ["logits"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(nodes, "mlp", [x], [logits], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_the_files_have_the_inputs_outputs_and_nodes_that_the_page_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    monkeypatch.chdir(tmp_path)
    (block,) = read_blocks("notes/architecture.md")
    run_block(block, {})

    graphs = {file.stem: onnx.load(file) for file in Path("run").glob("*_model.onnx")}
    parameters = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    names = {
        stem: ([i.name for i in model.graph.input], [o.name for o in model.graph.output])
        for stem, model in graphs.items()
    }
    assert names["training_model"] == (
        ["x", "labels", *parameters],
        ["loss", *(f"{p}_grad" for p in parameters)],
    )
    assert names["eval_model"] == (["x", "labels", *parameters], ["loss"])
    assert names["inference_model"] == (["x", *parameters], ["logits"])
    assert len(names["optimizer_model"][0]) == 2 + 4 * 4
    assert len(names["optimizer_model"][1]) == 3 * 4
    assert all(model.opset_import[0].version == 21 for model in graphs.values())

    eval_nodes = len(graphs["eval_model"].graph.node)
    training = graphs["training_model"].graph.node
    assert f"from {eval_nodes} nodes to {len(training)}" in PAGE
    called = sorted(node.op_type for node in training if node.domain == "onnxtrain")
    assert called == [
        "Elementwise0_float",
        "MatrixProduct_float",
        "MatrixProduct_float",
        "MeanCrossEntropyGradient_float",
        "MeanNegativeLogLikelihood_float",
    ]
    assert {"checkpoint", "manifest.json"} <= {file.name for file in Path("run").iterdir()}


def test_every_module_that_the_page_names_is_there() -> None:
    source = Path(__file__).parents[1] / "src" / "onnxtrain"
    named = {
        word.strip("`.,:;()")
        for word in PAGE.split()
        if word.startswith("`") and (word.strip("`.,:;()").endswith((".py", "/")))
    }
    missing = [
        name
        for name in sorted(named)
        if not any(
            (root / name).exists()
            for root in (source, source / "ortmodule", source / "autodiff", source.parents[1])
        )
    ]
    assert named
    assert missing == []
