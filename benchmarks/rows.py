"""Time gather and scatter of rows, forward and backward: the on-device API's graphs beside PyTorch eager.

Each case is one op of PyTorch and the ONNX ops that exporters make of it; gradients are those of `onnxtrain.autodiff`,
after the passes of the on-device API. Every engine has a process of its own; they take turns; one runs twice, as A/A
control. Inputs are OrtValues over NumPy memory; results are new in each call. Indices are random, sorted, or repeated:
a fifth or more of them name the first row.

Values are compared with PyTorch's in float64: the error of a result may be 1e-5 of the result for magnitudes of the
inputs, plus 1e-6. The results say which values have other bits on 2 or 4 threads than on one.

Usage: python benchmarks/rows.py [CASE ...] [--rows N ...] [--widths N ...] [--indices KIND ...] [--threads 1 2]
           [--rounds 5] [--seconds 0.1] [--quick] [--values] [--profile] [--results FILE] [--write]
Writes benchmarks/results/rows.json; cases that were measured before on the same machine stay in it. `--write` puts the
table into notes/performance.md. Cases whose arrays take more than 1 GB are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from steps.machine import about_machine

sys.path.append(str(Path(__file__).parent / "common"))
import page_tables
from turns import Worker, add_options, earlier_results, gflops, gflops_on, serve, times_of

HERE = Path(__file__).parent
PAGE = HERE.parent / "notes" / "performance.md"
ENGINES = {"kernels": "auto", "eager": "off", "stock": "off", "kernels again": "auto"}
"""Engines, and the setting of ONNXTRAIN_KERNELS of each."""
KINDS = ("random", "sorted", "repeated")
BAG = 16
MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Case:
    """An op.

    Attributes:
        body: the ONNX nodes that compute y of `data` [rows, width], `src` [n, width] and the indices `i` [n].
        floats: which of `data` and `src` it reads.
        torch: PyTorch's function of the same inputs.
        indices: the axes of `i`: n rows, b bags of k rows, or w columns.
        result: the axes of y.
    """

    body: str
    floats: tuple[str, ...]
    torch: Callable[..., Any]
    indices: str = "n"
    result: str = "nw"


def _functional() -> Any:
    from torch.nn import functional

    return functional


_SPREAD = "one = Constant<value = int64[1] {1}>() u = Unsqueeze(i, one) s = Shape(src) j = Expand(u, s) "
CASES = {
    "index_select": Case("y = Gather(data, i)", ("data",), lambda data, i: data.index_select(0, i)),
    "index_add": Case(
        'one = Constant<value = int64[1] {1}>() u = Unsqueeze(i, one) y = ScatterND<reduction = "add">(data, u, src)',
        ("data", "src"),
        lambda data, src, i: data.index_add(0, i, src),
    ),
    "scatter_reduce sum": Case(
        _SPREAD + 'y = ScatterElements<axis = 0, reduction = "add">(data, j, src)',
        ("data", "src"),
        lambda data, src, i: data.scatter_reduce(0, i[:, None].expand_as(src), src, "sum"),
    ),
    "scatter_reduce mean": Case(
        _SPREAD
        + """t = ScatterElements<axis = 0, reduction = "add">(data, j, src)
        ds = Shape(data) single = ConstantOfShape<value = float[1] {1}>(ds)
        each = ConstantOfShape<value = float[1] {1}>(s)
        count = ScatterElements<axis = 0, reduction = "add">(single, j, each) y = Div(t, count)""",
        ("data", "src"),
        lambda data, src, i: data.scatter_reduce(0, i[:, None].expand_as(src), src, "mean"),
    ),
    "scatter_reduce amax": Case(
        _SPREAD + 'y = ScatterElements<axis = 0, reduction = "max">(data, j, src)',
        ("data", "src"),
        lambda data, src, i: data.scatter_reduce(0, i[:, None].expand_as(src), src, "amax"),
    ),
    "embedding": Case(
        "y = Gather(data, i)", ("data",), lambda data, i: _functional().embedding(i, data), "bk", "bkw"
    ),
    "embedding_bag": Case(
        "g = Gather(data, i) one = Constant<value = int64[1] {1}>() y = ReduceSum<keepdims = 0>(g, one)",
        ("data",),
        lambda data, i: _functional().embedding_bag(i, data, mode="sum"),
        "bk",
        "bw",
    ),
    "take_along_dim": Case(
        "y = GatherElements<axis = 1>(data, i)",
        ("data",),
        lambda data, i: data.take_along_dim(i, 1),
        "nw",
    ),
}


def arrays(case: str, rows: int, width: int, kind: str) -> dict[str, np.ndarray]:
    """Returns the inputs, and `ct`, the cotangent of y."""
    rng, about = np.random.default_rng(0), CASES[case]
    sizes = {"n": rows, "b": rows // BAG, "k": BAG, "w": width}
    made = {name: rng.standard_normal((rows, width), np.float32) for name in about.floats}
    inner = "w" in about.indices
    drawn = rng.random([sizes[axis] for axis in about.indices])
    index = ((width if inner else rows) * (drawn**8 if kind == "repeated" else drawn)).astype(np.int64)
    if kind == "sorted":
        index = np.sort(index, axis=-1 if inner else None).reshape(index.shape)
    made["i"], made["ct"] = index, rng.standard_normal([sizes[axis] for axis in about.result], np.float32)
    return made


def fits(case: str, rows: int, width: int) -> bool:
    """True if inputs, results and gradients take at most 1 GB."""
    floats, inner = len(CASES[case].floats), "w" in CASES[case].indices
    return 4 * rows * width * (2 + 2 * floats + 2 * inner) <= MOST_BYTES


def write_models(case: str, rows: int, width: int, folder: Path) -> dict[str, Counter[str]]:
    """Writes forward.onnx, and both.onnx with the gradients; returns their ops."""
    import onnx
    import onnx_ir as ir

    from onnxtrain.autodiff import add_gradients, append_outputs
    from onnxtrain.fusion import ElementwisePass, RowsPass, fuse_kernels
    from onnxtrain.passes import (
        RacingScatterPass,
        apply_workarounds,
        canonicalize,
        infer_shapes,
        load_model,
        simplify_gradients,
    )

    about, sizes = CASES[case], {"k": BAG, "w": width}

    def typed(axes: str) -> str:
        return f"[{', '.join(str(sizes.get(axis, axis)) for axis in axes)}]"

    shapes = {"data": f"float[{rows}, {width}] data", "src": f"float[n, {width}] src"}
    inputs = [*(shapes[name] for name in about.floats), f"int64{typed(about.indices)} i"]
    if "w" in about.indices:
        inputs[0] = f"float[n, {width}] data"
    head = f"net ({', '.join(inputs)}) => (float{typed(about.result)} y)"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {head} {{ {about.body} }}')
    forward = canonicalize(load_model(proto))
    both, gradients = add_gradients(forward, "y", about.floats, cotangent="ct")
    append_outputs(both, about.floats, gradients)
    ops = {}
    for name, model in (("forward", forward), ("both", both)):
        # As `onnxtrain.training.gradient_graph` does.
        inferred = apply_workarounds(infer_shapes(model.clone()))
        simplify_gradients(inferred)
        fuse_kernels(inferred)
        RowsPass()(inferred)
        ElementwisePass()(inferred)
        RacingScatterPass()(inferred)
        ir.save(inferred, folder / f"{name}.onnx")
        ops[name] = Counter(node.op_type for node in inferred.graph)
    return ops


class InPyTorch:
    """Runs PyTorch's function forward; `both` adds the gradients."""

    def __init__(
        self, case: str, inputs: Mapping[str, np.ndarray], both: bool, dtype: str = "float32"
    ) -> None:
        import torch

        self._torch, self._function, self._both = torch, CASES[case].torch, both
        self._floats = [
            torch.from_numpy(inputs[name]).to(getattr(torch, dtype)) for name in CASES[case].floats
        ]
        self._index, ct = torch.from_numpy(inputs["i"]), torch.from_numpy(inputs["ct"])
        self._ct = ct.to(self._floats[0].dtype)
        for value in self._floats:
            value.requires_grad_(both)

    def __call__(self) -> Any:
        y = self._function(*self._floats, self._index)
        return (y, *self._torch.autograd.grad(y, self._floats, self._ct)) if self._both else (y,)

    def values(self, case: str) -> dict[str, np.ndarray]:
        names = ["y", *(f"{name}_grad" for name in CASES[case].floats)]
        return {name: y.detach().numpy() for name, y in zip(names, self(), strict=False)}


