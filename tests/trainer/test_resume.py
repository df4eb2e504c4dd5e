"""Stopping and resuming is bit-equal to not having stopped."""

from __future__ import annotations

import copy
import os
import pickle
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import models
from onnxtrain import Callback, CheckpointState, EarlyStopping, ReduceLROnPlateau, Trainer
from onnxtrain.errors import CheckpointError, InputError, ModelLoadError
from trainer import problems


class InterruptAt(Callback):
    """Presses Ctrl-C in a given step."""

    def __init__(self, step: int) -> None:
        self.left = step

    def on_step_end(self, trainer: Trainer, loss: float) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def state(trainer: Trainer) -> dict[str, Any]:
    """Everything that training changes."""
    store = trainer.state._store
    tensors = {f"parameter/{name}": p.data.tobytes() for name, p in trainer.parameters}
    tensors |= {f"statistic/{name}": p.data.tobytes() for name, p in trainer.state.statistics}
    tensors |= {
        f"{m}/{name}": b.read().tobytes() for m, group in store.moments.items() for name, b in group.items()
    }
    return {**tensors, "optimizer": vars(store.optimizer), "rate": trainer.learning_rate}


def make_trainer(problem: problems.Problem, directory: Path | None = None) -> Trainer:
    return Trainer(
        problem.model,
        problem.loss,
        learning_rate=1e-2,
        scheduler="cosine",
        warmup_steps=3,
        directory=directory,
    )


FIT: dict[str, Any] = {"epochs": 5, "batch_size": 8, "accumulate": 2, "validation": 0.2, "verbose": False}


def callbacks() -> list[Callback]:
    return [ReduceLROnPlateau("loss", patience=1, min_delta=0.05), EarlyStopping("val_loss", patience=4)]


@pytest.mark.parametrize("make", [problems.classes, problems.images], ids=["mlp", "batch-norm"])
@pytest.mark.parametrize("step", [1, 2, 3, 6, 7])
def test_interrupt_and_resume_is_bit_equal(make: Any, step: int, tmp_path: Path) -> None:
    problem = make()
    straight = make_trainer(problem)
    straight.fit(problem.x, problem.y, callbacks=callbacks(), **FIT)

    stopped = make_trainer(problem, tmp_path / "run")
    history = stopped.fit(problem.x, problem.y, callbacks=[*callbacks(), InterruptAt(step)], **FIT)
    assert history.stopped == "interrupted"
    assert len(history) < 5
    del stopped

    resumed = Trainer.resume(tmp_path / "run")
    assert resumed.resumes_fit
    history = resumed.fit(problem.x, problem.y, callbacks=callbacks(), **FIT)
    assert state(resumed) == state(straight)
    assert history == straight.history
    assert not resumed.resumes_fit


def test_same_process_resumes_too() -> None:
    problem = problems.classes()
    straight = make_trainer(problem)
    straight.fit(problem.x, problem.y, **FIT)
    stopped = make_trainer(problem)
    stopped.fit(problem.x, problem.y, callbacks=[InterruptAt(4)], **FIT)
    history = stopped.fit(problem.x, problem.y, **FIT)
    assert state(stopped) == state(straight)
    assert history == straight.history


def test_saved_between_fits(tmp_path: Path) -> None:
    problem = problems.classes()
    straight = Trainer(problem.model, problem.loss)
    straight.fit(problem.x, problem.y, epochs=3, verbose=False)
    first = Trainer(problem.model, problem.loss)
    first.fit(problem.x, problem.y, epochs=1, verbose=False)
    first.save(tmp_path / "saved")
    second = Trainer.resume(tmp_path / "saved")
    np.testing.assert_array_equal(second.predict(problem.x), first.predict(problem.x))
    second.fit(problem.x, problem.y, epochs=2, verbose=False)
    assert state(second) == state(straight)
    assert second.history == straight.history


