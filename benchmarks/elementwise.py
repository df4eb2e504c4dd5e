"""Time 30 chains of elementwise ops: ORTModule's programs, separate ONNX ops, PyTorch eager and torch.compile.

The chains are in elementwise_chains.py. ORTModule lowers each to ONNX, for every size; the graph is run as ORTModule
runs it, with `Elementwise` programs on native kernels, and without the programs, as separate ops. Every engine has a
process of its own; they take turns; one runs twice, as A/A control. Inputs are OrtValues over NumPy memory, so that
no copy is timed; results are new in each call.

Values are compared first. The largest error against PyTorch's float64 may be twice the larger one of PyTorch's
float32 and the separate ops, and one ulp of the largest value. Programs of exact ops must have the bits of the separate
ops; so must those with a sum behind them, unless the sum is part of the program.

Usage: python benchmarks/elementwise.py [CHAIN ...] [--sizes N ...] [--threads 1 2] [--rounds 5] [--seconds 0.1]
           [--engines NAME ...] [--quick] [--values] [--profile] [--results FILE] [--write]
Writes benchmarks/results/elementwise.json; chains, sizes and threads that were measured before on the same machine
stay in it. `--write` puts the tables into notes/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from steps.machine import about_machine

sys.path.append(str(Path(__file__).parent / "common"))
import page_tables
from turns import Worker, add_options, earlier_results, gflops, gflops_on, serve, times_of

HERE = Path(__file__).parent
PAGE = HERE.parent / "notes" / "performance.md"
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
ENGINES = ("programs", "Inductor", "eager", "separate", "programs again")
QUICK = ("swiglu", "huber", "normalize", "b_spline")
INEXACT = {"Reciprocal", "Exp", "Log", "Sigmoid", "Tanh", "Erf", "Softplus", "Sin", "Cos", "Gelu", "Pow"}
SUMS = {"ReduceSum", "ReduceMean", "Gemm", "MatMul"}


def lower(chain: str, size: int, folder: Path) -> dict[str, Any]:
    """Writes programs.onnx and separate.onnx; returns their ops and number of threads."""
    import onnx_ir as ir
    import torch
    from elementwise_chains import CHAINS

    import onnxtrain.ortmodule.sessions._session as sessions
    from onnxtrain.ortmodule import ORTModule
    from onnxtrain.ortmodule.sessions._threads import threads_for

    class Net(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return CHAINS[chain].function(*inputs)

    class NoPrograms(sessions.ElementwisePass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            return ir.passes.PassResult(model, False)

    captured: list[ir.Model] = []
    given: list[list[int]] = []
    suited, programs, run = sessions.suited, sessions.ElementwisePass, sessions.Session._run

    def capture(model: ir.Model, *arguments: Any) -> ir.Model:
        captured.append(model.clone())
        return suited(model, *arguments)

    def note(session: sessions.Session, values: Any, *arguments: Any) -> Any:
        given.append([value.data_ptr() for value in values])
        return run(session, values, *arguments)

    sessions.suited, sessions.Session._run = capture, note
    inputs = CHAINS[chain].arrays(size)
    ORTModule(Net())(*map(torch.from_numpy, inputs))
    sessions.suited, sessions.Session._run = suited, run
    if len(captured) != 1:
        raise RuntimeError(f"{chain} became {len(captured)} graphs")
    about: dict[str, Any] = {}
    for name, pass_ in (("programs", programs), ("separate", NoPrograms)):
        sessions.ElementwisePass = pass_
        model = suited(captured[0].clone(), torch.device("cpu"))
        about[name] = {"ops": Counter(node.op_type for node in model.graph), "threads": threads_for(model)}
        ir.save(model, folder / f"{name}.onnx")
    sessions.ElementwisePass = programs
    # Dynamo orders inputs by their first use.
    by_address = {array.ctypes.data: array for array in inputs}
    names = [value.name for value in captured[0].graph.inputs]
    np.savez(folder / "inputs.npz", **{n: by_address[at] for n, at in zip(names, given[0], strict=True)})
    return about


def in_onnx_runtime(name: str, folder: Path, threads: int, profile: bool = False) -> Any:
    """Returns the call of programs.onnx or separate.onnx."""
    from onnx_call import OnnxCall

    return OnnxCall(folder / f"{name}.onnx", np.load(folder / "inputs.npz"), threads, profile)


class InPyTorch:
    """Runs the function, compiled for `name` "Inductor"."""

    def __init__(self, name: str, chain: str, size: int, threads: int) -> None:
        import torch
        from elementwise_chains import CHAINS

        torch.set_num_threads(threads)
        torch._dynamo.reset()
        self._function = function = CHAINS[chain].function
        self._arrays = CHAINS[chain].arrays(size)
        self._inputs = [torch.from_numpy(array) for array in self._arrays]
        self._call = (
            torch.compile(function, fullgraph=True, dynamic=False) if name == "Inductor" else function
        )

    def __call__(self) -> Any:
        return self._call(*self._inputs)

    def values(self) -> dict[str, np.ndarray]:
        return {"y": self().numpy()}

    def exact(self) -> np.ndarray:
        return self._function(*(x.double() for x in self._inputs)).numpy()


def work(engine: str, folder: Path, threads: int) -> None:
    """Answers requests to open a chain, which saves its values, and to run it for some seconds."""
    running: Any = None

    def answer(seconds: float = 0, **of: Any) -> Any:
        nonlocal running
        if seconds:
            return times_of(running, seconds)
        if engine == "gflops":
            return gflops()
        if engine == "lower":
            return lower(folder=folder, **of)
        running = None
        if engine in ("eager", "Inductor"):
            running = InPyTorch(engine, of["chain"], of["size"], threads)
        else:
            running = in_onnx_runtime(engine.split()[0], folder, of["session_threads"])
        np.save(folder / f"{engine}.npy", *running.values().values())
        if engine == "eager":
            np.save(folder / "exact.npy", running.exact())
        return {}

    if engine in ("eager", "Inductor", "lower"):
        import torch

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
    serve(answer)


def check(folder: Path, about: Mapping[str, Any], what: str) -> dict[str, float]:
    """Compares values; returns the largest errors of engines against float64, in ulp of the largest value.

    Raises:
        SystemExit: values differ by more than the rounding of the ops explains.
    """
    exact = np.load(folder / "exact.npy")
    ulp = float(np.spacing(np.abs(exact).max().astype(np.float32)))
    values = {name: np.load(folder / f"{name}.npy") for name in ("programs", "separate", "eager")}
    errors = {name: float(np.abs(value - exact).max()) / ulp for name, value in values.items()}
    if not errors["programs"] <= 2 * max(errors["separate"], errors["eager"]) + 1:
        sys.exit(f"{what}: errors in ulp of the largest value are {errors}")
    ops, left = ({*about[name]["ops"]} for name in ("separate", "programs"))
    inexact = INEXACT & ops or any(name.endswith("_float") for name in ops) or SUMS & (ops - left)
    if not inexact and not np.array_equal(values["programs"], values["separate"], equal_nan=True):
        sys.exit(f"{what}: programs of exact ops differ from the separate ops")
    return {name: round(error, 2) for name, error in errors.items()}


def profile(folder: Path, threads: Mapping[str, int]) -> str:
    """Returns the least microseconds of each node of both graphs."""
    found = []
    for name in ("programs", "separate"):
        nodes = in_onnx_runtime(name, folder, threads[name], profile=True).nodes()
        found.append(f"  {name}: " + ", ".join(f"{op} {us}" for us, op in nodes[:8]))
    return "\n".join(found)


class Measurement:
    """The engines' processes for one number of threads."""

    def __init__(self, threads: int, engines: list[str], folder: Path) -> None:
        def start(engine: str) -> Worker:
            return Worker(__file__, ["--work", engine, str(folder), str(threads)], threads)

        self._folder = folder
        self._lowering = start("lower")
        self._engines = {engine: start(engine) for engine in engines}

    def case(self, chain: str, size: int, rounds: int, seconds: float, with_profile: bool) -> dict[str, Any]:
        """Returns the graphs' ops, errors and times of a chain."""
        about = self._lowering.ask(chain=chain, size=size)
        for engine, worker in self._engines.items():
            graph = about.get(engine.split()[0], {"threads": 0})
            worker.ask(chain=chain, size=size, session_threads=graph["threads"])
        errors = check(self._folder, about, f"{chain} of {size}")
        if with_profile:
            print(
                profile(self._folder, {name: graph["threads"] for name, graph in about.items()}), flush=True
            )
        times: dict[str, list[float]] = {engine: [] for engine in self._engines if rounds}
        for _ in range(rounds):
            for engine, line in times.items():
                line += self._engines[engine].ask(seconds=seconds)
        return {
            "ops": {name: graph["ops"] for name, graph in about.items()},
            "errors": errors,
            "us": {
                engine: {"median": round(statistics.median(line), 2), "min": round(min(line), 2)}
                for engine, line in times.items()
            },
        }

    def close(self) -> None:
        for worker in (self._lowering, *self._engines.values()):
            worker.close()


