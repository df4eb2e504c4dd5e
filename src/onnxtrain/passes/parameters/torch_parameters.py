"""Recovers parameters of a module that PyTorch's exporters have merged, replaced or dropped."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.op_facts import PRODUCTS
from onnxtrain.passes.io.load import share_tensor
from onnxtrain.passes.parameters.stop_gradient import is_stop_gradient
from onnxtrain.passes.parameters.training_mode import STATISTICS
from onnxtrain.passes.tidy.constants import add_initializer, is_float_parameter
from onnxtrain.passes.tidy.unique_names import fresh_name
from onnxtrain.passes.tidy.unused import remove_unread_initializers

# Metadata key of a model with gradients; see `mark_gradients`.
_GRADIENTS = "onnxtrain.gradients"
# `producer_name` of PyTorch's exporters. In other files, an Identity of a parameter does not indicate a merge.
_PRODUCER = "pytorch"
# Metadata of the Dynamo exporter and its optimizer: the module's signature with one line per parameter (graph), the
# names from which an initializer was folded (value), and the PyTorch operation (node).
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_OPERATION = "pkg.torch.onnx.fx_node"
_LINEAR = "target=torch.ops.aten.linear.default"
_ENTRY = re.compile(r"^(\w+): (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']+)'", re.MULTILINE)
_OPERAND = re.compile(r"%(\w+)")
# Names of parameters in TorchScript's exports, e.g. "norm1.weight"; names of other values contain slashes or colons, or
# are numbers.
_QUALIFIED_NAME = re.compile(r"\w+(\.\w+)+|[A-Za-z_]\w*")


class TorchSignature:
    """The parameters, buffers and constants of a PyTorch module, read from metadata of the Dynamo exporter.

    `bool(signature)` is False for a file without this metadata.

    Args:
        model: the model, after any passes that keep metadata.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        entries = _ENTRY.findall(model.graph.metadata_props.get(_SIGNATURE, ""))
        self._names = {placeholder: name for placeholder, _, name in entries}
        self._kinds = {name: kind for _, kind, name in entries}
        self._order = {name: index for index, name in enumerate(self._kinds)}

    def __bool__(self) -> bool:
        """True if the file lists the module's parameters."""
        return bool(self._kinds)

    def is_parameter(self, value: ir.Value) -> bool | None:
        """True if an initializer is a parameter or was folded from a parameter; False for a buffer or constant.

        Returns None if the metadata does not mention the initializer, e.g. because another tool has added it.
        """
        origins = self.origins(value)
        if not origins and _FOLDED not in value.metadata_props:
            return None
        return any(self._kinds[name] == "PARAMETER" for name in origins)

    def missing_parameters(self) -> list[str]:
        """Returns the names of parameters that the module uses but that are no longer initializers."""
        names = {name for _, missing in self.merged() for name in missing}
        return [name for name, kind in self._kinds.items() if name in names and kind == "PARAMETER"]

    def origins(self, value: ir.Value) -> list[str]:
        """Returns an initializer's PyTorch name, or the names of the PyTorch tensors that it was folded from."""
        if value.name in self._kinds:
            return [str(value.name)]
        return [name for name in _folded_from(value) if name in self._kinds]

    def read(self, node: ir.Node) -> list[str]:
        """Returns the names of the parameters, buffers and constants that a node's PyTorch operation uses, in order."""
        operands = _OPERAND.findall(node.metadata_props.get(_OPERATION, "").partition("args = ")[2])
        return [self._names[operand] for operand in operands if operand in self._names]

    def merged(self) -> Iterator[tuple[list[ir.Node], list[str]]]:
        """Yields (nodes, missing names) for each PyTorch operation that uses parameters missing from the graph.

        `nodes` are the nodes that the operation was exported as. A name is absent if no trainable initializer has it or
        was folded from it. Names that are absent because parameters are tied must not count as missing. The exporter
        keeps the last name of tied parameters, but the first name of separate parameters with equal values. An absent
        name therefore only counts as missing if the module lists it after all names that the nodes read instead.
        """
        graph = self._model.graph
        present = {
            name
            for value in graph.initializers.values()
            if is_float_parameter(value)
            for name in self.origins(value)
        }
        operations = defaultdict(list)
        for node in graph if self else ():
            if _OPERATION in node.metadata_props:
                operations[node.metadata_props[_OPERATION]].append(node)
        for nodes in operations.values():
            read = self.read(nodes[0])
            absent = [name for name in read if name not in present]
            if not absent:
                continue
            instead = {name for _, _, value in _operands(nodes) for name in self.origins(value)} - set(read)
            last = max((self._order[name] for name in instead), default=-1)
            missing = [name for name in absent if self._order[name] > last]
            if missing:
                yield nodes, missing


