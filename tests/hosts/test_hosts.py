"""The example hosts train artifacts of the portable profile as Python does."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from onnxtrain import api

from .cases import HOSTS, TOLERANCE, Case, Host, losses_of
from .nets import NETS, write_feeds

pytestmark = pytest.mark.usefixtures("without_kernels")

# Parameters whose gradient is zero but for rounding (a bias in front of BatchNormalization): Adam divides it by its own
# size, so that their values differ between hosts while the losses do not.
ROUNDING_ONLY = {"digits": {"conv2_b"}}


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


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda feeds: shorten(feeds / "feeds.bin"), "feeds.bin has"),
        (lambda feeds: change_json(feeds / "feeds.json", steps=51), "feeds.bin has"),
        (lambda feeds: change_json(feeds / "feeds.json", feeds=[]), "feeds.json"),
        (lambda feeds: (feeds / "feeds.json").unlink(), "feeds.json"),
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
    names = set()
    for script in ("device.py", "batches.py", "checkpoint_file.py"):
        for node in ast.walk(ast.parse((HOSTS / script).read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module))
    assert names - sys.stdlib_module_names - {"batches", "checkpoint_file"} == {"numpy", "onnxruntime"}


def test_where_the_checkpoint_cannot_be_written_is_said_before_training(
    host: Host, case_of: Callable[[str], Case], tmp_path: Path
) -> None:
    case = case_of("mlp")
    for out in (tmp_path, tmp_path / "missing" / "checkpoint"):
        done = host(case.artifacts, case.feeds, out)
        assert done.returncode == 2
        assert done.stdout == ""
        assert str(out) in done.stderr


def test_delta_wants_a_file(host: Host, case_of: Callable[[str], Case]) -> None:
    done = host(case_of("mlp").artifacts, case_of("mlp").feeds, "--delta")
    assert done.returncode == 2
    assert "--delta needs CHECKPOINT_OUT" in done.stderr