def test_second_interrupt_is_immediate() -> None:
    class Twice(Callback):
        def on_step_end(self, trainer: Trainer, loss: float) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    problem = problems.classes()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(problem).fit(problem.x, problem.y, callbacks=[Twice()], verbose=False)
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupted_temporary_run_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    problem = problems.classes()
    trainer = Trainer(problem.model, problem.loss)
    finished = trainer.directory
    trainer.fit(problem.x, problem.y, verbose=False)
    del trainer
    assert not finished.exists()

    trainer = Trainer(problem.model, problem.loss)
    trainer.fit(problem.x, problem.y, epochs=3, callbacks=[InterruptAt(1)])
    kept = trainer.directory
    assert f"Trainer.resume('{kept}')" in capsys.readouterr().err
    del trainer
    assert Trainer.resume(kept).resumes_fit
    for path in kept.iterdir():
        path.unlink()
    kept.rmdir()


def test_directory_is_saved_after_every_epoch(tmp_path: Path) -> None:
    problem = problems.classes()
    steps = []

    class Look(Callback):
        def on_epoch_end(self, trainer: Trainer, history: Any) -> None:
            saved = CheckpointState.load_checkpoint(tmp_path / "checkpoint")._store.optimizer
            steps.append(saved.step if saved else 0)

    trainer = Trainer(problem.model, problem.loss, directory=tmp_path)
    trainer.fit(problem.x, problem.y, epochs=3, batch_size=20, callbacks=[Look()], verbose=False)
    assert steps == [0, 3, 6]
    assert CheckpointState.load_checkpoint(tmp_path / "checkpoint")._store.optimizer.step == 9


def test_other_data_in_the_middle_of_an_epoch_is_refused(tmp_path: Path) -> None:
    problem = problems.classes()
    trainer = make_trainer(problem, tmp_path)
    trainer.fit(problem.x, problem.y, callbacks=[InterruptAt(1)], **FIT)
    with pytest.raises(InputError, match="interrupted in the middle of epoch 1"):
        Trainer.resume(tmp_path).fit(problem.x, problem.y, epochs=5, batch_size=4, verbose=False)


def test_functions_have_to_be_passed_again(tmp_path: Path) -> None:
    def bias(prediction: np.ndarray, target: np.ndarray) -> float:
        return float((prediction - target).mean())

    problem = problems.line()
    trainer = Trainer(
        problem.model, "mse", metrics=["mae", bias], scheduler=lambda s, t: 1.0, directory=tmp_path
    )
    trainer.fit(problem.x, problem.y, verbose=False)
    with pytest.raises(InputError, match="metrics included a function"):
        Trainer.resume(tmp_path)
    with pytest.raises(InputError, match="scheduler included a function"):
        Trainer.resume(tmp_path, metrics=["mae", bias])
    resumed = Trainer.resume(tmp_path, metrics=["mae", bias], scheduler=lambda s, t: 1.0)
    assert resumed.history == trainer.history


def test_directory_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    problem = problems.line()
    Trainer(problem.model, "mse", directory=tmp_path)
    with pytest.raises(CheckpointError, match=r"already contains a training run. Resume with Trainer.resume"):
        Trainer(problem.model, "mse", directory=tmp_path)


