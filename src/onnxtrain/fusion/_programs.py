"""Writes groups of nodes as calls of the `Elementwise` kernel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.emitter import Emitter
from onnxtrain.functions import DOMAIN, SpecializedOp
from onnxtrain.fusion._domain import Domain
from onnxtrain.fusion._instructions import (
    INSTRUCTIONS,
    bool_source,
    computes_mask,
    number_of,
    window_source,
)
from onnxtrain.fusion._windows import REDUCTIONS, Reduction, Window, reduction_of, window_of
from onnxtrain.passes import dims_of, known_array, remove_unread_chains

MOST_INPUTS, MOST_OUTPUTS, MOST_INSTRUCTIONS = 16, 8, 256
_MOST_BOOLS = 4
"""The number of bool inputs that the kernel has places for, behind those for float32 inputs."""

_SHORT_RUN = 64
"""ONNX Runtime broadcasts slowly along fewer numbers than this."""

_OPCODES = {name: code for code, name in enumerate(INSTRUCTIONS)}
_BOOL = ir.DataType.BOOL

_Ref = tuple[str, int] | tuple[str, tuple[int, ...]]
"""An operand: kind and number. Kinds: "x" an input, "b" a bool input, "c" a constant, "y" the result of an instruction,
"s" of a step. Of kind "i" it is the number itself, and of kind "k" a list of integers."""


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


@dataclass(frozen=True)
class _Result:
    """An output of a call.

    Attributes:
        step: the result among the steps.
        instruction: the result, before its reduction, among the instructions.
        columns: its size along the axis of columns; 0 without one.
        reduction: the reduction of the instruction's result.
    """

    step: _Ref
    instruction: _Ref
    columns: int = 0
    reduction: Reduction | None = None

    def numbers(self) -> list[int]:
        """Returns the kernel's three numbers for the reduction."""
        reduction = self.reduction
        if reduction is None:
            return [0, 0, 0]
        return [1 + REDUCTIONS.index(reduction.op_type), reduction.axes, int(reduction.keepdims)]


