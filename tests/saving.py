"""All ways in which this package saves, each with models and values that tell which save a file is of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from onnxtrain import Callback, EarlyStopping, ModelCheckpoint, Trainer, generate_artifacts
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.errors import CheckpointError
from onnxtrain.runtime import export

SIZE = 60
X = np.ones((8, SIZE), np.float32)


def model(hidden: int) -> onnx.ModelProto:
    """y = (x v) w + b with `hidden` columns in v: two sizes are two models, which do not fit each other."""
    v, w = ",".join(["0.01"] * SIZE * hidden), ",".join(["1.0"] * hidden)
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[n, {SIZE}] x) => (float[n, 1] y)
            <float[{SIZE}, {hidden}] v = {{{v}}}, float[{hidden}, 1] w = {{{w}}}, float[1] b = {{0.0}}>
        {{ h = MatMul(x, v)
           m = MatMul(h, w)
           y = Add(m, b) }}"""
    )


def mark(state: CheckpointState, k: int) -> None:
    """Makes every parameter say which save it is of."""
    for _, parameter in state.parameters:
        parameter.data[...] = k


def marked(state: CheckpointState) -> int:
    """Returns which save a state is of; all of it must be of one."""
    values = np.unique(np.concatenate([p.data.reshape(-1) for _, p in state.parameters]))
    assert len(values) == 1, values
    return int(values[0])


class Kind:
    """One way to save; `saves` yields the number of each save that has returned."""

    other_files: tuple[str, ...] = ()

    def prepare(self, directory: Path) -> None:
        raise NotImplementedError

    def saves(self, directory: Path, start: int) -> Iterator[int]:
        raise NotImplementedError

    def look(self, directory: Path) -> int:
        """Returns which save is in `directory`; anything unreadable or mixed is an exception."""
        raise NotImplementedError


class Checkpoint(Kind):
    """`CheckpointState.save_checkpoint`."""

    def prepare(self, directory: Path) -> None:
        arrays = {n: np.zeros(s, np.float32) for n, s in {"a": (300, 300), "b": (7,), "c": ()}.items()}
        CheckpointState.save_checkpoint(CheckpointState.from_arrays(arrays, ["a"]), directory / "checkpoint")

    def saves(self, directory: Path, start: int) -> Iterator[int]:
        state = CheckpointState.load_checkpoint(directory / "checkpoint")
        while True:
            start += 1
            mark(state, start)
            CheckpointState.save_checkpoint(state, directory / "checkpoint")
            yield start

    def look(self, directory: Path) -> int:
        return marked(CheckpointState.load_checkpoint(directory / "checkpoint"))


class Marker(Callback):
    """Marks the state of each epoch with its number, before it is saved."""

    def on_epoch_end(self, trainer: Trainer, history: Any) -> None:
        mark(trainer.state, len(history))
        if trainer._state.average is not None:
            trainer._state.average.update(1.0)  # marked as well


def look_at_run(trainer: Trainer) -> int:
    k = marked(trainer.state)
    with trainer.averaged():
        assert marked(trainer.state) == k
    width = trainer.parameters["v"].data.shape[1]
    loss = trainer.evaluate(X, X[:, :1])["loss"]
    np.testing.assert_allclose(loss, (SIZE * width * float(k) ** 2 + k - 1) ** 2, rtol=1e-5)
    return k


def run_in(directory: Path, hidden: int = 3, **options: Any) -> Trainer:
    return Trainer(
        model(hidden), loss="mse", optimizer="adamw", learning_rate=1e-4, directory=directory, **options
    )


class Fit(Kind):
    """`Trainer.fit`, which saves after each epoch, with the best epoch kept beside."""

    def prepare(self, directory: Path) -> None:
        trainer = run_in(directory)
        mark(trainer.state, 0)
        trainer.save(directory)

    def saves(self, directory: Path, start: int) -> Iterator[int]:
        trainer = Trainer.resume(directory)
        while True:
            trainer.fit(X, X[:, :1], epochs=1, verbose=False, callbacks=[Marker()])
            yield len(trainer.history)

    def look(self, directory: Path) -> int:
        trainer = Trainer.resume(directory)
        k = look_at_run(trainer)
        assert k == len(trainer.history)
        return k


class Checkpoints(Fit):
    """`ModelCheckpoint` into another directory, which starts with a run of another model."""

    def prepare(self, directory: Path) -> None:
        super().prepare(directory)
        run_in(directory / "unused", 4).save(directory / "copy")

    def saves(self, directory: Path, start: int) -> Iterator[int]:
        trainer = Trainer.resume(directory)
        stop = EarlyStopping("loss", patience=10**9, restore_best=True)
        while True:
            callbacks = [Marker(), stop, ModelCheckpoint(directory / "copy", monitor=None)]
            trainer.fit(X, X[:, :1], epochs=1, verbose=False, callbacks=callbacks)
            yield len(trainer.history)

    def look(self, directory: Path) -> int:
        trainer = Trainer.resume(directory / "copy")
        if trainer.parameters["v"].data.shape[1] == 4:  # the run that was there before
            return 0
        best = directory / "copy" / "best"
        if best.exists():
            CheckpointState.load_checkpoint(best)
        return look_at_run(trainer)