def test_resume_from_nothing_and_from_damage(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no file 'checkpoint'"):
        Trainer.resume(tmp_path)
    problem = problems.line()
    trainer = Trainer(problem.model, "mse", directory=tmp_path / "run")
    trainer.fit(problem.x, problem.y, verbose=False)
    trainer.state.properties["onnxtrain.trainer"] = '{"version": 9}'
    CheckpointState.save_checkpoint(
        trainer.state, tmp_path / "run" / "checkpoint", include_optimizer_state=True
    )
    with pytest.raises(CheckpointError, match="not a trainer's state"):
        Trainer.resume(tmp_path / "run")


def test_resume_trains_plain_artifacts(tmp_path: Path) -> None:
    from onnxtrain import generate_artifacts

    problem = problems.classes(samples=200)
    generate_artifacts(
        problem.model,
        loss=problem.loss,
        optimizer="adamw",
        artifact_directory=tmp_path,
        additional_output_names=["logits"],
    )
    trainer = Trainer.resume(tmp_path)
    trainer.learning_rate = 2e-2
    history = trainer.fit(problem.x, problem.y, epochs=10, verbose=False)
    assert history.last["accuracy"] > 0.9


def dropout_model() -> onnx.ModelProto:
    """x [n, 4] -> hidden [n, 8], two Dropout nodes, one of them with a seed -> logits [n, 3]."""
    rng = np.random.default_rng(0)
    helper = onnx.helper
    values = {"w1": rng.standard_normal((4, 8)), "w2": rng.standard_normal((8, 3)), "ratio": np.array(0.4)}
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Dropout", ["h", "ratio", "on"], ["d1"]),
        helper.make_node("Tanh", ["d1"], ["t"]),
        helper.make_node("Dropout", ["t", "ratio", "on"], ["d2"], seed=7),
        helper.make_node("MatMul", ["d2", "w2"], ["logits"]),
    ]
    tensors = {name: value.astype(np.float32) for name, value in values.items()} | {"on": np.array(True)}
    return models.make_model(nodes, {"x": ["n", 4]}, {"logits": ["n", 3]}, tensors)


@pytest.mark.parametrize("step", [1, 4, 5, 9])
def test_dropout_resumes_bit_equal(step: int, tmp_path: Path) -> None:
    problem = problems.classes()
    problem = problems.Problem(dropout_model(), problem.loss, problem.x, problem.y)
    straight = make_trainer(problem)
    straight.fit(problem.x, problem.y, **FIT)
    stopped = make_trainer(problem, tmp_path / "run")
    stopped.fit(problem.x, problem.y, callbacks=[InterruptAt(step)], **FIT)
    del stopped
    resumed = Trainer.resume(tmp_path / "run")
    resumed.fit(problem.x, problem.y, **FIT)
    assert state(resumed) == state(straight)
    assert resumed.history == straight.history


def test_dropout_follows_the_seed_and_is_another_in_each_step() -> None:
    problem = problems.classes()
    weights, losses = [], []
    for seed in (0, 0, 1):
        trainer = Trainer(dropout_model(), problem.loss, learning_rate=0.0 if seed else 1e-2, seed=seed)
        history = trainer.fit(problem.x, problem.y, epochs=3, batch_size=60, shuffle=False, verbose=False)
        weights.append(trainer.parameters["w1"].data.copy())
        losses.append(history["loss"])
    np.testing.assert_array_equal(weights[0], weights[1])
    assert len(set(losses[2])) == 3  # the weights stand still: only the masks differ


