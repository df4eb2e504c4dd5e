"""The command line: in this process for results, in processes of its own for exit codes."""

from __future__ import annotations

import inspect
import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import models
from cli.files import arrays_in
from cli.processes import environment
from onnxtrain import ImageFolder, Recipe, Trainer
from onnxtrain.cli._declared import options_of
from onnxtrain.cli._train_options import TrainOptions
from onnxtrain.errors import OnnxTrainError
from onnxtrain.losses import LOSSES
from onnxtrain.optimizers import OPTIMIZERS
from onnxtrain.schedules import SCHEDULES
from onnxtrain.texts import TextPairs
from onnxtrain.trainer import SAM

NAMES_OF_LOSSES = ", ".join(sorted(LOSSES))


def test_version(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXTRAIN_KERNELS", "off")
    result = run("--version")
    assert (result.code, result.out) == (0, "onnxtrain 0.1.0\nnative kernels: none (ONNXTRAIN_KERNELS=off)\n")


def test_python_m_is_the_command_line() -> None:
    command = [sys.executable, "-m", "onnxtrain", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert result.stdout.startswith("onnxtrain 0.1.0\nnative kernels: ")


def test_help_lists_the_commands(run: Any) -> None:
    result = run("--help")
    assert result.code == 0
    for command in (
        "demo",
        "artifacts",
        "train",
        "evaluate",
        "predict",
        "export",
        "ops",
        "check",
        "inspect",
        "plan",
    ):
        assert f" {command} " in result.out


def test_unknown_option_is_a_usage_error(run: Any) -> None:
    result = run("train", "--nonsense")
    assert result.code == 2
    assert "No such option" in result.err


def test_errors_are_one_message(run: Any, tmp_path: Path) -> None:
    result = run("check", tmp_path / "none.onnx")
    assert result.code == 1
    assert result.out == ""
    assert result.err.startswith("error: Cannot load a model from")
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) == 1


def test_debug_shows_the_traceback(mlp: Path) -> None:
    command = [sys.executable, "-m", "onnxtrain", "--debug", "check", str(mlp) + ".none"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "ModelLoadError" in result.stderr


def test_train_writes_a_model_that_classifies(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    result = run(
        "train", mlp, "--data", data, "--loss", "cross_entropy", "--epochs", 15, "--lr", 0.02, "--json"
    )
    assert result.code == 0, result.err
    document = result.json()
    assert document["directory"] == str(tmp_path / "mlp-trained")
    assert len(document["epochs"]) == 15
    assert "epoch 15/15" in result.err
    arrays = arrays_in(data)
    logits = ort.InferenceSession(document["model"]).run(None, {"x": arrays["x"]})[0]
    assert (logits.argmax(axis=1) == arrays["y"]).mean() > 0.9

    again = run("train", mlp, "--data", data, "--loss", "cross_entropy")
    assert again.code == 1
    assert "already contains a training run" in again.err
    assert f"Resume it with onnxtrain train {tmp_path / 'mlp-trained'}, choose" in again.err
    more = run("train", tmp_path / "mlp-trained", "--data", data, "--epochs", 2, "--json")
    assert [epoch["epoch"] for epoch in more.json()["epochs"]] == list(range(1, 18))


def test_train_by_names_with_validation_file_and_patience(
    run: Any, mlp: Path, data: Path, tmp_path: Path
) -> None:
    arrays = arrays_in(data)
    np.savez(tmp_path / "named.npz", x=arrays["x"], labels=arrays["y"], extra=np.zeros(3))
    result = run(
        *("train", mlp, "--data", tmp_path / "named.npz", "--validation", data, "--loss", "cross_entropy"),
        *("--patience", 1, "--lr", 0, "--output", tmp_path / "out", "--freeze", "w1", "--epochs", 9),
    )
    assert result.code == 0, result.err
    assert "Not used from" in result.err
    assert "extra" in result.err
    assert "val_accuracy" in result.out
    shown = run("inspect", tmp_path / "out", "--json").json()
    assert shown["epochs"] == 2
    assert {row["name"]: row["role"] for row in shown["parameters"]} == {
        "w1": "frozen",
        "b1": "trained",
        "w2": "trained",
        "b2": "trained",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss", "hinge"], f"received 'hinge'; give one of {NAMES_OF_LOSSES}"),
        (["--loss", "cross_entropy", "--freeze", "conv*"], "no parameter matches 'conv*'"),
        (["--loss", "mse"], "lacks target"),
        (["--loss", "cross_entropy", "--batch-norm", "off"], "choose from as_exported, training, inference"),
        (
            ["--loss", "cross_entropy", "--validation", "none.npz"],
            "Reading the data 'none.npz': there is no such file",
        ),
    ],
)
def test_train_refuses(run: Any, mlp: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((8, 4), np.float32), labels=np.zeros(8, np.int64))
    result = run("train", mlp, "--data", tmp_path / "d.npz", *arguments)
    assert result.code == 1
    assert message in result.err


def test_train_leaves_nothing_of_a_run_that_its_data_kept_from_beginning(
    run: Any, mlp: Path, data: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "bad.npz", x=np.zeros((8, 4), np.float32), y=np.zeros(7, np.int64))
    options = ["--loss", "cross_entropy", "--epochs", 1, "--output", tmp_path / "run"]
    for there_before in ([], ["notes.txt"]):
        result = run("train", mlp, "--data", tmp_path / "bad.npz", *options)
        assert result.code == 1
        assert "different numbers of samples" in result.err
        assert [path.name for path in tmp_path.glob("run/*")] == there_before
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "notes.txt").touch()
    assert run("train", mlp, "--data", data, *options).code == 0

    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert run("train", tmp_path / "run", "--data", tmp_path / "bad.npz").code == 1
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def _npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


def test_data_that_is_no_npz(run: Any, mlp: Path, tmp_path: Path) -> None:
    for name, write in (
        ("text.npz", lambda path: path.write_text("hello")),
        ("array.npz", lambda path: path.write_bytes(_npy())),
        ("objects.npz", lambda path: np.savez(path, x=np.array([{}], object))),
        ("array.npy", lambda path: path.write_bytes(_npy())),
        ("model.onnx", lambda path: path.write_bytes(mlp.read_bytes())),
    ):
        write(tmp_path / name)
        result = run("train", mlp, "--loss", "cross_entropy", "--data", tmp_path / name)
        assert result.code == 1
        problem = "an array holds Python objects" if name == "objects.npz" else "it is not an .npz file"
        assert f"Reading the data '{tmp_path / name}': {problem}" in result.err
        assert "pickle" not in result.err


def test_divergence_is_one_message_and_the_state_is_there(
    run: Any, mlp: Path, data: Path, tmp_path: Path
) -> None:
    options = ["--loss", "cross_entropy", "--optimizer", "sgd", "--lr", "1e38", "--output", tmp_path / "run"]
    result = run("train", mlp, "--data", data, *options)
    assert result.code == 1
    assert result.err.count("Training stopped in epoch 1") == 1
    assert "Traceback" not in result.err
    shown = run("inspect", tmp_path / "run")
    assert shown.code == 0
    assert "nan" not in shown.out


def test_tables_in_a_pipe_have_no_trailing_blanks(run: Any) -> None:
    lines = run("ops").out.splitlines()
    assert len(lines) > 150
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ((), False),
        (("--profile", "portable"), True),
        (("--profile", "portable", "--no-share-weights"), False),
        (("--share-weights",), True),
    ],
)
def test_artifacts_share_frozen_weights(
    run: Any, tmp_path: Path, options: tuple[str, ...], shared: bool
) -> None:
    onnx.save(models.mlp(hidden=5000), tmp_path / "wide.onnx")
    result = run(
        "artifacts",
        tmp_path / "wide.onnx",
        "--loss",
        "cross_entropy",
        "--train",
        "w2",
        "-o",
        tmp_path / "a",
        *options,
    )
    assert result.code == 0, result.err
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    # w1 has 4 x 5000 float32: it is in one file, or in each of the three models that read it.
    files = [path.name for path in (tmp_path / "a").glob("*.data")]
    assert [*manifest.get("data_files", {})] == files
    assert len(files) == shared
    for name in ("training", "eval", "inference"):
        assert ((tmp_path / "a" / f"{name}_model.onnx").stat().st_size < 80_000) == shared


