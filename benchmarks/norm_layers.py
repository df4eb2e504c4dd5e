"""Forward and backward of the four normalisation layers in each engine, on tensors of typical sizes.

Each engine runs in a process of its own; the processes take turns, and eager PyTorch takes two, so that their
difference tells what is noise. The input requires a gradient, as it does inside of a net. `darts` is eager PyTorch with
darts' own classes; it is left out where darts is not installed, and `inductor` where there is no C++ compiler.

Usage: python benchmarks/norm_layers.py [--rounds 3] [--seconds 0.5]
Writes benchmarks/norm_layers.json.
"""

import argparse
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

LAYERS = ["LayerNorm", "LayerNormNoBias", "RMSNorm", "RINorm"]
SHAPES = {"series": [64, 96, 8], "hidden": [64, 96, 128], "transformer": [8, 512, 768]}

WORKER = """
import json, logging, statistics, sys, time
logging.disable(logging.CRITICAL)  # importing darts names the optional packages it misses
import torch
import onnxtrain.nn
from onnxtrain.ortmodule import DebugOptions, FallbackPolicy, ORTModule

engine, layers, shapes, seconds = json.loads(sys.argv[1])
torch.set_num_threads(2)
torch._dynamo.config.automatic_dynamic_shapes = False  # every shape is compiled for itself
home = onnxtrain.nn
if engine == "darts":
    from darts.models.components import layer_norm_variants as home
wrap = {
    "inductor": torch.compile,
    "aot_eager": lambda m: torch.compile(m, backend="aot_eager"),
    "ORTModule": lambda m: ORTModule(m, DebugOptions(fallback_policy=FallbackPolicy.DISABLE)),
}.get(engine, lambda m: m)
results = {}
for shape_name, shape in shapes.items():
    x = torch.randn(shape, requires_grad=True)
    cotangent = torch.randn(shape)
    for name in layers:
        layer = wrap(getattr(home, name)(shape[-1]))

        def step():
            x.grad = None
            for parameter in layer.parameters():
                parameter.grad = None
            layer(x).backward(cotangent)

        for _ in range(20):
            step()
        times, end = [], time.perf_counter() + seconds
        while len(times) < 20 or time.perf_counter() < end:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        results[f"{name} {shape_name}"] = 1e6 * statistics.median(times)
print(json.dumps(results))
"""


def engines() -> list[str]:
    compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl"))
    darts = ["darts"] if importlib.util.find_spec("darts") else []
    return ["eager", *darts, "inductor" if compiler else "aot_eager", "ORTModule", "eager again"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="per layer, shape and process")
    arguments = parser.parse_args()
    names = engines()
    results: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            job = json.dumps([name.removesuffix(" again"), LAYERS, SHAPES, arguments.seconds])
            output = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", WORKER, job],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout
            for key, value in json.loads(output.splitlines()[-1]).items():
                results[name].setdefault(key, []).append(round(value, 1))
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    print("median microseconds of forward + backward")
    print(f"{'layer':28}" + "".join(f"{name:>14}" for name in names))
    for key in results["eager"]:
        medians = (statistics.median(results[name][key]) for name in names)
        print(f"{key:28}" + "".join(f"{value:14.0f}" for value in medians))


if __name__ == "__main__":
    main()