class KeptCheckpoints(Fit):
    """`ModelCheckpoint` that keeps the two newest, each in a directory of its own, with averages of the weights."""

    def prepare(self, directory: Path) -> None:
        trainer = run_in(directory, ema_decay=0.9)
        mark(trainer.state, 0)
        trainer.save(directory)
        saves = self.saves(directory, 0)
        for _ in range(2):
            next(saves)

    def saves(self, directory: Path, start: int) -> Iterator[int]:
        trainer = Trainer.resume(directory)
        keeping = ModelCheckpoint(directory / "kept", monitor=None, keep=2)
        while True:
            trainer.fit(X, X[:, :1], epochs=1, verbose=False, callbacks=[Marker(), keeping])
            yield len(trainer.history)

    def look(self, directory: Path) -> int:
        saves = ModelCheckpoint(directory / "kept", keep=2).saved()
        numbers = [marked(CheckpointState.load_checkpoint(path / "checkpoint")) for path in saves]
        assert [path.name for path in saves] == [f"epoch-{number:08d}" for number in numbers]
        assert numbers in (list(range(numbers[-1] - size, numbers[-1] + 1)) for size in (1, 2))
        newest = Trainer.resume(saves[-1])
        assert look_at_run(newest) == len(newest.history)
        return numbers[-1]


class Save(Kind):
    """`Trainer.save` of two models in turn to one directory: everything in it changes each time."""

    def prepare(self, directory: Path) -> None:
        for hidden in (3, 4):
            mark(run_in(directory / str(hidden), hidden).state, 0)
        trainer = Trainer.resume(directory / "3")
        mark(trainer.state, 0)
        trainer.save(directory / "copy")

    def saves(self, directory: Path, start: int) -> Iterator[int]:
        trainers = [Trainer.resume(directory / str(hidden)) for hidden in (3, 4)]
        while True:
            start += 1
            trainer = trainers[start % 2]
            mark(trainer.state, start)
            trainer.save_parameters(trainer.directory / "best")
            trainer.save(directory / "copy")
            yield start

    def look(self, directory: Path) -> int:
        trainer = Trainer.resume(directory / "copy")
        k = look_at_run(trainer)
        assert k == 0 or trainer.parameters["v"].data.shape[1] == 3 + k % 2
        if k:
            assert marked(CheckpointState.load_checkpoint(directory / "copy" / "best")) == k
        return k


class Export(Kind):
    """`Trainer.export`, as if the model were too large for one file; read by stock ONNX Runtime alone."""

    limit = 1

    def prepare(self, directory: Path) -> None:
        trainer = run_in(directory / "run")
        next(self._saves(trainer, directory, 0))

    def saves(self, directory: Path, start: int) -> Iterator[int]:
        return self._saves(Trainer.resume(directory / "run"), directory, start)

    def _saves(self, trainer: Trainer, directory: Path, start: int) -> Iterator[int]:
        export.MAX_FILE_SIZE = self.limit
        while True:
            start += 1
            mark(trainer.state, start)
            trainer.export(directory / "net.onnx")
            yield start

    def look(self, directory: Path) -> int:
        session = onnxruntime.InferenceSession(directory / "net.onnx")
        values = np.unique(session.run(None, {"x": X})[0])
        assert len(values) == 1, values
        k = round(np.sqrt(values[0] / (3 * SIZE)))
        np.testing.assert_allclose(values[0], 3 * SIZE * k**2 + k, rtol=1e-5)
        return k


class SmallExport(Export):
    """`Trainer.export` to one file."""

    limit = 2**31


class Artifacts(Kind):
    """`generate_artifacts` of two models in turn into one directory."""

    def prepare(self, directory: Path) -> None:
        next(self.saves(directory, -1))

    def saves(self, directory: Path, start: int) -> Iterator[int]:
        while True:
            start += 1
            generate_artifacts(
                model(3 + start % 2), loss="mse", optimizer="adamw", artifact_directory=directory / "run"
            )
            yield start

    def look(self, directory: Path) -> int:
        run = directory / "run"
        state = CheckpointState.load_checkpoint(run / "checkpoint")
        module = Module(run / "training_model.onnx", state, run / "eval_model.onnx")
        optimizer = Optimizer(run / "optimizer_model.onnx", module)
        loss = module(X, X[:, :1])
        optimizer.step()
        assert module.eval()(X, X[:, :1]) < loss
        manifest = json.loads((run / "manifest.json").read_text())
        assert manifest["fingerprint"] == module.manifest.fingerprint
        return -1  # which of the many saves of one model it is cannot be told


class FirstArtifacts(Artifacts):
    """`generate_artifacts` into an empty directory: a run that can be opened, or none."""

    def prepare(self, directory: Path) -> None:
        pass

    def look(self, directory: Path) -> int:
        run = directory / "run"
        if not run.exists():
            return -1
        try:
            Trainer(model(3), loss="mse", directory=run)
        except CheckpointError:  # there is one already
            return super().look(directory)
        return -1


KINDS: dict[str, type[Kind]] = {
    "checkpoint": Checkpoint,
    "fit": Fit,
    "ModelCheckpoint": Checkpoints,
    "Trainer.save": Save,
    "large export": Export,
    "export": SmallExport,
    "artifacts": Artifacts,
}
AT_EACH_STEP = KINDS | {"first artifacts": FirstArtifacts, "ModelCheckpoint that keeps": KeptCheckpoints}
