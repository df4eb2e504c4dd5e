"""Takes the cache of keys and values out of the graph of a language model that generates text.

Such a graph, e.g. from onnxruntime-genai's model builder, gets the keys and values of all earlier tokens as inputs
(`past_key_values.0.key`) and returns them with those of the new tokens (`present.0.key`). Training sees whole
sequences: there are no earlier tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.errors import GraphBuildError
from onnxtrain.passes import infer_shapes

_MS = "com.microsoft"

# Per attention op, pairs of an input with past keys or values and the output with those of all tokens, as in onnx 1.23
# and onnxruntime 1.32.
_CACHES: Mapping[tuple[str, str], tuple[tuple[int, int], ...]] = {
    ("", "Attention"): ((4, 1), (5, 2)),
    (_MS, "Attention"): ((4, 1),),
    (_MS, "GroupQueryAttention"): ((3, 1), (4, 2)),
    (_MS, "MultiHeadAttention"): ((6, 1), (7, 2)),
}


def find_cache(graph: ir.Graph) -> dict[str, str]:
    """Finds the inputs and outputs of a graph that are its cache of keys and values.

    They are those of attention ops. In graphs of PyTorch's exporter, whose attention is written in standard ops, they
    are inputs with "past" in their names that a Concat joins with the new keys or values to an output.

    Returns:
        Per input, the output that it comes back in, e.g. {"past_key_values.0.key": "present.0.key"}.
    """
    cache = {}
    for node in graph:
        for past, present in _pairs(node):
            if past.is_graph_input() and present.is_graph_output():
                cache[str(past.name)] = str(present.name)
    return cache


def _pairs(node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    """Lists the inputs of a node that may be past keys and values, each with the output that also has the new ones."""
    indices = _CACHES.get((node.domain, node.op_type), ())
    pairs = [
        (node.inputs[index], node.outputs[output])
        for index, output in indices
        if index < len(node.inputs) and output < len(node.outputs)
    ]
    # A Concat may as well join features of two inputs: there only the name tells.
    if (node.domain, node.op_type) == ("", "Concat") and "past" in str(
        node.inputs[0] and node.inputs[0].name
    ):
        pairs = [(node.inputs[0], node.outputs[0])]
    return [(past, present) for past, present in pairs if past is not None]


class DropCachePass(ir.passes.InPlacePass):
    """Compute attention without past keys and values where the graph does not return the cache.

    The inputs of the graph with past keys and values are removed. A mask over past and new tokens gets the length of
    the new ones: its symbolic size becomes that of the queries.
    """

    def __init__(self, cache: Mapping[str, str], *, as_deployed: bool = False) -> None:
        """Choose the cache.

        Args:
            cache: per input the output that it comes back in, from :func:`find_cache`.
            as_deployed: True lets attention ops compute the keys and values of all tokens, which nothing reads. Without
                these outputs GroupQueryAttention of onnxruntime (1.32) adds in another order, and its results differ
                from those of the file in the last bit.
        """
        super().__init__()
        self._cache = cache
        self._as_deployed = as_deployed

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the graph in place."""
        graph = model.graph
        returned = {value.name for value in graph.outputs}
        pasts = {
            value: None
            for value in graph.inputs
            if value.name in self._cache and self._cache[str(value.name)] not in returned
        }
        if not pasts:
            return ir.passes.PassResult(model, False)
        # The length of the new tokens is looked up below; not every file declares it.
        infer_shapes(model)
        names: dict[str, ir.SymbolicDim | int] = {}
        for node in tuple(graph):
            dropped = [(past, present) for past, present in _pairs(node) if past in pasts]
            # Shape inference knows the first layer best.
            names = _length_of_all(node, dropped) | _sizes_of_new(node, dropped) | names
            for past, present in dropped:
                _drop(node, past, present, keeps_output=self._as_deployed)
        for past in pasts:
            if past.uses():
                _rename(past, names)
                past.replace_all_uses_with(_empty(model, past, list(pasts)))
            graph.inputs.remove(past)
        # The empty caches were written behind their readers.
        graph.sort()
        for value in graph.inputs:
            _rename(value, names)
        return ir.passes.PassResult(model, True)