def test_artifacts_and_inspect(run: Any, mlp: Path, tmp_path: Path) -> None:
    result = run(
        "artifacts", mlp, "--loss", "cross_entropy", "-o", tmp_path / "a", "--freeze", "w1", "--nominal"
    )
    assert result.code == 0, result.err
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {
        "training_model.onnx",
        "eval_model.onnx",
        "inference_model.onnx",
        "optimizer_model.onnx",
        "checkpoint",
        "nominal_checkpoint",
        "manifest.json",
    }
    assert "0 .. 2, -100 is ignored" in result.out
    shown = run("inspect", tmp_path / "a", "--json").json()
    assert shown["inputs"] == ["x"]
    assert shown["targets"] == ["labels"]
    assert shown["outputs"][1:] == ["logits"]
    assert shown["optimizer"] == "AdamW"
    assert shown["elements"] == 4 * 8 + 8 + 8 * 3 + 3
    assert shown["trainable_elements"] == 8 + 8 * 3 + 3
    checkpoint = run("inspect", tmp_path / "a" / "checkpoint", "--json").json()
    assert checkpoint["elements"] == shown["elements"]
    manifest = tmp_path / "a" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"x"', b'"\xff"'))
    damaged = run("inspect", tmp_path / "a")
    assert damaged.code == 1
    assert "is not a usable manifest" in damaged.err
    nothing = run("inspect", tmp_path)
    assert nothing.code == 1
    assert "neither a checkpoint nor a directory with a manifest.json" in nothing.err


