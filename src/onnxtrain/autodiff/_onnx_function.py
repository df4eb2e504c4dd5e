"""Wraps onnxscript functions and `FunctionProto`s that users give as gradients or bodies of ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.errors import RuleDefinitionError
from onnxtrain.passes import canonicalize, fit_opset, inline_functions, load_model

from ._node import Signature

# The first opset of the canonical form, for functions without ops of the standard domain.
_OPSET = 21
# The first IR version with functions.
_IR_VERSION = 8


class OnnxFunction:
    """A function of ONNX ops, with the functions that it calls.

    Args:
        protos: the function, then those that it calls.
    """

    def __init__(self, protos: Sequence[onnx.FunctionProto]) -> None:
        self._protos = list(protos)
        main = self._protos[0]
        self.name = main.name
        self.inputs = tuple(main.input)
        self.outputs = tuple(main.output)
        self.attributes = (*main.attribute, *(attribute.name for attribute in main.attribute_proto))
        # A model may have the op hundreds of times, with inputs of the same few types.
        self._graphs: dict[tuple[Any, ...], ir.Model] = {}

    def refuse_calls_of(self, domain: str, op_type: str) -> None:
        """Raises RuleDefinitionError if the function calls an op, whose body it is to become."""
        for proto in self._protos:
            if any((node.domain, node.op_type) == (domain, op_type) for node in _nodes(proto.node)):
                raise RuleDefinitionError(
                    f"registering the body of {domain}::{op_type}: the function {proto.name} calls the op itself; "
                    "write it in standard ops"
                )

    def graph_for(
        self, values: Sequence[ir.Value | None], attributes: Mapping[str, ir.Attr], opset: int
    ) -> ir.Model:
        """Returns a canonical model of the function's ops.

        Its inputs have the types of `values`, without those that are None.

        Args:
            values: the arguments of a call, None for an omitted one.
            attributes: attributes of the op by name; those that the function does not declare are left out.
            opset: version of the standard domain.
        """
        passed = [attribute for name, attribute in attributes.items() if name in self.attributes]
        infos = [self._info(index, value) for index, value in enumerate(values)]
        key = (
            *(None if info is None else info.SerializeToString() for info in infos),
            *(ir.to_proto(attribute).SerializeToString() for attribute in passed),
            opset,
        )
        if key not in self._graphs:
            # All functions: `canonicalize` keeps those with the name of an op that has a gradient of its own.
            model = canonicalize(inline_functions(load_model(self._call(infos, passed))))
            self._graphs[key] = fit_opset(model, opset, f"calling the function {self.name}")
        return self._graphs[key]

    def body_of(
        self,
        signature: Signature,
        node: ir.Node,
        opset: int,
        functions: dict[ir.OperatorIdentifier, ir.Function] | None = None,
    ) -> ir.Function:
        """Returns the body of a node, as :class:`onnxtrain.op_bodies.MakeBody` does; `functions` is not used."""
        values = [*node.inputs, *[None] * (len(signature.inputs) - len(node.inputs))]
        graph = self.graph_for(values, node.attributes, opset).graph.clone()
        # A body has no initializers.
        for name, value in tuple(graph.initializers.items()):
            graph.initializers.pop(name)
            constant = ir.node("Constant", [], {"value": value.const_value})
            constant.outputs[0].type, constant.outputs[0].shape = value.type, value.shape
            value.replace_all_uses_with(constant.outputs[0], replace_graph_outputs=True)
            constant.outputs[0].name, value.name = name, None
            if len(graph):
                graph.insert_before(graph[0], constant)
            else:
                graph.append(constant)
        # Omitted inputs remain inputs of the body, so that positions match.
        for index, given in enumerate(node.inputs):
            if given is None:
                graph.inputs.insert(index, ir.Value(name=f"absent{index}"))
        return ir.Function("onnxtrain.twin", node.op_type, graph=graph, attributes=[])

    def _info(self, index: int, value: ir.Value | None) -> onnx.ValueInfoProto | None:
        """Returns the type of an argument under the name that the call uses; None if it is omitted."""
        if value is None:
            return None
        return ir.serde.serialize_value(ir.Value(name=f"in{index}", type=value.type, shape=value.shape))

    def _call(
        self, infos: Sequence[onnx.ValueInfoProto | None], passed: Sequence[ir.Attr]
    ) -> onnx.ModelProto:
        """Returns a model of one node, which calls the function."""
        main = self._protos[0]
        call = onnx.NodeProto(op_type=main.name, domain=main.domain)
        call.input.extend("" if info is None else info.name for info in infos)
        call.output.extend(f"out{index}" for index in range(len(self.outputs)))
        call.attribute.extend(ir.to_proto(attribute) for attribute in passed)
        model = onnx.ModelProto(ir_version=_IR_VERSION, functions=self._protos)
        model.graph.name = main.name
        model.graph.node.append(call)
        model.graph.input.extend(info for info in infos if info is not None)
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in call.output)
        imports = {
            imported.domain: imported.version for proto in self._protos for imported in proto.opset_import
        }
        imports.setdefault("", _OPSET)
        for proto in self._protos:
            imports.setdefault(proto.domain, 1)
        model.opset_import.extend(onnx.helper.make_opsetid(*pair) for pair in imports.items())
        return model


def onnx_function(given: object) -> OnnxFunction | None:
    """Wraps an onnxscript function, a `FunctionProto` or an `ir.Function`; returns None for anything else."""
    if isinstance(given, onnx.FunctionProto):
        return OnnxFunction([given])
    if isinstance(given, ir.Function):
        return OnnxFunction([ir.to_proto(given)])
    # By its methods: onnxscript need not be imported.
    if hasattr(given, "to_function_proto") and hasattr(given, "function_ir"):
        return OnnxFunction(list(_with_callees(given)))
    return None


def _with_callees(function: Any) -> Iterator[onnx.FunctionProto]:
    """Yields the proto of an onnxscript function, then those of the functions that it calls, directly or not."""
    todo, seen = [function], set()
    while todo:
        current = todo.pop(0)
        proto = current.to_function_proto()
        if (proto.domain, proto.name) not in seen:
            seen.add((proto.domain, proto.name))
            todo += current.function_ir.get_called_functions().values()
            yield proto


def _nodes(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yields nodes, and those of their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes(graph.node)
