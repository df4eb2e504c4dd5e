"""The example hosts train artifacts of the portable profile as Python does, and exchange checkpoints with it."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file

from onnxtrain import api
from onnxtrain.artifacts import generate_artifacts

from .nets import LEARNING_RATE, NETS, STEPS, Net, write_feeds

HOSTS = Path(__file__).parents[2] / "examples" / "hosts"
TOLERANCE = 1e-5

# Parameters whose gradient is zero but for rounding (a bias in front of BatchNormalization): Adam divides it by its own
# size, so that their values differ between hosts while the losses do not.
ROUNDING_ONLY = {"digits": {"conv2_b"}}

Host = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module", autouse=True)
def _without_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXTRAIN_KERNELS", "off")
        yield


@pytest.fixture(scope="module")
def device() -> Host:
    """Runs `device.py` in a new process."""
    return lambda *arguments: _run([sys.executable, str(HOSTS / "device.py"), *map(str, arguments)])


@pytest.fixture(scope="module")
def cpp(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """Compiles the program in C++ and runs it."""
    missing = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    # Windows has a .dll, macOS a .dylib; wheels call it libonnxruntime.so.1.32.0.
    libraries = [
        path
        for pattern in ("libonnxruntime.so*", "libonnxruntime*.dylib", "onnxruntime.dll")
        for path in (Path(ort.__file__).parent / "capi").glob(pattern)
    ]
    if not libraries:
        pytest.skip("the package onnxruntime has no shared library of its own")
    build = tmp_path_factory.mktemp("cpp")
    for command in (
        ["cmake", "-S", HOSTS / "cpp", "-B", build, f"-DONNXRUNTIME_LIBRARY={libraries[0]}"],
        ["cmake", "--build", build, "--config", "Release"],
    ):
        done = _run([str(part) for part in command])
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning" not in done.stdout + done.stderr
    program = next(
        path for path in build.rglob("onnxtrain_host*") if path.is_file() and path.suffix in ("", ".exe")
    )
    return lambda *arguments: _run([str(program), *map(str, arguments)])


@pytest.fixture(params=["device", "cpp"])
def host(request: pytest.FixtureRequest) -> Host:
    result: Host = request.getfixturevalue(request.param)
    return result


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def losses_of(host: Host, *arguments: object) -> list[float]:
    done = host(*arguments)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


class Case:
    """The artifacts of a net, its batches, and what Python makes of them."""

    def __init__(self, net: Net, folder: Path) -> None:
        self.net, self.artifacts = net, folder / "artifacts"
        arguments = {"optimizer": "adamw"} | net.arguments
        generate_artifacts(
            net.model(),
            loss="cross_entropy",
            artifact_directory=self.artifacts,
            additional_output_names=["logits"],
            profile="portable",
            **arguments,
        )
        self.manifest = json.loads((self.artifacts / "manifest.json").read_text())
        rng = np.random.default_rng(0)
        self.batches = [net.batch(rng) for _ in range(STEPS)]
        self.feeds = folder / "feeds"
        write_feeds(self.feeds, self.manifest, self.batches)

    def train(
        self, checkpoint: Path | None = None, *, seed: int = 0, batches: list[list[np.ndarray]] | None = None
    ) -> tuple[list[float], api.CheckpointState]:
        """Train in Python with the on-device API."""
        state = api.CheckpointState.load_checkpoint(checkpoint or self.artifacts / "checkpoint")
        module = api.Module(self.artifacts / "training_model.onnx", state, seed=seed)
        optimizer = api.Optimizer(self.artifacts / "optimizer_model.onnx", module)
        optimizer.set_learning_rate(LEARNING_RATE)
        losses = []
        for batch in self.batches if batches is None else batches:
            module.lazy_reset_grad()
            losses.append(float(module(*batch)[0]))
            optimizer.step()
        return losses, state


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    cases: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in cases:
            net = next(net for net in NETS if net.name == name)
            cases[name] = Case(net, tmp_path_factory.mktemp(name))
        return cases[name]

    return case


@pytest.mark.parametrize("name", [net.name for net in NETS])
def test_losses_and_checkpoint_equal_those_of_python(
    host: Host, case_of: Callable[[str], Case], name: str, tmp_path: Path
) -> None:
    case = case_of(name)
    expected, state = case.train()
    assert np.mean(expected[-10:]) < np.mean(expected[:10])
    written = tmp_path / "checkpoint"
    np.testing.assert_allclose(losses_of(host, case.artifacts, case.feeds, written), expected, atol=TOLERANCE)
    loaded = api.CheckpointState.load_checkpoint(written)
    for tensors, others in ((state.parameters, loaded.parameters), (state.statistics, loaded.statistics)):
        assert [key for key, _ in tensors] == [key for key, _ in others]
        for key, tensor in tensors:
            if key not in ROUNDING_ONLY.get(name, ()):
                np.testing.assert_allclose(others[key].data, tensor.data, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("name", ["transformer", "embedding"])
def test_python_continues_a_checkpoint_of_the_host_and_the_host_one_of_python(
    host: Host, case_of: Callable[[str], Case], name: str, tmp_path: Path
) -> None:
    case = case_of(name)
    half = STEPS // 2
    expected, _ = case.train()
    for part, batches in (("first", case.batches[:half]), ("second", case.batches[half:])):
        write_feeds(tmp_path / part, case.manifest, batches)
    # The host, then Python.
    first = losses_of(host, case.artifacts, tmp_path / "first", tmp_path / "checkpoint")
    second, state = case.train(tmp_path / "checkpoint", batches=case.batches[half:])
    np.testing.assert_allclose(first + second, expected, atol=TOLERANCE)
    # Python, then the host: it reads the checkpoint among the artifacts.
    first, state = case.train(batches=case.batches[:half])
    artifacts = shutil.copytree(case.artifacts, tmp_path / "artifacts")
    state.properties["note"] = 'kept: "é"'
    api.CheckpointState.save_checkpoint(state, artifacts / "checkpoint", include_optimizer_state=True)
    second = losses_of(host, artifacts, tmp_path / "second", tmp_path / "after")
    np.testing.assert_allclose(first + second, expected, atol=TOLERANCE)
    assert api.CheckpointState.load_checkpoint(tmp_path / "after").properties["note"] == 'kept: "é"'


def test_masks_follow_from_the_seed(host: Host, case_of: Callable[[str], Case], tmp_path: Path) -> None:
    case = case_of("transformer")
    write_feeds(tmp_path / "feeds", case.manifest, case.batches, seed=-5)
    with_seed, _ = case.train(seed=-5)
    assert abs(np.subtract(with_seed, case.train()[0])).max() > 1e-3
    np.testing.assert_allclose(losses_of(host, case.artifacts, tmp_path / "feeds"), with_seed, atol=TOLERANCE)


def test_frozen_parameters_stay(host: Host, case_of: Callable[[str], Case], tmp_path: Path) -> None:
    case = case_of("frozen")
    losses_of(host, case.artifacts, case.feeds, tmp_path / "checkpoint")
    before, after = load_file(case.artifacts / "checkpoint"), load_file(tmp_path / "checkpoint")
    changed = {key for key, value in before.items() if (after[key] != value).any()}
    assert changed == {"parameter/fc_w", "parameter/fc_b"}


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0\0\0\0")


def no_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 200)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def moved_tensor(path: Path) -> None:
    data = path.read_bytes()
    # The digits of an offset: the tensor would begin inside the one before.
    assert b"[0," in data
    path.write_bytes(data.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1))


def foreign(path: Path) -> None:
    data = path.read_bytes()
    place = data.index(b'"fingerprint":"') + len(b'"fingerprint":"')
    path.write_bytes(data[:place] + b"0000" + data[place + 4 :])


def missing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncated, longer, no_header, empty, moved_tensor, foreign, missing])
def test_damaged_checkpoints_are_refused(
    host: Host, case_of: Callable[[str], Case], damage: Callable[[Path], None], tmp_path: Path
) -> None:
    case = case_of("mlp")
    artifacts = shutil.copytree(case.artifacts, tmp_path / "artifacts")
    damage(artifacts / "checkpoint")
    written = tmp_path / "written"
    written.write_bytes(b"before")
    done = host(artifacts, case.feeds, written)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    # Nothing that was there before is lost.
    assert written.read_bytes() == b"before"


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda feeds: truncated(feeds / "feeds.bin"), "feeds.bin has"),
        (lambda feeds: change_json(feeds / "feeds.json", steps=51), "feeds.bin has"),
        (lambda feeds: change_json(feeds / "feeds.json", feeds=[]), "feeds.json"),
        (lambda feeds: missing(feeds / "feeds.json"), "feeds.json"),
    ],
)
def test_feeds_that_do_not_fit_are_refused(
    host: Host, case_of: Callable[[str], Case], damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    case = case_of("mlp")
    feeds = shutil.copytree(case.feeds, tmp_path / "feeds")
    damage(feeds)
    done = host(case.artifacts, feeds)
    assert done.returncode != 0
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_number_that_the_host_does_not_know_is_refused(
    host: Host, case_of: Callable[[str], Case], tmp_path: Path
) -> None:
    case = case_of("transformer")
    artifacts = shutil.copytree(case.artifacts, tmp_path / "artifacts")
    entry = case.manifest["host_inputs"][0] | {"holds": ["seed", "step", "clock"]}
    change_json(artifacts / "manifest.json", host_inputs=[entry])
    done = host(artifacts, case.feeds)
    assert done.returncode != 0
    assert "clock" in done.stderr


def test_the_device_needs_numpy_and_onnxruntime_only() -> None:
    tree = ast.parse((HOSTS / "device.py").read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert names - sys.stdlib_module_names == {"numpy", "onnxruntime"}
