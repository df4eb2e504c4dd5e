"""bfloat16 beside float32: products of matrices alone, and training steps of nets.

Products: onnxruntime's MatMul of float32 and the native kernel, with a Transpose before it where a factor is
transposed. Steps: artifacts with precision "fp32" and "bf16", and PyTorch and ORTModule without and with autocast.
All take turns in one process, and the least time over all turns counts: with one thread the time of the processor,
which is little changed by what else the machine does, with several that of the wall clock. Steps start from the same
weights; their losses are compared with those of PyTorch in float32.

Usage: python benchmarks/bfloat16.py [NET ...] [--threads 1] [--turns 40] [--steps 12]
Writes benchmarks/results/bfloat16.json; what was measured before on the same machine stays in it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from onnx import helper
from steps.engines._engine import ADAMW
from steps.machine import about_machine
from steps.nets import CASES, Case, WithLoss, make_batch, make_net
from steps.prepare import write_artifacts

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.functions import matmul_bfloat16
from onnxtrain.ortmodule import ORTModule
from onnxtrain.runtime.kernels import register_kernels

HERE = Path(__file__).parent
SWAP, BATCHED = [1, 0], [0, 2, 1]
PRODUCTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[int] | None, list[int] | None]] = {
    "[1024, 256] [256, 1024]": ((1024, 256), (256, 1024), None, None),
    "[1024, 1024] [1024, 256]": ((1024, 1024), (1024, 256), None, None),
    "[1024, 1024] [1024, 1024]": ((1024, 1024), (1024, 1024), None, None),
    "[1024, 256] [1024, 256]ᵀ": ((1024, 256), (1024, 256), None, SWAP),
    "[1024, 1024]ᵀ [1024, 256]": ((1024, 1024), (1024, 256), SWAP, None),
    "head: [512, 256] [8192, 256]ᵀ": ((512, 256), (8192, 256), None, SWAP),
    "its inputs: [512, 8192] [8192, 256]": ((512, 8192), (8192, 256), None, None),
    "its weights: [512, 8192]ᵀ [512, 256]": ((512, 8192), (512, 256), SWAP, None),
    "attention: 32 of [128, 64] [128, 64]ᵀ": ((32, 128, 64), (32, 128, 64), None, BATCHED),
    "[64, 784] [256, 784]ᵀ": ((64, 784), (256, 784), None, SWAP),
    "[1, 784] [256, 784]ᵀ": ((1, 784), (256, 784), None, SWAP),
    "[16, 16] [16, 16]": ((16, 16), (16, 16), None, None),
}
TURN_S = 2e-3
"""Least duration of one turn of a product, in seconds, about."""


def session(nodes: list[Any], shapes: dict[str, tuple[int, ...]], threads: int) -> ort.InferenceSession:
    inputs = [helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "product", inputs, [helper.make_empty_tensor_value_info("y")])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("onnxtrain", 1)]
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    register_kernels(options)
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def product(name: str, threads: int, turns: int, clock: Callable[[], float]) -> dict[str, float]:
    """Returns milliseconds and GFLOP/s of a product in both."""
    a, b, perm_a, perm_b = PRODUCTS[name]
    orders = {"a": perm_a, "b": perm_b}
    plain = [helper.make_node("Transpose", [v], [f"{v}t"], perm=p) for v, p in orders.items() if p]
    plain.append(helper.make_node("MatMul", [f"{v}t" if p else v for v, p in orders.items()], ["y"]))
    composite = matmul_bfloat16[perm_a is not None, perm_b is not None]
    given = {f"perm_{v}": p for v, p in orders.items() if p}
    own = helper.make_node(f"{composite.name}_float", ["a", "b"], ["y"], domain="onnxtrain", **given)
    rng = np.random.default_rng(0)
    feeds = {"a": rng.standard_normal(a, np.float32), "b": rng.standard_normal(b, np.float32)}
    bound = []
    for nodes in (plain, [own]):
        running = session(nodes, {"a": a, "b": b}, threads)
        binding = running.io_binding()
        for key, value in feeds.items():
            binding.bind_ortvalue_input(key, ort.OrtValue.ortvalue_from_numpy(value))
        (result,) = running.run(None, feeds)
        binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(result))
        bound.append((running, binding))
    work = 2.0 * np.prod(a) * (b[-2] if perm_b else b[-1])
    repeats = max(1, round(TURN_S * 2e11 / work))
    best = [float("inf")] * 2
    for _ in range(turns):
        for which, (running, binding) in enumerate(bound):
            began = clock()
            for _ in range(min(repeats, 1000)):
                running.run_with_iobinding(binding)
            best[which] = min(best[which], (clock() - began) / min(repeats, 1000))
    return {
        "float32_ms": round(best[0] * 1e3, 4),
        "bfloat16_ms": round(best[1] * 1e3, 4),
        "float32_gflops": round(work / best[0] / 1e9),
        "bfloat16_gflops": round(work / best[1] / 1e9),
        "ratio": round(best[1] / best[0], 3),
    }


def on_device(case: Case, files: Path, precision: str, threads: int) -> Callable[[], float]:
    folder = files / f"{case.name}-{precision}"
    if not (folder / "about.json").exists():
        write_artifacts(case, folder, precision)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, session_options=options)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(case.net.rate)
    module.train()
    batch = make_batch(case)

    def step() -> float:
        module.lazy_reset_grad()
        loss = float(module(*batch))
        optimizer.step()
        return loss

    return step


def in_pytorch(case: Case, autocast: bool, ours: bool) -> Callable[[], float]:
    net = WithLoss(make_net(case), case.net.loss)
    module = ORTModule(net) if ours else net
    optimizer = torch.optim.AdamW(net.parameters(), case.net.rate, fused=True, **ADAMW)
    batch = [torch.from_numpy(part) for part in make_batch(case)]

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = module(*batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def steps(net: str, files: Path, threads: int, count: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Returns milliseconds of a step in every engine, and how far its losses are from PyTorch's in float32."""
    case = CASES[net]
    engines = {
        "PyTorch": in_pytorch(case, False, False),
        "PyTorch, autocast": in_pytorch(case, True, False),
        "on-device API": on_device(case, files, "fp32", threads),
        "on-device API, bf16": on_device(case, files, "bf16", threads),
        "ORTModule": in_pytorch(case, False, True),
        "ORTModule, autocast": in_pytorch(case, True, True),
    }
    best = dict.fromkeys(engines, float("inf"))
    losses: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(count):
        for name, step in engines.items():
            began = clock()
            losses[name].append(step())
            if turn:
                best[name] = min(best[name], clock() - began)
    exact = np.array(losses["PyTorch"])
    return {
        name: {
            "ms": round(best[name] * 1e3, 3),
            "losses": [round(loss, 5) for loss in losses[name]],
            "mean_distance": round(float(np.abs(np.array(losses[name]) - exact).mean()), 6),
        }
        for name in engines
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nets", nargs="*", default=["encoder", "gpt2"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir(), "onnxtrain-benchmark"))
    parser.add_argument("--results", type=Path, default=HERE / "results" / "bfloat16.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    about = about_machine() | {"threads": arguments.threads}
    earlier = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    found = earlier if earlier.get("machine") == about else {"machine": about, "products": {}, "steps": {}}
    for name in PRODUCTS:
        result = found["products"][name] = product(name, arguments.threads, arguments.turns, clock)
        print(f"{name:40} {result}")
    for net in arguments.nets:
        result = found["steps"][net] = steps(net, arguments.files, arguments.threads, arguments.steps, clock)
        for name, values in result.items():
            print(f"{net:10} {name:22} {values['ms']:8.2f} ms, losses off by {values['mean_distance']:.6f}")
    arguments.results.parent.mkdir(exist_ok=True)
    arguments.results.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
