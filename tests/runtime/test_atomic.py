"""Files and sets of files that are replaced whole or not at all."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest

from fresh_process import SOURCE
from onnxtrain.api import CheckpointState
from onnxtrain.errors import CheckpointError, ModelLoadError
from onnxtrain.runtime import atomic
from onnxtrain.runtime.atomic import JOURNAL, FileSet, external_data_name, finish_interrupted, replace_file
from onnxtrain.runtime.device import CPU
from onnxtrain.runtime.session import open_session


def write(directory, **contents):
    with FileSet(directory) as files:
        for name, content in contents.items():
            with files.open(name) as file:
                file.write(content.encode())


def contents(directory):
    return {path.name: path.read_text() for path in directory.iterdir()}


def temporary(name, digits="0123456789ab"):
    return f".{name}.{digits}.onnxtrain-tmp"


def interrupted(directory, moves, remove=()):
    """A directory as a killed save leaves it: new content beside the old, and the journal."""
    for name, content in moves.items():
        (directory / temporary(name)).write_text(content)
    text = json.dumps({"moves": [[temporary(n), n] for n in moves], "remove": list(remove)})
    (directory / JOURNAL).write_text(text)


def test_a_set_takes_its_place_together(tmp_path):
    write(tmp_path, a="1", b="1")
    with FileSet(tmp_path) as files:
        with files.open("a") as file:
            file.write(b"2")
        with files.open("b") as file:
            file.write(b"2")
        assert {n: c for n, c in contents(tmp_path).items() if n[0] != "."} == {"a": "1", "b": "1"}
    assert contents(tmp_path) == {"a": "2", "b": "2"}


def test_an_exception_changes_nothing(tmp_path):
    write(tmp_path, a="1")

    def save():
        with FileSet(tmp_path) as files:
            with files.open("a") as file:
                file.write(b"2")
            files.remove("best")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save()
    assert contents(tmp_path) == {"a": "1"}


@pytest.mark.parametrize("act", ["read", "write", "session", "unrelated"])
def test_what_a_killed_save_had_decided_is_done_before_anything_else(tmp_path, act):
    state = CheckpointState.from_arrays({"w": np.zeros(2, np.float32)}, ["w"])
    for value, name in enumerate(["checkpoint", "new"]):
        state.parameters["w"].data[...] = value
        CheckpointState.save_checkpoint(state, tmp_path / name)
    os.replace(tmp_path / "new", tmp_path / temporary("checkpoint"))
    (tmp_path / "best").touch()
    interrupted(tmp_path, {"model.onnx": "new"}, ["best"])
    journal = json.loads((tmp_path / JOURNAL).read_text())
    journal["moves"].append([temporary("checkpoint"), "checkpoint"])
    (tmp_path / JOURNAL).write_text(json.dumps(journal))
    if act == "read":
        assert CheckpointState.load_checkpoint(tmp_path / "checkpoint").parameters["w"].data[0] == 1
    elif act == "write":
        state.parameters["w"].data[...] = 2
        CheckpointState.save_checkpoint(state, tmp_path / "checkpoint")
    elif act == "session":
        with pytest.raises(ModelLoadError, match=r"Protobuf parsing failed"):
            open_session(tmp_path / "model.onnx", "model", CPU, None)
    else:
        write(tmp_path, other="1")
    value = CheckpointState.load_checkpoint(tmp_path / "checkpoint").parameters["w"].data[0]
    assert value == (2 if act == "write" else 1)
    assert (tmp_path / "model.onnx").read_text() == "new"
    left = {"checkpoint", "model.onnx", *(["other"] if act == "unrelated" else [])}
    assert set(os.listdir(tmp_path)) == left


def test_a_second_death_while_finishing_loses_nothing(tmp_path, monkeypatch):
    write(tmp_path, a="1", b="1", c="1")
    interrupted(tmp_path, {"a": "2", "b": "2", "c": "2"})
    replace, done = os.replace, []

    def dying(source, target):
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", dying)
    with pytest.raises(KeyboardInterrupt):
        finish_interrupted(tmp_path / "a")
    monkeypatch.undo()
    finish_interrupted(tmp_path / "a")
    assert contents(tmp_path) == {"a": "2", "b": "2", "c": "2"}


@pytest.mark.parametrize(
    "journal",
    [
        "",
        "{}",
        "[" * 5000,
        '{"moves": [["../outside", "a"]], "remove": []}',
        '{"moves": [[".a.0123456789ab.onnxtrain-tmp", "../a"]], "remove": []}',
        '{"moves": [["secret", "a"]], "remove": []}',
        '{"moves": [[".a.0123456789ab.onnxtrain-tmp", "b"]], "remove": []}',
        '{"moves": [[3, 4]], "remove": []}',
        '{"moves": [], "remove": ["a"]}',
        '{"moves": [], "remove": ["../x.0123456789ab.data"]}',
        '{"moves": [], "remove": ["/etc/x.0123456789ab.data"]}',
        "\x00" * 100,
    ],
)
def test_a_journal_that_is_none_moves_nothing(tmp_path, journal):
    inner = tmp_path / "run"
    inner.mkdir()
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "x.0123456789ab.data").write_text("mine")
    write(inner, a="1", secret="2")
    (inner / temporary("a")).write_text("evil")
    (inner / JOURNAL).write_text(journal)
    before = contents(inner)
    with pytest.raises(CheckpointError, match=r"the record of an interrupted save.*delete it"):
        CheckpointState.load_checkpoint(inner / "a")
    with pytest.raises(OSError, match=r"the record of an interrupted save"), FileSet(inner):
        pass
    assert contents(inner) == before
    assert (tmp_path / "outside").read_text() == "mine"
    assert (tmp_path / "x.0123456789ab.data").read_text() == "mine"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_directory_that_cannot_be_flushed_makes_no_save_a_failed_one(tmp_path, monkeypatch, caplog, code):
    """Network and FUSE file systems flush files only; the files are complete and in place."""
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        state = CheckpointState.from_arrays({"w": np.full(2, 7, np.float32)}, ["w"])
        CheckpointState.save_checkpoint(state, tmp_path / "checkpoint")
        write(tmp_path, a="1", b="2")
    np.testing.assert_array_equal(
        CheckpointState.load_checkpoint(tmp_path / "checkpoint").parameters["w"].data, 7
    )
    assert (tmp_path / "b").read_text() == "2"
    assert bool(caplog.records) == (code == errno.EIO)


def test_files_are_flushed_through_handles_that_can_write(tmp_path, monkeypatch):
    """Windows flushes no others. Whoever saves anything here does it through `FileSet`."""
    fcntl = pytest.importorskip("fcntl")
    real, flushed = os.fsync, []

    def fsync(descriptor):
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            flushed.append(descriptor)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path, a="1", b="2")
    with replace_file(tmp_path / "c") as file:
        file.write(b"3")
    assert len(flushed) == 4  # the journal too


def test_a_set_that_cannot_take_its_place_leaves_everything_as_it_was(tmp_path, monkeypatch):
    write(tmp_path, a="1", b="1")

    def refuse(source, target):
        if os.path.basename(target) == "a":
            raise PermissionError(errno.EACCES, "in use")
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        write(tmp_path, a="2", b="2")
    monkeypatch.undo()
    assert contents(tmp_path) == {"a": "1", "b": "1"}
    (tmp_path / "d").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path, a="2", d="2")
    assert (tmp_path / "a").read_text() == "1"


def test_old_generations_of_external_data_go_with_their_model(tmp_path):
    old, new = external_data_name("m.onnx"), external_data_name("m.onnx")
    write(tmp_path, **{"m.onnx": "1", old: "1", external_data_name("other.onnx"): "1", "m.onnx.data": "1"})
    write(tmp_path, **{"m.onnx": "2", new: "2"})
    assert not (tmp_path / old).exists()
    assert (tmp_path / new).exists()
    assert len(list(tmp_path.iterdir())) == 4


def test_temporary_files_of_dead_saves_are_removed_and_those_of_living_ones_are_not(tmp_path):
    data = external_data_name("a")
    for name in ("a", data, "b"):
        (tmp_path / temporary(name)).write_text("left")
    with FileSet(tmp_path) as living, living.open("a") as file:
        file.write(b"1")
        running = set(os.listdir(tmp_path))
        assert len(running) == 2  # of b, and of this one
        write(tmp_path, a="2")
        assert running <= set(os.listdir(tmp_path))
    assert contents(tmp_path) == {"a": "1", temporary("b"): "left"}


def test_only_names_of_the_directory_can_be_written(tmp_path):
    with FileSet(tmp_path) as files:
        for name in ("../a", "/a", "a/b", "a\\b", "", ".", ".."):
            with pytest.raises(ValueError, match="not a file name"), files.open(name):
                pass
        with pytest.raises(ValueError, match="can be removed"):
            files.remove("checkpoint")
    assert not os.listdir(tmp_path)


def test_a_link_in_a_set_is_replaced_and_its_target_stays(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "target").write_text("mine")
    (tmp_path / "run" / "a").symlink_to(tmp_path / "target")
    write(tmp_path / "run", a="1", b="1")
    assert contents(tmp_path / "run") == {"a": "1", "b": "1"}
    assert (tmp_path / "target").read_text() == "mine"


def test_directories_that_cannot_be_locked_or_listed_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_lock", lambda descriptor, wait=False: False)
    write(tmp_path, a="1", b="1")
    (tmp_path / temporary("a")).write_text("of a save that may be running")
    write(tmp_path, a="2", b="2")
    assert contents(tmp_path) == {"a": "2", "b": "2", temporary("a"): "of a save that may be running"}


def reading(pipe):
    """Starts to read a pipe; returns the thread and the list that it fills with the content."""
    found = []
    thread = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    thread.start()
    return thread, found


@pytest.mark.skipif(sys.platform == "win32", reason="makes pipes")
@pytest.mark.parametrize("link", [False, True])
def test_a_pipe_is_written_into(tmp_path, link):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to("pipe")
    thread, found = reading(pipe)
    with replace_file(tmp_path / ("link" if link else "pipe")) as file:
        file.write(b"content")
    thread.join(60)
    assert found == [b"content"]
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]
    assert pipe.is_fifo()


@pytest.mark.skipif(sys.platform == "win32", reason="makes pipes")
def test_a_pipe_gets_nothing_of_a_write_that_fails(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    def fail():
        with replace_file(tmp_path / "pipe") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()  # nobody reads: a write into the pipe would wait


def device_in(folder):
    """A null device that a fault of the code cannot take from the machine: as root a twin of it in `folder`."""
    if os.access("/dev", os.W_OK):
        try:
            os.mknod(folder / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip(
                "this process may replace the system's devices, but make none; the tests of pipes remain"
            )
        return str(folder / "null")
    return os.devnull


@pytest.mark.skipif(sys.platform != "linux", reason="knows the numbers of the device")
def test_a_device_stays_a_device(tmp_path):
    from onnxtrain import CSVLogger, Trainer
    from onnxtrain.passes import load_model, save_model
    from trainer import problems

    problem = problems.line()
    trainer = Trainer(problem.model, "mse")
    device = device_in(tmp_path)
    before = os.stat(device)
    trainer.export(device)
    trainer.save_parameters(device)
    trainer.model_card(device, "card")
    save_model(load_model(problem.model), device)
    trainer.fit(
        problem.x,
        problem.y,
        callbacks=[CSVLogger(device)],
        evaluate_every=1,
        validation=0.2,
        verbose=False,
    )
    after = os.stat(device)
    assert (after.st_mode, after.st_rdev, after.st_ino) == (before.st_mode, before.st_rdev, before.st_ino)
    assert set(os.listdir(tmp_path)) <= {"null"}


@pytest.mark.skipif(sys.platform == "win32", reason="makes pipes")
def test_a_log_goes_into_a_pipe_row_by_row(tmp_path):
    from onnxtrain import CSVLogger, Trainer
    from trainer import problems

    problem = problems.line()
    os.mkfifo(tmp_path / "pipe")
    # Held open for reading, so that each row finds a reader.
    descriptor = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    history = Trainer(problem.model, "mse").fit(
        problem.x, problem.y, epochs=3, callbacks=[CSVLogger(tmp_path / "pipe")], verbose=False
    )
    header, *rows = os.read(descriptor, 2**16).decode().splitlines()
    os.close(descriptor)
    assert header.split(",") == list(history.last)
    assert [[float(v) for v in row.split(",")] for row in rows] == [list(e.values()) for e in history.epochs]
    assert os.listdir(tmp_path) == ["pipe"]


def test_standard_output_that_goes_to_a_file_stays_that_file(tmp_path):
    code = (
        "import os\nfrom onnxtrain.runtime.atomic import replace_file\nos.write(1, b'a')\n"
        "with replace_file('/dev/stdout') as file: file.write(b'b')\nos.write(1, b'c')\n"
    )
    if not os.path.exists("/dev/stdout"):
        pytest.skip("there is no /dev/stdout")
    with open(tmp_path / "out", "ab") as out:
        subprocess.run(
            [sys.executable, "-c", code], stdout=out, check=True, env=os.environ | {"PYTHONPATH": str(SOURCE)}
        )
    assert (tmp_path / "out").read_bytes() == b"abc"
