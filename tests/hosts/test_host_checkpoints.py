"""Every host resumes from the checkpoints and deltas of every other; a mismatch is an error that loses nothing."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from onnxtrain import api
from onnxtrain.artifacts import generate_artifacts

from .cases import HOSTS, TOLERANCE, Case, Host, losses_of
from .nets import STEPS, write_feeds

pytestmark = pytest.mark.usefixtures("without_kernels")

PROGRAMS = ["python", "device", "cpp", "node"]
HALF = STEPS // 2


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Host:
    """Every host: Python, the two examples, and the npm package in Node."""
    result: Host = request.getfixturevalue(request.param)
    return result


def halves(case: Case, folder: Path, seed: int = 3) -> tuple[Path, Path]:
    """Write the two halves of a run as folders of feeds."""
    for part, batches in (("first", case.batches[:HALF]), ("second", case.batches[HALF:])):
        write_feeds(folder / part, case.manifest, batches, seed=seed)
    return folder / "first", folder / "second"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["checkpoint", "delta"])
@pytest.mark.parametrize("writer", PROGRAMS)
def test_every_host_resumes_where_another_stopped(
    writer: str, kind: str, case_of: Callable[[str], Case], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A frozen layer, statistics, moments, masks of Dropout, and names beyond ASCII."""
    case = case_of("adapted")
    expected, _ = case.train(seed=3)
    first, second = halves(case, tmp_path)
    written = tmp_path / kind
    arguments = ["--delta"] if kind == "delta" else []
    begun = losses_of(request.getfixturevalue(writer), case.artifacts, first, written, *arguments)
    np.testing.assert_allclose(begun, expected[:HALF], atol=TOLERANCE)
    assert ("parameter/カ" in load_file(written)) == (kind == "checkpoint")
    for reader in PROGRAMS:
        continued = losses_of(request.getfixturevalue(reader), case.artifacts, second, "--from", written)
        np.testing.assert_allclose(continued, expected[HALF:], atol=TOLERANCE, err_msg=reader)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", ["transformer", "embedding"])
def test_properties_are_kept(
    program: Host, case_of: Callable[[str], Case], name: str, tmp_path: Path
) -> None:
    case = case_of(name)
    _, state = case.train(batches=case.batches[:HALF])
    state.properties["note"] = 'kept: "é"'
    state.properties["epoch"] = 3
    # JSON.parse has neither infinity nor integers beyond 2^53, and a double has no such integer.
    extremes = {
        "best_loss": np.inf,
        "worst": -np.inf,
        "time_ns": 1795867000123456789,
        "id": 2**64 + 1,
        "rate": 1e16,
    }
    for key, value in extremes.items():
        state.properties[key] = value
    before = tmp_path / "before"
    api.CheckpointState.save_checkpoint(state, before, include_optimizer_state=True)
    expected, _ = case.train()
    _, second = halves(case, tmp_path, seed=0)
    continued = losses_of(program, case.artifacts, second, tmp_path / "after", "--from", before)
    np.testing.assert_allclose(continued, expected[HALF:], atol=TOLERANCE)
    after = api.CheckpointState.load_checkpoint(tmp_path / "after")
    kept = dict(after.properties)
    assert kept == {"note": 'kept: "é"', "epoch": 3, **extremes}
    assert {key: type(value) for key, value in kept.items()} == {
        key: type(value) for key, value in state.properties
    }


def test_integers_of_64_bits_and_infinity_are_read_exactly(
    host: Host, case_of: Callable[[str], Case], tmp_path: Path
) -> None:
    """As a double, the next step would be another one; NaN in a manifest is no reason to refuse it."""
    case = case_of("embedding")
    artifacts = shutil.copytree(case.artifacts, tmp_path / "artifacts")
    manifest = case.manifest | {"note": [float("nan"), float("inf"), -float("inf"), 2**64 + 1]}
    (artifacts / "manifest.json").write_text(json.dumps(manifest))
    _, state = case.train(batches=case.batches[:1])
    api.CheckpointState.save_checkpoint(state, tmp_path / "late", include_optimizer_state=True)

    def change(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
        metadata["optimizer"] = json.dumps(json.loads(metadata["optimizer"]) | {"step": 2**53 + 2})

    edited(change)(tmp_path / "late")
    write_feeds(tmp_path / "feeds", case.manifest, case.batches[:1])
    losses_of(host, artifacts, tmp_path / "feeds", tmp_path / "later", "--from", tmp_path / "late")
    with safe_open(tmp_path / "later", "numpy") as file:
        assert json.loads(file.metadata()["optimizer"])["step"] == 2**53 + 3


@pytest.fixture(scope="module")
def deltas(
    device: Host, case_of: Callable[[str], Case], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Path], Path, list[float]]:
    """Two deltas, the second one on top of the first, feeds to go on with, and the losses of these by a host."""
    case, folder = case_of("adapted"), tmp_path_factory.mktemp("deltas")
    first, second = halves(case, folder)
    one, two = folder / "one", folder / "two"
    losses_of(device, case.artifacts, first, one, "--delta")
    losses_of(device, case.artifacts, second, two, "--delta", "--from", one)
    return [one, two], first, losses_of(device, case.artifacts, first, "--from", two)


