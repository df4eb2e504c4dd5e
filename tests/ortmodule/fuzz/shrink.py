"""Takes away what a difference does not need."""

from __future__ import annotations

import dataclasses

from ortmodule.fuzz.generate import Program
from ortmodule.fuzz.judge import judge

__all__ = ["shrink"]


def shrink(program: Program) -> Program:
    """Returns the program without lines whose absence leaves the kind of its verdict."""
    kind = judge(program.text, program.features).kind
    size = None
    while size != (size := len(program.text)):
        for part in ("scenario", "body", "init"):
            program = _shrink_part(program, part, kind)
        program = _shrink_result(program, kind)
    return program


def _shrink_part(program: Program, part: str, kind: str) -> Program:
    index = len(getattr(program, part)) - 1
    while index >= 0:
        lines = getattr(program, part)
        last = index + 1
        while last < len(lines) and _depth(lines[last]) > _depth(lines[index]):
            last += 1
        less = dataclasses.replace(program, **{part: (*lines[:index], *lines[last:]) or ("pass",)})
        if lines[index] != "pass" and _still(less, kind):
            program = less
        index -= 1
    return program


def _shrink_result(program: Program, kind: str) -> Program:
    if not program.result.startswith("("):
        return program
    names = [name.strip() for name in program.result.strip("()").split(",") if name.strip()]
    for name in [*names, *names]:
        fewer = [other for other in names if other != name]
        if fewer:
            less = dataclasses.replace(program, result=f"({', '.join(fewer)},)")
            if _still(less, kind):
                program, names = less, fewer
    return program


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _still(program: Program, kind: str) -> bool:
    try:
        return judge(program.text, program.features).kind == kind
    except Exception:  # what is left is no program any more
        return False
