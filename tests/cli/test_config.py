"""Files of options: `--config`, and run.toml, which every run writes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pandas as pd
import pytest
import typer

import models
from cli.processes import ROOT
from cli.test_resuming import OPTIONS, flat, tensors
from onnxtrain.cli._app import app
from onnxtrain.cli._config import names_file
from onnxtrain.cli._declared import options_of
from onnxtrain.cli._train_options import TrainOptions


def written(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of numbers with gaps and texts, and a network for it."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60).round(3), "b": rng.choice(["x", "y", "NA"], 60)})
    frame["y"] = np.where(frame["a"] > 0, "yes", "no")
    frame.loc[::7, "a"] = np.nan
    frame.to_csv(tmp_path / "table.csv", index=False)
    onnx.save(models.mlp(features=4, classes=2), tmp_path / "table.onnx")
    return tmp_path / "table.csv"


def test_a_run_is_repeated_bit_for_bit(
    run: Any, mlp: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another directory: the paths of the file are absolute."""
    monkeypatch.chdir(tmp_path)
    first = run("train", "mlp.onnx", "--data", "data.npz", *flat(OPTIONS), "-o", "run", "--json")
    assert first.code == 0, first.err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = run("train", "--config", tmp_path / "run" / "run.toml", "-o", "again", "--json")
    assert again.code == 0, again.err
    for key in ("epochs", "exported", "stopped"):
        assert again.json()[key] == first.json()[key]
    assert tensors(Path("again")) == tensors(tmp_path / "run")
    assert Path("again/trained.onnx").read_bytes() == (tmp_path / "run" / "trained.onnx").read_bytes()
    assert written(Path("again/run.toml")) == written(tmp_path / "run" / "run.toml")


def test_a_run_on_a_table_is_repeated(run: Any, table: Path, tmp_path: Path) -> None:
    options = ["--target", "y", "--one-hot", "--impute", "median", "--impute", "b=value=none", "--scale"]
    options += ["--loss", "cross_entropy", "--epochs", 2, "--validation", table, "--class-weight", "yes=2"]
    options += ["--swa-start", "0.5", "--optimizer", "sgd", "--optimizer-option", "momentum=0.9"]
    first = run(
        "train", table.with_suffix(".onnx"), "--data", table, *options, "-o", tmp_path / "run", "--json"
    )
    assert first.code == 0, first.err
    assert written(tmp_path / "run" / "run.toml")["impute"] == ["median", "b=value=none"]
    # Without --output the repetition goes to a directory beside the model, and the run stays as it was.
    before = tensors(tmp_path / "run")
    again = run("train", "--config", tmp_path / "run" / "run.toml", "--json")
    assert again.code == 0, again.err
    assert Path(again.json()["directory"]) == tmp_path / "table-trained"
    assert tensors(tmp_path / "table-trained") == tensors(tmp_path / "run") == before
    refused = run("train", "--config", tmp_path / "run" / "run.toml")
    assert refused.code == 1
    assert "already contains a training run" in refused.err


