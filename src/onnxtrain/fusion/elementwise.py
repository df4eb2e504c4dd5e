"""Fuses elementwise ops into programs, which a native kernel runs on one block of elements after the other.

ONNX Runtime runs a chain of elementwise ops one op at a time, each over all elements in memory. The native kernel of
`Elementwise` runs the whole chain on a block that fits the first-level cache, then on the next block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.functions import DOMAIN, SpecializedOp
from onnxtrain.fusion._pass import KeepingPass
from onnxtrain.passes import known_array, remove_unread_chains

INSTRUCTIONS = (
    "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Reciprocal", "Sqrt", "Exp", "Log", "Sigmoid", "Tanh", "Erf", "Relu",
    "Max", "Min", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "And", "Or", "Not", "Where", "Cast",
    "IsNaN", "Sign", "Floor", "Ceil", "Round", "Softplus", "Sin", "Cos", "Pow",
)  # fmt: skip
"""Standard ops in the order of the kernel's opcodes. Cast is that of a boolean to a float."""

MOST_INPUTS, MOST_OUTPUTS, MOST_INSTRUCTIONS = 16, 8, 256

_OPCODES = {name: code for code, name in enumerate(INSTRUCTIONS)}
_MASKS = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "IsNaN", "And", "Or", "Not"})
_FLOAT, _BOOL = ir.DataType.FLOAT, ir.DataType.BOOL

_Dims = tuple[int | str, ...]
_Ref = tuple[str, int]
"""An operand: kind ("x" an input, "c" a constant, "y" the result of an instruction, "s" of a step) and number."""


class ElementwisePass(KeepingPass):
    """Replaces connected elementwise float32 ops whose results have one shape with calls of `Elementwise` functions.

    Inputs of a chain may broadcast. The pass needs inferred shapes, with a name for each symbolic size. Comparisons are
    part of the chains of their readers, and are computed again in each; they remain if other nodes read them.

    Run this pass last: the functions have no gradient rules, and other passes look for the standard ops.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrites the main graph in place; subgraphs are not modified."""
        op = Emitter(model.graph, functions=model.functions)
        remove_unread_chains(model.graph, tuple(model.graph))
        groups = _Grouping(model, self.keeps).groups()
        modified = [_rewrite(op, group.nodes, group.dims, model.functions) for group in groups]
        if any(modified):
            model.graph.sort()
        return ir.passes.PassResult(model, any(modified))


@dataclass
class _Group:
    """Nodes that become one call.

    Attributes:
        dims: sizes of all results.
        nodes: the nodes, in the order of the graph.
        below: bit mask of the numbers of all groups that this one depends on.
        read: the values that the nodes read, those of the group among them.
    """

    dims: _Dims
    nodes: list[ir.Node] = field(default_factory=list)
    below: int = 0
    read: set[ir.Value] = field(default_factory=set)


