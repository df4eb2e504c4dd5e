"""Estimate the least time of a step on this machine: its arithmetic at the speed of large products, or its memory's.

The speed of products is that of ONNX Runtime's MatMul of 1024 x 1024 float32 matrices; that of memory is of copies far
larger than the caches, reads and writes counted. Arithmetic is counted by PyTorch (`FlopCounterMode`: products and
convolutions, as sums over taps; Winograd's convolutions need 4/9 of that). Bytes are counted for layers and optimizers
only: each tensor that must be read or written once per op.

Usage: python benchmarks/limits.py
Prints a table of these limits beside the times in benchmarks/results/steps.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime as ort
import torch
from steps.nets import CASES, make_batch, make_net
from torch.utils.flop_counter import FlopCounterMode

RESULTS = Path(__file__).parent / "results" / "steps.json"
THREADS = 2
SIDE = 1024
COPIED = 256 << 20
"""Bytes."""

_TOKENS, _MAPS, _PARAMETERS = 8 * 512 * 768 * 4, 32 * 64 * 32 * 32 * 4, 10_000_000 * 4
# Three norms forward read and write each, the square's mean reads; backward its gradient reads and writes, each norm
# reads its input and cotangent, and two of three write: 17. AdamW reads four tensors and writes three.
BYTES = dict.fromkeys(("layernorm", "rmsnorm", "rinorm"), 17 * _TOKENS)
BYTES |= dict.fromkeys(("batchnorm", "groupnorm"), 17 * _MAPS)
BYTES |= dict.fromkeys(("adamw-one", "adamw-many"), 7 * _PARAMETERS)


def least(call: Callable[[], object], times: int = 30) -> float:
    """Returns the least seconds of a call."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def products_per_second() -> float:
    """Returns operations (a product and a sum are two) per second."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> '
        "net (float[n, k] a, float[k, m] b) => (float[n, m] y) { y = MatMul(a, b) }"
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = dict(
        zip("ab", np.random.default_rng(0).normal(size=(2, SIDE, SIDE)).astype(np.float32), strict=True)
    )
    return 2 * SIDE**3 / least(lambda: session.run(None, feeds))


def bytes_per_second() -> float:
    """Returns bytes read and written per second by a copy."""
    source, target = torch.ones(COPIED // 4), torch.ones(COPIED // 4)
    return 2 * COPIED / least(lambda: target.copy_(source))


def operations(name: str) -> float:
    """Returns how many operations products and convolutions of a forward and backward pass have."""
    net, (inputs, _) = make_net(CASES[name]), make_batch(CASES[name])
    # oneDNN's recurrent layers are one op, of which the counter knows nothing.
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        net(torch.from_numpy(inputs)).float().sum().backward()
    return float(counter.get_total_flops())


def main() -> None:
    torch.set_num_threads(THREADS)
    arithmetic, memory = products_per_second(), bytes_per_second()
    print(f"products: {arithmetic / 1e9:.0f} GFLOP/s; memory: {memory / 1e9:.0f} GB/s\n")
    print("| net | GFLOP | MB | at best, ms | on-device API, kernels | best of PyTorch |")
    print("|---|---|---|---|---|---|")
    measured = json.loads(RESULTS.read_text())
    for name, case in CASES.items():
        engines = measured.get(name, {}).get("steps", {}).get("engines")
        if engines is None:
            continue
        work, size = operations(name), BYTES.get(name, 0)
        times = {
            key: found[f"{case.net.counts}_ms"]["min"] for key, found in engines.items() if "step_ms" in found
        }
        best = min(value for key, value in times.items() if key.startswith(("torch", "compile")))
        limit, own = 1e3 * (size / memory if size else work / arithmetic), times["device-kernels"]
        print(f"| {name} | {work / 1e9:.2f} | {size / 1e6:.0f} | {limit:.2f} | {own:.2f} | {best:.2f} |")


if __name__ == "__main__":
    main()
