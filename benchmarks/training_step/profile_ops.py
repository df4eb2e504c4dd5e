"""Prints where the training step or the optimizer step of a net spends its time, by op and by node.

Usage: python benchmarks/training_step/profile_ops.py NET [--model training_model|optimizer_model] [--top N]
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime as ort
from nets import NETS, write_artifacts

from onnxtrain.api import CheckpointState, Module, Optimizer

STEPS = 10


def profile(net: str, model: str, keep: Path | None) -> list[dict[str, object]]:
    """Returns the kernel events of STEPS steps, after as many to warm up."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = keep or Path(temporary)
        write_artifacts(net, directory)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(temporary, "profile"))
        state = CheckpointState.load_checkpoint(directory / "checkpoint")
        module = Module(str(directory / "training_model.onnx"), state, session_options=options)
        optimizer = Optimizer(str(directory / "optimizer_model.onnx"), module)
        with np.load(directory / "batch.npz") as batch:
            inputs, labels = batch["inputs"], batch["labels"]
        for _ in range(2 * STEPS):
            module.lazy_reset_grad()
            module(inputs, labels)
            optimizer.step()
        session = module._session if model == "training_model" else optimizer._binding._session
        events = json.loads(Path(session.end_profiling()).read_text())
        other = optimizer._binding._session if model == "training_model" else module._session
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
    parser.add_argument("net", choices=list(NETS))
    parser.add_argument("--model", default="training_model", choices=["training_model", "optimizer_model"])
    parser.add_argument("--top", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="directory to leave the artifacts in")
    arguments = parser.parse_args()
    ops: dict[str, float] = collections.Counter()
    nodes: dict[str, float] = collections.Counter()
    groups: dict[str, float] = collections.Counter()
    counts: dict[str, int] = collections.Counter()
    for event in profile(arguments.net, arguments.model, arguments.keep):
        detail = event["args"]
        ops[detail["op_name"]] += event["dur"] / 1e3 / STEPS
        counts[detail["op_name"]] += 1
        shapes = [str(next(iter(d.values()))) for d in detail.get("input_type_shape", ())]
        key = f"{event['name'].removesuffix('_kernel_time')} {detail['op_name']} {' '.join(shapes)}"
        nodes[key] += event["dur"] / 1e3 / STEPS
        groups[_group(str(event["name"]), detail["op_name"])] += event["dur"] / 1e3 / STEPS
    total = sum(ops.values())
    print(
        f"{arguments.net} {arguments.model}: {total:.2f} ms per step in {sum(counts.values()) // STEPS} kernels"
    )
    for name, time in sorted(ops.items(), key=lambda item: -item[1])[: arguments.top]:
        print(f"{time:9.3f} ms {time / total:6.1%} {counts[name] // STEPS:5d} x {name}")
    print("\nby the forward op or composite that a kernel belongs to:")
    for name, time in sorted(groups.items(), key=lambda item: -item[1])[: arguments.top]:
        print(f"{time:9.3f} ms {time / total:6.1%}  {name}")
    print("\nby node:")
    for name, time in sorted(nodes.items(), key=lambda item: -item[1])[: arguments.top]:
        print(f"{time:9.3f} ms  {name}")


if __name__ == "__main__":
    main()
