"""Exports a trained network with the encoding of its table in front of it, and the names of the classes behind it.

The file has one input of shape [rows] per column: double for numbers (NaN for a missing value) and string for
categories (empty for a missing value). Any stock ONNX Runtime runs it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.cli._classes import class_names
from onnxtrain.cli._loss import label_targets
from onnxtrain.emitter import Emitter, find_value
from onnxtrain.losses import loss_class
from onnxtrain.passes import load_model, save_model
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.tables._columns import NUMBER, Column
from onnxtrain.tables._encoder import PROPERTY, Encoding
from onnxtrain.tables._table import places_of
from onnxtrain.trainer import Trainer

_ML = "ai.onnx.ml"
# Opset of LabelEncoder; every version from 2 on has the attributes used here.
_ML_VERSION = 3


def export_table_model(
    trainer: Trainer, encoding: Encoding, path: Path, outputs: Sequence[str] | None = None
) -> list[str]:
    """Writes the trained network with the encoding of its table; returns the names of its outputs.

    The names are those of the network's outputs, then `probability` and `class` if the loss has them: see
    :func:`_write_classes`.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        network = Path(folder) / "network.onnx"
        with trainer._state.alone():
            trainer.export(network, outputs)
        model = load_model(network)
        manifest = trainer.manifest
        taken = {str(value.name) for value in model.graph.inputs}
        _Writer(model, encoding).write([spec for spec in manifest.inputs if spec.name in taken])
        _write_classes(model, trainer, encoding)
        # `onnxtrain predict` reads the encoding from the file: no run is needed.
        model.metadata_props[PROPERTY] = encoding.to_json()
        save_model(model, path)
        return [str(value.name) for value in model.graph.outputs]


class _Writer:
    """Writes the nodes that encode columns as inputs of a network.

    Args:
        model: network; it is changed in place.
        encoding: encoding of the columns.
    """

    def __init__(self, model: ir.Model, encoding: Encoding) -> None:
        self._graph = model.graph
        self._encoding = encoding
        self._model = model
        self._op = Emitter(model.graph)

    def write(self, inputs: Sequence[InputSpec]) -> None:
        """Replaces the inputs of the network by the columns of its table."""
        op, graph = self._op, self._graph
        replaced = {str(value.name): value for value in graph.inputs}
        # The first dimension of the network, fixed or symbolic, is the number of rows of each column.
        rows = next((value.shape[0] for value in graph.inputs if value.shape), "rows")
        for name, value in replaced.items():
            # A column may have the name of the input that it replaces.
            value.name = op.unique_name(f"{name}_encoded")
        graph.inputs.clear()
        # In front of the network: ONNX wants a node behind those that it reads.
        with op.placing(before=graph[0] if len(graph) else None):
            blocks = {column.name: self._column(column, rows) for column in self._encoding.columns}
            for spec in inputs:
                network_input = replaced[spec.name]
                input_blocks = list(blocks.values()) if len(inputs) == 1 else [blocks[spec.name]]
                joined = input_blocks[0] if len(input_blocks) == 1 else op.Concat(*input_blocks, axis=1)
                if network_input.shape is not None and network_input.shape.rank() == 1:
                    joined = op.Squeeze(joined, [1])
                assert network_input.dtype is not None
                # Encoded in float64, as in training: float32 would round large numbers before the mean is subtracted.
                encoded = op.Cast(joined, to=network_input.dtype)
                encoded.shape = network_input.shape
                network_input.replace_all_uses_with(encoded, replace_graph_outputs=True)

    def _column(self, column: Column, rows: Any) -> ir.Value:
        """Writes the encoding of a column, double [rows, width], and appends its input."""
        is_number = column.kind == NUMBER
        value = ir.Value(
            name=self._free(column.name),
            type=ir.TensorType(ir.DataType.DOUBLE if is_number else ir.DataType.STRING),
            shape=ir.Shape([rows]),
        )
        self._graph.inputs.append(value)
        return self._number(column, value) if is_number else self._category(column, value)

    def _free(self, name: str) -> str:
        """Frees the name of a column: values inside of the network that have it are renamed."""
        if any(output.name == name for output in self._graph.outputs):
            return self._op.unique_name(f"{name}_column")
        holder = self._graph.initializers.get(name)
        if holder is not None:
            self._graph.initializers.pop(name)
            holder.name = self._op.unique_name(f"{name}_parameter")
            self._graph.register_initializer(holder)
        for node in self._graph:
            for output in node.outputs:
                if output.name == name:
                    output.name = self._op.unique_name(f"{name}_value")
        return name

    def _number(self, column: Column, x: ir.Value) -> ir.Value:
        op = self._op
        finite: ir.Value = x
        refused: ir.Value = op.IsInf(x)
        fault = "infinite"
        if column.fill is not None:
            finite = op.Where(op.IsNaN(x), op.const(float(column.fill), like=x), x)
        else:
            refused, fault = op.Or(refused, op.IsNaN(x)), "missing or infinite"
        finite = op.Add(finite, self._refuse(refused, f"column '{column.name}': a value is {fault}", x))
        scaled = op.Div(op.Sub(finite, column.mean), column.deviation)
        return op.Unsqueeze(scaled, [1])

    def _refuse(self, condition: ir.Value, message: str, like: ir.Value) -> ir.Value:
        """Writes zeros that make a run fail if `condition` holds: ONNX has no other way to raise an error.

        Gather reads from one element: index 1 is out of range, and ONNX Runtime's error names the node, whose name is
        the message.
        """
        op = self._op
        zeros: ir.Value = op.Gather(
            op.const(np.zeros(1, np.float64), like=like), op.Cast(condition, to=ir.DataType.INT64)
        )
        self._name(zeros, message)
        return zeros

    def _category(self, column: Column, x: ir.Value) -> ir.Value:
        op, categories = self._op, list(column.categories or ())
        spellings = places_of(categories)
        # A text that stands for a missing value may be a category of its own, if training had it as one.
        missing = [text for text in places_of(["", *self._encoding.missing]) if text not in categories]
        codes = column.codes
        # The filling category may be unknown itself. Without one the place is behind the table: Gather refuses it.
        place_of_missing = len(codes)
        if column.fill is not None:
            place_of_missing = spellings.get(str(column.fill), len(categories))
        spellings |= dict.fromkeys(missing, place_of_missing)
        self._model.opset_imports.setdefault(_ML, _ML_VERSION)
        node = ir.node(
            "LabelEncoder",
            [x],
            domain=_ML,
            # Unknown texts get the index behind the last category. The table has a row for it, or Gather refuses it.
            attributes={
                "keys_strings": list(spellings),
                "values_int64s": list(spellings.values()),
                "default_int64": len(categories),
            },
            num_outputs=1,
        )
        index = node.outputs[0]
        index.name, index.type = op.unique_name(f"{column.name}_place"), ir.TensorType(ir.DataType.INT64)
        self._graph.append(node)
        # One-hot rows or numbers 0, 1, ...: both encodings are rows of a table, picked by Gather.
        numbers: ir.Value = op.Gather(op.const(codes, ir.DataType.DOUBLE), index)
        faults = ["none of the categories of training"] if column.unknown == "error" else []
        faults += [] if column.fill is not None else ["missing"]
        self._name(numbers, f"column '{column.name}': a value is {', or '.join(faults) or 'wrong'}")
        return numbers

    def _name(self, value: ir.Value, message: str) -> None:
        node = value.producer()
        assert node is not None
        node.name = message


