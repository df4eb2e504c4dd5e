"""On the device: numpy, onnxruntime and safetensors; no PyTorch, no onnx.

Usage: python device.py train DIRECTORY/co2
       python device.py personalise DIRECTORY/elnino --base DIRECTORY/co2/trained
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnxruntime
from protocol import TASKS, Series, Windows, batches, schedule

from onnxtrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer


def fit(module: Module, optimizer: Optimizer, windows: Windows, epochs: int, seed: int) -> None:
    """Trains on the training part, as `train.py` does at the desk."""
    contexts, horizons = windows.of("train")
    warmup, total = schedule(len(contexts), epochs)
    scheduler = LinearLRScheduler(optimizer, warmup, total, windows.task.learning_rate)
    module.train()
    for indices in batches(len(contexts), epochs, seed):
        module(contexts[indices], horizons[indices])
        optimizer.step()
        scheduler.step()
        module.lazy_reset_grad()


def forecast(module: Module, windows: Windows, path: Path) -> dict[str, np.ndarray]:
    """Forecasts of each part by the exported network, in the series' units, float64 [windows, horizon]."""
    module.export_model_for_inferencing(path, ["forecast"])
    session = onnxruntime.InferenceSession(path)
    return {
        part: windows.in_units(session.run(["forecast"], {"context": windows.of(part)[0]})[0])
        for part in ("validation", "test")
    }


def open_run(folder: Path, state: CheckpointState) -> tuple[Module, Optimizer]:
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return module, Optimizer(folder / "optimizer_model.onnx", module)


def train(folder: Path, windows: Windows, epochs: int, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Trains the whole network; writes `trained`, a checkpoint, and `trained.onnx`."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module, optimizer = open_run(folder, state)
    fit(module, optimizer, windows, epochs, seed)
    CheckpointState.save_checkpoint(state, folder / "trained")
    return {"trained": forecast(module, windows, folder / "trained.onnx")}


def personalise(
    folder: Path, base: Path, windows: Windows, epochs: int, seed: int
) -> dict[str, dict[str, np.ndarray]]:
    """Trains the last layers of the base's network on another series; writes `delta` and `personal.onnx`."""
    state = CheckpointState.load_checkpoint(base)
    module, optimizer = open_run(folder, state)
    forecasts = {"before": forecast(module, windows, folder / "before.onnx")}
    fit(module, optimizer, windows, epochs, seed)
    CheckpointState.save_checkpoint(state, folder / "delta", trainable_only=True)

    # Some other day: the device keeps the base, once, and a delta for each user.
    state = CheckpointState.load_checkpoint(base, delta=folder / "delta")
    module, _ = open_run(folder, state)
    forecasts["after"] = forecast(module, windows, folder / "personal.onnx")

    trained, everything = module.get_parameters_size(), module.get_parameters_size(trainable_only=False)
    delta, full = (path.stat().st_size for path in (folder / "delta", base))
    print(f"trained {trained} of {everything} parameters, {trained / everything:.1%}")
    print(f"delta of {delta} bytes, full checkpoint of {full} bytes, {delta / full:.1%}")
    return forecasts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("train", "personalise"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", type=Path, help="checkpoint to personalise")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    series = Series.load(options.folder / "series.npz")
    task = TASKS[series.name]
    windows, epochs = Windows(series, task), options.epochs or task.epochs
    if options.action == "train":
        forecasts = train(options.folder, windows, epochs, options.seed)
    elif options.base is None:
        parser.error("personalise needs --base")
    else:
        forecasts = personalise(options.folder, options.base, windows, epochs, options.seed)
    for state, parts in forecasts.items():
        for part, values in parts.items():
            errors = "  ".join(f"{name} {value:.4f}" for name, value in windows.errors(values, part).items())
            print(f"{state:8} {part:11} {errors}")
    arrays = {
        f"{state} {part}": values for state, parts in forecasts.items() for part, values in parts.items()
    }
    np.savez(options.folder / "forecasts.npz", **arrays)


if __name__ == "__main__":
    main()
