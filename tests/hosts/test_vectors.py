"""Hosts pass the test vectors; the vectors agree with torch, and the checker fails a host that is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from onnxtrain import api
from onnxtrain.errors import DivergenceError

from .cases import HOSTS, Case, Host

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the vectors, once."""
    folder = tmp_path_factory.mktemp("hosts") / "vectors"
    command = [sys.executable, str(HOSTS / "write_vectors.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def check() -> Any:
    """The module of the checker, which is run on programs in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOSTS))
        import check_host

        return check_host


def cases_of(folder: Path) -> list[dict[str, Any]]:
    listed: dict[str, Any] = json.loads((folder / "vectors.json").read_text("utf-8"))
    assert (listed["format"], listed["version"]) == ("onnxtrain-host-vectors", 1)
    cases: list[dict[str, Any]] = listed["cases"]
    return cases


@pytest.mark.parametrize(
    "program",
    [
        "cpp",
        pytest.param("device", marks=pytest.mark.thorough),
        pytest.param("python", marks=pytest.mark.thorough),
        pytest.param("node", marks=pytest.mark.thorough),
        pytest.param("java", marks=pytest.mark.thorough),
        pytest.param("csharp", marks=pytest.mark.thorough),
    ],
)
def test_host_passes_the_vectors(
    program: str, vectors: Path, check: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    host: Host = request.getfixturevalue(program)
    # The fixture knows the command and its environment.
    monkeypatch.setattr(check, "run_host", lambda command, _: host(*command))
    failed = {}
    for case in cases_of(vectors):
        try:
            check.check(vectors, case, [], 60)
        except ValueError as error:
            failed[case["name"]] = str(error)
    assert failed == {}


@pytest.mark.thorough
@pytest.mark.parametrize("program", ["device", "cpp", "java", "csharp"])
def test_python_loads_what_a_host_has_written(
    program: str, vectors: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By the safetensors package, with the digest of the frozen parameters."""
    host: Host = request.getfixturevalue(program)
    artifacts, feeds = vectors / "classifier" / "artifacts", vectors / "classifier" / "second_half"
    expected = api.CheckpointState.load_checkpoint(vectors / "classifier" / "resumed.checkpoint")
    start = vectors / "classifier" / "half.checkpoint"
    for kind in ("checkpoint", "delta"):
        written = tmp_path / kind
        arguments = ["--delta"] if kind == "delta" else []
        done = host(artifacts, feeds, written, "--from", start, *arguments)
        assert done.returncode == 0, done.stderr
        state = (
            api.CheckpointState.load_checkpoint(written)
            if kind == "checkpoint"
            else api.CheckpointState.load_checkpoint(start, delta=written)
        )
        assert {k: repr(v) for k, v in state.properties} == {k: repr(v) for k, v in expected.properties}
        module = api.Module(artifacts / "training_model.onnx", state)
        assert api.Optimizer(artifacts / "optimizer_model.onnx", module).step_count == 10
        for name, parameter in expected.parameters:
            np.testing.assert_allclose(state.parameters[name].data, parameter.data, atol=1e-4, err_msg=name)


def test_every_rule_has_a_case(vectors: Path) -> None:
    rules = {case["refused"] for case in cases_of(vectors) if "refused" in case}
    page = (HOSTS.parents[1] / "docs" / "devices" / "own-host.md").read_text("utf-8")
    assert rules == {
        "names", "dtypes", "shapes", "no empty batch", "labels", "no NaN", "finite loss", "finite gradients",
        "checkpoints", "shared weights", "versions",
    }  # fmt: skip
    for rule in rules:
        assert f"| {rule} |" in page, rule


def predict_regression(w: dict[str, Any], features: Any) -> Any:
    return torch.relu(features @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]


def predict_masked(w: dict[str, Any], features: Any, mask: Any) -> Any:
    assert torch.isneginf(mask).any()
    return torch.softmax(features @ w["scale"] + mask, -1) @ w["w"] + w["b"]


@pytest.mark.parametrize(("net", "predict"), [("regression", predict_regression), ("masked", predict_masked)])
def test_losses_are_those_of_torch(net: str, predict: Callable[..., Any], vectors: Path) -> None:
    """In float64, with torch's autograd and AdamW, from the same weights."""
    case = next(c for c in cases_of(vectors) if c["name"] == f"{net}: trains")
    start = load_file(vectors / case["artifacts"] / "checkpoint")
    weights = {
        name.removeprefix("parameter/"): torch.tensor(value.astype(np.float64), requires_grad=True)
        for name, value in start.items()
    }
    settings = json.loads((vectors / case["feeds"] / "feeds.json").read_text())
    fields = [(x["name"], x["dtype"], tuple(x["shape"])) for x in settings["feeds"]]
    optimizer = torch.optim.AdamW(weights.values(), lr=settings["learning_rate"])
    losses = []
    for batch in np.fromfile(vectors / case["feeds"] / "feeds.bin", fields):
        *inputs, target = (torch.tensor(batch[name].astype(np.float64)) for name in batch.dtype.names)
        loss = torch.nn.functional.mse_loss(predict(weights, *inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(case["losses"], losses, atol=1e-5)
    for key, value in load_file(vectors / case["checkpoint"]).items():
        if key.startswith("parameter/"):
            expected = weights[key.removeprefix("parameter/")].detach().numpy()
            np.testing.assert_allclose(value, expected, atol=1e-5, err_msg=key)


def trainer(losses: list[float], written: Path | None, code: int = 0, error: str = "") -> Callable[..., Any]:
    """Returns a host that prints losses and copies a checkpoint, whatever it is given."""

    def run(command: list[str], _: float) -> subprocess.CompletedProcess[str]:
        if written is not None:
            Path(command[2]).write_bytes(written.read_bytes())
        return subprocess.CompletedProcess(command, code, "".join(f"{x}\n" for x in losses), error)

    return run


def test_the_checker_refuses_wrong_hosts(
    vectors: Path, check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases = {case["name"]: case for case in cases_of(vectors)}
    resumes, refuses = cases["classifier: resumes from a checkpoint"], cases["classifier: refuses label -1"]
    losses, good = resumes["losses"], vectors / resumes["checkpoint"]
    other = vectors / cases["classifier: trains"]["checkpoint"]  # without the properties

    def verdict(case: dict[str, Any], run: Callable[..., Any]) -> str | None:
        monkeypatch.setattr(check, "run_host", run)
        try:
            check.check(vectors, case, [], 60)
        except ValueError as error:
            return str(error)
        return None

    assert verdict(resumes, trainer(losses, good)) is None
    assert "a loss differs by 0.001" in str(
        verdict(resumes, trainer([*losses[:-1], losses[-1] + 1e-3], good))
    )
    assert "4 losses instead of 5" in str(verdict(resumes, trainer(losses[:-1], good)))
    assert "properties" in str(verdict(resumes, trainer(losses, other)))
    assert "exit status 1" in str(verdict(resumes, trainer(losses, good, 1, "no")))
    with safe_open(good, "numpy") as file:
        metadata = file.metadata()
    changed = load_file(good)
    changed["parameter/w2"] = changed["parameter/w2"] + np.float32(1e-3)
    check.sys.modules["checkpoint_file"].write(tmp_path / "changed", metadata, changed)
    assert "'parameter/w2' differs by 0.001" in str(verdict(resumes, trainer(losses, tmp_path / "changed")))
    message = "input 'labels': -1 is no class"
    first = refuses["losses"]
    assert verdict(refuses, trainer(first, None, 1, message)) is None
    assert verdict(refuses, trainer([], None, 1, message)) is None
    assert "exit status 0" in str(verdict(refuses, trainer(first, good)))
    assert "trained on" in str(verdict(refuses, trainer([*first, 1.0], None, 1, message)))
    assert "checkpoint was written" in str(verdict(refuses, trainer(first, good, 1, message)))
    assert "does not name 'labels'" in str(verdict(refuses, trainer(first, None, 1, "wrong")))
    assert "4 lines" in str(verdict(refuses, trainer(first, None, 1, "at\n" * 3 + message)))
    assert "a loss differs" in str(verdict(refuses, trainer([first[0] + 1], None, 1, message)))


@pytest.mark.usefixtures("without_kernels")
def test_running_statistics_stay_where_the_loss_is_nan(case_of: Callable[[str], Case]) -> None:
    case = case_of("adapted")
    state = api.CheckpointState.load_checkpoint(case.artifacts / "checkpoint")
    module = api.Module(case.artifacts / "training_model.onnx", state)
    x, labels = case.batches[0]
    before = {name: np.array(value.data) for name, value in state.statistics}
    with pytest.raises(DivergenceError, match="the loss is nan"):
        module(x, np.full_like(labels, -100))
    for name, value in before.items():
        np.testing.assert_array_equal(state.statistics[name].data, value)
    module(x, labels)
    assert any((state.statistics[name].data != value).any() for name, value in before.items())
