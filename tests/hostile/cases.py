"""Opens damaged and hostile files, one after the other, and reports what came of each.

`python -m hostile.cases DIRECTORY FIRST COUNT STEP` prints one line of JSON per case; a crash leaves the rest without.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import models
from hostile import mutations
from hostile.mutations import Rng, choose, damage
from onnxtrain import Trainer
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.artifacts import generate_artifacts
from onnxtrain.cli._command_options import InspectOptions
from onnxtrain.cli._inspect import run_command
from onnxtrain.errors import OnnxTrainError
from onnxtrain.runtime.atomic import JOURNAL

X = np.random.default_rng(0).normal(0, 1, (5, 4)).astype(np.float32)
Y = np.array([0, 1, 2, 1, 0])
MODELS = ["training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"]
SECRET = b"TOP-SECRET-" * 1500
ADDRESS_SPACE = 3 * 2**30  # so that what goes wrong does not take the machine along
SECONDS = 1200  # after which a case is taken to wait for ever, as at a pipe; a fraction of one is usual
LEGACY = Path(__file__).parents[1] / "runtime" / "data" / "legacy_full"


class Refused(Exception):
    """ONNX Runtime refuses a model that was exported without a complaint."""


def load_exported(path: Path) -> None:
    """Loads an exported model as its users do, who have neither onnxtrain nor its error messages."""
    try:
        onnxruntime.InferenceSession(path)
    except Exception as error:
        raise Refused(str(error)) from error


def train(folder: Path, checkpoint: str = "checkpoint", delta: str | None = None) -> None:
    """Opens everything in a folder of artifacts and uses all of it once."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    state = CheckpointState.load_checkpoint(folder / checkpoint, delta=delta and folder / delta)
    module = Module(folder / MODELS[0], state, folder / MODELS[1], session_options=options)
    optimizer = Optimizer(folder / MODELS[2], module)
    module(X, Y)
    optimizer.step()
    module.eval()(X, Y)
    module.export_model_for_inferencing(folder / "trained.onnx", [module.output_names()[-1]])
    load_exported(folder / "trained.onnx")
    CheckpointState.save_checkpoint(state, folder / "saved", include_optimizer_state=True)


def resume(folder: Path) -> None:
    trainer = Trainer.resume(folder)
    trainer.evaluate(X, Y)
    trainer.fit(X, Y, epochs=1, verbose=False)


def predict(folder: Path) -> None:
    trainer = Trainer.resume(folder)
    trainer.predict(X)
    trainer.export(folder / "trained.onnx")
    load_exported(folder / "trained.onnx")


