"""Compares the losses of train.py on onnxtrain and on onnxruntime-training-cpu 1.19.2.

The scripts differ in their import lines only. The old package needs CPython 3.11 (its last wheels) and clashes
with stock onnxruntime, hence the separate environment, made on the first run.

Usage: python benchmarks/peer/compare.py [--environment DIR]
Writes benchmarks/peer/result.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = ["onnxruntime-training-cpu==1.19.2", "onnx==1.16.2", "numpy<2"]
TOLERANCE = 1e-4


def make_environment(directory: Path) -> Path:
    """Returns the Python of the old package's environment."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        # The old package imports torch at every import; the CPU build that the tests pin will do.
        subprocess.run([python, "-m", "pip", "install", "-q", *REQUIREMENTS, "torch==2.13.0"], check=True)
    return python


def run(python: Path, script: str, output: Path) -> dict[str, list[float]]:
    path = output.with_suffix(".py")
    path.write_text(script)
    completed = subprocess.run(
        [python, path, output], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""}
    )
    if completed.returncode:
        sys.exit(completed.stdout + completed.stderr)
    return json.loads(output.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", type=Path, default=HERE.parent.parent / ".venv-peer")
    arguments = parser.parse_args()
    python = make_environment(arguments.environment)
    script = (HERE / "train.py").read_text()
    with tempfile.TemporaryDirectory() as directory:
        ours = run(Path(sys.executable), script, Path(directory, "ours.json"))
        peer_script = script.replace("from onnxtrain", "from onnxruntime.training")
        theirs = run(python, peer_script, Path(directory, "theirs.json"))
    difference = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    result = {"largest loss difference": difference, "eval loss": [ours["eval"], theirs["eval"]]}
    (HERE / "result.json").write_text(
        json.dumps(result | {"ours": ours, "onnxruntime-training": theirs}, indent=1)
    )
    print(f"{len(ours['losses'])} steps, loss {ours['losses'][0]:.4f} -> {ours['losses'][-1]:.4f}")
    print(
        f"largest difference from onnxruntime-training-cpu 1.19.2: {difference:.2e} (limit {TOLERANCE:.0e})"
    )
    if difference > TOLERANCE or abs(ours["eval"] - theirs["eval"]) > TOLERANCE:
        sys.exit("the loss curves differ")


if __name__ == "__main__":
    main()
