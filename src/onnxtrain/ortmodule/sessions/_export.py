"""Writing what ORTModule runs as ONNX files."""

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


class _Body(Protocol):
    def executed(self) -> Iterator[tuple[str, ir.Model]]: ...


def renamed(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """Gives the inputs `input<n>` of a lowered graph, and the outputs `input<n>_grad`, names of arguments, in place."""
    writer = Emitter(model.graph)
    for value in (*model.graph.inputs, *model.graph.outputs):
        found = re.fullmatch(r"input(\d+)(_grad)?", str(value.name))
        if found:
            value.name = writer.unique_name(names[int(found[1])] + (found[2] or ""))
    return model


class CompiledGraphs:
    """The graphs of one ORTModule, or compiled function, that are in use: Dynamo may drop one for a newer one."""

    def __init__(self) -> None:
        self._graphs: list[weakref.ref[_Body]] = []

    def add(self, body: _Body) -> None:
        """Adds a graph."""
        self._graphs.append(weakref.ref(body))

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Writes the models of all graphs to a folder, which is made if it is not there; returns the files.

        Raises:
            ORTModuleONNXModelException: there is none.
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
            save_model(infer_shapes(model), file)  # onnx's checker wants to know the rank of each output
        return files