def test_the_file_says_what_the_run_used(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    options = [
        "--loss",
        "huber",
        "--loss-option",
        "delta=0.5",
        "--lr",
        0.02,
        "--validation",
        0.25,
        "--epochs",
        1,
    ]
    np.savez(tmp_path / "numbers.npz", x=np.ones((8, 4), np.float32), y=np.ones((8, 3), np.float32))
    assert run("train", mlp, "--data", tmp_path / "numbers.npz", *options, "-o", tmp_path / "run").code == 0
    content = written(tmp_path / "run" / "run.toml")
    assert content["model"] == str(mlp)
    assert content["data"] == str(tmp_path / "numbers.npz")
    assert (content["validation"], content["learning-rate"]) == (0.25, 0.02)
    assert content["loss-option"] == ["delta=0.5"]
    assert not {"output", "overwrite", "json", "config", "one-hot"} & set(content)
    # Options at their defaults, too: a later version may have others.
    assert (content["optimizer"], content["seed"]) == ("adamw", 0)
    keys = {option.key for option in options_of(TrainOptions).values()}
    assert set(content) <= keys


def test_the_command_line_wins(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'model = "mlp.onnx"\ndata = "data.npz"\nloss = "cross_entropy"\nepochs = 3\nmetric = ["f1", "accuracy"]\n'
        'lr = 0.5\nvalidation = 0.2\noutput = "out"\n'
    )
    command = ("train", "--config", tmp_path / "run.toml", "--epochs", 1, "--metric", "accuracy", "--json")
    result = run(*command, "--learning-rate", 0.01)
    assert result.code == 0, result.err
    (epoch,) = result.json()["epochs"]
    assert epoch["learning_rate"] == 0.01
    assert "f1" not in epoch
    assert "val_accuracy" in epoch
    # Paths of the file are relative to it, not to the directory of the command.
    assert Path(result.json()["directory"]) == tmp_path / "out"
    # A resumed run refuses other options, those of a file included.
    (tmp_path / "more.toml").write_text('loss = "nll"\n')
    refused = run("train", tmp_path / "out", "--data", data, "--config", tmp_path / "more.toml")
    assert refused.code == 1
    assert "--loss nll (it was cross_entropy)" in " ".join(refused.err.split())
    (tmp_path / "more.toml").write_text("epochs = 2\n")
    longer = run("train", tmp_path / "out", "--data", data, "--config", tmp_path / "more.toml", "--json")
    assert len(longer.json()["epochs"]) == 3


def test_the_command_line_switches_off(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    """`--no-drop-last` overrules `drop-last = true` of a file, and `--shuffle` its `no-shuffle = true`."""
    file = tmp_path / "options.toml"
    file.write_text(
        'model = "mlp.onnx"\ndata = "data.npz"\nloss = "cross_entropy"\nepochs = 1\nrecompute = true\n'
        "drop-last = true\nno-shuffle = true\njson = true\n"
    )
    command = ("train", "--config", file)
    off = run(*command, "--no-drop-last", "--shuffle", "--no-recompute", "-o", tmp_path / "off")
    plain = run(
        "train",
        mlp,
        "--data",
        data,
        "--loss",
        "cross_entropy",
        "--epochs",
        1,
        "--json",
        "-o",
        tmp_path / "plain",
    )
    on = run(*command, "-o", tmp_path / "on")
    assert (off.code, plain.code, on.code) == (0, 0, 0), off.err + plain.err + on.err
    assert off.json()["epochs"] == plain.json()["epochs"] != on.json()["epochs"]
    switches = {"drop-last", "no-shuffle", "recompute"}
    assert not switches & set(written(tmp_path / "off" / "run.toml"))
    assert switches <= set(written(tmp_path / "on" / "run.toml"))
    # The last spelling on the command line decides.
    assert run(*command, "--no-json", "--json", "--overwrite", "-o", tmp_path / "on").out.startswith("{")
    assert not run(*command, "--no-json", "--overwrite", "-o", tmp_path / "on").out.startswith("{")
    # A resumed run refuses a switch that was on, and says how to spell it.
    refused = run("train", tmp_path / "on", "--data", data, "--no-recompute")
    assert refused.code == 1
    assert "--no-recompute" in " ".join(refused.err.split())


@pytest.mark.parametrize("command", ["train", "artifacts", "plan", "merge", "evaluate", "predict"])
def test_every_switch_can_be_switched_off(run: Any, command: str) -> None:
    """And the help shows one spelling alone."""
    (declared,) = [c for name, c in typer.main.get_command(app).commands.items() if name == command]  # type: ignore[attr-defined]
    switches = [p for p in declared.params if getattr(p, "is_flag", False) and p.name != "help"]
    assert switches
    assert all(len(p.secondary_opts) == 1 for p in switches)
    shown = run(command, "--help-all").out
    for parameter in switches:
        assert parameter.opts[0] in shown
        assert parameter.secondary_opts[0] not in shown.replace("--no-scale", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 1", "epoch is not an option of `onnxtrain train`. The nearest one is epochs."),
        ("learning_rate = 1.0", "learning_rate is not an option of `onnxtrain train`. The nearest one is learning-"),
        ("config = 'x'", "config is not an option of `onnxtrain train`"),
        ("zzz = 1", "zzz is not an option of `onnxtrain train`. Its options are accumulate, activation,"),
        ("epochs = 1.5", "epochs is 1.5: "),
        ("epochs = 0", "epochs is 0: "),
        ("epochs = 'ten'", 'epochs is "ten": '),
        ("epochs = '10'", 'epochs is "10"; it must be a whole number, without quotation marks.'),
        ("learning-rate = '0.1'", 'learning-rate is "0.1"; it must be a number, without quotation marks.'),
        ("learning-rate = 1\nlr = 2", "lr is given twice, under two of its names."),
        ("epochs = [1]", "epochs is [1]; it takes one value, not a list."),
        ("epochs = true", "epochs is true; it must be a number or a string."),
        ("metric = [['f1']]", "it must be a number or a string."),
        ("one-hot = 1", "one-hot is 1; it must be true or false."),
        ("precision = 'fp16'", 'precision is "fp16": '),
        ("[train]\nepochs = 1", "train is a section. Write options without [train] above them."),
        ("epochs", "Expected '=' after a key in a key/value pair (at end of document)."),
        ("x = '\xff'", "'utf-8' codec can't decode"),
        (None, "there is no such file."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(run: Any, mlp: Path, tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    result = run("train", mlp, "--config", path)
    assert result.code == 1
    shown = " ".join(result.err.split())
    assert shown.startswith(f"error: Reading the options '{path}': ")
    assert message in shown


def test_options_that_the_file_lacks_are_still_required(run: Any, mlp: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("epochs = 1\n")
    assert run("train", "--config", tmp_path / "run.toml").code == 2
    result = run("train", mlp, "--config", tmp_path / "run.toml")
    assert result.code == 2
    assert "--data" in result.err


def test_evaluate_predict_and_artifacts_read_files(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    assert run("train", mlp, "--data", data, "--loss", "cross_entropy", "-o", tmp_path / "run").code == 0
    path = tmp_path / "evaluate.toml"
    path.write_text('run = "run"\ndata = "data.npz"\njson = true\nbatch-size = 7\n')
    direct = run("evaluate", tmp_path / "run", "--data", data, "--json").json()
    assert run("evaluate", "--config", path).json()["loss"] == pytest.approx(direct["loss"], rel=1e-6)
    path.write_text('model = "run"\ndata = "data.npz"\noutput = "p.npz"\nprobabilities = true\n')
    assert run("predict", "--config", path).code == 0
    with np.load(tmp_path / "p.npz") as content:
        assert content.files == ["probability"]
    path.write_text('model = "mlp.onnx"\nloss = "cross_entropy"\noutput = "device"\nfreeze = ["w1"]\n')
    assert run("artifacts", "--config", path).code == 0
    assert (tmp_path / "device" / "training_model.onnx").is_file()
    path.write_text('model = "run"\nepochs = 3\n')
    refused = run("evaluate", "--config", path)
    assert "epochs is not an option of `onnxtrain evaluate`" in refused.err


def test_the_file_of_the_guide_is_one(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "command-line.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "digits.toml").write_text(text)
    mlp.rename(tmp_path / "model.onnx")
    data.rename(tmp_path / "train.npz")
    result = run("train", "--config", tmp_path / "digits.toml", "--epochs", 1, "--json")
    assert result.code == 0, result.err
    assert "val_loss" in result.json()["epochs"][0]


def test_options_of_paths_are_known_by_the_name_of_their_value() -> None:
    """Paths of a file of options are relative to it, and those of run.toml absolute."""
    for option in options_of(TrainOptions).values():
        kind, declared = get_args(option.annotation)
        is_path = kind is Path or Path in get_args(kind)
        assert names_file(declared.metavar or "") >= is_path, option.key
