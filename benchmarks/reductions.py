"""Measure the error and time of sums over many float32 numbers: ONNX Runtime as it is, as rewritten, and PyTorch eager.

Errors are relative, against float64. Times are the minimum over the rounds, in which the three take turns, with the
number of threads given. "again" is ONNX Runtime as it is for a second time: its ratio to the first shows the noise.

Usage: python benchmarks/reductions.py [--most 8] [--rounds 20] [--threads 2]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnx import parser

from onnxtrain.passes import LongSumsPass, infer_shapes, load_model, to_proto

# What each line computes of x [n], in ONNX and in PyTorch.
LINES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "sum": ("y = ReduceSum<keepdims=0>(x)", lambda x: x.sum()),
    "mean": ("y = ReduceMean<keepdims=0>(x)", lambda x: x.mean()),
    "variance": (
        "m = ReduceMean<keepdims=0>(x) d = Sub(x, m) s = Mul(d, d) y = ReduceMean<keepdims=0>(s)",
        lambda x: x.var(correction=0),
    ),
    "norm": ("y = ReduceL2<keepdims=0>(x)", lambda x: x.norm()),
    "mse": (
        "s = Mul(x, x) y = ReduceMean<keepdims=0>(s)",
        lambda x: torch.nn.functional.mse_loss(x, torch.zeros_like(x)),
    ),
    "bce": (
        "e = Exp(x) o = Constant<value_float=1.0>() p = Add(e, o) s = Log(p) y = ReduceMean<keepdims=0>(s)",
        lambda x: torch.nn.functional.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
    ),
}


def values(kind: str, count: int) -> np.ndarray:
    """Returns float32 numbers: all equal, growing from 0 to 1, or random in [0, 1)."""
    if kind == "equal":
        return np.full(count, 0.1, np.float32)
    if kind == "growing":
        return np.linspace(0, 1, count, dtype=np.float32)
    return np.random.default_rng(0).random(count, dtype=np.float32)


def session(text: str, size: int | str, threads: int, *, rewrite: bool) -> ort.InferenceSession:
    """Opens a session of a line."""
    model = infer_shapes(
        load_model(
            parser.parse_model(
                f'<ir_version: 10, opset_import: ["": 21]> g (float[{size}] x) => (float y) {{ {text} }}'
            )
        )
    )
    assert isinstance(model, ir.Model)
    if rewrite:
        LongSumsPass()(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return ort.InferenceSession(to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])


def best(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Returns the least seconds of each of several runs that take turns."""
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            least[name] = min(least[name], time.perf_counter() - began)
    return least


def main() -> None:
    """Prints one row per computation, kind of numbers and count."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--most", type=int, default=8, help="power of ten of the largest count, e.g. 7")
    arguments.add_argument("--rounds", type=int, default=20, help="runs of each engine, e.g. 20")
    arguments.add_argument("--threads", type=int, default=2, help="threads of each engine, e.g. 2")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    print(
        "| computation | numbers | count | ONNX Runtime | rewritten | eager | ms | rewritten | again | eager ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for power in range(3, options.most + 1):
        for kind in ("equal", "growing", "random"):
            x = values(kind, 10**power)
            for name in LINES:
                rounds = max(3, options.rounds if power < 7 else options.rounds // 4)
                print(
                    f"| {name} | {kind} | 10^{power} | {row(name, x, options.threads, rounds)} |", flush=True
                )


def row(name: str, x: np.ndarray, threads: int, rounds: int) -> str:
    """Measures one computation of x; returns errors and times as cells of a table."""
    text, eager = LINES[name]
    tensor = torch.from_numpy(x)
    exact = eager(tensor.double()).item()
    plain, ours = (session(text, x.size, threads, rewrite=rewrite) for rewrite in (False, True))
    runs: dict[str, Callable[[], object]] = {
        "plain": lambda: plain.run(None, {"x": x})[0],
        "ours": lambda: ours.run(None, {"x": x})[0],
        "again": lambda: plain.run(None, {"x": x})[0],
        "eager": lambda: eager(tensor),
    }
    # The variance of equal numbers is 0: its error is relative to their square.
    scale = exact if exact > 1e-12 else 0.01
    errors = [abs(float(runs[key]()) - exact) / scale for key in ("plain", "ours", "eager")]
    seconds = best(runs, rounds)
    return (
        " | ".join(f"{error:.0e}" for error in errors)
        + f" | {seconds['plain'] * 1e3:.3f} | {seconds['ours'] / seconds['plain']:.2f} | "
        f"{seconds['again'] / seconds['plain']:.2f} | {seconds['eager'] * 1e3:.3f}"
    )


if __name__ == "__main__":
    main()