class _Grouping:
    """Decides which nodes of a graph become one call.

    A node joins the groups of its inputs, unless the call would then depend on itself, because another input of the
    node is computed from the group's results by other nodes.
    """

    def __init__(self, model: ir.Model, keeps: Callable[[ir.Node], bool]) -> None:
        self._model, self._keeps = model, keeps
        self._places = {node: place for place, node in enumerate(model.graph)}
        self._groups: list[_Group] = []
        self._group_of: dict[ir.Value, int] = {}
        # For each value that is computed outside of the groups, the bit mask of the groups that it depends on.
        self._behind: dict[ir.Value, int] = {}

    def groups(self) -> list[_Group]:
        """Returns the groups."""
        for node in self._model.graph:
            leaves = None if self._keeps(node) else elementwise_leaves(node, self._model.functions)
            if leaves is not None:
                self._place(node, leaves)
            else:
                mask = 0
                for value in _values_read(node):
                    mask |= self._needed(value)
                if mask:
                    self._behind.update(dict.fromkeys(node.outputs, mask))
        return [group for group in self._groups if group.nodes]

    def _needed(self, value: ir.Value) -> int:
        """Returns the bit mask of the groups that a value depends on, with its own."""
        number = self._group_of.get(value)
        mask = needed = self._behind.get(value, 0) if number is None else 1 << number
        while mask:
            lowest = mask & -mask
            needed |= self._groups[lowest.bit_length() - 1].below
            mask ^= lowest
        return needed

    def _place(self, node: ir.Node, leaves: Sequence[ir.Value]) -> None:
        """Adds a node to the group of its inputs, or to a new group."""
        dims = _dims(node.outputs[0])
        assert dims is not None
        joined: int | None = None
        for number in dict.fromkeys(self._group_of[v] for v in leaves if v in self._group_of):
            if self._groups[number].dims != dims or not self._may_join(number, leaves):
                continue
            if joined is None:
                joined = number
            elif self._may_merge(joined, number, leaves):
                self._merge(joined, number)
        if joined is None or not self._has_room([joined], leaves):
            joined = len(self._groups)
            self._groups.append(_Group(dims))
        group = self._groups[joined]
        group.nodes.append(node)
        group.read.update(leaves)
        self._group_of[node.outputs[0]] = joined
        self._depend(joined, leaves)

    def _may_join(self, number: int, leaves: Sequence[ir.Value]) -> bool:
        """True if no leaf outside of a group depends on the group."""
        return not any(
            self._needed(leaf) >> number & 1 for leaf in leaves if self._group_of.get(leaf) != number
        )

    def _may_merge(self, one: int, other: int, leaves: Sequence[ir.Value]) -> bool:
        """True if two groups don't depend on each other, and their nodes fit one call."""
        first, second = self._groups[one], self._groups[other]
        return not (first.below >> other | second.below >> one) & 1 and self._has_room([one, other], leaves)

    def _has_room(self, numbers: Sequence[int], leaves: Sequence[ir.Value]) -> bool:
        """True if the nodes of some groups, and one more, fit one call."""
        read = {*leaves}.union(*(self._groups[number].read for number in numbers))
        nodes = sum(len(self._groups[number].nodes) for number in numbers)
        inputs = sum(self._group_of.get(value) not in numbers for value in read)
        return inputs <= MOST_INPUTS and nodes < MOST_INSTRUCTIONS // 8

    def _merge(self, kept: int, other: int) -> None:
        """Moves the nodes of a group to another one. Its number then stands for a group without nodes."""
        group, gone = self._groups[kept], self._groups[other]
        for node in gone.nodes:
            self._group_of[node.outputs[0]] = kept
        group.nodes = sorted([*group.nodes, *gone.nodes], key=self._places.__getitem__)
        group.read |= gone.read
        gone.nodes = []
        # Values behind the other group depend on the kept one, and on what it depends on.
        self._extend(kept, gone.below)
        self._extend(other, group.below | 1 << kept)

    def _depend(self, number: int, leaves: Sequence[ir.Value]) -> None:
        needed = 0
        for leaf in leaves:
            needed |= self._needed(leaf)
        self._extend(number, needed & ~(1 << number))

    def _extend(self, number: int, needed: int) -> None:
        """Records that a group, and all that depend on it, depend on other groups."""
        if needed & ~self._groups[number].below == 0:
            return
        self._groups[number].below |= needed
        for group in self._groups:
            if group.below >> number & 1:
                group.below |= needed


def elementwise_leaves(
    node: ir.Node, functions: Mapping[ir.OperatorIdentifier, ir.Function]
) -> list[ir.Value] | None:
    """Returns the float32 values that a program reads to compute a node; None if it cannot compute it.

    For a node that reads a comparison these are the compared values.
    """
    if len(node.outputs) != 1 or node.outputs[0].dtype != _FLOAT or _dims(node.outputs[0]) is None:
        return None
    if node.domain == DOMAIN:
        function = functions.get(node.op_identifier())
        if function is None or not _is_program(function):
            return None
    elif node.domain != "" or not _is_instruction(node):
        return None
    leaves: list[ir.Value] = []
    for value in node.inputs:
        if value is None or not _add_leaves(value, leaves):
            return None
    # Numbers that constants alone determine stay outside, where ONNX Runtime folds them.
    return leaves or None


