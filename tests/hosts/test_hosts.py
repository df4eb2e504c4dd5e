"""The example hosts train artifacts of the portable profile as Python does."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
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


@pytest.mark.parametrize("label", [-1, 5, 100_000])
def test_labels_that_are_no_class_are_refused(
    host: Host, case_of: Callable[[str], Case], label: int, tmp_path: Path
) -> None:
    case = case_of("mlp")
    batches = [[array.copy() for array in batch] for batch in case.batches[:2]]
    batches[0][1][0] = -100  # is ignored
    batches[1][1][-1] = label
    write_feeds(tmp_path / "feeds", case.manifest, batches)
    written = tmp_path / "written"
    done = host(case.artifacts, tmp_path / "feeds", written)
    assert done.returncode == 1
    assert len(done.stdout.split()) == 1
    assert f"{label}" in done.stderr
    assert "-100" in done.stderr
    assert "4" in done.stderr
    assert not written.exists()


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


WATCH = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Logs what happens to the files of a folder, and makes one call fail. */
static const char *path_of(int file, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, path, 4095);
  path[size < 0 ? 0 : size] = 0;
  return path;
}

static int watch(const char *call, const char *path) {
  const char *folder = getenv("WATCHED");
  if (folder == NULL || strncmp(path, folder, strlen(folder)) != 0) return 0;
  const char *name = path[strlen(folder)] == 0 ? "folder" : path + strlen(folder) + 1;
  FILE *log = fopen(getenv("WATCH_LOG"), "a");
  fprintf(log, "%s %s\n", call, name);
  fclose(log);
  const char *failing = getenv("FAILING");
  if (failing == NULL || strcmp(failing, call) != 0) return 0;
  errno = ENOSPC;
  return 1;
}

int fsync(int file) {
  char path[4096];
  if (watch("fsync", path_of(file, path))) return -1;
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}

int rename(const char *from, const char *to) {
  if (watch("rename", from)) return -1;
  return ((int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename"))(from, to);
}

ssize_t write(int file, const void *bytes, size_t count) {
  char path[4096];
  if (watch("write", path_of(file, path))) return -1;
  /* Half of what was asked for: callers must go on. */
  size_t part = count > 1 && strstr(path, ".tmp") != NULL ? count / 2 : count;
  return ((ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write"))(file, bytes, part);
}
"""


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that logs and fails calls of the C library when it is preloaded."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("watch")
    (folder / "watch.c").write_text(WATCH)
    command = ["cc", "-shared", "-fPIC", "-o", folder / "watch.so", folder / "watch.c", "-ldl"]
    subprocess.run([str(part) for part in command], check=True)
    return folder / "watch.so"


# Mono, which runs the host in C#, finds fsync beside the library, and takes a write that was cut short for an error.
@pytest.mark.parametrize("name", ["cpp", "device", pytest.param("java", marks=pytest.mark.thorough)])
def test_a_checkpoint_is_on_the_disk_before_and_after_its_rename(
    name: str,
    case_of: Callable[[str], Case],
    watch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    case, host = case_of("mlp"), request.getfixturevalue(name)
    folder, log = tmp_path / "out", tmp_path / "log"
    folder.mkdir()
    log.touch()
    for key, value in {"LD_PRELOAD": watch, "WATCHED": folder, "WATCH_LOG": log}.items():
        monkeypatch.setenv(key, str(value))
    done = host(case.artifacts, case.feeds, folder / "checkpoint")
    assert done.returncode == 0, done.stderr
    calls = [line for line in log.read_text().splitlines() if not line.startswith("write")]
    assert calls == ["fsync checkpoint.tmp", "rename checkpoint.tmp", "fsync folder"]
    expected = api.CheckpointState.load_checkpoint(folder / "checkpoint")
    assert dict(expected.properties) == {}
    before = (folder / "checkpoint").read_bytes()
    for failing in ("write", "fsync", "rename"):
        monkeypatch.setenv("FAILING", failing)
        done = host(case.artifacts, case.feeds, folder / "checkpoint")
        assert done.returncode == 1, failing
        assert "No space left on device" in done.stderr
        assert (folder / "checkpoint").read_bytes() == before
        assert [path.name for path in folder.iterdir()] == ["checkpoint"]


@pytest.mark.thorough
def test_the_host_in_cpp_compiles_for_windows(tmp_path: Path) -> None:
    """Its other branch, of LoadLibrary, FlushFileBuffers and MoveFileEx; it is linked, too, but not run."""
    compiler = next(
        filter(None, map(shutil.which, ["x86_64-w64-mingw32-g++-posix", "x86_64-w64-mingw32-g++"])), None
    )
    if compiler is None:
        pytest.skip("needs MinGW: the Debian package g++-mingw-w64-x86-64-posix")
    flags = [
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Werror",
        '-DONNXRUNTIME_LIBRARY="onnxruntime.dll"',
    ]
    sources = sorted(map(str, (HOSTS / "cpp").glob("*.cpp")))
    done = subprocess.run(
        [compiler, *flags, *sources, "-o", str(tmp_path / "host.exe")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