@pytest.mark.parametrize("command", ["artifacts", "train"])
def test_without_a_loss_the_first_output_must_be_one(
    run: Any, mlp: Path, data: Path, tmp_path: Path, command: str
) -> None:
    options = ["--data", data] if command == "train" else []
    result = run(command, mlp, *options, "--output", tmp_path / "out")
    assert result.code == 1
    assert f"'logits' has shape [batch,3]; name a loss: --loss {NAMES_OF_LOSSES}" in result.err
    assert not (tmp_path / "out").exists()


def test_inspect_of_artifacts_with_a_prefix(run: Any, mlp: Path, tmp_path: Path) -> None:
    from onnxtrain import generate_artifacts

    generate_artifacts(mlp, loss="cross_entropy", artifact_directory=tmp_path / "a", prefix="my_")
    shown = run("inspect", tmp_path / "a", "--json").json()
    assert (shown["inputs"], shown["checkpoint"]) == (["x"], True)
    assert len(shown["parameters"]) == 4


def test_inspect_of_a_model(run: Any, mlp: Path) -> None:
    shown = run("inspect", mlp, "--json").json()
    assert shown["opset"] == 21
    assert shown["nodes"] == len(models.mlp().graph.node)
    assert shown["elements"] == 4 * 8 + 8 + 8 * 3 + 3
    assert [(value["role"], value["name"], value["shape"]) for value in shown["values"]] == [
        ("input", "x", "[batch, 4]"),
        ("output", "logits", "[batch, 3]"),
    ]
    assert [row["name"] for row in shown["parameters"]] == ["w1", "b1", "w2", "b2"]
    table = run("inspect", mlp)
    assert table.code == 0
    assert "float32" not in table.err
    assert "[4, 8]" in table.out


def test_messages_speak_the_words_of_the_command_line(
    run: Any, mlp: Path, data: Path, tmp_path: Path
) -> None:
    result = run("train", mlp, "--data", data, "--loss", "cross_entropy", "--batch-norm", "training")
    assert result.code == 1
    assert "--batch-norm training has no effect" in result.err
    model = models.mlp()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 8
    onnx.save(model, tmp_path / "fixed.onnx")
    fixed = ["train", tmp_path / "fixed.onnx", "--data", data, "--loss", "cross_entropy", "--epochs", 1]
    result = run(*fixed, "--batch-size", 16)
    assert result.code == 1
    assert "--batch-size is 16" in result.err
    assert "pass --dynamic-batch. Or leave --batch-size out" in result.err
    result = run(*fixed, "--batch-size", 16, "--dynamic-batch", "--json")
    assert result.code == 0, result.err
    plain = run("train", mlp, *fixed[2:], "--batch-size", 16, "--json")
    assert result.json()["epochs"] == plain.json()["epochs"]


def test_warnings_speak_the_words_of_the_command_line(
    run: Any, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.mlp()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, tmp_path / "single.onnx")
    handlers = list(logging.getLogger("onnxtrain").handlers)
    command = ["train", tmp_path / "single.onnx", "--data", data, "--loss", "cross_entropy", "--epochs", 1]
    result = run(*command, "--output", tmp_path / "run")
    assert result.code == 0, result.err
    assert "pass --dynamic-batch" in " ".join(result.err.split())
    assert "Or pass --accumulate 32." in caplog.text
    assert logging.getLogger("onnxtrain").handlers == handlers


