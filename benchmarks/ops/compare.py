"""Every standard op with a gradient, in onnxtrain, onnxruntime-training 1.19.2 and onnxsim 0.8.1.

For each op up to four of the cases in `tests/autodiff/cases` become models of that op: static and symbolic, at opset 21
(or what the op needs) and, where it is the same there, 17. Each engine differentiates them in an environment of its own
(`worker.py`), runs the result in its own runtime, and differentiates the slope of the gradient along a direction again.
PyTorch in float64 says what is right. An op has what one of its models has.

Usage, with `src` and `tests` on PYTHONPATH:
    python benchmarks/ops/compare.py --ort-training PYTHON --onnxsim PYTHON [NAME ...]
Writes results.json and notes/ops-beside-others.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper

from autodiff.case import Case, runtime_inputs
from autodiff.test_rules import CASES
from onnxtrain.autodiff import coverage

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
PAGE = HERE.parents[1] / "notes" / "ops-beside-others.md"
ASPECTS = ("static", "symbolic", "second", "portable")
ENGINES = {"onnxtrain": "onnxtrain", "ort_training": "onnxruntime-training", "onnxsim": "onnxsim"}
MODELS, OLD_OPSET, OLD_IR = 4, 17, 8

CONTROL_FLOW = {
    "If": """g (float[3, 2] x0, bool c, float[3, 2] w0) => (float loss) {
        y = If (c) <then_branch = t () => (float[3, 2] a) { a = Tanh(x0) },
                    else_branch = e () => (float[3, 2] b) { b = Neg(x0) }>
        p = Mul(y, w0)  loss = ReduceSum<keepdims = 0>(p) }""",
    "Loop": """g (float[3, 2] x0, int64 c, float[3, 2] w0) => (float loss) {
        y = Loop (c, , x0) <body = b (int64 i, bool k, float[3, 2] s) => (bool go, float[3, 2] t) {
            go = Identity(k)  t = Tanh(s) }>
        p = Mul(y, w0)  loss = ReduceSum<keepdims = 0>(p) }""",
    "Scan": """g (float[3, 2] x0, float[3, 2] w0) => (float loss) {
        y = Scan <num_scan_inputs = 1, body = b (float[2] s) => (float[2] t) { t = Tanh(s) }> (x0)
        p = Mul(y, w0)  loss = ReduceSum<keepdims = 0>(p) }""",
}
"""Ops that are no cases of one node, all of them tanh (the Loop twice)."""


def prepare(folder: Path, ops: list[str]) -> dict[str, list[str]]:
    """Writes the models of each op; returns their names."""
    items: dict[str, list[str]] = {}
    for op in ops:
        if op in CONTROL_FLOW:
            items[op] = [_write_flow(folder, op)]
            continue
        cases = [case for case in CASES if case.op == op and case.wrt][:MODELS]
        items[op] = [name for k, case in enumerate(cases) for name in _write_case(folder, f"{op}-{k}", case)]
    return items


def _write_flow(folder: Path, op: str) -> str:
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]>' + CONTROL_FLOW[op])
    x, w, direction = np.random.default_rng(0).uniform(-1, 1, (3, 3, 2)).astype(np.float32)
    tensor = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    y = torch.tanh(torch.tanh(tensor)) if op == "Loop" else torch.tanh(tensor)
    more = {"If": {"c": np.array(True)}, "Loop": {"c": np.array(2)}, "Scan": {}}[op]
    symbolic = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]>' + CONTROL_FLOW[op].replace("[3, 2]", "[n, 2]")
    )
    loss = (y * torch.tensor(w)).sum()
    _write(folder / op, model, symbolic, {"x0": x, "w0": w, **more}, loss, {"x0": tensor}, {"x0": direction})
    return op


def _write_case(folder: Path, name: str, case: Case) -> Iterator[str]:
    rng = np.random.default_rng(0)
    arrays = case.arrays(np.dtype(np.float32))
    tensors = [
        None if a is None else torch.tensor(a, dtype=torch.float64 if a.dtype == np.float32 else None)
        for a in arrays
    ]
    leaves = {f"x{i}": tensors[i].requires_grad_() for i in case.wrt}
    result = case.twin(*tensors)
    outputs = result if isinstance(result, tuple) else (result,)
    weights = [rng.uniform(0.5, 1.5, tuple(out.shape)).astype(np.float32) for out in outputs]
    loss = sum((out * torch.tensor(w)).sum() for out, w in zip(outputs, weights, strict=True))
    feeds = runtime_inputs(case, arrays) | {f"w{k}": w for k, w in enumerate(weights)}
    directions = {name: rng.uniform(-1, 1, leaf.shape).astype(np.float32) for name, leaf in leaves.items()}
    static, symbolic = (_without_sum(case.model(np.dtype(np.float32), symbolic=s)) for s in (False, True))
    _name_by_size(symbolic, feeds)
    _write(folder / name, static, symbolic, feeds, loss, leaves, directions)
    yield name
    try:
        old = [_at_old_opset(model) for model in (static, symbolic)]
    except Exception:  # the op is another one there
        return
    _write(folder / f"{name}-old", *old, feeds, loss, leaves, directions)
    yield f"{name}-old"


def _name_by_size(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
    """Gives sizes that are equal one name, as models have it."""
    for info in model.graph.input:
        for dim, size in zip(info.type.tensor_type.shape.dim, feeds[info.name].shape, strict=True):
            if dim.HasField("dim_param"):
                dim.dim_param = f"n{size}"


def _without_sum(model: onnx.ModelProto) -> onnx.ModelProto:
    """Writes the loss without Sum, of which not all have a gradient."""
    last = model.graph.node.pop()
    total = last.input[0]
    for k, term in enumerate(last.input[1:]):
        model.graph.node.append(helper.make_node("Add", [total, term], [f"total{k}"]))
        total = f"total{k}"
    producer = next(node for node in model.graph.node if total in node.output)
    producer.output[list(producer.output).index(total)] = "loss"
    return model


def _at_old_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.opset_import[0].version, copy.ir_version = OLD_OPSET, OLD_IR
    onnx.checker.check_model(copy, full_check=True)
    return copy


def _write(
    folder: Path,
    static: onnx.ModelProto,
    symbolic: onnx.ModelProto,
    feeds: dict[str, np.ndarray],
    loss: Any,
    leaves: dict[str, torch.Tensor],
    directions: dict[str, np.ndarray],
) -> None:
    """Writes a model, and what PyTorch says of it."""
    folder.mkdir(parents=True)
    onnx.save(static, folder / "static.onnx")
    onnx.save(symbolic, folder / "symbolic.onnx")
    tensors = list(leaves.values())
    gradients = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True, retain_graph=True)
    slope = sum(
        (g * torch.tensor(directions[name])).sum()
        for name, g in zip(leaves, gradients, strict=True)
        if g is not None
    )
    seconds: Any = [None] * len(tensors)
    if getattr(slope, "requires_grad", False):
        seconds = torch.autograd.grad(slope, tensors, allow_unused=True, retain_graph=True)
    arrays = dict(feeds)
    for name, leaf, gradient, second in zip(leaves, tensors, gradients, seconds, strict=True):
        arrays[f"{name}_expected"] = _plain(gradient, leaf)
        arrays[f"{name}_second"] = _plain(second, leaf)
        arrays[f"{name}_direction"] = directions[name]
    np.savez(folder / "arrays.npz", **arrays)
    (folder / "about.json").write_text(json.dumps({"wrt": list(leaves), "inputs": list(feeds)}))


def _plain(value: torch.Tensor | None, leaf: torch.Tensor) -> np.ndarray:
    return np.zeros(tuple(leaf.shape)) if value is None else value.detach().numpy(force=True)


def measure(python: str, engine: str, folder: Path, items: list[str]) -> tuple[dict[str, Any], str]:
    """Returns what an engine makes of the models, and its version; that one ends the process is a verdict."""
    found: dict[str, Any] = {}
    version, waiting = "", list(items)
    while waiting:
        command = [python, str(HERE / "worker.py"), engine, str(folder), *waiting]
        completed = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
        last = None
        for line in completed.stdout.splitlines():
            record = json.loads(line) if line.startswith("{") else {}
            version = record.get("version", version)
            last = record.get("begins", last)
            if "item" in record:
                found[record.pop("item")] = record
        if last is None:
            sys.exit(f"{engine}: {completed.stderr[-2000:]}")
        if last not in found:
            found[last] = dict.fromkeys(ASPECTS, f"ends the process with {completed.returncode}")
        waiting = [item for item in items if item not in found]
    return found, version


def best(records: list[dict[str, str]]) -> dict[str, str]:
    """Returns, for each aspect, right if one of the models is, else what was said of the first."""
    return {
        aspect: "right" if any(r[aspect] == "right" for r in records) else records[0][aspect]
        for aspect in ASPECTS
    }


def tagged() -> set[str]:
    """Returns the ops with an input that a schema of opset 21 to 26 says is differentiable."""
    differentiable = onnx.defs.OpSchema.DifferentiationCategory.Differentiable
    return {
        row.op_type
        for row in coverage()
        for opset in range(max(row.since, 21), 27)
        for formal in onnx.defs.get_schema(row.op_type, opset).inputs
        if formal.differentiation_category == differentiable
    }


ABOUT = """
What onnxtrain, onnxruntime-training and onnxsim can differentiate: each was given the same small models of each op, in
its own environment, and what it made of them was run in its own runtime and compared with PyTorch in float64. An op has
what one of its models has. `benchmarks/ops/compare.py` measures, and writes this page; what was said of each op is in
the result beside it.

