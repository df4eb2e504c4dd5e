"""All hosts train with the losses of Python: benchmarks/every_host.py compares them, and writes the page."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

from onnxtrain import api

from .cases import TOLERANCE, Case, Host, losses_of
from .nets import ADAPTERS, NETS, write_feeds
from .programs import JAVA_PACKAGE, ROOT

sys.path += [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "common")]

import every_host
import page_tables

pytestmark = pytest.mark.usefixtures("without_kernels")

FEW = 4
NAMES = ("mlp", "adapter-int4")


@pytest.mark.thorough
@pytest.mark.parametrize("name", [net.name for net in [*NETS, *ADAPTERS]])
@pytest.mark.parametrize("program", ["node", "java"])
def test_losses_of_50_steps_are_those_of_python(
    program: str, name: str, case_of: Callable[[str], Case], request: pytest.FixtureRequest
) -> None:
    """`test_hosts.py` has `device.py` and C++, web/test/losses.test.mjs WebAssembly."""
    if program == "java" and not os.environ.get(JAVA_PACKAGE):
        pytest.skip(f"needs ONNX Runtime's package for Java: {JAVA_PACKAGE}")
    host: Host = request.getfixturevalue(program)
    case = case_of(name)
    losses = losses_of(host, case.artifacts, case.feeds)
    np.testing.assert_allclose(losses, case.train()[0], rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def folder(case_of: Callable[[str], Case], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nets as web/test/reference.py writes them, trained for a few steps by the on-device API."""
    root = tmp_path_factory.mktemp("reference")
    for name in NAMES:
        case = case_of(name)
        net = Path(shutil.copytree(case.artifacts, root / name))
        batches = case.batches[:FEW]
        write_feeds(root / "feeds", case.manifest, batches)
        for path in (root / "feeds").iterdir():
            path.rename(net / path.name)
        (root / "feeds").rmdir()
        losses, state = case.train(batches=batches)
        (net / "losses.json").write_text(json.dumps({"losses": losses}))
        for file, delta in (("trained", False), ("delta", True)):
            api.CheckpointState.save_checkpoint(
                state, net / file, include_optimizer_state=True, trainable_only=delta
            )
    return root