def test_ops_table(run: Any) -> None:
    rows = {row["op_type"]: row for row in run("ops", "--json").json()}
    assert rows["MatMul"]["status"] == "rule"
    assert rows["MatMul"]["inputs"] == ["A", "B"]
    assert rows["Shape"]["status"] == "nondifferentiable"
    table = run("ops", "--status", "nondifferentiable").out
    assert "Shape" in table
    assert "Gemm" not in table
    wrong = run("ops", "--status", "good")
    assert wrong.code == 1
    assert "choose from rule" in wrong.err


def test_ops_of_another_domain(run: Any) -> None:
    rows = {row["op_type"]: row["status"] for row in run("ops", "--domain", "com.microsoft", "--json").json()}
    assert rows["QuickGelu"] == "function"
    assert rows["Inverse"] == "rule"
    assert rows["Sampling"] == "not yet"
    waiting = run("ops", "--domain", "com.microsoft", "--status", "unknown", "--json").json()
    # Those that onnxruntime knows and for which nothing is registered.
    assert "MurmurHash3" in {row["op_type"] for row in waiting}
    assert {row["op_type"] for row in waiting} == {op for op, status in rows.items() if status == "unknown"}
    wrong = run("ops", "--domain", "com.micosoft")
    assert wrong.code == 1
    assert "onnxruntime has no ops" in wrong.err


def test_ops_of_a_model(run: Any, mlp: Path, tmp_path: Path) -> None:
    result = run("ops", mlp)
    assert result.code == 0
    assert "Can be trained (4 parameters)." in result.out
    nodes = [
        onnx.helper.make_node("Mul", ["x", "w"], ["z"]),
        onnx.helper.make_node("Sampling", ["z"], ["y"], domain="com.microsoft"),
    ]
    model = models.make_model(nodes, {"x": [4]}, {"y": ["n"]}, {"w": np.ones(4, np.float32)})
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, tmp_path / "chosen.onnx")
    result = run("ops", tmp_path / "chosen.onnx", "--json")
    assert result.code == 1
    assert not result.json()["trainable"]
    assert "no VJP rule for 'com.microsoft::Sampling'" in result.json()["problem"]
    assert [row["op"] for row in result.json()["ops"]] == ["Mul", "com.microsoft::Sampling"]
    gelu = onnx.helper.make_node("BiasGelu", ["x", "w"], ["y"], domain="com.microsoft")
    model = models.make_model([gelu], {"x": [4]}, {"y": [4]}, {"w": np.ones(4, np.float32)})
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, tmp_path / "fused.onnx")
    result = run("ops", tmp_path / "fused.onnx", "--json")
    assert result.json()["trainable"]
    assert result.json()["ops"][0]["gradient"] == "through its function body"


NET = """<ir_version: 8, opset_import: ["": 17]> g (float[n, 3] x%s) => (%s)
    <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}, float s = {0.1}, int8 z = {0}> { h = MatMul(x, w)  %s }"""


@pytest.mark.parametrize(
    ("inputs", "outputs", "body"),
    [
        ("", "float[n, 3] y", "y = Relu(h)"),
        ("", "float[n, 3] y", "y = Round(h)"),
        ("", "float[n, 3] y", "i = Cast<to = 7>(h)  y = Cast<to = 1>(i)"),
        ("", "float[n, 3] y", "y = Sign(h)"),
        ("", "float[n, 3] y", "i = Greater(h, x)  y = Cast<to = 1>(i)"),
        ("", "float[n, 3] y", "q = QuantizeLinear(h, s, z)  y = DequantizeLinear(q, s, z)"),
        ("", "float[n, 3] y", "y = Relu(x)"),
        ("", "float y", "m = ReduceMean<keepdims = 0>(h)  y = Relu(m)"),
        ("", "int64[n, 3] y", "y = Cast<to = 7>(h)"),
        (", string[n] id", "float[n, 3] y, string[n] o", "y = Relu(h)  o = Identity(id)"),
        (", string[1] id", "float[n, 3] y", "l = ai.onnx.ml.LabelEncoder(id)  y = Mul(h, l)"),
    ],
)
def test_ops_says_what_trainer_does(inputs: str, outputs: str, body: str, run: Any, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    model = onnx.parser.parse_model(NET % (inputs, outputs, body))
    model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 2))
    for node in model.graph.node:
        if node.op_type == "LabelEncoder":
            attributes = {"keys_strings": ["a"], "values_floats": [2.0]}
            node.attribute.extend(onnx.helper.make_attribute(*pair) for pair in attributes.items())
    onnx.save(model, path)
    scalar = outputs == "float y"
    try:
        Trainer(path, loss=None if scalar else "mse", loss_input_names="y")
        trains = True
    except OnnxTrainError:
        trains = False
    result = run("ops", path)
    assert trains == (result.code == 0) == ("Can be trained" in result.out), result.out