def on_device(
    part: str, folder: Path, inputs: Mapping[str, np.ndarray], threads: int, profile: bool = False
) -> Any:
    """Returns the call of forward.onnx or both.onnx."""
    from onnx_call import OnnxCall

    return OnnxCall(folder / f"{part}.onnx", inputs, threads, profile)


def check(case: str, inputs: Mapping[str, np.ndarray], folder: Path, what: str) -> list[str]:
    """Compares results and gradients with PyTorch's in float64, and those of 1, 2 and 4 threads with each other.

    Returns:
        The names of the values whose bits depend on the number of threads.

    Raises:
        AssertionError: values differ by more than rounding.
    """
    exact = InPyTorch(case, inputs, True, "float64").values(case)
    magnitudes = {name: value if name == "i" else np.abs(value) for name, value in inputs.items()}
    large = InPyTorch(case, magnitudes, True, "float64").values(case)
    values = on_device("both", folder, inputs, 1).values()
    for name, value in exact.items():
        error = np.abs(values[name] - value)
        assert np.all(error <= 1e-5 * large[name] + 1e-6), f"{what}: {name} is off by up to {error.max()}"
    differ = {
        name
        for threads in (2, 4)
        for name, value in on_device("both", folder, inputs, threads).values().items()
        if not np.array_equal(value.view(np.int32), values[name].view(np.int32))
    }
    return sorted(differ)


