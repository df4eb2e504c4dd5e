"""Takes the cache of keys and values out of the graph of a language model that generates text.

Such a graph, e.g. from onnxruntime-genai's model builder, gets the keys and values of all earlier tokens as inputs
(`past_key_values.0.key`) and returns them with those of the new tokens (`present.0.key`). Training sees whole
sequences: there are no earlier tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.passes import infer_shapes

_MS = "com.microsoft"

# Per attention op, the inputs with past keys and values and the outputs with those of all tokens, as in onnx 1.23 and
# onnxruntime 1.32.
_CACHES: Mapping[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("", "Attention"): ((4, 5), (1, 2)),
    (_MS, "Attention"): ((4,), (1,)),
    (_MS, "GroupQueryAttention"): ((3, 4), (1, 2)),
    (_MS, "MultiHeadAttention"): ((6, 7), (1, 2)),
}


def cache_outputs(graph: ir.Graph) -> list[str]:
    """Lists the outputs of a graph that return its cache, e.g. ["present.0.key", "present.0.value"]."""
    presents = {value for node in graph if _past_inputs(node) for value in _present_outputs(node)}
    return [str(value.name) for value in graph.outputs if value in presents]


class DropCachePass(ir.passes.InPlacePass):
    """Compute attention without past keys and values where nothing reads the cache that the op returns.

    The inputs of the graph with past keys and values are removed. A mask over past and new tokens gets the length of
    the new ones: its symbolic size becomes that of the queries.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the graph in place."""
        graph = model.graph
        nodes = [
            node for node in graph if _past_inputs(node) and not any(map(_is_read, _present_outputs(node)))
        ]
        if not nodes:
            return ir.passes.PassResult(model, False)
        # The length of the queries is looked up below; not every file declares it.
        infer_shapes(model)
        pasts = {value: None for node in nodes for value in _past_inputs(node)}
        names: dict[str, ir.SymbolicDim | int] = {}
        for node in nodes:
            # Shape inference knows the queries of the first layer best.
            names = _length_of_all(node) | names
            for value in _past_inputs(node):
                node.replace_input_with(node.inputs.index(value), None)
            # ONNX Runtime would compute outputs that have a name.
            for value in _present_outputs(node):
                value.name = ""
            while node.outputs and not node.outputs[-1].name:
                node.resize_outputs(len(node.outputs) - 1)
        for value in pasts:
            # An input that another op reads, too, stays.
            if not value.uses() and not value.is_graph_output():
                graph.inputs.remove(value)
        for value in graph.inputs:
            _rename(value, names)
        return ir.passes.PassResult(model, True)


def _past_inputs(node: ir.Node) -> list[ir.Value]:
    """Lists the graph inputs that an attention op reads as past keys and values; none for other nodes."""
    indices, _ = _CACHES.get((node.domain, node.op_type), ((), ()))
    pasts = [node.inputs[index] for index in indices if index < len(node.inputs)]
    return [value for value in pasts if value is not None and value.is_graph_input()]


def _present_outputs(node: ir.Node) -> list[ir.Value]:
    """Lists the outputs of an attention op with the keys and values of past and new tokens."""
    _, indices = _CACHES[node.domain, node.op_type]
    return [node.outputs[index] for index in indices if index < len(node.outputs)]


def _is_read(value: ir.Value) -> bool:
    """Tell if a node or the graph's caller reads a value."""
    return bool(value.uses()) or value.is_graph_output()


def _length_of_all(node: ir.Node) -> dict[str, ir.SymbolicDim | int]:
    """Returns the name of the length of past and new tokens, and the length of the new ones, which is now the same."""
    queries = node.inputs[0]
    presents = _present_outputs(node)
    if queries is None or queries.shape is None or not presents or presents[0].shape is None:
        return {}
    total = presents[0].shape[-2]
    name = None if isinstance(total, int) else total.value
    return {} if name is None else {name: queries.shape[1]}


def _rename(value: ir.Value, names: Mapping[str, ir.SymbolicDim | int]) -> None:
    """Replaces symbolic sizes of a value by those that `names` gives for their names."""
    if value.shape is None:
        return
    sizes = [
        size if isinstance(size, int) or size.value is None else names.get(size.value, size)
        for size in value.shape
    ]
    value.shape = ir.Shape(sizes)