def test_a_delta_is_loaded_on_top_of_another(
    program: Host, case_of: Callable[[str], Case], deltas: tuple[list[Path], Path, list[float]]
) -> None:
    (one, two), feeds, expected = deltas
    losses = losses_of(program, case_of("adapted").artifacts, feeds, "--from", one, "--from", two)
    np.testing.assert_allclose(losses, expected, atol=TOLERANCE)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0\0\0\0")


def no_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 200)


def half_a_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def missing(path: Path) -> None:
    path.unlink()


def deep(path: Path) -> None:
    """A header of brackets alone would use up the stack of a parser that calls itself."""
    text = b"[" * 100_000
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def moved_tensor(path: Path) -> None:
    """Move the place of the first tensor into the one behind it."""
    data, changes = re.subn(rb'("data_offsets": ?\[)0,', rb"\g<1>4,", path.read_bytes(), count=1)
    assert changes == 1
    path.write_bytes(data)


def flipped_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[9] ^= 0x10
    path.write_bytes(data)


def edited(change: Callable[[dict[str, str], dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    """Rewrite metadata and tensors by the safetensors package."""

    def damage(path: Path) -> None:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        change(metadata, tensors)
        save_file(tensors, path, metadata)

    damage.__name__ = getattr(change, "__name__", "edited")
    return damage


def foreign(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
    metadata["fingerprint"] = "0000" + metadata["fingerprint"][4:]


def no_parameter(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
    del tensors["parameter/w2"]


def other_shape(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
    tensors["parameter/w2"] = tensors["parameter/w2"].T.copy()


def no_moment(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
    del tensors["momentum1/w2"]


def other_optimizer(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
    tensors["momentum2/w2"] = tensors["momentum1/w2"]


def no_statistic(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
    del tensors["statistic/bn_mean"]


def negative_step(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
    metadata["optimizer"] = '{"step": -1, "learning_rate": 0.1, "initial_learning_rate": 0.1}'


def step_that_is_no_number(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
    metadata["optimizer"] = '{"step": "1", "learning_rate": 0.1, "initial_learning_rate": 0.1}'


def newer(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
    metadata["version"] = "2"


def of_another_program(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
    metadata["format"] = "pt"


EDITS = [
    foreign, no_parameter, other_shape, no_moment, other_optimizer, no_statistic, negative_step,
    step_that_is_no_number, newer, of_another_program,
]  # fmt: skip
DAMAGES: list[Callable[[Path], None]] = [
    truncated, flipped_header, missing, edited(foreign), edited(no_parameter),
    longer, no_header, half_a_header, empty, deep, moved_tensor, *map(edited, EDITS[2:]),
]  # fmt: skip
# Python and the npm package have tests of their own with all kinds of damage.
CASES = [
    (program, damage, kind)
    for program in PROGRAMS
    for damage in DAMAGES[:5]
    for kind in ("checkpoint", "delta")
]
CASES += [(program, damage, "checkpoint") for program in ("device", "cpp") for damage in DAMAGES[5:]]


@pytest.fixture(scope="module")
def trained(
    case_of: Callable[[str], Case], device: Host, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Path]]:
    """A folder of feeds of two steps, and a checkpoint and a delta with optimizer state."""
    case, folder = case_of("adapted"), tmp_path_factory.mktemp("trained")
    write_feeds(folder / "feeds", case.manifest, case.batches[:2])
    files = {"checkpoint": folder / "checkpoint", "delta": folder / "delta"}
    losses_of(device, case.artifacts, folder / "feeds", files["checkpoint"])
    losses_of(device, case.artifacts, folder / "feeds", files["delta"], "--delta")
    return folder / "feeds", files


def require_refusal(done: subprocess.CompletedProcess[str], written: Path) -> None:
    """Nothing was trained, the message names the kind of file, and what was there before is there still."""
    assert done.returncode in (1, 2), done.stderr
    assert done.stdout == ""
    assert "checkpoint" in done.stderr.lower() or "delta" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip()) > 30
    assert written.read_bytes() == b"before"
    assert [path.name for path in written.parent.iterdir() if "tmp" in path.name] == []


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("program", "damage", "kind"), CASES, indirect=["program"])
def test_damaged_files_are_refused(
    program: Host,
    case_of: Callable[[str], Case],
    trained: tuple[Path, dict[str, Path]],
    kind: str,
    damage: Callable[[Path], None],
    tmp_path: Path,
) -> None:
    feeds, files = trained
    file = Path(shutil.copy(files[kind], tmp_path / kind))
    damage(file)
    written = tmp_path / "written"
    written.write_bytes(b"before")
    require_refusal(program(case_of("adapted").artifacts, feeds, written, "--from", file), written)


@pytest.mark.parametrize("damage", [truncated, no_header, missing, edited(foreign)])
def test_a_damaged_file_among_the_artifacts_is_refused(
    program: Host,
    case_of: Callable[[str], Case],
    trained: tuple[Path, dict[str, Path]],
    damage: Callable[[Path], None],
    tmp_path: Path,
) -> None:
    artifacts = shutil.copytree(case_of("adapted").artifacts, tmp_path / "artifacts")
    damage(artifacts / "checkpoint")
    written = tmp_path / "written"
    written.write_bytes(b"before")
    require_refusal(program(artifacts, trained[0], written), written)


def test_a_delta_of_other_frozen_values_is_refused(
    program: Host, case_of: Callable[[str], Case], trained: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    artifacts = shutil.copytree(case_of("adapted").artifacts, tmp_path / "artifacts")

    def change(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
        tensors["parameter/カ"][0] += 1e-3

    edited(change)(artifacts / "checkpoint")
    written = tmp_path / "written"
    written.write_bytes(b"before")
    feeds, files = trained
    done = program(artifacts, feeds, written, "--from", files["delta"])
    require_refusal(done, written)
    assert "on top of other values" in done.stderr


def test_a_delta_cannot_be_the_checkpoint_of_the_artifacts(
    program: Host, case_of: Callable[[str], Case], trained: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    artifacts = shutil.copytree(case_of("adapted").artifacts, tmp_path / "artifacts")
    feeds, files = trained
    shutil.copy(files["delta"], artifacts / "checkpoint")
    done = program(artifacts, feeds)
    assert done.returncode == 1
    assert "delta" in done.stderr


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_artifacts_that_were_made_again_with_another_optimizer(
    program: Host,
    case_of: Callable[[str], Case],
    trained: tuple[Path, dict[str, Path]],
    optimizer: str,
    tmp_path: Path,
) -> None:
    """Moments of another optimizer are refused; the same moments are accepted with other hyperparameters."""
    case = case_of("adapted")
    generate_artifacts(
        case.net.model(),
        loss="cross_entropy",
        artifact_directory=tmp_path / "artifacts",
        additional_output_names=["logits"],
        profile="portable",
        **case.net.arguments | {"optimizer": optimizer},
    )
    feeds, files = trained
    written = tmp_path / "written"
    written.write_bytes(b"before")
    done = program(tmp_path / "artifacts", feeds, written, "--from", files["checkpoint"])
    if optimizer == "sgd":
        require_refusal(done, written)
        assert "optimizer" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_sha256_in_cpp_equals_that_of_hashlib(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("needs c++")
    main = tmp_path / "main.cpp"
    # Reads in pieces of 1, 2, 3, ... bytes: blocks are filled in every way.
    main.write_text(
        """#include <cstdio>
        #include <iterator>
        #include <iostream>
        #include "sha256.h"
        int main() {
          std::string text(std::istreambuf_iterator<char>(std::cin), {});
          Sha256 digest;
          size_t size = 1;
          for (size_t place = 0; place < text.size(); place += size++) digest.update(text.substr(place, size));
          std::puts(digest.hex().c_str());
        }"""
    )
    program = tmp_path / "sha256"
    source = HOSTS / "cpp"
    command = ["c++", "-std=c++17", f"-I{source}", main, source / "sha256.cpp", "-o", program]
    subprocess.run([str(part) for part in command], check=True)
    rng = np.random.default_rng(0)
    for size in [0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 128, 1000, 1_000_000]:
        data = rng.bytes(size)
        done = subprocess.run([str(program)], input=data, capture_output=True, check=True)
        assert done.stdout.decode().strip() == hashlib.sha256(data).hexdigest(), size


def test_delta_of_the_examples_is_that_of_the_contracts(
    host: Host, case_of: Callable[[str], Case], tmp_path: Path
) -> None:
    """Its keys, and the digest as docs/reference/file-formats.md defines it."""
    case = case_of("adapted")
    losses_of(host, case.artifacts, case.feeds, tmp_path / "delta", "--delta")
    with safe_open(tmp_path / "delta", "numpy") as file:
        metadata, keys = file.metadata(), set(file.keys())
    assert keys == {
        "parameter/w2", "parameter/b2", "statistic/bn_mean", "statistic/bn_var_ones",
        "momentum0/w2", "momentum0/b2", "momentum1/w2", "momentum1/b2",
    }  # fmt: skip
    base = {
        key.removeprefix("parameter/"): value
        for key, value in load_file(case.artifacts / "checkpoint").items()
    }
    digest = hashlib.sha256()
    for name in sorted(['größe\t"1"', "\uff5e/b", "カ", "😀.bias"]):
        value = base[name]
        signature = [name, value.dtype.name, list(value.shape)]
        digest.update(json.dumps(signature, separators=(",", ":"), ensure_ascii=False).encode())
        digest.update(value.tobytes())
    assert metadata["frozen"] == digest.hexdigest()
    assert metadata["format"] == "onnxtrain-checkpoint-delta"
    assert metadata["fingerprint"] == case.manifest["fingerprint"]
    assert "order" not in metadata