def _drop(node: ir.Node, past: ir.Value, present: ir.Value, *, keeps_output: bool) -> None:
    """Lets a node compute without past keys or values."""
    if node.op_type == "Concat":
        if len(node.inputs) == 2 and node.inputs[1] is not None:
            present.replace_all_uses_with(node.inputs[1])
        return
    # ONNX Runtime would compute outputs that have a name. Readers of all keys stay: they are the new ones.
    if not keeps_output and not present.uses():
        present.name = ""
        while node.outputs and not node.outputs[-1].name:
            node.resize_outputs(len(node.outputs) - 1)
    node.replace_input_with(node.inputs.index(past), None)


def _empty(model: ir.Model, past: ir.Value, pasts: list[ir.Value]) -> ir.Value:
    """Writes keys or values of no tokens, for ops that take the length of the cache from its shape.

    Raises:
        GraphBuildError: the sizes of the cache, or the input that tells the number of samples, are not known.
    """
    dims = list(past.shape or ())
    others = [value for value in model.graph.inputs if value not in pasts and value.shape]
    batch = next((value for value in others if dims and value.shape and value.shape[0] == dims[0]), None)
    symbols = [axis for axis, dim in enumerate(dims) if axis and not isinstance(dim, int)]
    if batch is None or len(symbols) != 1:
        raise GraphBuildError(
            f"dropping the cache of keys and values: the input {past.name!r} has shape {past.shape}; all sizes but the "
            "number of samples, which another input must share, and of past tokens have to be known. Export the model "
            "without a cache"
        )
    op = Emitter(model.graph)
    sizes = [dim if isinstance(dim, int) else 0 for dim in dims[1:]]
    shape = op.Concat(op.Shape(batch, start=0, end=1), sizes, axis=0)
    # Not CastLike, which would read the input that this value replaces.
    empty: ir.Value = op.Cast(op.ConstantOfShape(shape), to=past.dtype)
    return empty


def _length_of_all(
    node: ir.Node, dropped: list[tuple[ir.Value, ir.Value]]
) -> dict[str, ir.SymbolicDim | int]:
    """Returns the name of the length of past and new tokens, and the length of the new ones, which is now the same."""
    queries = node.inputs[0]
    if not dropped or node.op_type == "Concat" or queries is None or queries.shape is None:
        return {}
    present = dropped[0][1]
    total = None if present.shape is None else present.shape[-2]
    name = total.value if isinstance(total, ir.SymbolicDim) else None
    return {} if name is None else {name: queries.shape[1]}


def _sizes_of_new(node: ir.Node, dropped: list[tuple[ir.Value, ir.Value]]) -> dict[str, ir.SymbolicDim | int]:
    """Returns sizes of past keys by their symbols, of which the new ones that a Concat joins them with tell numbers."""
    # The model builder of onnxruntime-genai (0.18) declares the size of a head as `kv_cache_dim`.
    if not dropped or node.op_type != "Concat" or len(node.inputs) != 2:
        return {}
    past, new = dropped[0][0].shape, node.inputs[1].shape if node.inputs[1] is not None else None
    if past is None or new is None or len(past) != len(new):
        return {}
    joined = node.attributes.get_int("axis", 0) % len(past)
    return {
        old.value: size
        for axis, (old, size) in enumerate(zip(past, new, strict=True))
        # The batch, axis 0, has a number in no file whose past leaves it open.
        if axis not in (0, joined)
        and isinstance(old, ir.SymbolicDim)
        and old.value is not None
        and isinstance(size, int)
    }


def _rename(value: ir.Value, names: Mapping[str, ir.SymbolicDim | int]) -> None:
    """Replaces symbolic sizes of a value by those that `names` gives for their names."""
    if value.shape is None:
        return
    sizes = [
        size if isinstance(size, int) or size.value is None else names.get(size.value, size)
        for size in value.shape
    ]
    value.shape = ir.Shape(sizes)
