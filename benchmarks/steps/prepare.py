"""Exports the net of a case and writes its training artifacts; a process of its own.

Usage: python -m steps.prepare CASE FILES
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain import artifacts, losses, optimizers
from onnxtrain.emitter import Emitter
from onnxtrain.passes import TrainingModePass
from steps.engines._engine import ADAMW
from steps.nets import CASES, Case, make_batch, make_net

__all__ = ["write_artifacts"]


class MeanLoss(losses.ElementwiseLoss):
    """output - target, as `steps.nets` defines the loss "mean"."""

    def _terms(self, op: Emitter, scores: ir.Value, target: ir.Value) -> ir.Value:
        return op.Sub(scores, target)


def write_artifacts(case: Case, directory: Path, precision: str = "fp32") -> None:
    """Writes what engines start from: artifacts, `forward.onnx`, `batch.npz` and `about.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    net, (inputs, target) = make_net(case), make_batch(case)
    parameters = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    np.savez(directory / "batch.npz", inputs=inputs, target=target)
    began = time.perf_counter()
    exported = _export(net, case, directory)
    between = time.perf_counter()
    norms = any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) and m.training for m in net.modules())
    artifacts.generate_artifacts(
        exported,
        requires_grad=parameters,
        loss=MeanLoss() if case.net.loss == "mean" else case.net.loss,
        optimizer=optimizers.AdamW(**ADAMW, adam_mode=0),
        batch_norm="training" if norms else "as_exported",
        artifact_directory=directory,
        precision=precision,
    )
    about = {
        "loss": case.net.loss,
        "rate": case.net.rate,
        "parameters": parameters,
        "export_s": round(between - began, 3),
        "artifacts_s": round(time.perf_counter() - between, 3),
        "nodes": len(list(ir.load(directory / "training_model.onnx").graph)),
    }
    _write_in_training_mode(exported, directory / "forward.onnx")
    (directory / "about.json").write_text(json.dumps(about))


def _export(net: torch.nn.Module, case: Case, directory: Path) -> Path:
    """Returns the exported net, with a symbolic batch size."""
    path = directory / "exported.onnx"
    sample, _ = case.net.data(np.random.default_rng(0), max(2, case.batch))
    torch.onnx.export(
        net,
        (torch.from_numpy(sample),),
        path,
        dynamo=True,
        optimize=False,
        verbose=False,
        external_data=False,
        input_names=["x"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch", min=2)},),
    )
    return path


def _write_in_training_mode(source: Path, target: Path) -> None:
    """Writes the forward model for onnxruntime-training.

    It does not switch BatchNormalization to training itself, and differentiates LayerNormalization only where that has
    all of its outputs.
    """
    model = ir.load(source)
    TrainingModePass(batch_norm="training", dropout="training")(model)
    for node in model.graph:
        if node.op_type == "LayerNormalization":
            node.resize_outputs(3)
            for index, name in ((1, "mean"), (2, "inv_std_dev")):
                node.outputs[index].name = f"{node.outputs[0].name}_{name}"
                node.outputs[index].type = node.outputs[0].type
    ir.save(model, target)


def main() -> None:
    name, directory = sys.argv[1:]
    warnings.simplefilter("ignore")
    write_artifacts(CASES[name], Path(directory))


if __name__ == "__main__":
    main()