def test_weights_in_constant_nodes_are_counted(run: Any, tmp_path: Path) -> None:
    """As paddle2onnx and spox write them."""
    path = tmp_path / "net.onnx"
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 11]> g (float[n, 3] x) => (float[n, 2] y) {
        w = Constant<value = float[3, 2] {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}>()
        b = Constant<value = float[2] {1.0, 2.0}>()  h = MatMul(x, w)  y = Add(h, b) }""")
    onnx.save(model, path)
    assert "Can be trained (2 parameters)." in run("ops", path).out
    document = run("inspect", path, "--json").json()
    assert document["elements"] == 8
    assert {row["name"]: row["trained"] for row in document["parameters"]} == {"w": True, "b": True}


def test_check_agrees(run: Any, mlp: Path) -> None:
    result = run("check", mlp)
    assert result.code == 0, result.err
    assert "all 4 agree" in result.out
    document = run("check", mlp, "--parameter", "w*", "--json").json()
    assert [row["name"] for row in document["parameters"]] == ["w1", "w2"]
    assert document["passed"]
    assert all(row["precision"] == "float64" and row["error"] < 1e-5 for row in document["parameters"])


def test_check_finds_a_wrong_rule(run: Any, mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from onnxtrain.autodiff._registry import RULES

    rule = RULES["", "Tanh"]
    wrong = dataclasses.replace(rule, function=lambda op, n, ct: op.Mul(ct, 0.9))
    monkeypatch.setitem(RULES, ("", "Tanh"), wrong)
    result = run("check", mlp, "--json")
    assert result.code == 1
    assert {row["name"]: row["passed"] for row in result.json()["parameters"]} == {
        "w1": False,
        "b1": False,
        "w2": True,
        "b2": True,
    }


def test_check_tells_a_kink_from_a_wrong_gradient(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "zeros.onnx"
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 2] x) => (float[n, 2] y) <float[2] w = {0.0, 0.0}> { a = Mul(x, w)  y = Relu(a) }""")
    onnx.save(model, path)
    result = run("check", path)
    assert result.code == 0, result.err
    assert "0 agree, 1 inconclusive" in result.out
    assert "w: a kink: the slope is" in result.out
    (row,) = run("check", path, "--json").json()["parameters"]
    assert (row["verdict"], row["passed"]) == ("inconclusive", False)


