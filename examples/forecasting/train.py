"""Trains the network in PyTorch, or by ONNX Runtime through ORTModule: one line is the difference.

Usage: python train.py [co2|sunspots] [--engine ortmodule|pytorch] [--norm layer_norm|layer_norm_no_bias|rms_norm]
"""

from __future__ import annotations

import argparse

import numpy as np
import series
import torch
from model import NORMS, Forecaster
from protocol import TASKS, Task, Windows, batches, schedule

from onnxtrain.ortmodule import ORTModule


def make_model(task: Task, norm: str, seed: int) -> Forecaster:
    torch.manual_seed(seed)
    return Forecaster(task.context, task.horizon, task.width, norm)


def fit(model: torch.nn.Module, windows: Windows, epochs: int, seed: int) -> None:
    """Trains on the training part; on the device `device.py` does the same."""
    contexts, horizons = (torch.from_numpy(array) for array in windows.of("train"))
    task, (warmup, total) = windows.task, schedule(len(contexts), epochs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, weight_decay=task.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(  # by the formula of LinearLRScheduler
        optimizer, lambda step: step / warmup if step < warmup else (total - step) / (total - warmup)
    )
    model.train()
    for indices in batches(len(contexts), epochs, seed):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(contexts[indices]), horizons[indices]).backward()
        optimizer.step()
        scheduler.step()


def forecast(model: torch.nn.Module, windows: Windows, part: str) -> np.ndarray:
    """Forecasts of a part in the series' units, float64 [windows, horizon]."""
    model.eval()
    with torch.no_grad():
        return windows.in_units(model(torch.from_numpy(windows.of(part)[0])).numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("series", choices=("co2", "sunspots"), nargs="?", default="co2")
    parser.add_argument("--engine", choices=("ortmodule", "pytorch"), default="ortmodule")
    parser.add_argument("--norm", choices=list(NORMS), default="layer_norm")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    task = TASKS[options.series]
    windows = Windows(series.load(options.series), task)

    model = make_model(task, options.norm, options.seed)
    if options.engine == "ortmodule":
        model = ORTModule(model)  # the one line

    fit(model, windows, options.epochs or task.epochs, options.seed)
    for part in ("validation", "test"):
        errors = windows.errors(forecast(model, windows, part), part)
        print(f"{part:10}  " + "  ".join(f"{name} {value:.4f}" for name, value in errors.items()))
    if options.engine == "ortmodule":
        print(model.report())


if __name__ == "__main__":
    main()