def ratio(case: Mapping[str, Any], engine: str, key: str) -> float:
    """Returns the time of the programs beside that of an engine."""
    return case["us"]["programs"][key] / case["us"][engine][key]


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Returns a table for each number of threads: ratios of medians to Inductor's and to the separate ops'."""
    made = {}
    for threads, chains in results["threads"].items():
        sizes = sorted({int(size) for found in chains.values() for size in found})
        rows = []
        for chain, found in chains.items():
            ops = [sum(next(iter(found.values()))["ops"][name].values()) for name in ("separate", "programs")]
            cells = [
                f"{ratio(found[str(size)], 'Inductor', 'median'):.2f} / "
                f"{ratio(found[str(size)], 'separate', 'median'):.2f}"
                if str(size) in found
                else ""
                for size in sizes
            ]
            rows.append([chain.replace("_", " "), f"{ops[0]} -> {ops[1]}", *cells])
        head = ["chain", "nodes", *(f"10^{round(np.log10(size))}" for size in sizes)]
        made[f"elementwise-{threads}"] = page_tables.lines(head, rows)
    return made


def summary(results: Mapping[str, Any]) -> str:
    """Returns, for each number of threads, how many cases meet the aims, and which don't."""
    found = []
    for threads, chains in results["threads"].items():
        cases = [(chain, int(size), case) for chain, sizes in chains.items() for size, case in sizes.items()]
        same = [
            case["us"]["programs again"]["median"] / case["us"]["programs"]["median"] for *_, case in cases
        ]
        found.append(f"threads {threads}, {len(cases)} cases; A/A {min(same):.2f} to {max(same):.2f}")
        for engine, most, least_size in (("Inductor", 1.2, 100_000), ("separate", 1.0, 0), ("eager", 1.0, 0)):
            for key in ("median", "min"):
                those = [(ratio(c, engine, key), n, size) for n, size, c in cases if size >= least_size]
                if not those:
                    continue
                middle = statistics.median(value for value, *_ in those)
                missed = [
                    f"{n} {size} ({value:.2f})"
                    for value, n, size in sorted(those, reverse=True)
                    if value > most
                ]
                found.append(
                    f"  {key} / {engine}, from {least_size}: median {middle:.2f}, "
                    f"{len(those) - len(missed)} of {len(those)} <= {most}; else {', '.join(missed) or 'none'}"
                )
    return "\n".join(found)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chains", nargs="*")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--quick", action="store_true", help="a few chains of 100,000, one thread")
    add_options(parser, HERE / "results" / "elementwise.json")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.chains = arguments.chains or QUICK
        arguments.sizes, arguments.threads, arguments.rounds = (100_000,), (1,), 3
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.work:
        engine, folder, threads = arguments.work
        return work(engine, Path(folder), int(threads))
    from elementwise_chains import CHAINS

    path = arguments.results
    about = about_machine()
    results = earlier_results(path, about)
    engines = (
        [e for e in ENGINES if e in ("programs", "separate", "eager")] if arguments.values else [*ENGINES]
    )
    for threads in arguments.threads:
        speed = gflops_on(__file__, threads)
        print(f"{about.get('processor')}, {threads} threads, {speed} GFLOP/s", flush=True)
        results["gflops"][str(threads)] = speed
        found = results["threads"].setdefault(str(threads), {})
        with tempfile.TemporaryDirectory() as folder:
            measurement = Measurement(threads, engines, Path(folder))
            rounds = 0 if arguments.values else arguments.rounds
            for chain in arguments.chains or CHAINS:
                for size in arguments.sizes:
                    case = measurement.case(chain, size, rounds, arguments.seconds, arguments.profile)
                    print(
                        chain,
                        size,
                        {name: us["min"] for name, us in case["us"].items()},
                        case["errors"],
                        flush=True,
                    )
                    found.setdefault(chain, {})[str(size)] = case
                    if rounds:
                        path.write_text(json.dumps(results, indent=1) + "\n")
            measurement.close()
    if arguments.values:
        return None
    print(summary(results))
    page_tables.write(PAGE, tables(results), into_page=arguments.write)
    return None


if __name__ == "__main__":
    main()
