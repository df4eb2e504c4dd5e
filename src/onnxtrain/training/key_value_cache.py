"""Finds the key-value cache of a language model that generates text, and removes it from the training graph.

The graph of such a model, e.g. from onnxruntime-genai's model builder, reads the keys and values of all earlier tokens
from inputs (`past_key_values.0.key`), and returns them with the new tokens' keys and values appended (`present.0.key`).
Training reads whole sequences, so there are no earlier tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.autodiff import reads
from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError
from onnxtrain.passes import infer_shapes

_MS = "com.microsoft"

# Per attention op, index pairs: the input with the past keys or values, and the output with the keys or values of all
# tokens. As in onnx 1.23 and onnxruntime 1.32.
_CACHES: Mapping[tuple[str, str], tuple[tuple[int, int], ...]] = {
    ("", "Attention"): ((4, 1), (5, 2)),
    (_MS, "Attention"): ((4, 1),),
    (_MS, "GroupQueryAttention"): ((3, 1), (4, 2)),
    (_MS, "MultiHeadAttention"): ((6, 1), (7, 2)),
}


def find_cache(graph: ir.Graph) -> dict[str, str]:
    """Finds the inputs and outputs of a graph that form its key-value cache.

    Attention ops with a cache read it from an input and return the extended cache. PyTorch's exporter writes attention
    as standard ops instead: a Concat appends the new keys or values to a cache input, whose name contains "past".

    Returns:
        The output name for each cache input, e.g. {"past_key_values.0.key": "present.0.key"}.
    """
    cache = {}
    for node in graph:
        for past, present in _cache_pairs(node):
            if past.is_graph_input() and present.is_graph_output():
                cache[str(past.name)] = str(present.name)
    return cache


def trained_outputs(graph: ir.Graph) -> list[str]:
    """Returns the names of the outputs that a training model can return.

    Key-value caches and outputs computed from string inputs are left out, because a training model has neither cache
    inputs nor string inputs.
    """
    texts = {value for value in graph.inputs if value.dtype == ir.DataType.STRING}
    for node in graph if texts else ():
        if not texts.isdisjoint(reads(node)):
            texts.update(node.outputs)
    cached = find_cache(graph).values()
    return [str(v.name) for v in graph.outputs if v.name not in cached and v not in texts]


def _cache_pairs(node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    """Returns the pairs (past, present) of cache inputs and outputs of a node.

    `past` is an input for past keys or values; `present` is the output with the new keys or values appended to them.
    """
    indices = _CACHES.get((node.domain, node.op_type), ())
    pairs = [
        (node.inputs[index], node.outputs[output])
        for index, output in indices
        if index < len(node.inputs) and output < len(node.outputs)
    ]
    # Only the name distinguishes a Concat that extends a cache from a Concat of two feature inputs.
    if (node.domain, node.op_type) == ("", "Concat") and "past" in str(
        node.inputs[0] and node.inputs[0].name
    ):
        pairs = [(node.inputs[0], node.outputs[0])]
    return [(past, present) for past, present in pairs if past is not None]


class DropCachePass(ir.passes.InPlacePass):
    """Removes each cache input whose extended cache the graph does not return.

    Attention then reads only the new tokens.

    The symbolic length of an attention mask over past and new tokens is replaced with the length of the queries.
    """

    def __init__(self, cache: Mapping[str, str], *, as_deployed: bool = False) -> None:
        """Sets the cache to remove.

        Args:
            cache: the output name for each cache input, as returned by :func:`find_cache`.
            as_deployed: True to keep the attention ops' outputs with the keys and values of all tokens, although
                nothing reads them. Without these outputs, onnxruntime's GroupQueryAttention (1.32) sums in a different
                order, and its results differ from the deployed model's in the last bit.
        """
        super().__init__()
        self._cache = cache
        self._as_deployed = as_deployed

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the graph in place."""
        graph = model.graph
        returned = {value.name for value in graph.outputs}
        pasts = {
            value: None
            for value in graph.inputs
            if value.name in self._cache and self._cache[str(value.name)] not in returned
        }
        if not pasts:
            return ir.passes.PassResult(model, False)
        # The number of new tokens is read from shapes below, which not every file declares.
        infer_shapes(model)
        names: dict[str, ir.SymbolicDim | int] = {}
        for node in tuple(graph):
            dropped = [(past, present) for past, present in _cache_pairs(node) if past in pasts]
            # Names of earlier nodes win, because shape inference knows the first layer best.
            names = (
                _total_length_substitution(node, dropped) | _past_size_substitutions(node, dropped) | names
            )
            for past, present in dropped:
                _drop(node, past, present, keeps_output=self._as_deployed)
        for past in pasts:
            if past.uses():
                _rename(past, names)
                past.replace_all_uses_with(_empty(model, past, list(pasts)))
            graph.inputs.remove(past)
        # The empty caches were appended after their readers.
        graph.sort()
        for value in graph.inputs:
            _rename(value, names)
        return ir.passes.PassResult(model, True)