def program_leaves(
    node: ir.Node, functions: Mapping[ir.OperatorIdentifier, ir.Function]
) -> list[ir.Value] | None:
    """Returns the float32 values that a program reads to compute a node or a comparison; None if it cannot."""
    if node.outputs[0].dtype != _BOOL:
        return elementwise_leaves(node, functions)
    leaves: list[ir.Value] = []
    return leaves if _dims(node.outputs[0]) is not None and _add_leaves(node.outputs[0], leaves) else None


def _add_leaves(value: ir.Value, leaves: list[ir.Value]) -> bool:
    """Appends the float32 values that a value is read from; False if it is neither float32 nor a comparison of such."""
    if value.dtype == _FLOAT:
        if _number(value) is None:
            if _dims(value) is None:
                return False
            leaves.append(value)
        return True
    node = value.producer()
    if value.dtype != _BOOL or node is None or node.domain != "" or node.op_type not in _MASKS:
        return False
    return all(source is not None and _add_leaves(source, leaves) for source in node.inputs)


def _is_instruction(node: ir.Node) -> bool:
    """True if a node of the standard domain, with suitable inputs, is one instruction."""
    if node.op_type in ("Max", "Min"):
        return len(node.inputs) == 2
    if node.op_type == "Cast":
        return node.inputs[0] is not None and node.inputs[0].dtype == _BOOL
    if node.op_type == "Gelu":
        return node.attributes.get_string("approximate", "none") == "none"
    if node.op_type == "Pow":
        return node.inputs[1] is not None and _number(node.inputs[1]) in (2.0, 3.0)
    if node.op_type in _EXPANSIONS:
        return True
    return node.op_type in _OPCODES and node.op_type not in (*_MASKS, "Pow")


def _is_program(function: ir.Function) -> bool:
    """True if the body of a function consists of instructions and scalar constants."""
    return len(function.outputs) == 1 and all(
        node.domain == ""
        and all(attribute.ref_attr_name is None for attribute in node.attributes.values())
        and (
            (node.op_type == "Constant" and _number(node.outputs[0]) is not None)
            or node.op_type in _MASKS
            or _is_instruction(node)
        )
        for node in function
    )


