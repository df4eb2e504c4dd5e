"""Runs `onnxtrain merge`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx

from onnxtrain.cli._command_options import MergeOptions
from onnxtrain.cli._data import assign, load_arrays
from onnxtrain.cli._output import print_json, print_next, print_table, summary_table
from onnxtrain.errors import InputError, ModelError
from onnxtrain.lora import METADATA_KEY, LoraConfig, merge
from onnxtrain.passes import load_model, save_model
from onnxtrain.trainer import Trainer


def run_command(options: MergeOptions) -> None:
    """Writes the merged model, and prints the losses before and after the merge.

    Raises:
        InputError: only one of `--data` and `--loss` is given.
    """
    if (options.data is None) != (options.loss is None):
        raise InputError("onnxtrain merge computes losses from --data and --loss; pass both, or neither.")
    losses = None if options.data is None else _Losses(options)
    # An onnx_ir.Model, because a proto holds at most two gigabytes.
    merged = merge(
        load_model(options.source),
        options.adapter,
        options.requantize,
        evaluate=losses.compute if losses else None,
    )
    try:
        save_model(merged, options.output)
    except OSError as error:
        raise ModelError(f"Writing the merged model to '{options.output}' failed: {error}.") from error
    found = dict(zip(("before", "after"), losses.computed, strict=True)) if losses else {}
    document = {"model": str(options.source), "adapter": str(options.adapter), "merged": str(options.output)}
    if options.json:
        print_json(document | {"loss": found or None})
        return
    rows = [*document.items(), *((f"loss {when}", f"{loss:.6g}") for when, loss in found.items())]
    print_table(summary_table(None, rows))
    print_next("predict", options.output, "--data", "FILE", "-o", "predictions.npz")


class _Losses:
    """Computes the loss over the `--data` file, before and after an adapter is merged into a model.

    Call :meth:`compute` first with the model in which the adapter is still separate, and then with the merged model.

    Attributes:
        computed: the losses computed so far, in the order of the calls.
    """

    def __init__(self, options: MergeOptions) -> None:
        assert options.data is not None
        assert options.loss is not None
        self._data: Path = options.data
        self._arrays = load_arrays(options.data)
        self._loss: str = options.loss
        self._batch_size = options.batch_size
        self._modules: list[str] = []
        self.computed: list[float] = []

    def compute(self, model: onnx.ModelProto) -> float:
        """Computes a model's loss over the data, appends it to `computed` and returns it."""
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        settings: dict[str, Any] = {}
        if METADATA_KEY in metadata:
            self._modules = [module["path"] for module in json.loads(metadata[METADATA_KEY])["modules"]]
        else:
            # A Trainer needs something to train. New adapters for the same layers add zero.
            settings["lora"] = LoraConfig(r=1, target_modules=self._modules)
        # The losses are those of the deployed file, with int8 activations where it has them.
        trainer = Trainer(model, self._loss, activations="deployed", **settings)
        manifest = trainer.manifest
        x, y = assign(manifest.inputs, manifest.targets, self._arrays, self._data)
        self.computed.append(trainer.evaluate(x, y, batch_size=self._batch_size)["loss"])
        return self.computed[-1]
