"""Help on one screen: the most used options first, all of them under `--help-all`, and the next command after each."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import typer

from onnxtrain.cli._app import app
from onnxtrain.cli._brief_help import COMMANDS, GENERAL, OPTIONS, SAME_COMMAND
from onnxtrain.cli._complete import completion_of, literals
from onnxtrain.losses import LOSSES
from onnxtrain.recipe import LayerMode
from onnxtrain.schedules import SCHEDULES

COMMAND_OBJECTS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("command", "lines"), [((), 24), (("train",), 50), (("artifacts",), 24), (("plan",), 24)]
)
@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_on_a_screen(
    run: Any, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], lines: int, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = run(*command, "--help")
    assert shown.code == 0
    # One line for the prompt.
    assert len(shown.out.rstrip("\n").splitlines()) < lines
    assert max(map(len, shown.out.splitlines())) <= columns


def test_a_bare_command_shows_the_help(run: Any) -> None:
    assert run().out == run("--help").out != ""


@pytest.mark.parametrize("command", list(COMMAND_OBJECTS))
@pytest.mark.parametrize("columns", [60, 80])
def test_all_help_has_each_option_once_and_no_long_lines(
    run: Any, monkeypatch: pytest.MonkeyPatch, command: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = run(command, "--help-all").out
    options = [p for p in COMMAND_OBJECTS[command].params if p.param_type_name == "option"]
    heads = re.findall(r"^  (-[^ ].*?)(?:  |$)", shown, re.MULTILINE)
    for option in options:
        assert sum(option.opts[0] in re.split(r",? ", head) for head in heads) == 1, option.opts
        assert not option.is_flag or f"{option.opts[0]} <" not in shown
    assert "<bool>" not in shown
    # Spellings are not broken, as people copy them.
    assert all(len(line) <= columns or line.startswith("  -") for line in shown.splitlines())
    if command not in OPTIONS:
        assert run(command, "--help").out == shown


def test_brief_help_names_commands_and_options_that_exist(run: Any) -> None:
    assert COMMANDS.keys() <= COMMAND_OBJECTS.keys()
    assert SAME_COMMAND.keys() <= COMMAND_OBJECTS.keys()
    assert not COMMAND_OBJECTS.keys() & {word for text in SAME_COMMAND.values() for word in text.split()}
    assert all(text in run("--help").out for text in GENERAL.values())
    for command, headings in OPTIONS.items():
        params = {p.name: p for p in COMMAND_OBJECTS[command].params}
        for name, text in [pair for texts in headings.values() for pair in texts.items()]:
            # A default that the text gives is the one that holds.
            if (given := re.search(r"\[default: ([\w.]+)\]", text)) and params[name].default is not None:
                assert given[1] == str(params[name].default), name
            assert params[name].help, name


def test_every_command_is_listed(run: Any) -> None:
    assert all(re.search(rf"^  {name} +\w", run("--help").out, re.MULTILINE) for name in COMMAND_OBJECTS)


# Names in the user's own model or data, or names of the user's choice: nothing to choose from.
OPEN = {
    "lora_targets",
    "loss_input",
    "of",
    "outputs",
    "sample_weight",
    "dim",
    "encoding",
    "teacher_output",
    "train",
    "freeze",
    "parameter",
    "sparse_gradients",
}


@pytest.mark.parametrize("command", list(COMMAND_OBJECTS))
def test_values_from_a_closed_set_are_completed(command: str) -> None:
    """Each option that names things has a completion, and each word of a metavar that is a value is completed."""
    from onnxtrain.cli import _command_options as declared
    from onnxtrain.cli._declared import options_of
    from onnxtrain.cli._train_options import TrainOptions

    kind = TrainOptions if command == "train" else getattr(declared, f"{command.capitalize()}Options")
    for name, option in options_of(kind).items():
        metavar = option.annotation.__metadata__[0].metavar or ""
        typed = get_args(option.annotation)[0]
        if "Literal" in str(typed) or typed is bool:
            continue
        complete = completion_of(name, metavar)
        if metavar.startswith("NAME") and name not in OPEN:
            assert complete is not None, name
        if literals(metavar):
            assert complete is not None
            assert set(complete("", **({"ctx": None} if "option" in name else {}))) >= set(literals(metavar))


@pytest.mark.parametrize(
    ("name", "metavar", "expected"),
    [
        ("class_weight", "balanced|CLASS=WEIGHT", ["balanced"]),
        (
            "impute",
            "[COLUMN=]mean|median|most_frequent|value=VALUE",
            ["mean", "median", "most_frequent", "value="],
        ),
        ("status", "STATUS", ["rule", "function", "nondifferentiable", "not-yet", "unknown"]),
        ("hosts", "auto|local|ADDRESS,...", ["auto", "local"]),
        ("batch_norm", "MODE|PATTERN=MODE", list(get_args(LayerMode))),
        ("config", "FILE.toml", None),
        ("validation", "FRACTION|FILE", None),
    ],
)
def test_completions_of_values(name: str, metavar: str, expected: list[str] | None) -> None:
    complete = completion_of(name, metavar)
    assert (None if complete is None else complete("")) == expected


def test_devices_are_completed() -> None:
    complete = completion_of("device", "NAME")
    assert complete is not None
    assert complete("c") == ["cpu", "cuda", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("name", "of", "kinds"), [("loss_option", "loss", LOSSES), ("schedule_option", "schedule", SCHEDULES)]
)
def test_settings_of_the_chosen_class_are_completed(name: str, of: str, kinds: dict[str, Any]) -> None:
    class Context:
        def __init__(self, **params: str) -> None:
            self.params = params

    complete = completion_of(name, "NAME=VALUE")
    assert complete is not None
    for chosen, kind in kinds.items():
        assert complete(Context(**{of: chosen}), "") == [f"{entry.name}=" for entry in fields(kind)]
    every = complete(Context(), "")
    assert set(every) == {f"{entry.name}=" for kind in kinds.values() for entry in fields(kind)}


def test_a_status_may_be_typed_without_a_blank(run: Any) -> None:
    assert run("ops", "--status", "not-yet").out == run("ops", "--status", "not yet").out != ""


def test_each_result_ends_with_the_next_command(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    """It is a note on standard error, and runs as it is once FILE is a file."""
    directory = tmp_path / "run"

    def following(*words: object) -> list[str]:
        result = run(*words)
        assert result.code == 0, result.err
        assert "Next:" not in result.out
        command = result.err.rstrip("\n").splitlines()[-1]
        assert command.startswith("Next: onnxtrain ")
        given = {"FILE": str(data), "MODEL": str(mlp), "NAME": "cross_entropy"}
        return [given.get(word, word) for word in command.split()[2:]]

    output = ["-o", str(tmp_path / "predictions.csv")]
    after_ops = following("ops", mlp)
    assert after_ops == ["train", str(mlp), "--data", str(data), "--loss", "cross_entropy"]
    after_train = following(*after_ops, "--epochs", 1, "-o", directory)
    after_predict = following(*after_train[:-2], *output)
    assert after_predict[:2] == ["export", str(directory)]
    after_export = following(*after_predict[:-1], tmp_path / "model.onnx")
    assert following(*after_export[:-2], *output)[:2] == ["evaluate", str(tmp_path / "model.onnx")]
    assert following("inspect", mlp) == ["ops", str(mlp)]
    assert "Next" not in run("evaluate", directory, "--data", data, "--json").err


@pytest.mark.parametrize(
    ("shape", "op", "suffix"),
    [
        ("N", "s = ReduceSum<keepdims = 0>(h, axis) out = Identity(s)", ".csv"),
        ("N, 4", "out = Identity(h)", ".csv"),
        ("N, 2, 2", "out = Reshape(h, sizes)", ".npz"),
    ],
)
def test_the_next_command_writes_a_file_that_the_predictions_fit_in(
    run: Any, tmp_path: Path, shape: str, op: str, suffix: str
) -> None:
    network = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 4] x) => (float[{shape}] out) <int64[1] axis = {{1}}, int64[3] sizes = {{-1, 2, 2}}>
        {{ h = MatMul(x, w) {op} }}"""
    )
    network.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    onnx.save(network, tmp_path / "net.onnx")
    x = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    y = ort.InferenceSession(tmp_path / "net.onnx").run(None, {"x": x})[0] + 1
    np.savez(tmp_path / "data.npz", x=x, y=y)
    options = ("--data", tmp_path / "data.npz", "--loss", "mse", "--epochs", 1, "-o", tmp_path / "run")
    trained = run("train", tmp_path / "net.onnx", *options)
    assert trained.code == 0, trained.err
    command = trained.err.rstrip("\n").splitlines()[-1].removeprefix("Next: onnxtrain ").split()
    assert command[-1] == f"predictions{suffix}"
    given = {"FILE": tmp_path / "data.npz", command[-1]: tmp_path / command[-1]}
    written = run(*(given.get(word, word) for word in command))
    assert written.code == 0, written.err