def test_check_takes_its_inputs_from_the_data(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    result = run("check", mlp, "--data", data)
    assert result.code == 0, result.err
    np.savez(tmp_path / "wrong.npz", x=np.zeros((3, 5), np.float32), y=np.zeros(3, np.int64))
    result = run("check", mlp, "--data", tmp_path / "wrong.npz")
    assert result.code == 1
    assert "The input 'x' has shape [batch,4], received an array of shape [3, 5]" in " ".join(
        result.err.split()
    )
    np.savez(tmp_path / "none.npz", images=np.zeros((3, 4), np.float32), y=np.zeros(3, np.int64))
    result = run("check", mlp, "--data", tmp_path / "none.npz")
    assert result.code == 1
    assert "contains images, y, but the model's inputs are x" in " ".join(result.err.split())


def test_check_of_an_embedding_with_named_dimension(run: Any, tmp_path: Path) -> None:
    helper = onnx.helper
    table = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["y"])],
        "embedding",
        [helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", "sequence", 3])],
        [onnx.numpy_helper.from_array(table, "table")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "embedding.onnx")
    assert run("check", tmp_path / "embedding.onnx", "--dim", "sequence=11").code == 0
    wrong = run("check", tmp_path / "embedding.onnx", "--dim", "sequence")
    assert wrong.code == 1
    assert "write it as NAME=SIZE" in wrong.err
    unknown = run("check", tmp_path / "embedding.onnx", "--dim", "length=3")
    assert unknown.code == 1
    assert "no symbolic dimension 'length'; they have batch, sequence" in unknown.err


def test_output_into_a_closed_pipe_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "onnxtrain", "ops"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate()
    assert b"Traceback" not in err


def test_batch_norm_by_layer(run: Any, tmp_path: Path) -> None:
    onnx.save(models.conv_bn(training=False), tmp_path / "net.onnx")
    arguments = (
        "artifacts",
        tmp_path / "net.onnx",
        "--loss",
        "cross_entropy",
        "-o",
        tmp_path / "a",
        "--json",
    )
    shown = run(*arguments, "--batch-norm", "b?=training", "--batch-norm", "*=inference").json()
    roles = {row["name"]: row["role"] for row in shown["parameters"]}
    assert {name for name, role in roles.items() if role == "statistic"} == {"bn.mean", "bn.var"}
    assert "=training" not in run(*arguments, "--batch-norm", "training").err
    wrong = run(*arguments, "--batch-norm", "b?=on")
    assert (
        "--batch-norm is 'b?=on'; choose from as_exported, training, inference, or give PATTERN=MODE"
        in wrong.err
    )


def test_precision(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    arguments = ("--loss", "cross_entropy", "--precision", "bf16", "-o", tmp_path / "run")
    for command in (("artifacts", mlp), ("train", mlp, "--data", data, "--epochs", 1, "--overwrite")):
        result = run(*command, *arguments)
        assert result.code == 0, result.err
        ops = {node.op_type for node in onnx.load(tmp_path / "run/training_model.onnx").graph.node}
        assert {"GemmBfloat16_float", "MatMulBfloat16_float"} & ops
    again = run("train", tmp_path / "run", "--data", data, "--epochs", 2, "--precision", "fp32")
    assert "--precision" in again.err
    assert "is not one of" in run("artifacts", mlp, "--precision", "bf8").err


def test_artifacts_of_a_prepared_model(run: Any, tmp_path: Path) -> None:
    model = models.conv_bn(training=False)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, tmp_path / "net.onnx")
    arguments = (
        "artifacts",
        tmp_path / "net.onnx",
        "--loss",
        "cross_entropy",
        "-o",
        tmp_path / "a",
        "--json",
    )
    refused = run(*arguments, "--batch-norm", "training")
    assert "with dynamic_shapes, or pass --dynamic-batch. Or pass --batch-norm inference" in refused.err
    shown = run(*arguments, "--batch-norm", "training", "--dynamic-batch", "--replace-head", 5)
    assert shown.code == 0, shown.err
    session = ort.InferenceSession(tmp_path / "a" / "inference_model.onnx")
    assert [value.shape for value in session.get_outputs()] == [["batch", 5]]


def test_sam_of_the_shell_is_that_of_python(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    options = ["--loss", "cross_entropy", "--epochs", 2, "--sam", 0.2, "--lr", 0.01]
    shown = run("train", mlp, "--data", data, *options, "-o", tmp_path / "run", "--json")
    assert shown.code == 0, shown.err
    with np.load(data) as file:
        arrays = dict(file)
    trainer = Trainer(mlp, "cross_entropy", learning_rate=0.01)
    history = trainer.fit(arrays["x"], arrays["y"], epochs=2, callbacks=[SAM(0.2)], verbose=False)
    assert shown.json()["epochs"] == history.epochs
    refused = run("train", tmp_path / "run", "--data", data, "--sam", 0.1)
    assert "--sam 0.1 (it was 0.2)" in " ".join(refused.err.split())


@pytest.mark.parametrize(
    ("option", "names"), [("loss", LOSSES), ("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)]
)
def test_help_names_every_choice(option: str, names: dict[str, Any]) -> None:
    """Help is read without onnx, which a table of losses needs: the names of schedules are written out."""
    (_, declared) = get_args(options_of(TrainOptions)[option].annotation)
    unnamed = {name for name in names if not re.search(rf"\b{name}\b", declared.help)} - {"constant"}
    assert unnamed == set(), f"name {unnamed} in the help of --{option} in src/onnxtrain/cli/_options.py"


def test_options_name_arguments_of_python() -> None:
    """An option whose rule names no argument would be called by a name that nobody knows."""
    callables = (Trainer, Trainer.fit, ImageFolder, Recipe, TextPairs.read)
    arguments = {name for entry in callables for name in inspect.signature(entry).parameters}
    named = {option.rule.python for option in options_of(TrainOptions).values() if option.rule.python}
    assert named
    assert named <= arguments


def test_demo_draws_by_its_seed(run: Any, tmp_path: Path) -> None:
    """Equal seeds give equal weights, other seeds other ones."""
    results = []
    for folder, seed in (("a", 0), ("b", 1), ("c", 1)):
        shown = run("demo", "--epochs", 1, "--seed", seed, "--json", "-o", tmp_path / folder)
        assert shown.code == 0, shown.err
        results.append((tmp_path / folder / "untrained.onnx").read_bytes())
    assert results[0] != results[1] == results[2]
