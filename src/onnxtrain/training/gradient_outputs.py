"""Appends gradients, which may be sparse for embedding tables, to the outputs of a training model.

A sparse gradient contains only the rows used in a batch. The dense gradient of a table of a million rows has a million
rows, of which a batch of 100 words fills at most 100.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxtrain._words import argument
from onnxtrain.autodiff import append_outputs
from onnxtrain.emitter import Emitter, values_by_name
from onnxtrain.errors import GraphBuildError
from onnxtrain.functions import DOMAIN, embedding_gradient
from onnxtrain.selection import some_names
from onnxtrain.training.build_state import Build

_DTYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)


def append_gradients(build: Build, training: ir.Model, gradients: Sequence[ir.Value]) -> None:
    """Appends gradients, row indices and updated running statistics to the training model's outputs.

    Args:
        build: state of the build.
        training: the training model.
        gradients: gradients of the trained parameters, then of the inputs in `build.input_gradients`.
    """
    count = len(build.trainable)
    append_outputs(training, build.trainable, gradients[:count])
    # Read from the outputs: parameters may share one gradient (as in x + y), which `append_outputs` copies.
    tables = dict(zip(build.trainable, list(training.graph.outputs)[-count:], strict=True))
    parameters = {str(value.name): value for value in build.forward.graph.inputs}
    build.row_indices = _keep_rows(training, {name: tables[name] for name in build.sparse}, parameters)
    values = values_by_name(training.graph)
    training.graph.outputs.extend(values[output] for output in build.updated.values())
    append_outputs(training, build.input_gradients, gradients[count:])


def _keep_rows(
    model: ir.Model, gradients: Mapping[str, ir.Value], parameters: Mapping[str, ir.Value]
) -> dict[str, str]:
    """Replaces dense embedding gradients `[n, *rest]` with sparse gradients: the gathered rows `[reads, *rest]`.

    `reads` is the number of lookups in a batch: a row that is looked up twice appears twice. For each table, an output
    with the row indices is appended. The nodes of the dense gradients become dead; a later pass removes them.

    Args:
        model: a training model.
        gradients: gradient outputs of the model, by parameter name.
        parameters: the parameters in the forward graph, by name.

    Returns:
        The name of each parameter's output with row indices, int64 `[reads]`, e.g. {"table": "table_grad_indices"}.

    Raises:
        GraphBuildError: a parameter is read by an op other than Gather on axis 0, or has an unsupported dtype.
    """
    op = Emitter(model.graph, functions=model.functions)
    outputs = model.graph.outputs
    names = {}
    for name, dense_gradient in gradients.items():
        shape = parameters[name].shape
        assert shape is not None
        dims = shape.numpy()
        writers = _terms_of(dense_gradient)
        if dense_gradient.dtype not in _DTYPES or not all(map(_is_of_rows, writers)):
            raise GraphBuildError(_refusal(parameters[name], writers))
        reads = [_rows_and_indices(op, node, dims) for node in writers if node is not None]
        rows, indices = (
            parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0) for parts in zip(*reads, strict=True)
        )
        if rows.dtype != dense_gradient.dtype:
            rows = op.Cast(rows, to=dense_gradient.dtype)
        rows.name, dense_gradient.name = dense_gradient.name, op.unique_name(f"{dense_gradient.name}_whole")
        # The number of rows differs from batch to batch. Gradient and row indices share the symbol for it.
        rows.shape = ir.Shape([f"{name}_reads", *dims[1:]])
        outputs[outputs.index(dense_gradient)] = rows
        names[name] = indices.name = op.unique_name(f"{name}_grad_indices")
        indices.shape = ir.Shape([f"{name}_reads"])
        outputs.append(indices)
    return names


def _terms_of(gradient: ir.Value) -> list[ir.Node | None]:
    """Returns the node that computes each term of a gradient, which may be a sum.

    The entry is None for a term that no node computes, such as a graph input.
    """
    # The driver sums the cotangents of a table that several Gathers read, and casts half-precision cotangents.
    node = gradient.producer()
    if node is None or node.domain != "" or node.op_type not in ("Add", "Cast", "Identity"):
        return [node]
    return [writer for value in node.inputs if value is not None for writer in _terms_of(value)]


def _is_of_rows(node: ir.Node | None) -> bool:
    """True if a node scatters row gradients, as the gradient of a Gather on axis 0 does."""
    return node is not None and node.domain == DOMAIN and node.op_type in embedding_gradient.function_names


def _rows_and_indices(op: Emitter, node: ir.Node, dims: tuple[int, ...]) -> tuple[ir.Value, ir.Value]:
    """Returns the row cotangents `[reads, *rest]` that the EmbeddingGradient `node` sums, and their row indices.

    The row indices are non-negative; `dims` is the shape of the table.
    """
    cotangent, indices, _ = node.inputs
    flat = op.Reshape(indices, [-1])
    rows = op.Reshape(cotangent, op.Concat(op.Shape(flat), list(dims[1:]), axis=0), allowzero=1)
    # Gather counts negative indices from the end. The optimizer sums gradients of equal indices, so each row must have
    # only one index.
    return rows, op.Where(op.Less(flat, 0), op.Add(flat, dims[0]), flat)


def _refusal(parameter: ir.Value, writers: Sequence[ir.Node | None]) -> str:
    """Returns the error message for a parameter that cannot have a sparse gradient.

    `writers` are the nodes that compute the terms of its gradient, as returned by :func:`_terms_of`.
    """
    if all(map(_is_of_rows, writers)):
        problem = f"it is {parameter.dtype}; only float32, float64 and float16 are supported"
    else:
        kinds = sorted({node.op_type for node in writers if node is not None and not _is_of_rows(node)})
        readers = [f"{use.node.op_type} ({use.node.name!r})" for use in parameter.uses()]
        problem = (
            f"its gradient comes from {some_names(kinds)}, not only from Gather on axis 0; the nodes that "
            f"read it are {some_names(readers)}"
        )
    return (
        f"building the training graph: {parameter.name!r} cannot have a sparse gradient: {problem}. Leave "
        f"it out of {argument('sparse_gradients')}"
    )
