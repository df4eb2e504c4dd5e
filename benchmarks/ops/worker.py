"""Differentiates the models in a folder with one engine, and prints a line of JSON for each.

Usage, in the engine's environment: python worker.py ENGINE FOLDER NAME ...
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

STANDARD = ("", "ai.onnx")
TOLERANCE = 1e-3
"""Of an element of a gradient, beside the largest one."""


def main() -> None:
    """Judges each model."""
    name, folder, *items = sys.argv[1:]
    engine = importlib.import_module(f"engines.in_{name}")
    print(json.dumps({"version": metadata.version(engine.PACKAGE)}), flush=True)
    for item in items:
        print(json.dumps({"begins": item}), flush=True)
        print(json.dumps({"item": item, **_judge(engine, Path(folder) / item)}), flush=True)


def _judge(engine: Any, folder: Path) -> dict[str, Any]:
    about = json.loads((folder / "about.json").read_text())
    arrays = dict(np.load(folder / "arrays.npz"))
    names, feeds = about["wrt"], {name: arrays[name] for name in about["inputs"]}
    found: dict[str, Any] = {}
    gradients: dict[str, tuple[onnx.ModelProto, list[str]]] = {}
    for shapes in ("static", "symbolic"):
        model = onnx.load(folder / f"{shapes}.onnx")
        try:
            gradients[shapes] = engine.gradient_model(model, "loss", names)
            found[shapes] = _compare(
                *gradients[shapes], feeds, [arrays[f"{name}_expected"] for name in names]
            )
        except BaseException as error:  # some raise what is no Exception
            found[shapes] = f"{type(error).__name__}: {str(error)[-300:]}"
    if found["static"] != "right":
        return {**found, "second": "no first", "portable": "no first"}
    model, results = gradients["static"]
    found["portable"] = _foreign(model) or "right"
    try:
        again, seconds = engine.gradient_model(_slope(model, names, results), "slope", names)
        directions = {f"{name}_direction": arrays[f"{name}_direction"] for name in names}
        expected = [arrays[f"{name}_second"] for name in names]
        found["second"] = _compare(again, seconds, {**feeds, **directions}, expected)
    except BaseException as error:
        said = str(error)
        # Of a gradient that hangs on nothing: zero, says PyTorch.
        zero = "reach" in said and not any(arrays[f"{name}_second"].any() for name in names)
        found["second"] = "right" if zero else f"{type(error).__name__}: {said[-300:]}"
    return found


def _slope(model: onnx.ModelProto, names: list[str], results: list[str]) -> onnx.ModelProto:
    """The model of the gradient along a direction, alone."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    # Engines may use the same names again.
    kept = {"", *(info.name for info in graph.input), *(tensor.name for tensor in graph.initializer)}
    results = [result if result in kept else f"first/{result}" for result in results]
    _rename(graph, kept)
    del graph.value_info[:]
    shapes = {info.name: info.type for info in graph.input}
    for name, result in zip(names, results, strict=True):
        info = onnx.ValueInfoProto(name=f"{name}_direction")
        info.type.CopyFrom(shapes[name])
        graph.input.append(info)
        graph.node.append(helper.make_node("Mul", [result, f"{name}_direction"], [f"{name}_along"]))
        graph.node.append(helper.make_node("ReduceSum", [f"{name}_along"], [f"{name}_part"], keepdims=0))
    total = f"{names[0]}_part"
    for name in names[1:]:
        graph.node.append(helper.make_node("Add", [total, f"{name}_part"], [f"{name}_total"]))
        total = f"{name}_total"
    graph.node.append(helper.make_node("Identity", [total], ["slope"]))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("slope", onnx.TensorProto.FLOAT, []))
    return copy


def _rename(graph: onnx.GraphProto, kept: set[str]) -> None:
    kept = kept | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        node.name = ""
        for names in (node.input, node.output):
            names[:] = [name if name in kept else f"first/{name}" for name in names]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, kept)
    for info in (*graph.output, *graph.input):
        info.name = info.name if info.name in kept else f"first/{info.name}"


def _foreign(model: onnx.ModelProto) -> str:
    """The ops of other domains than the standard one."""
    own = {(function.domain, function.name) for function in model.functions}
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    found = {
        f"{node.domain}::{node.op_type}"
        for node in nodes
        if node.domain not in STANDARD and (node.domain, node.op_type) not in own
    }
    return ", ".join(sorted(found))


def _compare(
    model: onnx.ModelProto, results: list[str], feeds: dict[str, np.ndarray], expected: list[np.ndarray]
) -> str:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    missing = names - feeds.keys()
    more = {name: np.ones(1, bool) for name in missing if "lazy_reset_grad" in name}
    for value in session.get_inputs():  # buffers in which onnxruntime-training adds gradients up
        if value.name in missing - more.keys():
            more[value.name] = np.zeros(feeds[value.name.partition("_grad")[0]].shape, np.float32)
    got = session.run(results, {k: v for k, v in feeds.items() if k in names} | more)
    for array, want in zip(got, expected, strict=True):
        if array.shape != want.shape:
            return f"wrong: shape {list(array.shape)} for {list(want.shape)}"
        scale = float(np.abs(want).max(initial=0)) + 1e-2
        worst = float(np.abs(array - want).max(initial=0))
        if not worst <= TOLERANCE * scale:
            return f"wrong: off by {worst:.2g} of {scale:.2g}"
    return "right"


if __name__ == "__main__":
    main()
