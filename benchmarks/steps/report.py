"""Tables and the chart of the results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steps import results
from steps.chart import write_chart
from steps.engines import ENGINES, REFERENCES
from steps.measure import CONTROL
from steps.nets import CASES

__all__ = ["one_case", "ratio", "summary", "write_report"]

START, END = "<!-- results: made by benchmarks/run.py --report -->", "<!-- end of results -->"
COLUMNS = (
    "torch", "compile", "device", "device-kernels", "ortmodule", "ortmodule-kernels", "ort-training", "onnxsim"
)  # fmt: skip


def _time(measured: Mapping[str, Any], name: str, counts: str, statistic: str = "min") -> float | None:
    """Milliseconds of an engine; of PyTorch's the faster layout."""
    names = [name, f"{name}-cl"] if name in ("torch", "compile") else [name]
    times = [measured[n][f"{counts}_ms"][statistic] for n in names if f"{counts}_ms" in measured.get(n, {})]
    return min(times) if times else None


def ratio(measured: Mapping[str, Any], name: str, counts: str, statistic: str = "min") -> float | None:
    """Return the time of an engine over that of the best of PyTorch's engines."""
    best = [t for n in REFERENCES if (t := _time(measured, n, counts, statistic)) is not None]
    own = _time(measured, name, counts, statistic)
    return own / min(best) if best and own is not None else None


def one_case(case: str, measured: Mapping[str, Any]) -> str:
    """Returns what was measured of one case, a line for each engine."""
    counts = CASES[case].net.counts
    lines = [f"{case}: {CASES[case].net.about}, batch {CASES[case].batch}"]
    for name, found in measured.items():
        title = ENGINES[name.removesuffix(CONTROL)].title + (" (control)" if CONTROL in name else "")
        if "failed" in found:
            lines.append(f"  {title:32} failed: {found['failed']}")
        elif "first_step_s" in found:
            lines.append(f"  {title:32} first step {found['first_step_s']:7.2f} s")
        else:
            lines.append(f"  {title:32} {_line(measured, name, counts)}")
    return "\n".join(lines)


def _line(measured: Mapping[str, Any], name: str, counts: str) -> str:
    found = measured[name]
    whole, update = found["step_ms"], found["update_ms"]["min"]
    against = {statistic: ratio(measured, name, counts, statistic) for statistic in ("min", "median")}
    text = (
        f"step min {whole['min']:8.2f} median {whole['median']:8.2f} ms ({whole['q1']:.2f} to {whole['q3']:.2f}), "
        f"of it AdamW {update:6.2f}; peak {found['peak_mb'] or 0:5.0f} MB"
    )
    return text + "; ratio " + ", ".join(f"{key} {value:.2f}" for key, value in against.items() if value)


def _cell(measured: Mapping[str, Any], name: str, counts: str, statistic: str) -> str:
    time, against = _time(measured, name, counts, statistic), ratio(measured, name, counts, statistic)
    if time is None:
        return "fails" if "failed" in measured.get(name, {}) else ""
    number = f"{time:.2f}" if time < 10 else f"{time:.1f}" if time < 100 else f"{time:.0f}"
    return f"{number} ({against:.2f})" if against else number


def _times_table(found: Mapping[str, Any], cases: list[str], statistic: str) -> list[str]:
    titles = [ENGINES[name].title for name in COLUMNS]
    lines = ["| network, batch | " + " | ".join(titles) + " | A/A |", "|---" * (len(titles) + 2) + "|"]
    for case in cases:
        measured, counts = found[case]["steps"]["engines"], CASES[case].net.counts
        cells = [_cell(measured, name, counts, statistic) for name in COLUMNS]
        lines.append(
            f"| {case}, {CASES[case].batch} | "
            + " | ".join(cells)
            + f" | {_control(measured, counts, statistic)} |"
        )
    return lines


def _control(measured: Mapping[str, Any], counts: str, statistic: str) -> str:
    again = next((name for name in measured if name.endswith(CONTROL)), None)
    if again is None:
        return ""
    pair = [measured[name][f"{counts}_ms"][statistic] for name in (again, again.removesuffix(CONTROL))]
    return f"{pair[0] / pair[1]:.2f}"


