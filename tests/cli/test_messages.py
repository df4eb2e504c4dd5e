"""Messages of commands: options that the command has, remedies for a shell, and classes by name."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from models import make_model, parse_nodes

X = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
LABELS = X[:, :3].argmax(axis=1)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("check MODEL --parameter nosuch*", "no parameter matches 'nosuch*' of --parameter;"),
        ("check MODEL --parameter nosuch", "--parameter names 'nosuch';"),
        ("check MODEL --of nosuch", "no node of the model computes 'nosuch', which --of names;"),
        ("plan MODEL --loss mse --memory 1GB --train nosuch*", "no parameter matches 'nosuch*' of --train;"),
        (
            "plan MODEL --loss mse --memory 1GB --freeze nosuch*",
            "no parameter matches 'nosuch*' of --freeze;",
        ),
        ("artifacts MODEL --loss mse --train nosuch* -o DIR", "no parameter matches 'nosuch*' of --train;"),
        (
            "train MODEL --data DATA --loss mse --train nosuch* -o DIR",
            "no parameter matches 'nosuch*' of --train;",
        ),
    ],
)
def test_messages_name_options_of_the_command(
    run: Any, mlp: Path, data: Path, command: str, option: str
) -> None:
    places = {"MODEL": mlp, "DATA": data, "DIR": mlp.parent / "other"}
    result = run(*(places.get(word, word) for word in command.split()))
    assert result.code == 1
    assert option in result.err


def test_advice_for_another_command_names_it(run: Any, tmp_path: Path) -> None:
    """`ops --profile portable` advises to switch a layer off, by an option that `train` has, and `ops` has not."""
    text = """<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 2] x, bool c) => (float[n, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float r = {0.5}, bool t = {1}> {
            h = MatMul(x, w)
            y = If (c) <then_branch = a () => (p) { p = Dropout(h, r, t) }, else_branch = b () => (q) { q = Tanh(h) }>
        }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    shown = " ".join(run("ops", tmp_path / "model.onnx", "--profile", "portable").out.split())
    assert "--profile portable supports Dropout only in the main graph" in shown
    assert "pass --batch-norm inference of `onnxtrain train`" in shown


@pytest.mark.parametrize("command", ["train", "artifacts", "inspect", "ops"])
@pytest.mark.parametrize("value", ["true", "false", "1", "yes"])
def test_a_switch_with_a_value_is_told_so(run: Any, mlp: Path, data: Path, command: str, value: str) -> None:
    more = {"train": ("--data", data), "artifacts": ("--loss", "mse")}.get(command, ())
    result = run(command, mlp, *more, "--json", value)
    assert result.code == 2
    assert "--json takes no value; --no-json is its opposite." in " ".join(result.err.split())


def test_a_second_argument_is_not_taken_for_a_value(run: Any, mlp: Path) -> None:
    result = run("inspect", mlp, "second")
    assert "unexpected extra argument" in result.err


def test_the_help_of_train_resumes_as_it_says(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    assert "`onnxtrain train DIR` resumes it" in " ".join(run("train", "--help").out.split())
    directory = tmp_path / "run"
    begun = run("train", mlp, "--data", data, "--loss", "cross_entropy", "--epochs", 1, "-o", directory)
    assert begun.code == 0, begun.err
    assert run("train", directory, "--data", data, "--epochs", 1).code == 0


@pytest.mark.parametrize(
    "command", ["evaluate FOLDER --data DATA", "export MODEL -o OTHER", "predict FOLDER --data DATA"]
)
def test_what_is_no_run_is_said_for_a_shell(run: Any, mlp: Path, data: Path, command: str) -> None:
    places = {"MODEL": mlp, "DATA": data, "OTHER": mlp.parent / "o.onnx", "FOLDER": mlp.parent}
    result = run(*(places.get(word, word) for word in command.split()))
    assert result.code == 1
    assert "Pass the directory of a run, as written by `onnxtrain train`." in result.err
    assert ("it is a file, not a directory" in result.err) == ("MODEL" in command)


@pytest.mark.parametrize(
    ("arrays", "loss", "message"),
    [
        (
            {"x": X, "y": LABELS.astype("f4")},
            "cross_entropy",
            "Class labels are integers: store the values as int64 in",
        ),
        (
            {"x": (50 * X).astype("i4"), "y": LABELS},
            "cross_entropy",
            "Store the values as float32 in the file of --data",
        ),
        ({"x": X, "y": np.eye(3, dtype="i8")[LABELS]}, "cross_entropy", "--loss-option probabilities=true"),
        (
            {"x": X, "y": LABELS[:, None]},
            "cross_entropy",
            "Store them without the last axis in the file of --data",
        ),
        (
            {"x": X.astype(str), "y": LABELS},
            "cross_entropy",
            "If that is intended, store it as float32 in the file of --data",
        ),
        (
            {"x": X, "y": np.ones((30, 3), "i8")},
            "mse",
            "If they are quantities, store the values as float32 in the",
        ),
    ],
)
def test_advice_about_data_is_for_a_shell(
    run: Any, mlp: Path, tmp_path: Path, arrays: dict[str, np.ndarray], loss: str, message: str
) -> None:
    np.savez(tmp_path / "wrong.npz", **arrays)
    result = run("train", mlp, "--data", tmp_path / "wrong.npz", "--loss", loss, "-o", tmp_path / "run")
    assert result.code == 1
    assert message in result.err
    for python in ("astype", "[:, 0]", "argmax", "CrossEntropyLoss("):
        assert python not in result.err


def test_one_hot_labels_train_as_the_message_says(run: Any, mlp: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=X, y=np.eye(3, dtype="f4")[LABELS])
    options = ("--loss", "cross_entropy", "--loss-option", "probabilities=true", "--epochs", 1)
    assert run("train", mlp, "--data", tmp_path / "d.npz", *options, "-o", tmp_path / "run").code == 0


def test_the_axis_of_classes_is_set_as_the_message_says(run: Any, tmp_path: Path) -> None:
    model = make_model(
        parse_nodes("logits = MatMul(x, w)"),
        {"x": ["n", "length", 2]},
        {"logits": ["n", "length", 5]},
        {"w": np.ones((2, 5), np.float32)},
    )
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((6, 3, 2), "f4"), y=np.ones((6, 3), "i8"))
    command = (
        "train",
        tmp_path / "m.onnx",
        "--data",
        tmp_path / "d.npz",
        "--loss",
        "cross_entropy",
        "--epochs",
        1,
    )
    refused = run(*command, "-o", tmp_path / "a")
    assert refused.code == 1
    assert "pass --loss-option axis=-1" in refused.err
    assert "loss=CrossEntropyLoss" not in refused.err
    assert run(*command, "--loss-option", "axis=-1", "-o", tmp_path / "b").code == 0


def test_the_help_of_loss_input_holds(run: Any, tmp_path: Path) -> None:
    help_text = " ".join(run("artifacts", "--help-all").out.replace("│", " ").split())
    assert "A second NAME is the value of the model to use as the target" in help_text
    assert "Default: the only output; without --loss the first." in help_text
    model = make_model(
        parse_nodes("a = MatMul(x, w)  b = Tanh(a)  total = ReduceMean<keepdims = 0>(b)"),
        {"x": ["n", 2]},
        {"total": [], "a": ["n", 2], "b": ["n", 2]},
        {"w": np.eye(2, dtype=np.float32)},
    )
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    several = run("artifacts", path, "--loss", "mse", "-o", tmp_path / "1")
    assert several.code == 1
    assert "name them in --loss-input" in several.err

    def inputs(*options: object) -> list[str]:
        result = run("artifacts", path, *options, "-o", tmp_path / "2")
        assert result.code == 0, result.err
        return [value.name for value in onnx.load(tmp_path / "2" / "training_model.onnx").graph.input]

    assert inputs("--loss", "mse", "--loss-input", "a") == ["x", "target", "w"]
    assert inputs("--loss", "mse", "--loss-input", "a", "--loss-input", "b") == ["x", "w"]
    assert inputs() == ["x", "w"]
    assert inputs("--loss-input", "total") == ["x", "w"]


def write_table(path: Path, labels: list[str]) -> Path:
    with open(path, "w", newline="") as file:
        rows = [[*map(str, row), label] for row, label in zip(X, labels, strict=True)]
        csv.writer(file).writerows([["a", "b", "c", "d", "kind"], *rows])
    return path


def test_a_class_that_training_lacked_is_named(run: Any, mlp: Path, tmp_path: Path) -> None:
    known = write_table(tmp_path / "known.csv", [("cat", "dog", "dog")[label] for label in LABELS])
    labels = [("cat", "dog", "fox")[label] for label in LABELS]
    unknown = write_table(tmp_path / "unknown.csv", labels)
    directory = tmp_path / "run"
    options = ("--target", "kind", "--loss", "cross_entropy", "--epochs", 1)
    assert run("train", mlp, "--data", known, *options, "-o", directory).code == 0
    commands = (
        ("evaluate", directory, "--data", unknown),
        ("train", directory, "--data", unknown, "--epochs", 1),
        ("train", mlp, "--data", known, *options, "--validation", unknown, "-o", tmp_path / "other"),
    )
    for command in commands:
        result = run(*command)
        assert result.code == 1
        assert f"column 'kind', row {labels.index('fox') + 1} " in result.err
        assert "trained without the class 'fox'; its classes are cat, dog." in result.err
        assert f"{labels.count('fox')} of 30 rows" in result.err
        assert "train a new run on a table that has all classes" in result.err
        # Which is an option for inputs.
        assert "--unknown-category" not in result.err
    assert run("predict", directory, "--data", unknown, "-o", tmp_path / "p.csv").code == 0


@pytest.mark.parametrize("option", ["--warmup", "--steps-per-epoch", "--epochs", "--seed", "--save-every"])
def test_integers_of_more_than_64_bits_are_refused_before_the_run_is_made(
    run: Any, mlp: Path, tmp_path: Path, option: str
) -> None:
    np.savez(tmp_path / "d.npz", x=X, y=LABELS)
    options = ("--data", tmp_path / "d.npz", "--loss", "cross_entropy", option, 2**63, "-o", tmp_path / "run")
    result = run("train", mlp, *options)
    assert result.code == 1
    assert f"{option} must be less than 2**63, received {2**63}" in result.err
    assert not (tmp_path / "run").exists()


def test_one_hot_targets_take_memory_in_proportion_to_samples_and_classes(run: Any, tmp_path: Path) -> None:
    """An identity matrix over 300,000 classes would take 360 GB."""
    classes = 300_000
    model = make_model(
        parse_nodes("logits = MatMul(x, w)"),
        {"x": ["n", 1]},
        {"logits": ["n", classes]},
        {"w": np.zeros((1, classes), np.float32)},
    )
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((4, 1), "f4"), y=np.array([0, 1, 2, classes - 1]))
    command = (
        "train",
        tmp_path / "m.onnx",
        "--data",
        tmp_path / "d.npz",
        "--loss",
        "cross_entropy",
        "--mixup",
        0.2,
    )
    assert (
        run(*command, "--epochs", 1, "--optimizer", "sgd", "--learning-rate", 0, "-o", tmp_path / "run").code
        == 0
    )
