"""Prints where the training step or the optimizer step of a net spends its time, by op and by node.

Usage: python benchmarks/profile_ops.py NET [--model training_model|optimizer_model] [--top N] [--threads N] [--kernels]
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import tempfile
from pathlib import Path

from steps.nets import CASES
from steps.processes import Settings, prepare

STEPS = 10


def profile(files: Path, model: str, threads: int) -> list[dict[str, object]]:
    """Returns the kernel events of STEPS steps, after as many to warm up."""
    import numpy as np
    import onnxruntime as ort

    from onnxtrain.api import CheckpointState, Module, Optimizer

    with tempfile.TemporaryDirectory() as temporary:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(temporary, "profile"))
        state = CheckpointState.load_checkpoint(files / "checkpoint")
        module = Module(str(files / "training_model.onnx"), state, session_options=options)
        optimizer = Optimizer(str(files / "optimizer_model.onnx"), module)
        optimizer.set_learning_rate(0.0)
        with np.load(files / "batch.npz") as batch:
            inputs, target = batch["inputs"], batch["target"]
        for _ in range(2 * STEPS):
            module.lazy_reset_grad()
            module(inputs, target)
            optimizer.step()
        sessions = {"training_model": module._session, "optimizer_model": optimizer._binding._session}
        events = json.loads(Path(sessions.pop(model).end_profiling()).read_text())
        for other in sessions.values():
            os.unlink(other.end_profiling())
    kernels = [event for event in events if event["name"].endswith("_kernel_time")]
    return kernels[len(kernels) // 2 :]


def _group(name: str, op: str) -> str:
    """Names like `grad/node_relu_2/Where_kernel_time` without what tells layers apart."""
    composite = re.match(r"_inlfunc_([A-Za-z]+)", name)
    gradient = re.match(r"grad/(.*?)[_0-9]*/", name)
    if composite:
        return f"{composite[1]}: {op}"
    return f"gradient of {gradient[1]}: {op}" if gradient else f"forward: {op}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("net", choices=list(CASES))
    parser.add_argument("--model", default="training_model", choices=["training_model", "optimizer_model"])
    parser.add_argument("--top", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--kernels", action="store_true", help="with native kernels, where they are installed"
    )
    parser.add_argument("--again", action="store_true", help="write artifacts again that are there already")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir(), "onnxtrain-benchmark"))
    arguments = parser.parse_args()
    if not arguments.kernels:
        os.environ["ONNXTRAIN_KERNELS"] = "off"
    prepare(arguments.net, Settings(arguments.threads, arguments.files, {}), arguments.again)
    ops: dict[str, float] = collections.Counter()
    nodes: dict[str, float] = collections.Counter()
    groups: dict[str, float] = collections.Counter()
    counts: dict[str, int] = collections.Counter()
    for event in profile(arguments.files / arguments.net, arguments.model, arguments.threads):
        detail = event["args"]
        ops[detail["op_name"]] += event["dur"] / 1e3 / STEPS
        counts[detail["op_name"]] += 1
        shapes = [str(next(iter(d.values()))) for d in detail.get("input_type_shape", ())]
        key = f"{event['name'].removesuffix('_kernel_time')} {detail['op_name']} {' '.join(shapes)}"
        nodes[key] += event["dur"] / 1e3 / STEPS
        groups[_group(str(event["name"]), detail["op_name"])] += event["dur"] / 1e3 / STEPS
    total = sum(ops.values())
    kernels = sum(counts.values()) // STEPS
    print(f"{arguments.net} {arguments.model}: {total:.2f} ms per step in {kernels} kernels")
    for name, time in sorted(ops.items(), key=lambda item: -item[1])[: arguments.top]:
        print(f"{time:9.3f} ms {time / total:6.1%} {counts[name] // STEPS:5d} x {name}")
    for title, times in (("forward op or composite", groups), ("node", nodes)):
        print(f"\nby {title}:")
        for name, time in sorted(times.items(), key=lambda item: -item[1])[: arguments.top]:
            print(f"{time:9.3f} ms {time / total:6.1%}  {name}")


if __name__ == "__main__":
    main()
