"""Describe this machine, and tell whether anything else works on it."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

__all__ = ["about_machine", "busy_processes", "memory_mb"]

WATCHED_S = 0.5
BUSY = 0.05
"""Share of one core from which a process counts as busy."""


def busy_processes() -> list[str]:
    """Returns what other processes use the processor now, as texts; empty on an idle machine, and where none tells."""
    before = _processor_times()
    time.sleep(WATCHED_S)
    ticks = os.sysconf("SC_CLK_TCK") * WATCHED_S if before else 1.0
    busy, own = [], _own_processes()
    for process, (name, used) in _processor_times().items():
        share = (used - before.get(process, (name, used))[1]) / ticks
        if process not in own and share >= BUSY:
            busy.append((share, f"{name} (process {process}) uses {share:.0%} of a core"))
    return [text for _, text in sorted(busy, reverse=True)]


def _own_processes() -> set[int]:
    """This process and those that have started it, such as a program that keeps the machine quiet."""
    own, process = {os.getpid()}, os.getppid()
    while process > 1 and process not in own:
        own.add(process)
        try:
            text = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            break
        process = int(text[text.rindex(")") + 2 :].split()[1])
    return own


def _processor_times() -> dict[int, tuple[str, int]]:
    """Name and clock ticks of every process, from Linux's /proc."""
    times = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text()
        except OSError:  # it has ended
            continue
        name = text[text.index("(") + 1 : text.rindex(")")]
        fields = text[text.rindex(")") + 2 :].split()
        times[int(folder.name)] = (name, int(fields[11]) + int(fields[12]))
    return times


def memory_mb(key: str = "VmHWM") -> float | None:
    """Resident memory of this process in MB, at most so far (VmHWM) or now (VmRSS); None where no system tells."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return round(next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024, 1)


def about_machine() -> dict[str, object]:
    """Returns processor, cores, vector extensions that matter, and the system."""
    about: dict[str, object] = {"machine": platform.machine(), "system": platform.system()}
    if hasattr(os, "sched_getaffinity"):
        about["cores"] = len(os.sched_getaffinity(0))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return about
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    about["processor"] = found.get("model name", "unknown")
    flags = set(found.get("flags", "").split())
    about["extensions"] = sorted(flags & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
    return about
