"""`onnxtrain evaluate MODEL.onnx`: beside the run that wrote the model, and beside scikit-learn and PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, log_loss, mean_absolute_error

import models
from cli.files import arrays_in
from models import parse_nodes


def outputs(path: Path, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    session = ort.InferenceSession(path)
    (result,) = session.run(None, {session.get_inputs()[0].name: x})
    return np.asarray(result, np.float64)


def softmax(scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def test_loss_metrics_and_classes(run: Any, mlp: Path, data: Path) -> None:
    arrays = arrays_in(data)
    scores = outputs(mlp, arrays["x"])
    result = run(
        "evaluate",
        mlp,
        "--data",
        data,
        "--loss",
        "cross_entropy",
        "--metric",
        "accuracy",
        "--metric",
        "f1_macro",
        "--json",
    ).json()
    assert result["model"] == str(mlp)
    guess = scores.argmax(axis=1)
    assert result["loss"] == pytest.approx(log_loss(arrays["y"], softmax(scores)), rel=1e-6)
    assert result["accuracy"] == pytest.approx(accuracy_score(arrays["y"], guess))
    assert result["f1_macro"] == pytest.approx(f1_score(arrays["y"], guess, average="macro"))
    assert result["confusion_matrix"] == confusion_matrix(arrays["y"], guess).tolist()
    # The table is the same for all batch sizes, and has what JSON has.
    shown = run("evaluate", mlp, "--data", data, "--loss", "cross_entropy", "--batch-size", 7).out
    assert f"{result['loss']:,.6g}" in shown
    assert "Confusion matrix" in shown


def test_without_a_loss_the_metrics_that_suit_the_target(
    run: Any, mlp: Path, data: Path, tmp_path: Path
) -> None:
    arrays = arrays_in(data)
    scores = outputs(mlp, arrays["x"])
    result = run("evaluate", mlp, "--data", data, "--json").json()
    assert "loss" not in result
    assert result["accuracy"] == pytest.approx(accuracy_score(arrays["y"], scores.argmax(axis=1)))
    target = np.random.default_rng(1).standard_normal((200, 3)).astype(np.float32)
    np.savez(tmp_path / "floats.npz", x=arrays["x"], y=target)
    result = run("evaluate", mlp, "--data", tmp_path / "floats.npz", "--json").json()
    assert result.keys() == {"model", "data", "mae", "rmse"}
    assert result["mae"] == pytest.approx(mean_absolute_error(target, scores), rel=1e-6)


def test_the_exported_model_of_a_run_has_the_values_of_the_run(
    run: Any, mlp: Path, data: Path, tmp_path: Path
) -> None:
    command = ["train", mlp, "--data", data, "--loss", "cross_entropy", "--epochs", 1]
    assert run(*command, "-o", tmp_path / "run").code == 0
    of_run = run("evaluate", tmp_path / "run", "--data", data, "--json").json()
    model = tmp_path / "run" / "trained.onnx"
    of_file = run("evaluate", model, "--data", data, "--loss", "cross_entropy", "--json").json()
    assert of_file["loss"] == pytest.approx(of_run["loss"], rel=1e-6)
    assert of_file["classes"] == of_run["classes"]
    for words in (["--loss", "mse"], ["--metric", "f1"], ["--loss-input", "logits"]):
        refused = run("evaluate", tmp_path / "run", "--data", data, *words)
        assert refused.code == 1
        assert (
            f"{words[0]}: '{tmp_path / 'run'}' is a run, which has a loss and metrics of its own"
            in refused.err
        )


def test_a_model_exported_from_a_run_on_a_table(run: Any, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({name: rng.standard_normal(60) for name in "abcd"})
    frame["kind"] = np.array(["left", "middle", "right"])[frame[["a", "b", "c"]].to_numpy().argmax(axis=1)]
    frame.to_csv(tmp_path / "table.csv", index=False)
    onnx.save(models.mlp(), tmp_path / "net.onnx")
    table = tmp_path / "table.csv"
    command = ["train", tmp_path / "net.onnx", "--data", table, "--target", "kind", "--loss", "cross_entropy"]
    first = run(*command, "--epochs", 1, "-o", tmp_path / "run")
    assert first.code == 0, first.err
    of_run = run("evaluate", tmp_path / "run", "--data", table, "--json").json()
    model = tmp_path / "run" / "trained.onnx"
    of_file = run("evaluate", model, "--data", table, "--loss", "cross_entropy", "--json").json()
    assert of_file["loss"] == pytest.approx(of_run["loss"], rel=1e-6)
    assert of_file["classes"] == of_run["classes"]
    assert run("evaluate", model, "--data", table, "--json").json()["accuracy"] == of_run["accuracy"]


def test_a_model_without_gradients_and_with_a_fixed_batch(run: Any, data: Path, tmp_path: Path) -> None:
    """The outputs are all that the loss needs: this model has no parameters, an op without a gradient, batches of 8."""
    model = models.make_model(
        parse_nodes("r = Round(x)  logits = Mul(r, r)"), {"x": [8, 4]}, {"logits": [8, 4]}, {}
    )
    onnx.save(model, tmp_path / "round.onnx")
    arrays = arrays_in(data)
    scores = np.round(arrays["x"]).astype(np.float64) ** 2
    result = run("evaluate", tmp_path / "round.onnx", "--data", data, "--loss", "cross_entropy", "--json")
    assert result.code == 0, result.err
    expected = log_loss(arrays["y"], softmax(scores), labels=range(4))
    assert result.json()["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["labels", "target"])
def test_the_target_may_have_another_usual_name(
    run: Any, mlp: Path, data: Path, tmp_path: Path, name: str
) -> None:
    arrays = arrays_in(data)
    np.savez(tmp_path / "named.npz", **{"x": arrays["x"], name: arrays["y"]})
    expected, found = (
        run("evaluate", mlp, "--data", path, "--loss", "cross_entropy", "--json")
        for path in (data, tmp_path / "named.npz")
    )
    assert found.json()["loss"] == expected.json()["loss"]
    assert "Not used" not in found.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--loss", "binary_crossentropy"], "pass --loss bce_with_logits"),
        (["--loss-option", "label_smoothing=0.1"], "--loss-option is given without --loss."),
        (["--loss-input", "nothing"], "--loss-input is 'nothing'; its floating-point outputs are logits."),
        (
            ["--data", "OTHER"],
            "suit several losses, or none. Name the one that the model was trained with: --loss NAME.",
        ),
        (["--data", "WITHOUT"], "--loss NAME"),
        (
            ["--data", "WITHOUT", "--loss", "cross_entropy"],
            "no array for the target labels; it holds x. Name the array of the target y.",
        ),
    ],
)
def test_what_does_not_fit_is_said(
    run: Any, mlp: Path, data: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    arrays = arrays_in(data)
    np.savez(tmp_path / "other.npz", x=arrays["x"], y=np.ones((200, 3, 2), np.int64))
    np.savez(tmp_path / "without.npz", x=arrays["x"])
    files = {"OTHER": tmp_path / "other.npz", "WITHOUT": tmp_path / "without.npz"}
    result = run("evaluate", mlp, "--data", data, *(files.get(word, word) for word in words))
    assert result.code == 1
    assert said in " ".join(result.err.split())


@pytest.mark.parametrize("probabilities", [False, True])
def test_predictions_with_the_loss_of_the_model(
    run: Any, mlp: Path, data: Path, tmp_path: Path, probabilities: bool
) -> None:
    arrays = arrays_in(data)
    scores = outputs(mlp, arrays["x"])
    output = tmp_path / "predictions.npz"
    words = ["--loss", "cross_entropy", *(["--probabilities"] if probabilities else [])]
    assert run("predict", mlp, "--data", data, "-o", output, *words).code == 0
    found = arrays_in(output)
    np.testing.assert_allclose(found["probability"], softmax(scores), rtol=1e-5)
    if probabilities:
        assert found.keys() == {"probability"}
    else:
        assert found.keys() == {"logits", "probability", "class"}
        np.testing.assert_array_equal(found["class"], scores.argmax(axis=1))


def test_predictions_of_yes_and_no(run: Any, data: Path, tmp_path: Path) -> None:
    onnx.save(models.mlp(classes=1), tmp_path / "yes.onnx")
    scores = outputs(tmp_path / "yes.onnx", arrays_in(data)["x"])
    output = tmp_path / "predictions.npz"
    words = ["--data", data, "--loss", "bce_with_logits", "-o", output]
    assert run("predict", tmp_path / "yes.onnx", *words).code == 0
    found = arrays_in(output)
    np.testing.assert_allclose(found["probability"], 1 / (1 + np.exp(-scores)), rtol=1e-5)
    np.testing.assert_array_equal(found["class"], (scores[:, 0] > 0).astype(int))


def test_predictions_that_have_no_probabilities(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "predictions.npz"
    result = run("predict", mlp, "--data", data, "-o", output, "--loss", "mse")
    assert result.code == 1
    assert "--loss mse does not define class probabilities for its outputs" in result.err
    assert not output.exists()


def test_a_loss_of_several_outputs_reads_all_of_them(run: Any, tmp_path: Path) -> None:
    """The outputs have names that onnxtrain uses itself, and a target has the name of an array that is not read."""
    head = '<ir_version: 10, opset_import: ["": 21]>'
    net = onnx.parser.parse_model(
        f"""{head} net (float[n, 4] x) => (float[n, 3] scores, float[n, 3] one, int64[n, 1] rank) {{
            scores = MatMul(x, w)  one = Tanh(scores)  rank = ArgMax<axis = 1>(scores)
        }}"""
    )
    weight = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    net.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    loss = onnx.parser.parse_model(
        f"""{head} loss (float[n, 3] scores, float[n, 3] one, int64[n, 1] rank, float[n, 3] truth) => (float loss) {{
            d = Sub(scores, truth)  e = Mul(d, one)  f = Mul(e, e)
            g = CastLike(rank, f)  h = Mul(f, g)  loss = ReduceMean<keepdims = 0>(h)
        }}"""
    )
    onnx.save(net, tmp_path / "net.onnx")
    onnx.save(loss, tmp_path / "loss.onnx")
    rng = np.random.default_rng(1)
    x, truth = rng.normal(size=(50, 4)).astype(np.float32), rng.normal(size=(50, 3)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, truth=truth)
    values = ort.InferenceSession(tmp_path / "net.onnx").run(None, {"x": x})
    scores, tanh, rank = (np.asarray(value, np.float64) for value in values)
    expected = np.mean(((scores - truth) * tanh) ** 2 * rank)
    command = ["evaluate", tmp_path / "net.onnx", "--data", tmp_path / "data.npz", "--loss"]
    named = [word for name in ("scores", "one", "rank") for word in ("--loss-input", name)]
    for words in ([], named):
        shown = run(*command, tmp_path / "loss.onnx", *words, "--json")
        assert shown.code == 0, shown.err
        assert shown.json()["loss"] == pytest.approx(expected, rel=1e-5)
        assert "Not used" not in shown.err
    of_one = run(*command, "mse", "--loss-input", "one", "--json")
    assert "it holds x, truth" in of_one.err
