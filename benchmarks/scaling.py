"""Measure building, session creation and a step for 500 to 8,000 nodes, named and unnamed.

The model is a stack of dense layers of width 64, each with a residual, an activation and a norm: five nodes a layer.
Each size is measured in a process of its own.

Usage: python benchmarks/scaling.py [--nodes N ...]
Writes benchmarks/results/scaling.json and notes/images/scaling.png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NODES = (500, 1000, 2000, 4000, 5000, 8000)
WORKER = """
import json, sys, tempfile, time
import numpy as np, onnx, onnxruntime as ort
from onnx import helper, numpy_helper, TensorProto as T

nodes, named = int(sys.argv[1]), sys.argv[2] == "named"
rng, items, weights, last = np.random.default_rng(0), [], [], "x"
def add(op_type, inputs, **attributes):
    name = f"v{len(items)}"
    items.append(helper.make_node(op_type, inputs, [name], name=f"/{name}" if named else "", **attributes))
    return name
def weight(*shape):
    weights.append(numpy_helper.from_array(rng.normal(0, 0.1, shape).astype(np.float32), f"w{len(weights)}"))
    return weights[-1].name
while len(items) + 6 <= nodes:
    h = add("Add", [add("MatMul", [last, weight(64, 64)]), weight(64)])
    h = add("LayerNormalization", [add("Tanh", [h]), weight(64), weight(64)])
    last = add("Add", [last, h])
add("ReduceMean", [last], keepdims=0)
items[-1].output[0] = "loss"
x = helper.make_tensor_value_info("x", T.FLOAT, ["n", 64])
y = helper.make_tensor_value_info("loss", T.FLOAT, [])
graph = helper.make_graph(items, "stack", [x], [y], weights)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

from onnxtrain import artifacts, optimizers
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.autodiff import differentiate

found = {"nodes": len(items)}
def timed(key, call):
    start = time.perf_counter()
    result = call()
    found[key] = round(time.perf_counter() - start, 4)
    return result
timed("differentiate_s", lambda: differentiate(model, of="loss", wrt=[w.name for w in weights]))
with tempfile.TemporaryDirectory() as folder:
    timed("artifacts_s", lambda: artifacts.generate_artifacts(
        model, optimizer=optimizers.AdamW(), artifact_directory=folder))
    def sessions():
        module = Module(f"{folder}/training_model.onnx", CheckpointState.load_checkpoint(f"{folder}/checkpoint"))
        return module, Optimizer(f"{folder}/optimizer_model.onnx", module)
    module, optimizer = timed("sessions_s", sessions)
    batch = rng.normal(size=(32, 64)).astype(np.float32)
    def step():
        module.lazy_reset_grad()
        module(batch)
        optimizer.step()
    timed("first_step_s", step)
    found["step_s"] = min((timed("step_s", step), found["step_s"])[1] for _ in range(10))
print(json.dumps(found))
"""
WHAT = {
    "differentiate_s": "differentiate",
    "artifacts_s": "generate_artifacts",
    "sessions_s": "sessions",
    "step_s": "step",
}


def measure(nodes: int, named: bool) -> dict[str, float]:
    command = [sys.executable, "-c", WORKER, str(nodes), "named" if named else "unnamed"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def plot(results: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4.5))
    for kind, style in (("named", "-"), ("unnamed", "--")):
        for color, (key, title) in enumerate(WHAT.items()):
            line = sorted(results.get(kind, ()), key=lambda found: found["nodes"])
            sizes, times = [found["nodes"] for found in line], [found[key] for found in line]
            axes.loglog(sizes, times, style, marker="o", color=f"C{color}", label=f"{title}, {kind}")
    axes.set_xlabel("nodes of the forward model")
    axes.set_ylabel("seconds")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES))
    nodes = parser.parse_args().nodes
    path = HERE / "results" / "scaling.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for kind in ("named", "unnamed"):
        line = {found["nodes"]: found for found in results.get(kind, [])}
        for size in nodes:
            found = measure(size, kind == "named")
            line[found["nodes"]] = found
            print(kind, found, flush=True)
        results[kind] = [line[size] for size in sorted(line)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    plot(results, HERE.parent / "docs" / "images" / "scaling.png")


if __name__ == "__main__":
    main()