def inspect(path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        run_command(InspectOptions(path, json=True))


def generate(folder: Path) -> None:
    generate_artifacts(
        folder / "source.onnx", loss="cross_entropy", optimizer="adamw", artifact_directory=folder / "made"
    )


def _change(path: Path, change: Callable[[Rng, bytes], bytes], rng: Rng) -> None:
    content = path.read_bytes()
    path.unlink()  # it may be linked into other folders
    path.write_bytes(change(rng, content))


def checkpoint(rng: Rng, folder: Path) -> Callable[[], object]:
    _change(folder / "checkpoint", choose(rng, [damage, mutations.edit_safetensors]), rng)
    return partial(train, folder)


def delta(rng: Rng, folder: Path) -> Callable[[], object]:
    _change(folder / "delta", choose(rng, [damage, mutations.edit_safetensors]), rng)
    return partial(train, folder, delta="delta")


def legacy(rng: Rng, folder: Path) -> Callable[[], object]:
    shutil.copyfile(LEGACY, folder / "legacy")
    _change(folder / "legacy", damage, rng)
    return lambda: CheckpointState.load_checkpoint(folder / "legacy")


def run_model(rng: Rng, folder: Path) -> Callable[[], object]:
    _change(folder / choose(rng, MODELS), choose(rng, [damage, mutations.edit_model]), rng)
    return partial(train, folder)


def inference_model(rng: Rng, folder: Path) -> Callable[[], object]:
    _change(folder / "inference_model.onnx", choose(rng, [damage, mutations.edit_model]), rng)
    return partial(predict, folder)


def external_data(rng: Rng, folder: Path) -> Callable[[], object]:
    name = choose(rng, MODELS[:2])
    model = onnx.load(folder / name)
    constant = onnx.numpy_helper.from_array(np.ones(700, np.float32), "constant")
    model.graph.initializer.append(constant)
    output = model.graph.output[0].name
    for node in model.graph.node:  # the loss needs it, so that it is exported too
        node.output[:] = ["without" if n == output else n for n in node.output]
    model.graph.node.append(onnx.helper.make_node("ReduceMax", ["constant"], ["largest"], keepdims=0))
    model.graph.node.append(onnx.helper.make_node("Mul", ["without", "largest"], [output]))
    (folder / name).unlink()
    onnx.save(model, folder / name, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    mutations.edit_external_data(rng, folder, name)
    return partial(train, folder)


def source_model(rng: Rng, folder: Path) -> Callable[[], object]:
    onnx.save(models.mlp(), folder / "source.onnx")
    _change(folder / "source.onnx", choose(rng, [damage, mutations.edit_model, mutations.edit_model]), rng)
    return partial(generate, folder)


def source_data(rng: Rng, folder: Path) -> Callable[[], object]:
    onnx.save(
        models.mlp(),
        folder / "source.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    mutations.edit_external_data(rng, folder, "source.onnx")
    return partial(generate, folder)


def run_folder(rng: Rng, folder: Path) -> Callable[[], object]:
    """A folder that is resumed: its checkpoint and what it says of the trainer, its manifest, a journal."""
    kind = rng.integers(5)
    if kind == 0:
        _change(folder / "manifest.json", lambda r, c: mutations.edit_json(r, c.decode()).encode(), rng)
    elif kind == 4:  # bytes, which need not be UTF-8 any more
        _change(folder / choose(rng, ["manifest.json", "checkpoint", *MODELS]), damage, rng)
    elif kind == 1:
        names = ["checkpoint", "../outside/secret.bin", "eval_model.onnx", "best", "x.0123456789ab.data"]
        moves = [[f".{n}.0123456789ab.onnxtrain-tmp", n] for n in names]
        text = json.dumps({"moves": [choose(rng, moves)], "remove": [choose(rng, names)][: rng.integers(2)]})
        (folder / ".checkpoint.0123456789ab.onnxtrain-tmp").write_bytes(damage(rng, b"x" * 100))
        (folder / JOURNAL).write_text(choose(rng, [lambda t: t, partial(mutations.edit_json, rng)])(text))
    else:
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        text = str(state.properties["onnxtrain.trainer"])
        state.properties["onnxtrain.trainer"] = (
            mutations.edit_json(rng, text).encode("utf-8", "replace").decode()
        )
        CheckpointState.save_checkpoint(state, folder / "checkpoint", include_optimizer_state=True)
    return partial(resume, folder)


def inspected(rng: Rng, folder: Path) -> Callable[[], object]:
    """Return the path for `onnxtrain inspect`: a folder whose manifest or checkpoint was damaged, or one file."""
    name = choose(rng, ["manifest.json", "manifest.json", "checkpoint", *MODELS, "inference_model.onnx"])
    edit = mutations.edit_model if name.endswith(".onnx") else mutations.edit_safetensors
    if name == "manifest.json":
        edit = lambda rng, content: mutations.edit_json(rng, content.decode()).encode()
    _change(folder / name, choose(rng, [damage, edit]), rng)
    return partial(inspect, folder / name if name.endswith(".onnx") else folder)


KINDS: list[Callable[[Rng, Path], Callable[[], object]]] = [
    checkpoint, checkpoint, delta, legacy, run_model, run_model, external_data, external_data, source_model,
    source_data, run_folder, inference_model, inspected,
]  # fmt: skip


def prepare(directory: Path) -> None:
    """Makes the folder that cases begin with."""
    directory.mkdir(parents=True)
    trainer = Trainer(models.mlp(), loss="cross_entropy", directory=directory / "run")
    trainer.fit(X, Y, epochs=1, verbose=False)
    trainer.save(directory / "run")
    state = CheckpointState.load_checkpoint(directory / "run" / "checkpoint")
    CheckpointState.save_checkpoint(state, directory / "run" / "delta", trainable_only=True)


def _memory(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) // 1024


class Watch:
    """Sees whether anything, native code too, opens or changes a file in a directory."""

    def __init__(self, directory: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._file = libc.inotify_init1(os.O_NONBLOCK)
        in_open, in_modify, in_create, in_delete, in_moved = 0x20, 0x2, 0x100, 0x200, 0xC0
        mask = in_open | in_modify | in_create | in_delete | in_moved
        if libc.inotify_add_watch(self._file, os.fsencode(directory), mask) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")

    def close(self) -> None:
        os.close(self._file)

    def touched(self) -> bool:
        ready, _, _ = select.select([self._file], [], [], 0)
        return bool(ready) and bool(os.read(self._file, 4096))


def _outcome(act: Callable[[], object]) -> str:
    signal.alarm(SECONDS)
    try:
        act()
    except OnnxTrainError as error:
        return f"noticed {type(error).__name__}"
    except BaseException as error:
        signal.alarm(0)
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"unexpected {type(error).__name__} ({where.name}): {str(error)[:200]}"
    finally:
        signal.alarm(0)
    return "used"


def _timeout(*_: object) -> None:
    raise TimeoutError(f"the case took more than {SECONDS} seconds")


def case(directory: Path, seed: int) -> dict[str, object]:
    """Runs one case in a folder of its own."""
    rng = np.random.default_rng([seed, 8])
    kind = KINDS[seed % len(KINDS)]
    root = directory / f"case-{seed}"
    folder = root / "run"
    shutil.copytree(directory / "run", folder, copy_function=os.link)
    (root / "outside").mkdir()
    (root / "outside" / "secret.bin").write_bytes(SECRET)
    act = kind(rng, folder)
    watch = Watch(root / "outside")
    Path("/proc/self/clear_refs").write_text("5")  # the highest use of memory is counted from here
    before, start = _memory("VmRSS"), time.monotonic()
    outcome = _outcome(act)
    report = {"case": seed, "kind": kind.__name__, "outcome": outcome, "seconds": time.monotonic() - start}
    report["memory"] = _memory("VmHWM") - before
    report["outside"] = watch.touched() or any(
        SECRET[:11] in path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    watch.close()
    shutil.rmtree(root)
    return report


def main(directory: str, first: str, count: str, step: str) -> None:
    warnings.simplefilter("ignore")
    onnxruntime.set_default_logger_severity(4)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    signal.signal(signal.SIGALRM, _timeout)
    for index in range(int(count)):
        seed = int(first) + index * int(step)
        print(json.dumps({"begins": seed}), flush=True)
        print(json.dumps(case(Path(directory), seed)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
    else:
        main(*sys.argv[1:])
