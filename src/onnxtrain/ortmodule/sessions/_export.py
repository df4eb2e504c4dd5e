"""Writes the graphs of an ORTModule to ONNX files."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.ortmodule._exceptions import ORTModuleONNXModelException
from onnxtrain.passes import infer_shapes, save_model


class _GraphBody(Protocol):
    """A compiled graph: `OnnxPart`, or `Steps` if PyTorch runs some of its operators.

    A protocol avoids a circular import: the modules of both classes import this module.
    """

    def executed(self) -> Iterator[tuple[str, ir.Model]]: ...


def renamed(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """Renames inputs `input<n>` and outputs `input<n>_grad` of a graph, in place; returns the graph.

    Args:
        model: the graph.
        names: the new names, e.g. ["0.weight", "x"] for input0 and input1.
    """
    writer = Emitter(model.graph)
    for value in (*model.graph.inputs, *model.graph.outputs):
        match = re.fullmatch(r"input(\d+)(_grad)?", str(value.name))
        if match:
            # The name may be taken by another value of the graph, e.g. an ATen node `x`.
            value.name = writer.unique_name(names[int(match[1])] + (match[2] or ""))
    return model


class CompiledGraphs:
    """Registry of the compiled graphs of one ORTModule or compiled function, for `export_training_graph`.

    A graph that Dynamo has discarded is no longer exported.
    """

    def __init__(self) -> None:
        # Weak references: a graph that Dynamo has replaced must not be kept alive, nor written.
        self._graphs: list[weakref.ref[_GraphBody]] = []

    def add(self, body: _GraphBody) -> None:
        """Registers a compiled graph; keeps only a weak reference to it."""
        self._graphs.append(weakref.ref(body))

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Writes the models of all graphs to a folder, which is created if it does not exist.

        Returns:
            The files, e.g. [Path("graphs/graph_0_forward.onnx"), Path("graphs/graph_0_backward.onnx")].

        Raises:
            ORTModuleONNXModelException: nothing has run in ONNX Runtime yet.
        """
        in_use = [body for reference in self._graphs if (body := reference()) is not None]
        models = [
            (f"graph_{number}_{kind}.onnx", model)
            for number, body in enumerate(in_use)
            for kind, model in body.executed()
        ]
        if not models:
            raise ORTModuleONNXModelException(
                f"exporting to {os.fspath(folder)!r}: nothing has run in ONNX Runtime yet; call the model first, in "
                "training mode for forward and backward. model.report() tells what runs where"
            )
        Path(folder).mkdir(parents=True, exist_ok=True)
        files = [Path(folder) / name for name, _ in models]
        for file, (_, model) in zip(files, models, strict=True):
            # onnx's checker refuses outputs of unknown rank.
            save_model(infer_shapes(model), file)
        return files