- static, symbolic: the gradient is right for declared sizes, or for sizes that are not known
- second: the gradient along a direction, differentiated again, is right
- portable: the gradient is made of ops of the standard domain, so that any ONNX Runtime runs it

Of {count} ops with a gradient:
"""
TAGGED = """
The schemas of opsets 21 to 26 tag {tagged} ops as differentiable, of which onnxtrain has a gradient of {ours}{rest}.
QLinearConv and QLinearMatMul, between integers, have gradients straight through the rounding only, and are left out.
"""


def page(results: dict[str, Any]) -> str:
    """Returns the page of the documentation."""
    ops, versions = results["ops"], results["versions"]
    marked, rows = tagged(), {row.op_type: row for row in coverage()}
    rest = sorted(op for op in marked if rows[op].status not in ("rule", "function"))
    lacks = [
        f"- {op}, {aspect}: {' '.join(found['onnxtrain'][aspect].split())[:160]}"
        for op, found in ops.items()
        for aspect in ASPECTS
        if found["onnxtrain"][aspect] != "right"
    ]
    said = "; not of " + ", ".join(f"{op} ({rows[op].reason})" for op in rest) if rest else ""
    lines = [
        "# Ops and their gradients beside other engines",
        ABOUT.format(count=len(ops)).rstrip("\n"),
        *("", "| | static | symbolic | second | portable |", "|---|---|---|---|---|"),
    ]
    for engine, title in ENGINES.items():
        counts = [sum(found.get(engine, {}).get(a) == "right" for found in ops.values()) for a in ASPECTS]
        lines.append(f"| {title} {versions.get(engine, '')} | {' | '.join(map(str, counts))} |")
    lines += [TAGGED.format(tagged=len(marked), ours=len(marked) - len(rest), rest=said)]
    lines += [f"| op | tagged | {' | '.join(ENGINES.values())} |", "|---|---|---|---|---|"]
    for op, found in ops.items():
        cells = [_cell(found.get(engine, {})) for engine in ENGINES]
        lines.append(f"| {op} | {'yes' if op in marked else ''} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "## What onnxtrain lacks", "", *(lacks or ["Nothing."]), ""])


def _cell(found: dict[str, str]) -> str:
    have = [aspect for aspect in ASPECTS if found.get(aspect) == "right"]
    return "all" if len(have) == len(ASPECTS) else ", ".join(have) or "-"


def main() -> None:
    """Measures, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", help="all by default")
    parser.add_argument("--ort-training", help="Python of its environment")
    parser.add_argument("--onnxsim", help="Python of its environment")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"versions": {}, "ops": {}}
    covered = [row.op_type for row in coverage() if row.status in ("rule", "function")]
    ops = [
        op for op in covered if not op.startswith("QLinear") and (not arguments.ops or op in arguments.ops)
    ]
    pythons = {
        "onnxtrain": sys.executable,
        "ort_training": arguments.ort_training,
        "onnxsim": arguments.onnxsim,
    }
    with tempfile.TemporaryDirectory() as place:
        items = prepare(Path(place), ops)
        everything = [name for names in items.values() for name in names]
        for engine, python in pythons.items():
            if python is None:
                continue
            found, known["versions"][engine] = measure(python, engine, Path(place), everything)
            for op, names in items.items():
                known["ops"].setdefault(op, {})[engine] = best([found[name] for name in names])
    known["ops"] = {op: known["ops"][op] for op in sorted(known["ops"])}
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    PAGE.write_text(page(known))


if __name__ == "__main__":
    main()