def mark_gradients(model: ir.Model) -> None:
    """Marks `model` as containing gradients, for `RestoreParametersPass`; cloning and saving preserve the mark."""
    model.metadata_props[_GRADIENTS] = "true"


class RestoreParametersPass(ir.passes.InPlacePass):
    """Restores separate initializers for parameters that an exporter has merged because their values were equal.

    In a new network, all norms have scale 1 and bias 0, which are also the running variance and mean of BatchNorm, and
    copies of a layer have equal parameters. A single initializer would be trained as one parameter, or be overwritten
    by running statistics. Parameters that are tied in PyTorch remain a single initializer.

    - TorchScript's exporter writes `norm2.weight = Identity(norm1.weight)` in eval mode.
    - The Dynamo exporter records the PyTorch operation of each node. If the operation uses `norm2.weight`, which is
      missing from the file, and the node reads `norm1.weight`, the two were merged. The exporter also stores weights of
      linear layers transposed, under generated names; the pass restores shape and name and adds a Transpose.
    - In any file, an initializer was merged if it is both a running statistic of a BatchNormalization and any other
      input.

    A model with gradients is not modified. Its parameters have been restored before differentiation, and running
    statistics that gradient nodes also read are not the result of a merge.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Restores the parameters in place."""
        if _GRADIENTS in model.metadata_props:
            return ir.passes.PassResult(model, False)
        before = list(model.graph.initializers)
        _restore_identities(model)
        signature = TorchSignature(model)
        if signature:
            _restore_operands(model, signature)
            _restore_linear_weights(model)
        _restore_statistics(model)
        return ir.passes.PassResult(model, list(model.graph.initializers) != before)


def _restore_identities(model: ir.Model) -> None:
    """Turns each `norm2.weight = Identity(norm1.weight)` of a parameter into an initializer `norm2.weight`."""
    for node in tuple(model.graph) if model.producer_name == _PRODUCER else ():
        source, result = node.inputs[0] if node.inputs else None, node.outputs[0]
        if (
            node.op_type == "Identity"
            and node.domain == ""
            and source is not None
            and _is_parameter(source)
            and _QUALIFIED_NAME.fullmatch(result.name or "")
            and not (result.is_graph_output() or is_stop_gradient(node))
        ):
            name, result.name = str(result.name), None
            result.replace_all_uses_with(_register(model, source, name))
            model.graph.remove(node, safe=True)


def _restore_operands(model: ir.Model, signature: TorchSignature) -> None:
    """Restores the parameters that the Dynamo exporter merged into equal parameters of other operations.

    An exported node whose PyTorch operation uses a missing parameter (:meth:`TorchSignature.merged`) reads the equal
    parameter of another operation. That input is replaced by an initializer with the same value, named after the
    missing parameter.
    """
    for nodes, missing in tuple(signature.merged()):
        names_read = set(signature.read(nodes[0]))
        # Shared inputs that are parameters of other PyTorch operations: (node, index, name).
        foreign = [
            (node, index, origins[0])
            for node, index, value in _operands(nodes)
            if len(value.uses()) > 1
            and (origins := signature.origins(value))
            and names_read.isdisjoint(origins)
        ]
        for node, index, name in _paired(foreign, missing):
            value = node.inputs[index]
            assert value is not None
            # A folded value, e.g. a transposed weight, is not the parameter itself and must not have its name.
            folded = _FOLDED in value.metadata_props
            restored = model.graph.initializers.get(name) or _register(
                model, value, f"{name}.{value.name}" if folded else name
            )
            if folded:
                restored.metadata_props[_FOLDED] = repr([name])
            node.replace_input_with(index, restored)