def _values_read(node: ir.Node) -> Iterator[ir.Value]:
    """Yields the values that a node reads, and those that its subgraphs read from outside."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        graphs = (
            [attribute.as_graph()]
            if attribute.type == ir.AttributeType.GRAPH
            else attribute.as_graphs()
            if attribute.type == ir.AttributeType.GRAPHS
            else []
        )
        for graph in graphs:
            for inner in graph.all_nodes():
                yield from (value for value in inner.inputs if value is not None)
            yield from graph.outputs


def _dims(value: ir.Value) -> _Dims | None:
    """Returns the sizes of a value, as numbers and names; None if one is unknown."""
    if value.shape is None:
        return None
    dims = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
    return None if None in dims else dims  # type: ignore[return-value]


def _number(value: ir.Value) -> float | None:
    """Returns a constant of one element and without axes; None for other values."""
    if value.shape is not None and len(value.shape) > 0:
        return None
    array = known_array(value)
    return float(array) if array is not None and array.size == 1 and array.ndim == 0 else None


@dataclass(frozen=True)
class _Step:
    """A node of the function's body.

    Attributes:
        op_type: a standard op.
        attributes: the attributes of the node.
        operands: the inputs of the node.
    """

    op_type: str
    attributes: tuple[ir.Attr, ...]
    operands: tuple[_Ref, ...]


class _Program:
    """The instructions of a group, and the standard ops that compute the same.

    Attributes:
        inputs: the values that the program reads.
        numbers: the constants that the ops and the instructions read, as bytes of float32.
        steps: the ops.
        instructions: opcode and operands of each instruction.
    """

    def __init__(self, functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> None:
        self.inputs: dict[ir.Value, int] = {}
        self.numbers: dict[bytes, int] = {}
        self.steps: list[_Step] = []
        self.instructions: list[tuple[str, tuple[_Ref, ...]]] = []
        self._known: dict[ir.Value, tuple[_Ref, _Ref]] = {}
        self._functions = functions

    def add(self, node: ir.Node) -> tuple[_Ref, _Ref]:
        """Appends the steps and the instructions of a node; returns its result among both."""
        self._known[node.outputs[0]] = self._computed(node, self._known)
        return self._known[node.outputs[0]]

    def emit(self, op_type: str, *operands: _Ref | float) -> _Ref:
        """Appends an instruction; returns its result."""
        refs = tuple(self._constant(o) if isinstance(o, float) else o for o in operands)
        self.instructions.append((op_type, refs))
        return ("y", len(self.instructions) - 1)

    def _computed(self, node: ir.Node, known: dict[ir.Value, tuple[_Ref, _Ref]]) -> tuple[_Ref, _Ref]:
        pairs = [self._ref(value, known) for value in node.inputs if value is not None]
        if node.domain == "":
            operands = [instruction for _, instruction in pairs]
            result = (
                _EXPANSIONS[node.op_type](self, node, *operands)
                if node.op_type in _EXPANSIONS
                else self.emit(node.op_type, *operands)
            )
            attributes = tuple(node.attributes.values())
            self.steps.append(_Step(node.op_type, attributes, tuple(step for step, _ in pairs)))
            return ("s", len(self.steps) - 1), result
        function = self._functions[node.op_identifier()]
        inner = dict(zip(function.inputs, pairs, strict=True))
        for step in function:
            if step.op_type != "Constant":
                inner[step.outputs[0]] = self._computed(step, inner)
        return inner[function.outputs[0]]

    def _ref(self, value: ir.Value, known: dict[ir.Value, tuple[_Ref, _Ref]]) -> tuple[_Ref, _Ref]:
        if value in known:
            return known[value]
        number = _number(value)
        if number is not None:
            return (self._constant(number),) * 2
        producer = value.producer()
        if value.dtype == _BOOL and producer is not None:
            known[value] = self._computed(producer, known)
            return known[value]
        return (("x", self.inputs.setdefault(value, len(self.inputs))),) * 2

    def _constant(self, number: float) -> _Ref:
        return ("c", self.numbers.setdefault(np.float32(number).tobytes(), len(self.numbers)))

    def attributes(self, outputs: Sequence[_Ref]) -> dict[str, int | float | list[int]]:
        """Returns the attributes of the call, which the kernel reads.

        Args:
            outputs: the results that the call returns.
        """
        # At least one constant, as an empty list has no type.
        first = {"x": 0, "c": len(self.inputs), "y": len(self.inputs) + max(1, len(self.numbers))}
        program: list[int] = []
        for name, operands in self.instructions:
            places = [first[kind] + index for kind, index in operands]
            program += [_OPCODES[name], *places, *[-1] * (3 - len(places))]
        return {
            "inputs": len(self.inputs),
            "program": program,
            "constants": [int.from_bytes(bits, "little", signed=True) for bits in self.numbers] or [0],
            "outputs": [first[kind] + index for kind, index in outputs],
        }

    def body(self, outputs: Sequence[_Ref]) -> Callable[..., tuple[ir.Value, ...]]:
        """Returns a function that emits the steps.

        Args:
            outputs: the results that it returns.
        """
        constants = [np.frombuffer(bits, np.float32)[0] for bits in self.numbers]
        steps = tuple(self.steps)

        def body(op: Emitter, *inputs: ir.Value, **_: object) -> tuple[ir.Value, ...]:
            made: list[ir.Value] = []

            def operand(ref: _Ref) -> ir.Value:
                kind, index = ref
                return op.const(constants[index]) if kind == "c" else {"x": inputs, "s": made}[kind][index]

            for step in steps:
                attributes = {attribute.name: attribute.value for attribute in step.attributes}
                made.append(op.emit(step.op_type, *map(operand, step.operands), **attributes))
            return tuple(made[index] for _, index in outputs)

        return body


def _leaky_relu(program: _Program, node: ir.Node, x: _Ref) -> _Ref:
    slope = program.emit("Mul", x, node.attributes.get_float("alpha", 0.01))
    return program.emit("Where", program.emit("Less", x, 0.0), slope, x)


def _gelu(program: _Program, node: ir.Node, x: _Ref) -> _Ref:
    probability = program.emit("Add", program.emit("Erf", program.emit("Mul", x, math.sqrt(0.5))), 1.0)
    return program.emit("Mul", program.emit("Mul", x, 0.5), probability)


def _pow(program: _Program, node: ir.Node, x: _Ref, _: _Ref) -> _Ref:
    square = program.emit("Mul", x, x)
    exponent = node.inputs[1]
    return program.emit("Mul", square, x) if exponent is not None and _number(exponent) == 3 else square


_EXPANSIONS: dict[str, Callable[..., _Ref]] = {"LeakyRelu": _leaky_relu, "Gelu": _gelu, "Pow": _pow}
"""Standard ops that are several instructions."""


def _rewrite(
    op: Emitter,
    nodes: Sequence[ir.Node],
    dims: _Dims,
    functions: Mapping[ir.OperatorIdentifier, ir.Function],
) -> bool:
    """Replaces the nodes of a group with one call, or with several if they have too many inputs or results.

    Args:
        op: emitter of the graph.
        nodes: the nodes, in the order of the graph.
        dims: sizes of their results.
        functions: the model's function table.

    Returns:
        True if a node was replaced.
    """
    program = _Program(functions)
    results = [(node, program.add(node)) for node in nodes]
    members = {id(node) for node in nodes}
    returned = [
        (node, *refs)
        for node, refs in results
        if node.outputs[0].is_graph_output()
        or any(id(use.node) not in members for use in node.outputs[0].uses())
    ]
    inputs = list(program.inputs)
    # One native function, or one op, is not faster as a program. ONNX Runtime's Sigmoid is inexact.
    if (
        len(nodes) == 1
        and (nodes[0].domain == DOMAIN or len(program.steps) == 1)
        and nodes[0].op_type != "Sigmoid"
    ):
        return False
    if (
        not inputs
        or len(inputs) > MOST_INPUTS
        or len(returned) > MOST_OUTPUTS
        or len(program.instructions) > MOST_INSTRUCTIONS
        or not _broadcast_to(inputs, dims)
    ):
        middle = len(nodes) // 2
        halves = [part for part in (nodes[:middle], nodes[middle:]) if part and len(nodes) > 1]
        done = [_rewrite(op, part, dims, functions) for part in halves]
        return any(done)
    attributes = program.attributes([ref for *_, ref in returned])
    steps = [step for _, step, _ in returned]
    composite = SpecializedOp(
        "Elementwise",
        {f"x{index}": None for index in range(len(inputs))},
        {name: ir.AttributeType.INT if name == "inputs" else ir.AttributeType.INTS for name in attributes},
        len(returned),
        f"{program.steps} {steps} {attributes}",
        program.body(steps),
    )
    with op.placing(before=nodes[-1]):
        values = op.call(composite, *inputs, **attributes, _outputs=len(returned))
    for (node, *_), value in zip(returned, values, strict=True):
        old = node.outputs[0]
        value.name, old.name = old.name, None
        value.type, value.shape = old.type, old.shape
        old.replace_all_uses_with(value, replace_graph_outputs=True)
    remove_unread_chains(op.graph, nodes)
    return True


def _broadcast_to(inputs: Sequence[ir.Value], dims: _Dims) -> bool:
    """True if the shapes of the inputs broadcast to `dims`, without the help of constants."""
    shapes = [_dims(value) or () for value in inputs]
    rank = len(dims)
    return max(map(len, shapes), default=0) == rank and all(
        dims[axis] == 1 or any(len(s) >= rank - axis and s[axis - rank] == dims[axis] for s in shapes)
        for axis in range(rank)
    )