class _Program:
    """The instructions of a group, and the standard ops that compute the same.

    Attributes:
        domain: the sizes of all values of the instructions.
        inputs: the values that the program reads, and the column of each that is column 0 of the program's. The call
            reads bool values among them as float32.
        bools: the bool values that the program reads as they are.
        numbers: the constants that the ops and the instructions read, as bytes of float32.
        steps: the ops.
        instructions: opcode and operands of each instruction.
    """

    def __init__(self, domain: Domain, functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> None:
        self.domain = domain
        self.inputs: dict[tuple[ir.Value, int], int] = {}
        self.bools: dict[ir.Value, int] = {}
        self.numbers: dict[bytes, int] = {}
        self.steps: list[_Step] = []
        self.instructions: list[tuple[str, tuple[_Ref, ...]]] = []
        self._known: dict[ir.Value, tuple[_Ref, _Ref]] = {}
        self._reductions: dict[ir.Value, _Result] = {}
        self._functions = functions

    def add(self, node: ir.Node) -> _Result | None:
        """Appends the steps and the instructions of a node.

        Returns:
            The result of the node. None for the sum of two reductions if the program does not compute both.
        """
        reduction, output = reduction_of(node), node.outputs[0]
        if reduction is not None:
            self._reductions[output] = self._reduced(node, reduction)
            return self._reductions[output]
        reduced = [self._reductions[value] for value in node.inputs if value in self._reductions]
        if len(reduced) == 2:
            self._reductions[output] = self._added(node, reduced)
            return self._reductions[output]
        window = window_of(node)
        if reduced or not (window or self.domain.contains(dims_of(output))):
            return None
        self._known[output] = self._computed(node) if window is None else self._window(node, window)
        return _Result(*self._known[output], self._columns(output))

    def emit(self, op_type: str, *operands: _Ref | float) -> _Ref:
        """Appends an instruction; returns its result."""
        refs = tuple(self._constant(o) if isinstance(o, float) else o for o in operands)
        self.instructions.append((op_type, refs))
        return ("y", len(self.instructions) - 1)

    def _columns(self, value: ir.Value) -> int:
        """Returns the size of a value along the axis of columns; 0 without one."""
        dims = dims_of(value)
        size = dims[-self.domain.axis] if dims and self.domain.axis else 0
        assert isinstance(size, int)
        return size

    def _step(self, node: ir.Node, operands: Sequence[_Ref]) -> _Ref:
        self.steps.append(_Step(node.op_type, tuple(node.attributes.values()), tuple(operands)))
        return ("s", len(self.steps) - 1)

    def _step_of_data(self, node: ir.Node, data: _Ref) -> _Ref:
        """Appends a Slice, Pad or reduction, whose other inputs are integers; the fill of a Pad is 0."""
        arrays = [known_array(value) for value in node.inputs[1:]]
        integers = [array for array in arrays if array is not None and array.dtype.kind == "i"]
        return self._step(node, [data, *(("k", tuple(array.reshape(-1).tolist())) for array in integers)])

    def _reduced(self, node: ir.Node, reduction: Reduction) -> _Result:
        source = node.inputs[0]
        assert source is not None
        step, instruction = self._ref(source)
        columns = self._columns(source)
        if self.domain.axis and reduction.axes > 0 and columns != self.domain.width:
            instruction = self.emit("Window", instruction, ("i", 0), ("i", columns))
            columns = self.domain.width
        return _Result(self._step_of_data(node, step), instruction, columns, reduction)

    def _added(self, node: ir.Node, reduced: Sequence[_Result]) -> _Result:
        """Appends the sum of two reductions, which is the reduction of a sum."""
        step = self._step(node, [result.step for result in reduced])
        instruction = self.emit("Add", *(result.instruction for result in reduced))
        return _Result(step, instruction, reduced[0].columns, reduced[0].reduction)

    def _window(self, node: ir.Node, window: Window) -> tuple[_Ref, _Ref]:
        """Appends a Slice or a Pad of a value of the group, or of an input."""
        if window.source in self._known or window.source_size <= self.domain.width:
            step, instruction = self._ref(window.source)
            size = window.source_size if window.bounded else -1
            if window.offset or window.bounded:
                instruction = self.emit("Window", instruction, ("i", window.offset), ("i", size))
        else:
            step = self._input(window.source)
            instruction = self._input(window.source, window.offset)
        return self._step_of_data(node, step), instruction

    def _computed(
        self, node: ir.Node, known: dict[ir.Value, tuple[_Ref, _Ref]] | None = None
    ) -> tuple[_Ref, _Ref]:
        pairs = [self._ref(value, known) for value in node.inputs if value is not None]
        if node.domain == "":
            operands = [instruction for _, instruction in pairs]
            result = (
                _EXPANSIONS[node.op_type](self, node, *operands)
                if node.op_type in _EXPANSIONS
                else self.emit(node.op_type, *operands)
            )
            return self._step(node, [step for step, _ in pairs]), result
        function = self._functions[node.op_identifier()]
        inner = dict(zip(function.inputs, pairs, strict=True))
        for step in function:
            if step.op_type != "Constant":
                inner[step.outputs[0]] = self._computed(step, inner)
        return inner[function.outputs[0]]

    def _ref(
        self, value: ir.Value, known: dict[ir.Value, tuple[_Ref, _Ref]] | None = None
    ) -> tuple[_Ref, _Ref]:
        known = self._known if known is None else known
        if value in known:
            return known[value]
        number = number_of(value)
        if number is not None:
            return (self._constant(number),) * 2
        node = value.producer()
        if value.dtype == _BOOL:
            if node is not None and computes_mask(node):
                known[value] = self._computed(node, known)
            else:
                known[value] = self._mask(value)
        elif node is not None and (source := bool_source(value)) is not None and self._reads_bool(source):
            place = self._bool(source)
            known[value] = self._step(node, [place]), place
        elif node is not None and self._is_read_by_windows(node):
            window = window_of(node)
            known[value] = self._computed(node, known) if window is None else self._window(node, window)
        return known[value] if value in known else (self._input(value),) * 2

    def _mask(self, value: ir.Value) -> tuple[_Ref, _Ref]:
        """Appends the comparison that makes a mask of a bool input, which the kernel reads as 1 and 0."""
        if self._reads_bool(value):
            return self._bool(value), self.emit("Greater", self._bool(value), 0.0)
        operands = (self._input(value), self._constant(0.0))
        self.steps.append(_Step("Greater", (), operands))
        return ("s", len(self.steps) - 1), self.emit("Greater", *operands)

    def _reads_bool(self, value: ir.Value) -> bool:
        """True if the program can read a bool value as it is: it has the shape of the results."""
        has_room = value in self.bools or len(self.bools) < _MOST_BOOLS
        return has_room and not self.domain.axis and dims_of(value) == self.domain.dims

    def _bool(self, value: ir.Value) -> _Ref:
        return ("b", self.bools.setdefault(value, len(self.bools)))

    def _is_read_by_windows(self, node: ir.Node) -> bool:
        """True if the program reads the source of a Slice or a Pad, or of windows that an op combines."""
        if not self.domain.axis or window_source(node.outputs[0]) is None:
            return False
        windows = [
            window_of(node),
            *(window_of(p) for v in node.inputs if v is not None and (p := v.producer())),
        ]
        return all(
            w.axis == self.domain.axis and w.size <= self.domain.width for w in windows if w is not None
        )

    def _input(self, value: ir.Value, offset: int = 0) -> _Ref:
        return ("x", self.inputs.setdefault((value, offset), len(self.inputs)))

    def _constant(self, number: float) -> _Ref:
        return ("c", self.numbers.setdefault(np.float32(number).tobytes(), len(self.numbers)))

    def attributes(self, results: Sequence[_Result]) -> dict[str, int | float | list[int]]:
        """Returns the attributes of the call, which the kernel reads.

        Args:
            results: the outputs of the call.
        """
        # At least one constant, as an empty list has no type.
        inputs = len(self.inputs) + len(self.bools)
        first = {"x": 0, "b": len(self.inputs), "c": inputs, "y": inputs + max(1, len(self.numbers)), "i": 0}

        def place(ref: _Ref) -> int:
            kind, index = ref
            assert isinstance(index, int)
            return first[kind] + index

        program: list[int] = []
        for name, operands in self.instructions:
            program += [_OPCODES[name], *map(place, operands), *[-1] * (3 - len(operands))]
        attributes: dict[str, int | float | list[int]] = {
            "inputs": inputs,
            "program": program,
            "constants": [int.from_bytes(bits, "little", signed=True) for bits in self.numbers] or [0],
            "outputs": [place(result.instruction) for result in results],
        }
        if self.bools:
            attributes["bools"] = [len(self.bools)]
        if self.domain.axis:
            attributes["row"] = [self.domain.axis, self.domain.width]
            attributes["offsets"] = [offset for _, offset in self.inputs]
            attributes["columns"] = [result.columns for result in results]
        if any(result.reduction for result in results):
            attributes["reductions"] = [number for result in results for number in result.numbers()]
        return attributes

    def body(self, results: Sequence[_Result]) -> Callable[..., tuple[ir.Value, ...]]:
        """Returns a function that emits the steps.

        Args:
            results: its outputs.
        """
        constants = [np.frombuffer(bits, np.float32)[0] for bits in self.numbers]
        steps = tuple(self.steps)

        def body(op: Emitter, *inputs: ir.Value, **_: object) -> tuple[ir.Value, ...]:
            made: list[ir.Value] = []

            def operand(ref: _Ref) -> ir.Value:
                kind, index = ref
                if isinstance(index, tuple):
                    return op.const(np.array(index, np.int64))
                if kind == "c":
                    return op.const(constants[index])
                return {"x": inputs, "b": inputs[MOST_INPUTS:], "s": made}[kind][index]

            for step in steps:
                attributes = {attribute.name: attribute.value for attribute in step.attributes}
                made.append(op.emit(step.op_type, *map(operand, step.operands), **attributes))
            return tuple(operand(result.step) for result in results)

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
    return program.emit("Mul", square, x) if exponent is not None and number_of(exponent) == 3 else square


def _clip(program: _Program, node: ir.Node, x: _Ref, low: _Ref, high: _Ref | None = None) -> _Ref:
    x = program.emit("Max", x, low)
    return x if high is None else program.emit("Min", x, high)


_GELUS = (Counter(Mul=2, Div=1, Erf=1, Add=1), Counter(Mul=3, Erf=1, Add=1))
"""The ops of x / 2 * (1 + erf(x / sqrt(2)))."""

_EXPANSIONS: dict[str, Callable[..., _Ref]] = {
    "LeakyRelu": _leaky_relu,
    "Gelu": _gelu,
    "Pow": _pow,
    "Clip": _clip,
}
"""Standard ops that are several instructions."""


def rewrite(
    op: Emitter,
    nodes: Sequence[ir.Node],
    domain: Domain,
    functions: Mapping[ir.OperatorIdentifier, ir.Function],
) -> bool:
    """Replaces the nodes of a group with one call, or with several if they have too many inputs or results.

    Args:
        op: emitter of the graph.
        nodes: the nodes, in the order of the graph.
        domain: sizes of the values of a program with all of them.
        functions: the model's function table.

    Returns:
        True if a node was replaced.
    """
    nodes = [node for node in nodes if node.graph is op.graph]
    if not nodes:
        return False
    program = _Program(_with_windows(domain, nodes), functions)
    results = [(node, result) for node in nodes if (result := program.add(node)) is not None]
    members = {node for node, _ in results}
    returned = [(node, result) for node, result in results if _is_read_outside(node.outputs[0], members)]
    inputs = [value for value, _ in program.inputs]
    # One native function or one op is not faster as a program, unless it broadcasts. ONNX Runtime's Sigmoid is inexact,
    # and its Where takes four to ten times as long.
    if (
        len(nodes) == 1
        and (nodes[0].domain == DOMAIN or len(program.steps) == 1)
        and nodes[0].op_type not in ("Sigmoid", "Where")
        and not _broadcasts_short_rows(nodes[0])
    ):
        return False
    # ONNX Runtime makes one op of these, Gelu, which is faster than the program.
    if len(inputs) == 1 and Counter(node.op_type for node in nodes) in _GELUS:
        return False
    if (
        not inputs
        or len(inputs) + len(program.bools) > MOST_INPUTS
        or len(returned) > MOST_OUTPUTS
        or len(program.instructions) > MOST_INSTRUCTIONS
        or not _broadcast_to([*inputs, *program.bools], program.domain)
    ):
        middle = len(nodes) // 2
        halves = [part for part in (nodes[:middle], nodes[middle:]) if part and len(nodes) > 1]
        done = [rewrite(op, part, domain, functions) for part in halves]
        return any(done)
    attributes = program.attributes([result for _, result in returned])
    bools = [f"b{index}" for index in range(len(program.bools))]
    # The kernel has places for all float inputs in front of the bool ones.
    absent = [None] * (MOST_INPUTS - len(inputs)) if bools else []
    composite = SpecializedOp(
        "Elementwise",
        dict.fromkeys([*(f"x{index}" for index in range(len(inputs) + len(absent))), *bools]),
        {name: ir.AttributeType.INT if name == "inputs" else ir.AttributeType.INTS for name in attributes},
        len(returned),
        f"{program.steps} {[result.step for _, result in returned]} {attributes}",
        program.body([result for _, result in returned]),
        dict.fromkeys(bools, _BOOL),
    )
    inputs = [_as_float(op, value) if value.dtype == _BOOL else value for value in inputs]
    with op.placing(before=nodes[-1]):
        values = op.call(composite, *inputs, *absent, *program.bools, **attributes, _outputs=len(returned))
    for (node, _), value in zip(returned, values, strict=True):
        old = node.outputs[0]
        value.name, old.name = old.name, None
        value.type, value.shape = old.type, old.shape
        old.replace_all_uses_with(value, replace_graph_outputs=True)
    remove_unread_chains(op.graph, nodes)
    return True


def _as_float(op: Emitter, mask: ir.Value) -> ir.Value:
    """Returns a bool value as float32: the output of a Cast, which all calls share.

    Args:
        op: emitter of the graph.
        mask: the bool value.
    """
    for use in mask.uses():
        node = use.node
        is_cast = (node.domain, node.op_type) == ("", "Cast") and node.graph is op.graph
        if is_cast and node.outputs[0].dtype == ir.DataType.FLOAT:
            return node.outputs[0]
    producer = mask.producer()
    # The producer of an input or an initializer is None.
    with op.placing(before=op.graph[0] if producer is None else None, after=producer):
        value = op.Cast(mask, to=ir.DataType.FLOAT)
    value.shape = mask.shape
    return value


def _is_read_outside(value: ir.Value, members: Collection[ir.Node]) -> bool:
    """True if a graph output or a node other than the members reads a value, or a comparison of it.

    Members compute the comparisons that they read themselves.
    """
    return value.is_graph_output() or any(
        use.node not in members
        and (not computes_mask(use.node) or _is_read_outside(use.node.outputs[0], members))
        for use in value.uses()
    )


def _with_windows(domain: Domain, nodes: Sequence[ir.Node]) -> Domain:
    """Returns the domain of a group, with columns for the windows that its nodes read."""
    members = {value for node in nodes for value in node.outputs}
    found: dict[tuple[ir.Value, int], set[int]] = {}
    for window in _windows_read(nodes, members):
        found.setdefault((window.source, window.axis), set()).add(window.offset)
    axes = Counter(axis for (_, axis), offsets in found.items() for _ in offsets)
    if not domain.axis:
        for axis, _ in axes.most_common():
            columns = domain.with_columns(axis)
            if columns is not None:
                domain = columns
                break
    # Several windows of one source share its copy, if they are not much smaller.
    for (source, axis), offsets in found.items():
        dims = dims_of(source)
        size = dims[-axis] if dims else 0
        if axis == domain.axis and len(offsets) > 1 and isinstance(size, int):
            domain = domain.widened(size)
    return domain


def _windows_read(nodes: Sequence[ir.Node], members: set[ir.Value]) -> list[Window]:
    """Returns the windows of other values that the nodes of a group, and the comparisons that they read, read."""
    windows: dict[ir.Node, Window] = {}
    stack = [value for node in nodes for value in node.inputs if value is not None and value not in members]
    while stack:
        value = stack.pop()
        node = value.producer()
        if node is None or value in members or node in windows:
            continue
        if computes_mask(node):
            stack += [v for v in node.inputs if v is not None]
        elif window_source(value) is not None:
            window = window_of(node)
            if window is None:
                stack += [v for v in node.inputs if v is not None]
            else:
                windows[node] = window
    return list(windows.values())


def _broadcasts_short_rows(node: ir.Node) -> bool:
    """True if an input of a node broadcasts in short runs, for each of which ONNX Runtime starts a loop."""
    dims = dims_of(node.outputs[0]) or ()
    for value in node.inputs:
        own = (dims_of(value) if value is not None else None) or ()
        run, kinds = 1, set()
        for place in range(1, len(dims) + 1):
            size = dims[-place]
            kinds.add(place <= len(own) and own[-place] == size)
            if size == 1:
                kinds.discard(True)
                continue
            if len(kinds) > 1 and run < _SHORT_RUN:
                return True
            if not isinstance(size, int):
                break
            run *= size
    return False


def _broadcast_to(inputs: Sequence[ir.Value], domain: Domain) -> bool:
    """True if the shapes of the inputs broadcast to those of the domain, without the help of constants."""
    shapes, dims = [dims_of(value) or () for value in inputs], domain.dims
    rank = len(dims)
    return max(map(len, shapes), default=0) == rank and all(
        dims[axis] == 1
        or rank - axis == domain.axis
        or any(len(s) >= rank - axis and s[axis - rank] == dims[axis] for s in shapes)
        for axis in range(rank)
    )
