"""At the desk: exports the untrained network and writes all that a device needs to train and to personalise it.

Usage: python desk.py DIRECTORY [--norm layer_norm|layer_norm_no_bias|rms_norm]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import series
import torch
from model import NORMS
from protocol import BASE, PERSONAL, PERSONAL_PREFIXES, TASKS, Task
from train import make_model

from onnxtrain.artifacts import generate_artifacts
from onnxtrain.optimizers import AdamW


def export(task: Task, norm: str, seed: int, path: Path) -> list[str]:
    """Writes the network with its first weights as an .onnx file; returns the names of its parameters."""
    model = make_model(task, norm, seed).eval()
    torch.onnx.export(
        model,
        (torch.zeros(2, task.context, 1),),
        path,
        input_names=["context"],
        output_names=["forecast"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        optimize=False,  # it would fold weights into others
        external_data=False,
        verbose=False,
    )
    return [name for name, _ in model.named_parameters()]


def write_artifacts(
    onnx_file: Path, task: Task, trained: list[str], frozen: list[str], directory: Path
) -> None:
    generate_artifacts(
        onnx_file,
        requires_grad=trained,
        frozen_params=frozen,
        loss="mse",
        # adam_mode=0 is torch.optim.AdamW's form.
        optimizer=AdamW(weight_decay=task.weight_decay, eps=1e-8, adam_mode=0),
        additional_output_names=["forecast"],
        artifact_directory=directory,
    )


def prepare(name: str, directory: Path, norm: str = "layer_norm", seed: int = 0) -> None:
    """Writes to `directory / name` what a device needs to train on a series."""
    task, folder = TASKS[name], directory / name
    folder.mkdir(parents=True, exist_ok=True)
    parameters = export(task, norm, seed, folder / "network.onnx")
    write_artifacts(folder / "network.onnx", task, parameters, [], folder)
    series.load(name).save(folder / "series.npz")


def prepare_personal(directory: Path, norm: str = "layer_norm") -> None:
    """Writes to `directory / PERSONAL` what a device needs to personalise the base's network, made before."""
    task, folder, network = TASKS[PERSONAL], directory / PERSONAL, directory / BASE / "network.onnx"
    folder.mkdir(parents=True, exist_ok=True)
    parameters = [name for name, _ in make_model(task, norm, seed=0).named_parameters()]
    trained = [name for name in parameters if name.startswith(PERSONAL_PREFIXES)]
    frozen = [name for name in parameters if name not in trained]
    write_artifacts(network, task, trained, frozen, folder)
    series.load(PERSONAL).save(folder / "series.npz")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--norm", choices=list(NORMS), default="layer_norm")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in ("co2", "sunspots"):
        prepare(name, options.directory, options.norm, options.seed)
    prepare_personal(options.directory, options.norm)


if __name__ == "__main__":
    main()