@pytest.fixture
def compare(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs the program for the two nets, and returns its results."""
    monkeypatch.setattr(every_host, "reference", lambda: folder)
    monkeypatch.setattr(every_host, "gflops", lambda: 1.0)
    monkeypatch.setattr(every_host, "NETS", NAMES)
    monkeypatch.setattr(every_host, "STEPS", FEW)

    def run(*arguments: str) -> dict[str, Any]:
        path = tmp_path / "results.json"
        monkeypatch.setattr(sys, "argv", ["every_host.py", "--results", str(path), *arguments])
        every_host.main()
        results: dict[str, Any] = json.loads(path.read_text())
        return results

    return run


def test_hosts_train_as_python_does(
    compare: Callable[..., dict[str, Any]], folder: Path, capsys: Any
) -> None:
    """A few steps; `test_hosts.py` has C++, which takes long to compile."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    results = compare("--values", "--hosts", "device", "node", "csharp")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    out = capsys.readouterr().out
    assert "C# was not run: " in out
    for name in NAMES:
        hosts = results["nets"][name]["hosts"]
        assert set(hosts) <= {"device", "node"}
        assert "device" in hosts
        for host, entry in hosts.items():
            assert 0 <= entry["difference"] <= 1e-5, host
            assert "steps_per_s" not in entry
    assert "| mlp |" in every_host.tables(results)["hosts-losses"]
    assert [*every_host.tables(results)] == ["hosts-losses"]


def test_times_are_measured(compare: Callable[..., dict[str, Any]], folder: Path) -> None:
    results = compare("--hosts", "device", "--nets", "mlp", "--rounds", "2")
    entry = results["nets"]["mlp"]["hosts"]["device"]
    for kind, file in (("checkpoint", "trained"), ("delta", "delta")):
        assert entry[f"{kind}_ms"] > 0
        # Hosts may differ in the JSON of the metadata.
        assert abs(entry[f"{kind}_bytes"] - (folder / "mlp" / file).stat().st_size) < 200
    assert entry["steps_per_s"] > 0
    assert [*every_host.tables(results)] == ["hosts-losses", "hosts-speed", "hosts-saving"]


def test_a_wrong_loss_and_a_wrong_tensor_are_found(
    compare: Callable[..., dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file = folder / "mlp" / "losses.json", folder / "mlp" / "trained"
    text, data = path.read_text(), file.read_bytes()
    losses = json.loads(text)["losses"]
    run = ("--values", "--hosts", "device", "--nets", "mlp")
    try:
        losses[-1] += 2e-5
        path.write_text(json.dumps({"losses": losses}))
        with pytest.raises(SystemExit, match=r"mlp in Python, `device.py`: losses differ .* by 2.0e-05"):
            compare(*run)
        path.write_text(text)
        tensors = load_file(file)
        tensors["parameter/w1"][0, 0] += 1e-3
        save_file(tensors, file)
        with pytest.raises(SystemExit, match=r"tensors of the checkpoint differ by 1.0e-03"):
            compare(*run)
    finally:
        path.write_text(text)
        file.write_bytes(data)


def test_losses_that_are_nan_or_missing_differ(folder: Path) -> None:
    net = folder / "mlp"
    losses = json.loads((net / "losses.json").read_text())["losses"]
    assert every_host.difference(losses, net) == 0
    assert every_host.difference([*losses[:-1], float("nan")], net) == np.inf
    for wrong in ([], [*losses, 1.0]):
        with pytest.raises(SystemExit, match="losses"):
            every_host.difference(wrong, net)
    assert every_host.written_difference((net / "delta").read_bytes(), net, "delta") == 0


def test_parameters_that_rounding_errors_move_are_left_out(tmp_path: Path) -> None:
    tensors = {"parameter/w": np.ones(3, np.float32), "momentum1/w": np.float32([0, 1e-20, 1e-6])}
    save_file(tensors, tmp_path / "trained")
    for position, difference in enumerate([2.0, 0.0, 2.0]):
        moved = np.ones(3, np.float32)
        moved[position] = 3
        data = save({**tensors, "parameter/w": moved})
        assert every_host.written_difference(data, tmp_path, "checkpoint") == difference
    data = save({**tensors, "momentum1/w": np.float32([0, 1e-20, 1])})
    assert every_host.written_difference(data, tmp_path, "checkpoint") == pytest.approx(1)


def test_tables() -> None:
    def entry(difference: float, rate: float, ms: float) -> dict[str, float]:
        sizes = {"checkpoint_bytes": 2_000, "delta_bytes": 1_250}
        return {"difference": difference, "steps_per_s": rate, "checkpoint_ms": ms, "delta_ms": 20} | sizes

    hosts = {"node": entry(0, 2000, 1.25), "cpp": entry(2.44e-8, 3000, 12)}
    results = {
        "machine": {"processor": "some CPU", "cores": 2},
        "gflops": 100.0,
        "nets": {"mlp": {"downloaded": 61_400, "hosts": hosts}, "cnn": {}},
    }
    made = {name: text.splitlines() for name, text in every_host.tables(results).items()}
    assert made["hosts-losses"][2:] == [
        "| net | downloaded, kB | Node, native | C++ |",
        "| --- | --- | --- | --- |",
        "| mlp | 61 | 0 | 2.4e-08 |",
    ]
    assert "(some CPU, 2 cores, 100.0 GFLOP/s)" in made["hosts-speed"][0]
    assert made["hosts-speed"][-1] == "| mlp | 2,000 (1.00) | 3,000 (1.50) |"
    assert made["hosts-saving"][-1] == "| mlp | 2.0 | 1.2 | 1.2 / 20 | 12 / 20 |"


def test_the_page_has_the_tables() -> None:
    """Without times, their places are empty."""
    path = ROOT / "benchmarks" / "results" / "every_host.json"
    made = every_host.tables(json.loads(path.read_text()))
    page = every_host.PAGE.read_text(encoding="utf-8")
    for name in ("hosts-losses", "hosts-speed", "hosts-saving"):
        shown = page_tables.place(name).search(page)
        assert shown, f"notes/web.md has no place for the table '{name}'"
        assert shown[1] == made.get(name), f"python benchmarks/every_host.py --write: {name}"


def test_differences_on_the_page_are_within_the_limits() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "every_host.json").read_text())
    assert {*results["nets"]} == {*every_host.NETS}
    for name, found in results["nets"].items():
        for host, entry in found["hosts"].items():
            assert entry["difference"] <= (1e-4 if host == "webgpu" else 1e-5), (name, host)