def _drop(node: ir.Node, past: ir.Value, present: ir.Value, *, keeps_output: bool) -> None:
    """Makes a node ignore past keys or values: bypasses a Concat, or clears the input of an attention op.

    Args:
        node: the node.
        past: its input with the past keys or values.
        present: its output with the keys or values of all tokens.
        keeps_output: True to keep `present` as an output of an attention op even if nothing reads it.
    """
    if node.op_type == "Concat":
        if len(node.inputs) == 2 and node.inputs[1] is not None:
            present.replace_all_uses_with(node.inputs[1])
        return
    # ONNX Runtime computes every output that has a name. Readers of all keys stay: all keys are now the new keys.
    if not keeps_output and not present.uses():
        present.name = ""
        while node.outputs and not node.outputs[-1].name:
            node.resize_outputs(len(node.outputs) - 1)
    node.replace_input_with(node.inputs.index(past), None)


def _empty(model: ir.Model, past: ir.Value, pasts: list[ir.Value]) -> ir.Value:
    """Emits an empty cache (0 tokens) that replaces a cache input whose shape some ops read.

    Args:
        model: the model.
        past: the cache input to replace, e.g. [batch, heads, past, 64].
        pasts: all cache inputs that are removed; the batch size is read from an input that remains.

    Raises:
        GraphBuildError: a size of the cache is unknown, or no other input has the batch size.
    """
    dims = list(past.shape or ())
    others = [value for value in model.graph.inputs if value not in pasts and value.shape]
    batch = next((value for value in others if dims and value.shape and value.shape[0] == dims[0]), None)
    symbols = [axis for axis, dim in enumerate(dims) if axis and not isinstance(dim, int)]
    if batch is None or len(symbols) != 1:
        raise GraphBuildError(
            f"dropping the key-value cache: the input {past.name!r} has shape {past.shape}; only the "
            "number of past tokens and the batch size, which another input must share, may be symbolic. "
            "Export the model without a cache"
        )
    op = Emitter(model.graph)
    sizes = [dim if isinstance(dim, int) else 0 for dim in dims[1:]]
    shape = op.Concat(op.Shape(batch, start=0, end=1), sizes, axis=0)
    # Not CastLike, which would read the input that this value replaces.
    empty: ir.Value = op.Cast(op.ConstantOfShape(shape), to=past.dtype)
    return empty


def _total_length_substitution(
    node: ir.Node, dropped: list[tuple[ir.Value, ir.Value]]
) -> dict[str, ir.SymbolicDim | int]:
    """Maps the symbol for the total number of tokens (cached and new) to the number of new tokens.

    Without a cache, the two are equal. Returns an empty dict if the node has no such symbol. `dropped` contains the
    node's pairs (past, present) of cache inputs and outputs to remove.
    """
    queries = node.inputs[0]
    if not dropped or node.op_type == "Concat" or queries is None or queries.shape is None:
        return {}
    present = dropped[0][1]
    total = None if present.shape is None else present.shape[-2]
    name = total.value if isinstance(total, ir.SymbolicDim) else None
    return {} if name is None else {name: queries.shape[1]}


def _past_size_substitutions(
    node: ir.Node, dropped: list[tuple[ir.Value, ir.Value]]
) -> dict[str, ir.SymbolicDim | int]:
    """Maps the symbolic sizes of past keys or values to the static sizes of the new ones.

    Returns an empty dict if the node is not a Concat. `dropped` contains the node's pairs (past, present) of cache
    inputs and outputs to remove.
    """
    # The model builder of onnxruntime-genai (0.18) declares the head size as `kv_cache_dim`.
    if not dropped or node.op_type != "Concat" or len(node.inputs) != 2:
        return {}
    past, new = dropped[0][0].shape, node.inputs[1].shape if node.inputs[1] is not None else None
    if past is None or new is None or len(past) != len(new):
        return {}
    joined = node.attributes.get_int("axis", 0) % len(past)
    return {
        old.value: size
        for axis, (old, size) in enumerate(zip(past, new, strict=True))
        # The batch, axis 0, is fixed in no file whose past keys have a symbolic batch.
        if axis not in (0, joined)
        and isinstance(old, ir.SymbolicDim)
        and old.value is not None
        and isinstance(size, int)
    }


def _rename(value: ir.Value, names: Mapping[str, ir.SymbolicDim | int]) -> None:
    """Replaces symbolic sizes in a value's shape; `names` maps symbols to the new sizes."""
    if value.shape is None:
        return
    sizes = [
        size if isinstance(size, int) or size.value is None else names.get(size.value, size)
        for size in value.shape
    ]
    value.shape = ir.Shape(sizes)
