"""Differentiates the models of ONNX's own node tests and compares with differences of what they compute.

Each test is measured in a process of its own (`measure.py`), as kernels may end theirs. Verdicts: right, not
differentiable (no input or no output that is a floating-point tensor, or an op whose derivative is zero, which the
differences say too), newer opset (in no opset that stock runtimes accept), refused (a documented error), no judge
(nobody computes the outputs that the test expects), at a kink (wherever the data is moved to), wrong.

Usage, with `src` and `tests` on PYTHONPATH: python benchmarks/node_tests/sweep.py [NAME or part of it ...]
Writes results.json and notes/node-tests.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
PAGE = HERE.parents[1] / "notes" / "node-tests.md"
VERDICTS = ("right", "not differentiable", "newer opset", "refused", "no judge", "at a kink", "wrong")
SECONDS = 600


def cases() -> list[Any]:
    """Returns the node tests of ONNX, and its tests of the Gradient op."""
    from onnx.backend.test.case.model import collect_testcases as collect_models
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradients = [case for case in collect_models() if case.name.startswith("test_gradient")]
        return sorted([*collect_testcases(None), *gradients], key=lambda case: case.name)


def measured(wanted: list[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields names and verdicts, one test after the other."""
    context = multiprocessing.get_context("fork")
    for case in wanted:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(theirs, case))
        process.start()
        theirs.close()
        try:
            found = (
                mine.recv()
                if mine.poll(SECONDS)
                else {"verdict": "wrong", "reason": f"more than {SECONDS} s"}
            )
        except EOFError:
            process.join()
            found = {"verdict": "wrong", "reason": f"the process ended with {process.exitcode}"}
        process.kill()
        process.join()
        yield case.name, found


def _send(connection: Any, case: Any) -> None:
    warnings.simplefilter("ignore")
    from measure import measure

    try:
        found = measure(case)
    except Exception as error:
        found = {"verdict": "wrong", "reason": f"{type(error).__name__}: {str(error)[:400]}"}
    connection.send(found)


def main() -> None:
    """Measures, prints what is not right, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="all whose names contain one of these")
    parser.add_argument("--resume", action="store_true", help="leave out what the results have already")
    parser.add_argument("--again", nargs="*", default=[], help="verdicts to measure again, alone")
    arguments = parser.parse_args()
    known = json.loads(RESULTS.read_text())["tests"] if RESULTS.exists() else {}
    tests = cases()
    # Here, so that every process has it already.
    import measure  # noqa: F401

    wanted = [
        case for case in tests if not arguments.names or any(part in case.name for part in arguments.names)
    ]
    if arguments.resume:
        wanted = [case for case in wanted if case.name not in known]
    if arguments.again:
        wanted = [case for case in wanted if known.get(case.name, {}).get("verdict") in arguments.again]
    for number, (name, found) in enumerate(measured(wanted)):
        known[name] = found
        if found["verdict"] not in ("right", "not differentiable"):
            print(name, found["verdict"], found.get("reason", "")[:300], sep=" | ", flush=True)
        if number % 50 == 49:
            _write(known)
    known = {case.name: known[case.name] for case in tests if case.name in known}
    _write(known)
    PAGE.write_text(page(known))


def _write(known: dict[str, Any]) -> None:
    versions = {name: metadata.version(name) for name in ("onnx", "onnxruntime")}
    RESULTS.write_text(
        json.dumps({"versions": versions, "tests": known}, indent=0, ensure_ascii=False) + "\n"
    )


ABOUT = """
Each of ONNX's node tests is a model of one op, or of the ops that its function is made of (`_expanded`), with inputs
and expected outputs. The loss is a weighted sum of its floating-point outputs, differentiated with respect to each
input that is a floating-point tensor; sequences and optionals are built from tensors in the model. The gradient model
runs in ONNX Runtime in the dtype of the test, and must agree along three random directions per input with central
differences of the test's own model, which must first give the outputs that the test expects.
`benchmarks/node_tests/sweep.py` writes this page; its result for each test is beside it.

Versions: {versions}. The gradient models of tests whose opset is above 26 are of opset 26.
"""
OF_RIGHT = """
Of those that are right, {judges}. {reference} have the gradient by ONNX's reference evaluator, as ONNX Runtime lacks a
kernel of the model itself, or computes something else than the test expects. {rounding} are right in float64, as
float32 loses too many digits (1 - y² of a tanh). {constants} have inputs that are no floats as constants; as run-time
inputs these are refused ({refused}). {moved} are at data a little beside those of the test, where these lie at a kink:
{names}.
"""


def page(known: dict[str, Any]) -> str:
    """Returns the page of the documentation."""
    counts = Counter(found["verdict"] for found in known.values())
    right = {name: found for name, found in known.items() if found["verdict"] == "right"}
    judges = Counter(found["judge"] for found in right.values()).most_common()
    fixed = [found["constants"] for found in right.values() if "constants" in found]
    moved = [name.removeprefix("test_") for name, found in right.items() if "moved" in found]
    about = ABOUT.format(versions=", ".join(f"{n} {metadata.version(n)}" for n in ("onnx", "onnxruntime")))
    of_right = OF_RIGHT.format(
        judges=", ".join(f"{count} are beside differences by {by}" for by, count in judges),
        reference=sum(found["gradient"] == "reference" for found in right.values()),
        rounding=sum("rounding" in found for found in right.values()),
        constants=len(fixed),
        refused=", ".join(sorted(set(map(_refused, fixed)))),
        moved=len(moved),
        names=", ".join(moved),
    )
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, found in known.items():
        if found["verdict"] != "right":
            reasons.setdefault((found["verdict"], _short(found)), []).append(name.removeprefix("test_"))
    order = sorted(reasons.items(), key=lambda item: (VERDICTS.index(item[0][0]), -len(item[1])))
    lines = [
        "# ONNX's node tests",
        *("", *_wrapped(about)),
        *("", "| verdict | tests |", "|---|---|"),
        *(f"| {verdict} | {counts[verdict]} |" for verdict in VERDICTS),
        f"| in all | {len(known)} |",
        *("", *_wrapped(of_right)),
        *("", "## Not right", "", "| verdict | why | tests |", "|---|---|---|"),
        *(f"| {verdict} | {why} | {_some(names)} |" for (verdict, why), names in order),
    ]
    return "\n".join([*lines, ""])


def _wrapped(text: str) -> list[str]:
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n\n".join(textwrap.fill(p, 118, break_long_words=False) for p in paragraphs).splitlines()


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{len(names)}: {', '.join(names[:3])}, ..."


def _refused(error: str) -> str:
    match = re.search(r"(?:differentiating |VJP rule for ')([\w.:]+)", error)
    return match[1] if match else error[:40]


def _short(found: dict[str, Any]) -> str:
    why = found.get("reason", "")
    if found["verdict"] == "newer opset":
        return why.partition(":")[0]
    if found["verdict"] == "refused" and (match := re.search(r"(?:\(node|\(the node) [^)]*\)+:? ?(.*)", why)):
        return f"{_refused(why)}: {match[1].partition('. ')[0]}"[:200].replace("|", "/")
    return " ".join(why.split())[:200].replace("|", "/")


if __name__ == "__main__":
    main()