def work(engine: str, folder: Path, threads: int) -> None:
    """Answers requests to open a case, to check its values, and to run a part of it for some seconds."""
    running: dict[str, Any] = {}

    def answer(seconds: float = 0, part: str = "", **of: Any) -> Any:
        if seconds:
            return times_of(running[part], seconds)
        running.clear()
        if engine == "gflops":
            return gflops()
        if engine == "prepare":
            return write_models(of["case"], of["rows"], of["width"], folder)
        inputs = arrays(of["case"], of["rows"], of["width"], of["kind"])
        if of.get("check"):
            return check(of["case"], inputs, folder, f"{engine}: {of}")
        for name in ("forward", "both"):
            running[name] = (
                InPyTorch(of["case"], inputs, name == "both")
                if engine == "eager"
                else on_device(name, folder, inputs, threads)
            )
        if of.get("profile"):
            return on_device("both", folder, inputs, threads, profile=True).nodes()[:6]
        return None

    if engine == "eager":
        import torch

        torch.set_num_threads(threads)
    serve(answer)


def ratio(case: Mapping[str, Any], engine: str, part: str, key: str) -> float:
    """Returns the time of our graph with kernels beside that of an engine."""
    return case["us"]["kernels"][part][key] / case["us"][engine][part][key]


def table(results: Mapping[str, Any], threads: str) -> str:
    """Returns ratios of medians to PyTorch's, forward and forward with backward, by rows and width."""
    cases = results["threads"][threads]
    columns = sorted({tuple(map(int, name.split(", ")[1:3])) for name in cases})
    lines: dict[tuple[str, str], dict[tuple[int, int], str]] = {}
    for name, found in cases.items():
        case, rows, width, kind = name.split(", ")
        cell = " / ".join(f"{ratio(found, 'eager', part, 'median'):.2f}" for part in ("forward", "both"))
        lines.setdefault((case, kind), {})[int(rows), int(width)] = cell
    head = ["op", "indices", *(f"10^{round(math.log10(rows))} x {width}" for rows, width in columns)]
    return page_tables.lines(
        head, ([*key, *(line.get(column, "") for column in columns)] for key, line in lines.items())
    )


def summary(results: Mapping[str, Any]) -> str:
    """Returns, for each number of threads, how many cases meet the aim, and which don't."""
    found = []
    for threads, cases in results["threads"].items():
        same = [ratio(c, "kernels again", "both", "median") for c in cases.values()]
        found.append(f"threads {threads}, {len(cases)} cases; A/A {min(same):.2f} to {max(same):.2f}")
        for part, engine, key in itertools.product(
            ("forward", "both"), ("eager", "stock"), ("median", "min")
        ):
            those = sorted(((ratio(c, engine, part, key), n) for n, c in cases.items()), reverse=True)
            missed = [f"{name} ({value:.2f})" for value, name in those if value > 1]
            worst = "; ".join(missed[:6]) or "none"
            found.append(
                f"  {part}, {key} / {engine}: median {statistics.median(value for value, _ in those):.2f}, "
                f"{len(those) - len(missed)} of {len(those)} <= 1.0; worst: {worst}"
            )
    return "\n".join(found)


