"""Trains the same network in three ways, personalises it on the device, and compares the errors.

Eager PyTorch, ORTModule, and the on-device API start from the same weights and see the same batches.

Usage: python compare.py [--output forecasting-output] [--norm layer_norm|layer_norm_no_bias|rms_norm] [--epochs N]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import desk
import numpy as np
import plots
import series
from model import NORMS
from protocol import BASE, PERSONAL, TASKS, Windows
from rich import box
from rich.console import Console
from rich.table import Table
from train import fit, forecast, make_model

from onnxtrain.api import CheckpointState
from onnxtrain.ortmodule import ORTModule

Forecasts = dict[str, dict[str, np.ndarray]]  # method -> part -> forecasts in the series' units
HERE = Path(__file__).parent


def on_device(action: str, folder: Path, *options: str) -> Forecasts:
    """Runs `device.py`, a process without PyTorch, and returns its forecasts by state of the network."""
    command = [sys.executable, str(HERE / "device.py"), action, str(folder), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    forecasts: Forecasts = {}
    with np.load(folder / "forecasts.npz") as file:
        for key in file.files:
            state, part = key.split()
            forecasts.setdefault(state, {})[part] = file[key]
    return forecasts


def train_in_three_ways(windows: Windows, folder: Path, options: argparse.Namespace) -> Forecasts:
    epochs = options.epochs or windows.task.epochs
    parts = ("validation", "test")
    forecasts: Forecasts = {"seasonal-naive": {part: windows.seasonal_naive(part) for part in parts}}
    for method, wrap in (("PyTorch, eager", lambda model: model), ("ORTModule", ORTModule)):
        model = wrap(make_model(windows.task, options.norm, options.seed))
        fit(model, windows, epochs, options.seed)
        forecasts[method] = {part: forecast(model, windows, part) for part in parts}
        if method == "ORTModule":
            assert model.report().runs_in_onnxruntime, model.report()
    trained = on_device("train", folder, f"--epochs={epochs}", f"--seed={options.seed}")["trained"]
    return forecasts | {"on the device": trained}


def personalise(windows: Windows, folder: Path, base: Path, options: argparse.Namespace) -> Forecasts:
    epochs = options.epochs or windows.task.epochs
    states = on_device(
        "personalise", folder, f"--base={base}", f"--epochs={epochs}", f"--seed={options.seed}"
    )
    return {
        "seasonal-naive": {part: windows.seasonal_naive(part) for part in ("validation", "test")},
        f"trained on {BASE}": states["before"],
        "personalised": states["after"],
    }


def error_table(windows: dict[str, Windows], forecasts: dict[str, Forecasts]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Errors on the test part", title_justify="left")
    for column in ("series", "forecast"):
        table.add_column(column)
    for column in ("MAE", "RMSE", "MASE", "MAE, validation"):
        table.add_column(column, justify="right")
    for name, methods in forecasts.items():
        label = f"{windows[name].series.title}, {windows[name].series.unit}"
        for method, parts in methods.items():
            errors = {part: windows[name].errors(values, part) for part, values in parts.items()}
            values = [*errors["test"].values(), errors["validation"]["MAE"]]
            table.add_row(label, method, *(f"{value:.3f}" for value in values))
            label = ""
        table.add_section()
    return table


def personal_share(base: Path, delta: Path) -> str:
    """How much of the network was personalised."""
    state = CheckpointState.load_checkpoint(base, delta=delta)
    sizes = [(parameter.data.size, parameter.requires_grad) for _, parameter in state.parameters]
    trained, everything = sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)
    small, full = delta.stat().st_size, base.stat().st_size
    return (
        f"personalised: {trained} of {everything} parameters ({trained / everything:.1%}); "
        f"delta of {small} bytes, full checkpoint of {full} ({small / full:.1%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("forecasting-output"))
    parser.add_argument("--norm", choices=list(NORMS), default="layer_norm")
    parser.add_argument("--epochs", type=int, help="default: those of each series, in protocol.py")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    artifacts = options.output / "artifacts"
    windows = {name: Windows(series.load(name), task) for name, task in TASKS.items()}
    forecasts: dict[str, Forecasts] = {}
    for name in ("co2", "sunspots"):
        desk.prepare(name, artifacts, options.norm, options.seed)
        forecasts[name] = train_in_three_ways(windows[name], artifacts / name, options)
    desk.prepare_personal(artifacts, options.norm)
    base = artifacts / BASE / "trained"
    forecasts[PERSONAL] = personalise(windows[PERSONAL], artifacts / PERSONAL, base, options)
    Console(width=None if sys.stdout.isatty() else 100).print(error_table(windows, forecasts))
    print(personal_share(base, artifacts / PERSONAL / "delta"))
    for name, methods in forecasts.items():
        plots.plot_forecasts(windows[name], methods, options.output / f"{name}.png")
    errors = {
        name: {
            method: {part: windows[name].errors(values, part) for part, values in parts.items()}
            for method, parts in methods.items()
        }
        for name, methods in forecasts.items()
    }
    (options.output / "errors.json").write_text(json.dumps(errors, indent=2))
    print(f"plots and errors: {options.output}")


if __name__ == "__main__":
    main()