def _numbers_table(found: Mapping[str, Any], cases: list[str], kind: str, key: str, form: str) -> list[str]:
    lines = [
        "| network, batch | " + " | ".join(ENGINES[name].title for name in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for case in cases:
        measured = found[case].get(kind, {}).get("engines", {})
        cells = [format(v, form) if (v := measured.get(n, {}).get(key)) else "" for n in COLUMNS]
        if any(cells):
            lines.append(f"| {case}, {CASES[case].batch} | " + " | ".join(cells) + " |")
    return lines


def write_report(path: Path, notes: Path) -> None:
    """Writes the tables between the marks of notes/performance.md, and the chart beside it."""
    found = results.read(path)
    cases = [case for case in CASES if "steps" in found.get(case, {})]
    page = notes / "performance.md"
    text = page.read_text()
    before, after = text[: text.index(START) + len(START)], text[text.index(END) :]
    parts = [
        [
            "## One step",
            "",
            "Median time in milliseconds, and in brackets its ratio to PyTorch's best median.",
        ],
        _times_table(found, cases, "median"),
        ["The same table for the fastest step of each engine. PyTorch's step times vary more."],
        _times_table(found, cases, "min"),
        ["## Peak memory", "", "Peak memory of the process (`VmHWM`) in MB."],
        _numbers_table(found, cases, "steps", "peak_mb", ".0f"),
        ["## First step of each engine", "", "Seconds, without imports, with empty compilation caches."],
        _numbers_table(found, cases, "first", "first_step_s", ".2f"),
    ]
    page.write_text(before + "\n\n" + "\n\n".join("\n".join(part) for part in parts) + "\n\n" + after)
    write_chart(notes / "images" / "performance.png", _ratios(found, cases))


def summary(path: Path, cases: list[str]) -> str:
    """Returns a table of ratios, a line for each case, and the range and median of each engine's ratios."""
    found = results.read(path)
    cases = [case for case in cases or CASES if "steps" in found.get(case, {})]
    engines = ("device-kernels", "ortmodule-kernels", "device", "ortmodule")
    titles = ("device, kernels", "ORTModule, kernels", "device, stock", "ORTModule, stock")
    lines = [f"| network | best of PyTorch, ms | {' | '.join(titles)} | A/A | MB |", "|---" * 8 + "|"]
    ratios: dict[str, list[float]] = {name: [] for name in engines}
    for case in cases:
        measured, counts = found[case]["steps"]["engines"], CASES[case].net.counts
        cells = []
        for name in engines:
            median, least = (ratio(measured, name, counts, which) for which in ("median", "min"))
            cells.append("" if median is None or least is None else f"{median:.2f} ({least:.2f})")
            ratios[name] += [] if median is None else [median]
        best = min(t for n in REFERENCES if (t := _time(measured, n, counts, "median")) is not None)
        peaks = [measured.get(n, {}).get("peak_mb") for n in ("torch", "ortmodule-kernels", "device-kernels")]
        lines.append(
            f"| {case} | {best:.3g} | {' | '.join(cells)} | {_control(measured, counts, 'median')} | "
            + " / ".join("" if peak is None else f"{peak:.0f}" for peak in peaks)
            + " |"
        )
    lines += [
        f"{title}: {min(values):.2f} to {max(values):.2f}, median {statistics.median(values):.2f}"
        for title, values in zip(titles, ratios.values(), strict=True)
        if values
    ]
    return "\n".join(lines)


def _ratios(found: Mapping[str, Any], cases: list[str]) -> dict[str, dict[str, float]]:
    """Ratio by engine and case, of those that were measured."""
    wanted = [name for name in COLUMNS if name not in REFERENCES]
    table: dict[str, dict[str, float]] = {}
    for name in wanted:
        for case in cases:
            value = ratio(found[case]["steps"]["engines"], name, CASES[case].net.counts, "median")
            if value is not None:
                table.setdefault(ENGINES[name].title, {})[case] = value
    return table