class Measurement:
    """The engines' processes for one number of threads."""

    def __init__(self, threads: int, engines: list[str], folder: Path) -> None:
        def start(engine: str) -> Worker:
            environment = {"ONNXTRAIN_KERNELS": ENGINES.get(engine, "auto")}
            return Worker(__file__, ["--work", engine, str(folder), str(threads)], threads, environment)

        self._start = start
        self._preparing = start("prepare")
        self._engines = {engine: start(engine) for engine in engines}

    def case(self, of: dict[str, Any], rounds: int, seconds: float, with_profile: bool) -> dict[str, Any]:
        """Returns ops, names of values whose bits depend on the number of threads, and times, after a check."""
        ops = self._preparing.ask(**{key: of[key] for key in ("case", "rows", "width")})
        differ = {}
        for engine in ("kernels", "stock"):
            # The engines' processes keep the memory that they have had: several GB in float64.
            large = of["rows"] * of["width"] > 1 << 24
            worker = self._start(engine) if large else self._engines[engine]
            differ[engine] = worker.ask(**of, check=True)
            if large:
                worker.close()
        if not rounds:
            return {"ops": ops, "bits_by_threads": differ, "us": {}}
        for engine, worker in self._engines.items():
            nodes = worker.ask(**of, profile=with_profile and engine in ("kernels", "stock"))
            if nodes:
                print(f"  {engine}: " + ", ".join(f"{op} {us}" for us, op in nodes), flush=True)
        times: dict[str, dict[str, list[float]]] = {e: {"forward": [], "both": []} for e in self._engines}
        for _ in range(rounds):
            for engine, parts in times.items():
                for part, line in parts.items():
                    line += self._engines[engine].ask(seconds=seconds, part=part)
        us = {
            engine: {
                part: {"median": round(statistics.median(line), 2), "min": round(min(line), 2)}
                for part, line in parts.items()
            }
            for engine, parts in times.items()
        }
        return {"ops": ops, "bits_by_threads": differ, "us": us}

    def close(self) -> None:
        for worker in (self._preparing, *self._engines.values()):
            worker.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[[], *CASES])
    parser.add_argument("--rows", type=int, nargs="+", default=(10_000, 100_000, 1_000_000))
    parser.add_argument("--widths", type=int, nargs="+", default=(1, 16, 64, 256))
    parser.add_argument("--indices", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--quick", action="store_true", help="10,000 rows of 16, one thread")
    add_options(parser, HERE / "results" / "rows.json")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.widths, arguments.threads = (10_000,), (16,), (1,)
        arguments.rounds, arguments.seconds = 3, 0.03
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.work:
        engine, folder, threads = arguments.work
        return work(engine, Path(folder), int(threads))
    path, about = arguments.results, about_machine()
    results = earlier_results(path, about)
    engines = ["kernels", "stock"] if arguments.values else [*ENGINES]
    cases = [
        (case, rows, width, kind)
        for case, rows, width, kind in itertools.product(
            arguments.cases or CASES, arguments.rows, arguments.widths, arguments.indices
        )
        if fits(case, rows, width)
    ]
    for threads in arguments.threads:
        found = results["threads"].setdefault(str(threads), {})
        with tempfile.TemporaryDirectory() as folder:
            results["gflops"][str(threads)] = gflops_on(__file__, threads)
            print(f"{about.get('processor')}, {threads} threads, {results['gflops'][str(threads)]} GFLOP/s")
            measurement = Measurement(threads, engines, Path(folder))
            for case, rows, width, kind in cases:
                of = {"case": case, "rows": rows, "width": width, "kind": kind}
                measured = measurement.case(
                    of, 0 if arguments.values else arguments.rounds, arguments.seconds, arguments.profile
                )
                name = f"{case}, {rows}, {width}, {kind}"
                least = {e: [part["min"] for part in us.values()] for e, us in measured["us"].items()}
                print(name, least, measured["bits_by_threads"], flush=True)
                found[name] = measured
                if not arguments.values:
                    path.write_text(json.dumps(results, indent=1) + "\n")
            measurement.close()
    if arguments.values:
        return None
    print(summary(results))
    tables = {f"rows-{threads}": table(results, threads) for threads in results["threads"]}
    page_tables.write(PAGE, tables, into_page=arguments.write)
    return None


if __name__ == "__main__":
    main()