def test_other_random_ops_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[n, 4] x) => (float[n, 3] y) <float[4, 3] w>
        { noise = RandomNormalLike(x) s = Add(x, noise) y = MatMul(s, w) }"""
    )
    del model.graph.input[1:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    problem = problems.classes()
    trainer = Trainer(model, problem.loss, directory=tmp_path)
    trainer.fit(problem.x, problem.y, callbacks=[InterruptAt(1)], **FIT)
    caplog.clear()
    Trainer.resume(tmp_path)
    assert "draws random numbers in RandomNormalLike, which restart in evaluation" in caplog.text


def spread(prediction: np.ndarray, target: np.ndarray) -> float:
    return float(np.median(prediction) + target.std())


@pytest.mark.parametrize("step", [2, 3, 5])
def test_metric_functions_see_the_whole_interrupted_epoch(step: int, tmp_path: Path) -> None:
    problem = problems.classes()
    straight = Trainer(problem.model, problem.loss, metrics=["accuracy", spread])
    straight.fit(problem.x, problem.y, **FIT)
    stopped = Trainer(problem.model, problem.loss, metrics=["accuracy", spread], directory=tmp_path / "run")
    stopped.fit(problem.x, problem.y, callbacks=[InterruptAt(step)], **FIT)
    if step != 3:  # in the middle of an epoch of three steps
        assert len(list((tmp_path / "run").glob("predictions-*.npz"))) == 1
        with pytest.raises(InputError, match="in the middle of an epoch with other metrics than accuracy"):
            Trainer.resume(tmp_path / "run", metrics=["accuracy"])
        (hidden,) = (tmp_path / "run").glob("predictions-*.npz")
        content = hidden.read_bytes()
        hidden.write_bytes(b"PK")
        with pytest.raises(CheckpointError, match="predictions of the interrupted epoch"):
            Trainer.resume(tmp_path / "run", metrics=["accuracy", spread])
        hidden.write_bytes(content)
    resumed = Trainer.resume(tmp_path / "run", metrics=["accuracy", spread])
    resumed.fit(problem.x, problem.y, **FIT)
    assert resumed.history == straight.history
    assert state(resumed) == state(straight)
    assert not list((tmp_path / "run").glob("predictions-*.npz"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 4}, "batch_size 8, now 4"),
        ({"accumulate": 1}, "accumulate 2, now 1"),
        ({"validation": 0.3}, "samples 48, now 42, validation 0.2, now 0.3"),
        ({"shuffle": False}, "shuffle True, now False"),
    ],
)
@pytest.mark.parametrize("step", [2, 3], ids=["within-an-epoch", "between-epochs"])
def test_other_arguments_than_those_of_the_interrupted_fit(
    step: int, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    problem = problems.classes()
    trainer = make_trainer(problem, tmp_path)
    trainer.fit(problem.x, problem.y, callbacks=[InterruptAt(step)], **FIT)
    resumed = Trainer.resume(tmp_path)
    with pytest.raises(InputError, match=message):
        resumed.fit(problem.x, problem.y, **{**FIT, **change})
    done = len(resumed.history)
    resumed.abandon_fit()
    resumed.fit(problem.x, problem.y, **{**FIT, **change})
    assert len(resumed.history) == done + {**FIT, **change}["epochs"]


def test_an_interrupted_fit_may_end_where_it_stopped(tmp_path: Path) -> None:
    """Its epochs count from its start: two for one that was interrupted in the last step of the second of five."""
    problem = problems.classes()
    trainer = make_trainer(problem, tmp_path)
    trainer.fit(problem.x, problem.y, callbacks=[InterruptAt(6)], **FIT)
    assert (len(trainer.history), trainer.global_step) == (1, 6)
    resumed = Trainer.resume(tmp_path)
    ended: list[int] = []

    class End(Callback):
        def on_fit_end(self, trainer: Trainer, history: Any) -> None:
            ended.append(len(history))

    resumed.fit(problem.x, problem.y, callbacks=[End()], **{**FIT, "epochs": 2})
    assert ended == [2]
    assert (resumed.resumes_fit, resumed.history.stopped, resumed.global_step) == (False, None, 6)
    assert Trainer.resume(tmp_path).resumes_fit is False
    assert {name: resumed.parameters[name].data.tobytes() for name, _ in resumed.parameters} == {
        name: trainer.parameters[name].data.tobytes() for name, _ in trainer.parameters
    }


def test_an_epoch_that_has_begun_is_trained_to_its_end(tmp_path: Path) -> None:
    problem = problems.classes()
    trainer = make_trainer(problem, tmp_path)
    trainer.fit(problem.x, problem.y, callbacks=[InterruptAt(5)], **FIT)
    resumed = Trainer.resume(tmp_path)
    with pytest.raises(
        InputError, match=r"epochs=1 is the length of the whole fit, .* Pass at least epochs=2\."
    ):
        resumed.fit(problem.x, problem.y, **{**FIT, "epochs": 1})
    resumed.fit(problem.x, problem.y, **{**FIT, "epochs": 2})
    assert (len(resumed.history), resumed.resumes_fit) == (2, False)


def test_a_fit_that_could_not_begin_leaves_the_next_one_free() -> None:
    problem = problems.line()
    trainer = Trainer(problem.model, "mse")
    with pytest.raises(InputError, match="will not be recorded"):
        trainer.fit(problem.x, problem.y, epochs=3, callbacks=[EarlyStopping()], verbose=False)
    assert not trainer.resumes_fit
    trainer.fit(problem.x, problem.y, epochs=2, verbose=False)
    assert len(trainer.history) == 2


def test_resume_finds_the_files_by_the_manifest(tmp_path: Path) -> None:
    from onnxtrain import generate_artifacts

    problem = problems.classes()
    options: dict[str, Any] = {"loss": problem.loss, "additional_output_names": ["logits"]}
    generate_artifacts(
        problem.model, optimizer="adamw", artifact_directory=tmp_path / "a", prefix="my_", **options
    )
    trainer = Trainer.resume(tmp_path / "a")
    trainer.fit(problem.x, problem.y, verbose=False)
    trainer.save(tmp_path / "b")
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        "my_training_model.onnx",
        "my_eval_model.onnx",
        "my_inference_model.onnx",
        "my_optimizer_model.onnx",
        "my_checkpoint",
        "my_manifest.json",
    }
    for place in ("a", "b"):
        np.testing.assert_array_equal(
            Trainer.resume(tmp_path / place).predict(problem.x), trainer.predict(problem.x)
        )
    generate_artifacts(
        problem.model, optimizer="adamw", artifact_directory=tmp_path / "a", prefix="other_", **options
    )
    with pytest.raises(
        CheckpointError, match=r"it contains several runs \(my_manifest.json, other_manifest.json\)"
    ):
        Trainer.resume(tmp_path / "a")
    generate_artifacts(problem.model, artifact_directory=tmp_path / "c", **options)
    with pytest.raises(CheckpointError, match="has no optimizer model"):
        Trainer.resume(tmp_path / "c")
    manifest = tmp_path / "b" / "my_manifest.json"
    manifest.write_text(manifest.read_text().replace("my_checkpoint", "../a/my_checkpoint"))
    with pytest.raises(ModelLoadError, match=r"its manifest 'my_manifest.json' is corrupt"):
        Trainer.resume(tmp_path / "b")


def test_numbers_of_threads_that_nobody_means_are_errors(tmp_path: Path) -> None:
    """ONNX Runtime would take them as an int32, and make each of the threads at once."""
    with pytest.raises(InputError, match="threads must be at most 4096, received 1000000"):
        Trainer(problems.line().model, "mse", threads=1_000_000)
    trainer = Trainer(problems.line().model, "mse", threads=1)
    trainer.save(tmp_path)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    for number in (2**40, 1_000_000, 0):
        text = str(state.properties["onnxtrain.trainer"])
        state.properties["onnxtrain.trainer"] = re.sub(r'"threads": \d+', f'"threads": {number}', text)
        CheckpointState.save_checkpoint(state, tmp_path / "checkpoint", include_optimizer_state=True)
        with pytest.raises(CheckpointError, match=f"the number of threads is {number}"):
            Trainer.resume(tmp_path)


@pytest.mark.parametrize("name", ["\\ud800", "\u00e9" * 200], ids=["no text", "400 bytes"])
def test_a_manifest_that_names_no_file_is_damaged(tmp_path: Path, name: str) -> None:
    Trainer(problems.line().model, "mse").save(tmp_path)
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(
        text.replace('"checkpoint": "checkpoint"', f'"checkpoint": "{name}"'), encoding="utf-8"
    )
    with pytest.raises(ModelLoadError, match=r"its manifest 'manifest\.json' is corrupt"):
        Trainer.resume(tmp_path)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_trainer_is_neither_copied_nor_pickled_and_resume_makes_one_of_its_own(
    how: Callable[[Any], Any], tmp_path: Path
) -> None:
    line = problems.line()
    trainer = Trainer(line.model, line.loss)
    with pytest.raises(
        TypeError, match=r"A Trainer can be neither copied nor pickled.*Trainer\.resume\(path\)"
    ):
        how(trainer)
    trainer.save(tmp_path / "run")
    before = {name: parameter.data.copy() for name, parameter in trainer.parameters}
    Trainer.resume(tmp_path / "run").fit(line.x, line.y, verbose=False)
    for name, parameter in trainer.parameters:
        np.testing.assert_array_equal(parameter.data, before[name])
