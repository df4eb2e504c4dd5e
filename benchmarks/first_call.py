"""First call (forward and backward) of a transformer encoder, and time per call of a tiny MLP, on each compiler.

Each engine runs in a process of its own; the processes take turns. Imports are not counted, but what a compiler imports
when it is first used is.

Usage: python benchmarks/first_call.py [--rounds 3]
Writes benchmarks/first_call.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ENGINES = ["eager", "aot_eager", "inductor", "ORTModule"]

WORKER = """
import json, statistics, sys, time, tempfile, os
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # compiled code of an earlier run does not count
import torch
from torch import nn
from onnxtrain.ortmodule import ORTModule

torch.set_num_threads(2)
wrap = {
    "eager": lambda m: m,
    "aot_eager": lambda m: torch.compile(m, backend="aot_eager"),
    "inductor": torch.compile,
    "ORTModule": ORTModule,
}[sys.argv[1]]
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
encoder, x = wrap(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)), torch.randn(8, 128, 256)
start = time.perf_counter()
encoder(x).sum().backward()
first = time.perf_counter() - start
mlp, x = wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))), torch.randn(5, 4)
times = []
for _ in range(600):
    start = time.perf_counter()
    mlp(x).sum().backward()
    times.append(time.perf_counter() - start)
print(json.dumps({"first_call_s": first, "tiny_mlp_us": 1e6 * statistics.median(times[100:])}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    results: dict[str, dict[str, list[float]]] = {name: {} for name in ENGINES}
    for _ in range(rounds):
        for name in ENGINES:
            output = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", WORKER, name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for key, value in json.loads(output.splitlines()[-1]).items():
                results[name].setdefault(key, []).append(round(value, 3))
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"{'engine':12} {'first call of the encoder':>26} {'tiny MLP, forward + backward':>30}")
    for name, measured in results.items():
        first, call = (statistics.median(measured[key]) for key in ("first_call_s", "tiny_mlp_us"))
        print(f"{name:12} {first:24.2f} s {call:27.0f} us")


if __name__ == "__main__":
    main()
