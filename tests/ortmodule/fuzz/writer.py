"""Writes the body of a forward, statement by statement, while it runs on real tensors."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ortmodule.fuzz import prelude

__all__ = ["Unfit", "Writer"]

_MOST_ELEMENTS = 2000
_LARGEST = 1e3


class Unfit(Exception):
    """There is nothing that an ingredient could be applied to."""


class Writer:
    """A forward that is being written.

    Attributes:
        choose: the random numbers of the program.
        off: names of what is not to be written, see `known`.
        init: lines of `__init__`.
        body: lines of `forward`.
        scope: names and their values after the last line.
        tensors: names of tensors, of which the next statements choose.
        features: what the program has that the judge or the scenario must know.
        layers: modules that a later statement may call again.
        refused: the name of a result that eager PyTorch refuses to compute.
        grad: whether the next line runs with gradients.
        takes_empty: whether placeholders may be tensors without elements.
    """

    def __init__(self, seed: str, off: frozenset[str]) -> None:
        self.choose = random.Random(seed)
        self.off = off
        self.init: list[str] = []
        self.body: list[str] = []
        self.scope: dict[str, Any] = {name: getattr(prelude, name) for name in prelude.__all__}
        self.scope["self"] = nn.Module()
        self.tensors: list[str] = []
        self.features: set[str] = set()
        self.layers: list[str] = []
        self.refused = ""
        self.grad = True
        self.takes_empty = True
        self.depth = 0
        self._count = 0

    # Names and values

    def new(self, prefix: str = "v") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def value(self, expression: str) -> Any:
        return eval(expression, self.scope)

    def pick(self, fits: Callable[[torch.Tensor], bool] = lambda _: True) -> str:
        """A tensor, of the later ones more often than of the first."""
        values = {name: self.value(name) for name in self.tensors}
        names = [
            name
            for name, value in values.items()
            if isinstance(value, torch.Tensor) and fits(value) and (self.takes_empty or value.numel())
        ]
        if not names:
            raise Unfit
        late = names[-4:]
        return self.choose.choice(late if self.choose.random() < 0.7 else names)

    def float(self, rank: int = 0, most: int = 5) -> str:
        return self.pick(lambda t: t.dtype == torch.float32 and rank <= t.dim() <= most)

    def odds(self, probability: float) -> bool:
        return self.choose.random() < probability

    # Lines

    def declare(self, line: str) -> None:
        """Writes a line of `__init__`, which runs at once."""
        exec(line, self.scope)
        self.init.append(line)

    def write(self, lines: list[str], made: list[str]) -> bool:
        """Writes lines of `forward` that define the names `made`; False if they do not run."""
        before = {name: self.scope[name] for name in made if name in self.scope}
        try:
            exec("\n".join(lines), self.scope)
            fits = all(_is_fit(self.value(name)) for name in (*made, *self.tensors))
        except Exception:
            fits = False
        if not fits:
            self.scope.update(before)
            return False
        self.body += [f"{'    ' * self.depth}{line}" for line in lines]
        self.tensors += [
            name for name in made if torch.is_tensor(self.value(name)) and name not in self.tensors
        ]
        return True

    @contextmanager
    def region(self, header: str, manager: Any) -> Iterator[None]:
        """Make the lines that follow the block of `header`, and run them in `manager`."""
        self.body.append(f"{'    ' * self.depth}{header}")
        self.depth += 1
        length = len(self.body)
        grad = self.grad
        try:
            with manager:
                self.grad = torch.is_grad_enabled()
                yield
        except Unfit:
            del self.body[length - 1 :]
            self.depth -= 1
            raise
        finally:
            self.grad = grad
        if len(self.body) == length:
            self.body.append(f"{'    ' * self.depth}pass")
        self.depth -= 1

    def nest(self, headers: list[str], write: Callable[[], None]) -> None:
        """Writes a block inside of `headers`, each of which is in the one before; see :meth:`region`."""
        if not headers:
            write()
            return
        header = headers[0]
        expression = header.removeprefix("with ").removesuffix(":")
        manager = self.value(expression) if header.startswith("with ") else contextlib.nullcontext()
        with contextlib.ExitStack() as entered:
            try:
                entered.enter_context(manager)
            except RuntimeError as error:  # some managers exclude others
                raise Unfit from error
            with self.region(header, contextlib.nullcontext()):
                self.nest(headers[1:], write)

    # Templates

    def fill(self, template: str) -> str:
        """Replaces the placeholders of a template; one that occurs again stands for the same again.

        {x} a float tensor, {x1} of rank 1 or more, {x2=} of rank 2 exactly; {y} another of the same shape, {z} any
        other; {n} integers, {m} bools, {t} any tensor; {p} a parameter, {b} a buffer. Of the first one: {d} an axis,
        {e} another, {k} a length along d, {j} an index along d, {q} several. {c} a number, {B} True or False.
        """
        first: list[str] = []
        axes: list[int] = []
        known: dict[str, str] = {}

        def replaced(match: re.Match[str]) -> str:
            kind, rank, exact = match.group(1), match.group(2), match.group(3)
            if match.group() not in known or kind in "cBz":
                if kind in "xtnmpb":
                    text = self._tensor(kind, int(rank or 0), bool(exact))
                    first.append(text)
                else:
                    text = self._dependent(kind, self.value(first[0]) if first else None, axes)
                known[match.group()] = text
            return known[match.group()]

        return re.sub(r"\{([a-zB])(\d?)(=?)\}", replaced, template)

    def _tensor(self, kind: str, rank: int, exact: bool) -> str:
        if kind == "p":
            return self._held("nn.Parameter")
        if kind == "b":
            return self._held("buffer")
        if kind == "x":
            return self.float(rank, rank if exact else 5)
        fits = {
            "t": lambda t: True,
            "n": lambda t: t.dtype in (torch.int64, torch.int32),
            "m": lambda t: t.dtype == torch.bool,
        }[kind]
        return self.pick(lambda t: fits(t) and t.dim() >= rank and (not exact or t.dim() == rank))

    def _held(self, kind: str) -> str:
        names = [n for n in self.tensors if n.startswith("self.")]
        is_parameter = kind == "nn.Parameter"
        names = [n for n in names if isinstance(self.value(n), nn.Parameter) == is_parameter]
        if not names:
            raise Unfit
        return self.choose.choice(names)

    def _dependent(self, kind: str, first: torch.Tensor | None, axes: list[int]) -> str:
        choose = self.choose
        if kind == "c":
            return choose.choice(["0.5", "2", "-1.5", "0.1", "1", "3.0"])
        if kind == "B":
            return choose.choice(["True", "False"])
        if kind == "z":
            return self.float()
        if first is None:
            raise Unfit
        if kind == "y":
            return self.pick(lambda t: t.dtype == first.dtype and t.shape == first.shape)
        rank = first.dim()
        if rank == 0:
            raise Unfit
        if kind in "de":
            left = [axis for axis in range(rank) if axis not in axes]
            if not left:
                raise Unfit
            axes.append(choose.choice(left))
            return str(axes[-1] - rank if self.odds(0.5) else axes[-1])
        size = first.shape[axes[0]] if axes else first.shape[0]
        if size == 0:
            raise Unfit
        if kind == "k":
            return str(choose.randint(1, min(size, 3)))
        if kind == "j":
            return str(choose.randint(-size, size - 1))
        if kind == "q":
            return str([choose.randint(-size, size - 1) for _ in range(choose.randint(1, 4))])
        raise AssertionError(kind)


def _is_fit(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_complex():
        return not isinstance(value, torch.Tensor)
    if value.numel() > _MOST_ELEMENTS or value.dim() > 6:
        return False
    value = value.detach()
    return not value.numel() or bool((value.double().abs() < _LARGEST).all())
