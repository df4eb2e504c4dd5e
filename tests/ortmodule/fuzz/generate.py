"""A program from a seed: a module as Python text, and what is done with it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch

from ortmodule.fuzz.known import OFF
from ortmodule.fuzz.run import run
from ortmodule.fuzz.scenario import write_scenario
from ortmodule.fuzz.statements import write_refused, write_statement
from ortmodule.fuzz.writer import Unfit, Writer

__all__ = ["Program", "generate"]


_REFUSED = 0.1
"""The part of the programs that eager PyTorch need not be able to run."""


@dataclass(frozen=True)
class Program:
    """A generated program.

    Attributes:
        seed: what it was made from.
        init: lines of `__init__`.
        body: lines of `forward`.
        result: what `forward` returns.
        scenario: lines of the function that calls it.
        features: what the judge must know of it.
    """

    seed: str
    init: tuple[str, ...]
    arguments: tuple[str, ...]
    body: tuple[str, ...]
    result: str
    scenario: tuple[str, ...]
    features: frozenset[str] = field(default_factory=frozenset)

    @property
    def text(self) -> str:
        """The program as a Python file."""
        lines = [
            f'"""Seed {self.seed}."""',
            "from ortmodule.fuzz.prelude import *",
            "",
            "",
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *(f"        {line}" for line in self.init),
            "",
            f"    def forward({', '.join(('self', *self.arguments))}):",
            *(f"        {line}" for line in self.body),
            f"        return {self.result}",
            "",
            "",
            "def scenario(net, model, see):",
            *(f"    {line}" for line in self.scenario),
        ]
        return "\n".join(lines) + "\n"


def generate(seed: str, off: frozenset[str] = OFF) -> Program:
    """Returns the program of a seed; the same for the same seed and switches."""
    attempt = 0
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            try:
                return _written(seed, Writer(f"{seed}/{attempt}", off))
            except Unfit:
                attempt += 1


def _written(seed: str, writer: Writer) -> Program:
    inputs = _write_inputs(writer)
    _write_state(writer, inputs)
    for _ in range(writer.choose.randint(3, 11)):
        write_statement(writer)
    patience = 1 if writer.odds(_REFUSED) else 6
    if patience == 1 and writer.odds(0.7):
        write_refused(writer)
    result = _result(writer)
    body = tuple(writer.body) or ("pass",)
    for attempt in range(patience):
        scenario = tuple(write_scenario(writer, inputs, changing=attempt < 4))
        program = Program(
            seed,
            tuple(writer.init),
            tuple(inputs.arguments),
            body,
            result,
            scenario,
            frozenset(writer.features),
        )
        if patience == 1 or run(program.text, "eager").error is None:
            return program
    raise Unfit


@dataclass
class Inputs:
    """Arguments of `forward`: expressions that make the tensors, in which B is the batch size, S another size."""

    arguments: list[str] = field(default_factory=list)
    makers: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


_SHAPES = (
    "B, 3",
    "B, 4",
    "B, 2, 3",
    "B, S, 4",
    "B, 4, S",
    "B, 3, 6, 6",
    "B, 2, S + 2, S + 2",
    "B",
    "3, B",
    "S, B, 3",
    "B, B",
    "",
)


def _write_inputs(writer: Writer) -> Inputs:
    choose = writer.choose
    inputs = Inputs(sizes={"B": choose.choice([2, 3, 4]), "S": choose.choice([3, 4, 5])})
    shape = choose.choice(_SHAPES[:-1])
    inputs.makers["x0"] = _maker(writer, shape)
    if writer.odds(0.5):
        inputs.makers["x1"] = _maker(writer, shape if writer.odds(0.6) else choose.choice(_SHAPES))
    if writer.odds(0.35):
        inputs.makers["n0"] = f"ints(5, {choose.choice(['B', 'B, 3', 'B, S', shape])})"
    if writer.odds(0.15):
        inputs.makers["m0"] = f"bools({shape})"
    inputs.arguments = list(inputs.makers)
    if writer.odds(0.15):
        inputs.arguments.append(choose.choice(["scale=2", "scale=0.5", "mask=None", "flag=True"]))
    for name, size in inputs.sizes.items():
        writer.scope[name] = size
    for name, maker in inputs.makers.items():
        writer.scope[name] = eval(maker, writer.scope)
        writer.tensors.append(name)
    if inputs.arguments[-1].startswith("scale"):
        exec(inputs.arguments[-1], writer.scope)
        writer.write([f"v0 = x0 * {inputs.arguments[-1].partition('=')[0]}"], ["v0"])
    elif inputs.arguments[-1].startswith(("mask", "flag")):
        exec(inputs.arguments[-1], writer.scope)
        name = inputs.arguments[-1].partition("=")[0]
        writer.write([f"v0 = x0 + 1 if {name} else x0 * 2"], ["v0"])
    return inputs


def _maker(writer: Writer, shape: str) -> str:
    plain = f"randn({shape})"
    if not shape or writer.odds(0.8):
        return plain
    first, *others = shape.split(", ")
    views = [f"randn({', '.join([*others[::-1], first])}).permute(*range({len(others)}, -1, -1))"]
    views += [
        f"randn(2 * {shape})[::2]",
        f"randn(1 + {shape})[1:]",
        f"randn(1, {', '.join(others) or 1})[:, :].expand({shape})",
    ]
    if not others:
        views.pop()
    return writer.choose.choice(views)


def _write_state(writer: Writer, inputs: Inputs) -> None:
    choose = writer.choose
    net = writer.scope["self"]
    size = writer.value("x0").shape[-1]
    if any(symbol in inputs.makers["x0"].split(",")[-1] for symbol in "BS"):
        size = 3
    if writer.odds(0.6):
        shape = choose.choice([f"{size}", f"{size}, {size}", f"4, {size}", "1", ""])
        _hold(writer, "p0", f"nn.Parameter(randn({shape}))")
    if hasattr(net, "p0") and writer.odds(0.3):
        _hold(writer, "p2", f"nn.Parameter(randn({shape}))")
    if writer.odds(0.2):
        _hold(writer, "p1", "nn.Parameter(randn(5, 3))")
    if writer.odds(0.4):
        shape = choose.choice([f"({size},)", "()", "(1,)", f"(2, {size})"])
        _hold(writer, "b0", f"{choose.choice(['torch.zeros', 'torch.ones'])}({shape})")
    if writer.odds(0.12):
        _hold(writer, "n1", "torch.arange(4)")
    if writer.odds(0.1) and hasattr(net, "p0"):
        writer.declare("self.tied = self.p0")
    if writer.odds(0.06) and hasattr(net, "b0") and "overlap" not in writer.off:
        _hold(writer, "b2", "self.b0.view(-1)[:1]")


def _hold(writer: Writer, name: str, value: str) -> None:
    """Writes a parameter or a buffer."""
    is_parameter = value.startswith("nn.Parameter")
    writer.declare(f"self.{name} = {value}" if is_parameter else f"self.register_buffer({name!r}, {value})")
    writer.tensors.append(f"self.{name}")


def _result(writer: Writer) -> str:
    """Write the return statement: the last values, inputs, parameters, buffers or numbers, in some container."""
    choose = writer.choose
    local = [name for name in writer.tensors if name.startswith("v")]
    if not local:
        raise Unfit
    names = local[-choose.randint(1, 4) :]
    names += [writer.refused] if writer.refused else []
    if writer.odds(0.25):
        names.append(choose.choice(writer.tensors))
    if writer.odds(0.06):
        names.append(
            choose.choice(
                [
                    "None",
                    "1.5",
                    "'text'",
                    f"{names[0]}.shape",
                    f"{names[0]}.shape[0]",
                    "self.training",
                    f"[{names[0]}]",
                ]
            )
        )
    if len(names) == 1:
        return names[0] if writer.odds(0.9) else f"({names[0]},)"
    if writer.odds(0.2):
        return "dict(" + ", ".join(f"k{index}={name}" for index, name in enumerate(names)) + ")"
    return f"[{', '.join(names)}]" if writer.odds(0.1) else f"({', '.join(names)})"
