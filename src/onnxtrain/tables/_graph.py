"""Prepends the encoding of a table to a network, and appends probabilities and classes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, TypeAlias

import onnx_ir as ir

from onnxtrain.emitter import Emitter, find_value
from onnxtrain.runtime.calibration import StoredCalibration
from onnxtrain.tables._columns import Column
from onnxtrain.tables._writer import ColumnWriter

Activation: TypeAlias = Literal["softmax", "exp", "sigmoid"] | None
"""Function that turns logits into probabilities; None if no function does, as for hinge losses."""

_MOST_NAMED = 10**6
"""Largest number of classes whose names are stored in a model."""


def attach_columns(graph: ir.Graph, columns: Sequence[Column], missing: Sequence[str]) -> None:
    """Replaces the inputs of a network with the raw columns of a table, and prepends the nodes that encode them.

    Args:
        graph: graph of the network, changed in place. If it has one input, all encoded columns are concatenated;
            otherwise, columns and inputs are matched by name.
        columns: encoding of each column.
        missing: strings that stand for a missing value, in addition to the empty string.
    """
    op = Emitter(graph)
    writer = ColumnWriter(op, missing)
    network_inputs = {str(value.name): value for value in graph.inputs}
    # The batch axis of the network, fixed or symbolic, is the axis of the rows of each column.
    rows = next((value.shape[0] for value in graph.inputs if value.shape), "rows")
    for name, value in network_inputs.items():
        # Frees the name, which a column may have.
        value.name = op.unique_name(f"{name}_encoded")
    graph.inputs.clear()
    with op.placing(before=graph[0] if len(graph) else None):
        encoded = {}
        for column in columns:
            name = _free_name(op, column.name)
            x = ir.Value(name=name, type=ir.TensorType(column.dtype), shape=ir.Shape([rows]))
            graph.inputs.append(x)
            encoded[column.name] = column.write(writer, x)
        for name, value in network_inputs.items():
            blocks = list(encoded.values()) if len(network_inputs) == 1 else [encoded[name]]
            joined = blocks[0] if len(blocks) == 1 else op.Concat(*blocks, axis=1)
            if value.shape is not None and value.shape.rank() == 1:
                joined = op.Squeeze(joined, [1])
            assert value.dtype is not None
            # Cast last: float32 would round large numbers before the mean is subtracted.
            joined = op.Cast(joined, to=value.dtype)
            joined.shape = value.shape
            value.replace_all_uses_with(joined, replace_graph_outputs=True)


def _free_name(op: Emitter, name: str) -> str:
    """Makes a column's name available in the graph by renaming inner values and initializers that already use it.

    Returns:
        `name`, or "<name>_column" if an output of the network has the name: outputs are not renamed, because users
        refer to them.
    """
    graph = op.graph
    if any(output.name == name for output in graph.outputs):
        return op.unique_name(f"{name}_column")
    initializer = graph.initializers.get(name)
    if initializer is not None:
        graph.initializers.pop(name)
        initializer.name = op.unique_name(f"{name}_parameter")
        graph.register_initializer(initializer)
    for node in graph:
        for output in node.outputs:
            if output.name == name:
                output.name = op.unique_name(f"{name}_value")
    return name


def attach_classes(
    graph: ir.Graph,
    logits: str,
    activation: Activation,
    classes: Sequence[str] | None,
    columns: Collection[str],
    calibration: StoredCalibration | None = None,
) -> None:
    """Appends the outputs `probability` and `class` to a classifier.

    For logits [rows, classes], `probability` has the same shape, and `class` [rows] contains class names, or class
    numbers if there are no names. For one logit per row and "sigmoid", `probability` is the probability of class 1, and
    `class` is 0 or 1.

    Args:
        graph: graph of the network, changed in place. If an input or output already has one of the new names, the
            new output is left out.
        logits: name of the output with the logits.
        activation: function that turns logits into probabilities; None to append no output `probability`.
        classes: class names, indexed by class number; None for class numbers.
        columns: names of the input columns; if one is "probability" or "class", "predicted_" is prepended to the name
            of the output.
        calibration: calibration of the logits, whose threshold determines `class`; None for the most probable class.
    """
    scores = next((value for value in graph.outputs if value.name == logits), None)
    if scores is None or scores.shape is None:
        return
    op, rank = Emitter(graph), scores.shape.rank()
    probability: ir.Value | None = None
    chosen: ir.Value | None = None
    if activation == "sigmoid":
        probability = op.Sigmoid(scores)
        if rank == 1 or (rank == 2 and scores.shape[1] == 1):
            cut = (calibration.cut if calibration is not None else None) or 0.0
            positive = op.Cast(op.Greater(scores, cut), to=ir.DataType.INT64)
            chosen = positive if rank == 1 else op.Squeeze(positive, [1])
    elif rank == 2:
        if activation == "softmax":
            probability = op.Softmax(scores, axis=1)
        elif activation == "exp":
            probability = op.Exp(scores)
        if calibration is not None and calibration.cut is not None and scores.shape[1] == 2:
            yes, no = (
                op.Gather(scores, op.const(at), axis=1)
                for at in (calibration.positive, 1 - calibration.positive)
            )
            is_yes = op.Greater(op.Sub(yes, no), calibration.cut)
            chosen = op.Where(is_yes, op.const(calibration.positive), op.const(1 - calibration.positive))
        else:
            chosen = op.ArgMax(scores, axis=1, keepdims=0)
        names = class_names(classes, scores.shape[1])
        if classes is not None and names is not None:
            chosen = op.Gather(_strings(op, names), chosen)
    taken = {str(value.name) for value in (*graph.outputs, *graph.inputs)}
    for kind, value in (("probability", probability), ("class", chosen)):
        name = output_name(kind, columns)
        if value is None or name in taken:
            continue
        inner = find_value(graph, name)
        if inner is not None:
            inner.name = op.unique_name(f"{name}_value")
        value.name = name
        value.shape = scores.shape if kind == "probability" else ir.Shape([scores.shape[0]])
        graph.outputs.append(value)


def output_name(name: str, columns: Collection[str]) -> str:
    """Returns a name for a new output: `name`, or "predicted_<name>" if it is the name of a column.

    >>> output_name("class", ["class", "age"])
    'predicted_class'
    """
    return f"predicted_{name}" if name in columns else name


def class_names(classes: Sequence[str] | None, count: object) -> list[str] | None:
    """Returns one name per class of a network; classes without a name are named after their number.

    Args:
        classes: known class names, indexed by class number, e.g. from the training table; None if unknown. A network
            may have more classes than the table.
        count: number of classes of the network. A value that is not an int means that the number is symbolic.

    Returns:
        The names; None if the number of classes is symbolic, over a million, or less than the number of known names.

    >>> class_names(["cat", "dog"], 3)
    ['cat', 'dog', '2']
    """
    named = list(classes or ())
    if not isinstance(count, int) or not len(named) <= count <= _MOST_NAMED:
        return None
    return [*named, *map(str, range(len(named), count))]


def _strings(op: Emitter, texts: Sequence[str]) -> ir.Value:
    """Adds strings to the graph as an initializer [n], and returns it."""
    name = op.unique_name("class_names")
    shape = ir.Shape([len(texts)])
    tensor = ir.StringTensor([text.encode() for text in texts], shape=shape, name=name)
    value = ir.Value(name=name, type=ir.TensorType(ir.DataType.STRING), shape=shape, const_value=tensor)
    op.graph.register_initializer(value)
    return value