def _write_classes(model: ir.Model, trainer: Trainer, encoding: Encoding) -> None:
    """Appends the outputs `probability` and `class` if the loss and the shape of the scores define them.

    For scores [rows, classes] `probability` has this shape and `class` [rows] holds names for a target of texts, else
    numbers. For one yes-or-no score per row `probability` is that of yes, and `class` is 0 or 1.
    """
    scores = next((value for value in model.graph.outputs if value.name == trainer.prediction), None)
    targets = label_targets(trainer)
    if scores is None or scores.shape is None or not targets:
        return
    op, rank = Emitter(model.graph), scores.shape.rank()
    names = class_names(trainer, encoding.classes)
    probability: ir.Value | None = None
    chosen: ir.Value | None = None
    activation = loss_class(trainer.loss_name).activation
    if activation == "sigmoid":
        probability = op.Sigmoid(scores)
        if rank == 1 or (rank == 2 and scores.shape[1] == 1):
            yes = op.Cast(op.Greater(scores, 0.0), to=ir.DataType.INT64)
            chosen = yes if rank == 1 else op.Squeeze(yes, [1])
    elif targets[0].class_labels is not None and rank == 2:
        if activation == "softmax":
            probability = op.Softmax(scores, axis=1)
        elif activation == "exp":
            probability = op.Exp(scores)
        chosen = op.ArgMax(scores, axis=1, keepdims=0)
        if encoding.classes is not None and names is not None:
            chosen = op.Gather(_texts(model, op, names), chosen)
    taken = {str(value.name) for value in (*model.graph.outputs, *model.graph.inputs)}
    for kind, value in (("probability", probability), ("class", chosen)):
        name = encoding.output_name(kind)
        # A network may have an output of this name already; it stays.
        if value is not None and name not in taken:
            inner = find_value(model.graph, name)
            if inner is not None:
                inner.name = op.unique_name(f"{name}_value")
            value.name = name
            value.shape = scores.shape if kind == "probability" else ir.Shape([scores.shape[0]])
            model.graph.outputs.append(value)


def _texts(model: ir.Model, op: Emitter, texts: Sequence[str]) -> ir.Value:
    """Adds an initializer of strings [n]."""
    name = op.unique_name("class_names")
    tensor = ir.StringTensor([text.encode() for text in texts], shape=ir.Shape([len(texts)]), name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(ir.DataType.STRING), shape=ir.Shape([len(texts)]), const_value=tensor
    )
    model.graph.register_initializer(value)
    return value