def _paired(
    foreign: Sequence[tuple[ir.Node, int, str]], missing: Sequence[str]
) -> Iterator[tuple[ir.Node, int, str]]:
    """Yields (node, input index, name) for each input to restore; `name` is the missing parameter it must read.

    Inputs and missing parameters are paired in order if their counts match. Otherwise each input is paired with the
    missing parameter whose name ends in the same part, e.g. "weight"; an input with no or several such parameters is
    skipped.

    Args:
        foreign: the inputs that may be restored, as (node, input index, name of the parameter that it reads now).
        missing: names of the missing parameters.
    """
    if len(foreign) == len(missing):
        yield from ((node, index, name) for (node, index, _), name in zip(foreign, missing, strict=True))
        return
    for node, index, origin in foreign:
        alike = [name for name in missing if name.rpartition(".")[2] == origin.rpartition(".")[2]]
        if len(alike) == 1:
            yield node, index, alike[0]


def _restore_linear_weights(model: ir.Model) -> None:
    """Restores the shapes and names of linear weights, which the Dynamo exporter stores transposed."""
    for node in tuple(model.graph):
        value = node.inputs[1] if node.op_type in PRODUCTS and node.domain == "" else None
        if (
            value is None
            or not _is_parameter(value)
            or _LINEAR not in node.metadata_props.get(_OPERATION, "")
        ):
            continue
        origins = _folded_from(value)
        tensor = value.const_value
        if (
            len(origins) != 1
            or tensor is None
            or tensor.shape.rank() != 2
            or node.attributes.get_int("transB") == 1
        ):
            continue
        # Several layers may read the same weight: the first restores it, the others find it.
        array = np.ascontiguousarray(tensor.numpy().T)
        weight = model.graph.initializers.get(origins[0])
        if weight is None:
            weight = _register(model, value, origins[0], ir.Tensor(array, dtype=tensor.dtype))
        elif weight.const_value is None or not np.array_equal(weight.const_value.numpy(), array):
            continue
        transposed = ir.Value(name=f"{node.outputs[0].name}.{value.name}", type=value.type, shape=value.shape)
        transpose = ir.node("Transpose", [weight], {"perm": [1, 0]}, outputs=[transposed])
        transpose.metadata_props.update(node.metadata_props)
        node.prepend(transpose)
        node.replace_input_with(1, transposed)
        remove_unread_initializers(model.graph, [value])


def _restore_statistics(model: ir.Model) -> None:
    """Adds separate initializers for running statistics that share an initializer with other inputs."""
    for node in tuple(model.graph):
        if node.op_type != "BatchNormalization" or node.domain != "":
            continue
        for (index, _), leaf in zip(STATISTICS, ("running_mean", "running_var"), strict=True):
            value, scale = node.inputs[index], node.inputs[1]
            if value is None or scale is None or not _is_parameter(value):
                continue
            # A layer that is applied twice reads its statistic twice, by the same input and with the same scale. This
            # is not a merge.
            if len({(use.node.op_type, use.idx, use.node.inputs[1:2]) for use in value.uses()}) > 1:
                name = f"{str(scale.name).removesuffix('.weight')}.{leaf}"
                node.replace_input_with(index, _register(model, value, name))


def _operands(nodes: Sequence[ir.Node]) -> Iterator[tuple[ir.Node, int, ir.Value]]:
    """Yields (node, input index, initializer) for each trainable initializer that one of `nodes` reads."""
    for node in nodes:
        for index, value in enumerate(node.inputs):
            if value is not None and _is_parameter(value):
                yield node, index, value


def _is_parameter(value: ir.Value) -> bool:
    """True if a value is an initializer that may be trained."""
    return value.is_initializer() and is_float_parameter(value)


def _folded_from(value: ir.Value) -> list[str]:
    """Returns the names of the values that the Dynamo exporter's optimizer has folded into `value`."""
    names: list[str] = ast.literal_eval(value.metadata_props.get(_FOLDED, "[]"))
    return names


def _register(
    model: ir.Model, like: ir.Value, name: str, tensor: ir.TensorProtocol | None = None
) -> ir.Value:
    """Adds an initializer called `name`, or `name_2`, ... if that name is in use.

    Its content is `tensor`, by default the content of `like`.
    """
    name = fresh_name(model, name)
    if tensor is None:
        assert like.const_value is not None
        tensor = share_tensor(like.const_value)
    tensor.name = name
    return add_initializer(model.graph, tensor)
