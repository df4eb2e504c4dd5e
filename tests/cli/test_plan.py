"""`onnxtrain plan`, and the commands that it prints."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import onnx
import pytest

from onnxtrain.api import CheckpointState

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from /proc"
)
OPTIONS = ("--loss", "cross_entropy", "--lora-rank", 2, "--batch-size", 16)


def test_the_printed_commands_train_the_recommended_choice(
    run: Any, mlp: Path, data: Path, tmp_path: Path
) -> None:
    # Weight decay reaches the commands, as what was measured with it is trained with it.
    settings = (*OPTIONS, "--memory", "1GB", "--freeze", "b1", "--weight-decay", 0.1)
    shown = run("plan", mlp, *settings)
    assert shown.code == 0, shown.err
    assert "1 of 8: all chosen parameters" in shown.err
    rows = [line.split() for line in shown.out.splitlines()]
    assert [row[-1] for row in rows if row[:2] == ["all", "chosen"]] == ["recommended"]
    commands = [shlex.split(line) for line in shown.out.splitlines() if line.startswith("    onnxtrain")]
    common = ["--loss", "cross_entropy", "--freeze", "b1", "--weight-decay", "0.1"]
    assert commands == [
        ["onnxtrain", "artifacts", str(mlp), *common],
        ["onnxtrain", "train", str(mlp), "--data", "FILE", *common, "--batch-size", "16"],
    ]
    made = run(*commands[0][1:], "-o", tmp_path / "device")
    assert made.code == 0, made.err
    trained = run(*[data if word == "FILE" else word for word in commands[1][1:]], "-o", tmp_path / "desk")
    assert trained.code == 0, trained.err
    for folder in ("device", "desk"):
        state = CheckpointState.load_checkpoint(tmp_path / folder / "checkpoint")
        assert {name for name, p in state.parameters if p.requires_grad} == {"w1", "w2", "b2"}


def test_json_has_every_choice_and_the_commands(run: Any, mlp: Path) -> None:
    shown = run("plan", mlp, *OPTIONS, "--memory", "1GB", "--json").json()
    assert shown["memory"] == 10**9
    names = [choice["name"] for choice in shown["choices"]]
    assert names[0] == "all parameters"
    lora = shown["choices"][names.index("LoRA of rank 2, all linear layers")]
    assert lora["lora"]["r"] == 2
    assert lora["trained"] == 2 * (4 + 8 + 8 + 3)
    assert set(shown["commands"]) == {"artifacts", "train"}


def test_the_profile_is_measured(run: Any, tmp_path: Path) -> None:
    """`plan` refuses what no browser runs, before it prints a command that would refuse it."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[N, 4] x) => (float[N, 3] y) <float[4, 3] w = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}> {
        h = MatMul(x, w)
        a = Cast<to = DTYPE>(h)
        y = Cast<to = 1>(a)
    }"""
    onnx.save(onnx.parser.parse_model(text.replace("DTYPE", "1")), tmp_path / "fits.onnx")
    onnx.save(onnx.parser.parse_model(text.replace("DTYPE", "11")), tmp_path / "no.onnx")
    options = ("--loss", "mse", "--memory", "1GB", "--lora-rank", 1, "--profile", "portable")
    shown = run("plan", tmp_path / "fits.onnx", *options)
    assert shown.code == 0, shown.err
    assert shown.out.count("--profile portable") == 2
    refused = run("plan", tmp_path / "no.onnx", *options)
    assert refused.code == 1
    assert "have no float64 kernels" in " ".join(refused.err.split())


def test_recompute_reaches_the_training(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    """The option that the printed commands have for a choice that recomputes."""
    made = run("artifacts", mlp, "--loss", "cross_entropy", "--recompute", "-o", tmp_path / "a")
    assert made.code == 0, made.err
    run("artifacts", mlp, "--loss", "cross_entropy", "-o", tmp_path / "b")
    options = ("--loss", "cross_entropy", "--epochs", 1)
    kept = run("train", mlp, "--data", data, *options, "-o", tmp_path / "kept", "--json")
    again = run("train", mlp, "--data", data, *options, "--recompute", "-o", tmp_path / "again", "--json")
    assert kept.json()["epochs"] == again.json()["epochs"]
    refused = run("train", tmp_path / "kept", "--data", data, "--recompute")
    assert "--recompute" in refused.err


def test_nothing_fits(run: Any, mlp: Path) -> None:
    shown = run("plan", mlp, *OPTIONS, "--memory", "40MB")
    assert shown.code == 1
    assert "recommended" not in shown.out
    assert f"error: no configuration to train '{mlp}' fits in 40 MB: the least (" in shown.err
    assert "A smaller --batch-size or --dim takes less" in shown.err
    stopped = run("plan", mlp, *OPTIONS, "--memory", "8MB")
    assert "more than 32 MB" in stopped.out
    assert "each takes more than 32 MB" in stopped.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "512 Mb?"), "--memory is '512 Mb?'; write a number and a unit, e.g. 512MB"),
        (("--memory", "1GB", "--dim", "sequence"), "--dim is 'sequence'; write it as NAME=SIZE"),
        (
            ("--memory", "1GB", "--dim", "sequence=4"),
            "no input or target has a symbolic dimension 'sequence'",
        ),
        (("--memory", "1GB", "--train", "nothing*"), "no parameter matches 'nothing*' of --train"),
    ],
)
def test_wrong_questions_are_one_message(run: Any, mlp: Path, options: tuple[str, ...], message: str) -> None:
    shown = run("plan", mlp, *OPTIONS, *options)
    assert shown.code == 1
    assert shown.out == ""
    assert message in shown.err


def test_straight_through_reaches_the_trainings_of_a_file_in_int8(run: Any, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 3] y)
        <int8[4, 4] w1 = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7},
         int8[4, 3] w2 = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}, float s = {0.1}, int8 z = {0}> {
            a = DequantizeLinear(w1, s, z)  h = MatMul(x, a)
            q = QuantizeLinear(h, s, z)  d = DequantizeLinear(q, s, z)
            b = DequantizeLinear(w2, s, z)  y = MatMul(d, b) }"""
    )
    onnx.save(model, tmp_path / "int8.onnx")
    settings = (*OPTIONS, "--memory", "1GB", "--json")
    refused = run("plan", tmp_path / "int8.onnx", *settings)
    assert "pass straight_through=True" in refused.out + refused.err
    shown = run("plan", tmp_path / "int8.onnx", *settings, "--straight-through").json()
    complete = [choice["name"] for choice in shown["choices"] if choice["complete"]]
    assert complete[0] == "LoRA of rank 2, all linear layers"
    assert "--straight-through" in shown["commands"]["train"]


def test_threads_are_measured_and_reach_the_command(run: Any, mlp: Path) -> None:
    shown = run("plan", mlp, *OPTIONS, "--memory", "1GB", "--threads", 1, "--json")
    assert shown.code == 0, shown.err
    assert "--threads 1" in " ".join(shown.json()["commands"]["train"].split())
