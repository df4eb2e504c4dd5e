"""Networks that the command makes for a table: sizes, loss and encoding, beside the same training in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd
import pytest

from cli.test_tables import passengers, write
from onnxtrain import Recipe, Trainer
from onnxtrain.tables import TableEncoder


def houses(rows: int = 100) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"size": rng.normal(90, 30, rows), "town": rng.choice(["a", "b"], rows)})
    frame["price"] = 3000 * frame["size"] + 1e5 * (frame["town"] == "b") + rng.normal(0, 1e4, rows)
    frame["rent"] = frame["price"] / 300 + 0.5
    return frame


def make(run: Any, path: Path, *options: object) -> Any:
    return run("train", "--network", "mlp", "--data", path, *options)


def test_a_network_for_quantities_is_that_of_python(run: Any, tmp_path: Path) -> None:
    frame = houses()
    path = write(frame, tmp_path / "houses.csv")
    options = ("--hidden", "8,4", "--activation", "gelu", "--epochs", 5, "--seed", 3, "--lr", 0.01)
    result = make(
        run, path, "--target", "price", "--inputs", "size,town", "--metric", "r2", *options, "--json"
    )
    assert result.code == 0, result.err
    # Beside the data, named after it.
    directory = tmp_path / "houses-trained"
    told = " ".join(result.err.split())
    assert "Loss: mse, because 'price' is a number. To choose another one, pass --loss" in told
    assert "Network: 3 inputs, hidden layers of 8, 4 (gelu), 1 output; 73 parameters" in told
    mean, deviation = frame["price"].mean(), frame["price"].std(ddof=0)
    assert f"Target 'price', standardized in training: mean {mean:.5g}, deviation {deviation:.5g}" in told

    encoder = TableEncoder(
        target="price", inputs=["size", "town"], encode="one-hot", scale=True, scale_target=True
    ).fit(frame)
    recipe = Recipe(loss="mse", target_scale=encoder.target_scale_)
    trainer = Trainer.mlp(
        3, 1, (8, 4), activation="gelu", recipe=recipe, seed=3, learning_rate=0.01, metrics=["r2"]
    )
    x, y = encoder.transform(frame), encoder.transform_target(frame)[:, None]
    trainer.fit(x, y, epochs=5, verbose=False)
    assert result.json()["exported"]["loss"] == pytest.approx(trainer.evaluate(x, y)["loss"], rel=1e-6)
    assert result.json()["exported"]["r2"] == pytest.approx(trainer.evaluate(x, y)["r2"], rel=1e-6)

    assert run("predict", directory, "--data", path, "-o", tmp_path / "p.csv").code == 0
    predicted = pd.read_csv(tmp_path / "p.csv")
    assert list(predicted) == ["prediction"]
    np.testing.assert_allclose(predicted["prediction"], trainer.predict(x)[:, 0], rtol=1e-5)
    session = ort.InferenceSession(directory / "trained.onnx")
    feeds = {"size": frame["size"].to_numpy(), "town": frame["town"].to_numpy(object)}
    np.testing.assert_allclose(session.run(None, feeds)[0], trainer.predict(x), rtol=1e-5)
    # A resumed run needs neither --network nor a model.
    more = run("train", directory, "--data", path, "--epochs", 1, "--json")
    assert more.code == 0, more.err
    assert len(more.json()["epochs"]) == 6


@pytest.mark.parametrize(
    ("target", "loss", "why", "outputs"),
    [
        (["no", "yes"], "cross_entropy", "'t' has 2 classes", 2),
        ([True, False], "cross_entropy", "the whole numbers 0 to 1, which are read as classes", 2),
        ([0, 1, 2], "cross_entropy", "the whole numbers 0 to 2, which are read as classes", 3),
        ([1, 2, 3], "mse", "'t' is a number", 1),
        ([0, 2], "mse", "'t' is a number", 1),
        ([0, 1.5], "mse", "'t' is a number", 1),
        ([-1, 0, 1], "mse", "'t' is a number", 1),
        (list(range(30)), "mse", "'t' is a number", 1),
    ],
)
def test_the_loss_follows_from_the_target(
    run: Any, target: list[Any], loss: str, why: str, outputs: int, tmp_path: Path
) -> None:
    frame = pd.DataFrame({"a": np.arange(60.0), "t": (target * 60)[:60]})
    result = make(run, write(frame, tmp_path / "t.csv"), "--target", "t", "--hidden", 0, "--epochs", 1)
    assert result.code == 0, result.err
    told = " ".join(result.err.split())
    assert f"Loss: {loss}, because {why}" in told.replace("'t' has the", "the")
    plural = "s" * (outputs > 1)
    assert f"Network: 1 input, {outputs} output{plural}; {2 * outputs} parameters" in told
    assert ("standardized in training" in told) == (loss == "mse")


@pytest.mark.thorough
def test_classes_have_names_and_options_replace_the_defaults(run: Any, tmp_path: Path) -> None:
    path = write(passengers().dropna(), tmp_path / "t.csv")
    options = ("--target", "fate", "--epochs", 2, "--json", "--overwrite", "-o", tmp_path / "run")
    assert make(run, path, *options).code == 0
    assert run("predict", tmp_path / "run", "--data", path, "-o", tmp_path / "p.csv").code == 0
    assert set(pd.read_csv(tmp_path / "p.csv")["class"]) <= {"lost", "saved"}

    def encoder() -> TableEncoder:
        from onnxtrain.tables import PROPERTY

        return TableEncoder.from_json(str(Trainer.resume(tmp_path / "run").state.properties[PROPERTY]))

    assert (encoder().encode, encoder().scale) == ("one-hot", True)
    given = ("--no-scale", "--ordinal", "--dropout", 0.25)
    assert make(run, path, *options, *given).code == 0
    assert (encoder().encode, encoder().scale) == ("ordinal", False)
    ops = [node.op_type for node in onnx.load(tmp_path / "run" / "training_model.onnx").graph.node]
    assert ops.count("Dropout") == 2
    # The file of options repeats the run, also what was switched off.
    again = run("train", "--config", tmp_path / "run" / "run.toml", "-o", tmp_path / "again", "--json")
    assert again.code == 0, again.err
    both = ("rent", "price")
    path = write(houses(), tmp_path / "h.csv")
    several = make(run, path, "--target", "rent", "--target", "price", "--epochs", 2, "--json")
    assert several.code == 0, several.err
    assert run("predict", tmp_path / "h-trained", "--data", path, "-o", tmp_path / "p.csv").code == 0
    predicted = pd.read_csv(tmp_path / "p.csv")
    assert list(predicted) == ["prediction_0", "prediction_1"]
    for column, name in zip(predicted, both, strict=True):
        assert predicted[column].mean() == pytest.approx(houses()[name].mean(), rel=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name the column to predict with --target; its columns are size, town, price, rent"),
        (["--target", "price", "--loss", "nll"], "--loss is nll; with --network, choose one of cross_entropy"),
        (["--target", "price", "--loss", "causal_lm"], "--loss is causal_lm; with --network"),
        (["--target", "price", "--loss", "cross_entropy"], "The target 'price' has"),
        (["--target", "price", "--hidden", "8,0"], "--hidden is '8,0'; pass sizes such as 64,32, or 0"),
        (["--target", "price", "--hidden", "big"], "--hidden is 'big'; pass sizes"),
        (["--target", "price", "--replace-head", "3"], "--replace-head changes a model; --network makes"),
        (["--target", "price", "--add-classes", "1"], "--add-classes changes a model; --network makes"),
        (["--target", "town", "--scale-target"], "--scale-target standardizes numbers to predict, but the target has"),
        (["--target", "price", "--loss", "poisson_nll", "--scale-target"], "PoissonNLLLoss are no quantities"),
    ],
)  # fmt: skip
def test_networks_that_cannot_be_made_are_one_message(
    run: Any, options: list[str], message: str, tmp_path: Path
) -> None:
    frame = houses()
    frame["price"] = frame["price"].astype(int) * 10
    result = make(run, write(frame, tmp_path / "t.csv"), *options)
    assert result.code == 1
    assert message in " ".join(result.err.split()), result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "t-trained").exists()


def test_a_model_or_a_network_is_needed(run: Any, mlp: Path, data: Path, tmp_path: Path) -> None:
    path = write(houses(), tmp_path / "t.csv")
    neither = run("train", "--data", path)
    assert "Pass the path of an .onnx file or the directory of a run, or --network mlp" in neither.err
    both = run("train", mlp, "--network", "mlp", "--data", path)
    assert f"--network makes a new network, but '{mlp}' is a model" in both.err
    other = run("train", mlp, "--data", path, "--hidden", "8", "--activation", "tanh")
    assert "--hidden, --activation need --network, which makes a new network" in other.err
    text = run("train", mlp, "--data", data, "--loss", "mse", "--decimal", ",")
    assert f"--decimal are for text files with a table (.csv, .tsv); '{data}' is not one" in text.err
    arrays = make(run, data, "--loss", "mse")
    assert f"--network makes a network for a table; '{data}' is not a table" in arrays.err


def test_the_target_of_a_model_is_standardized_if_asked(run: Any, tmp_path: Path) -> None:
    import models

    path = write(houses(), tmp_path / "t.csv")
    onnx.save(models.mlp(features=1, classes=1), tmp_path / "net.onnx")
    losses = []
    for name, switch in (("on", ["--scale-target"]), ("off", [])):
        result = run(
            *(
                "train",
                tmp_path / "net.onnx",
                "--data",
                path,
                "--target",
                "price",
                "--inputs",
                "size",
                "--loss",
                "mse",
            ),
            *(
                "--scale",
                "--epochs",
                3,
                "--lr",
                0.01,
                "--validation",
                0.2,
                "--json",
                "-o",
                tmp_path / name,
                *switch,
            ),
        )
        assert result.code == 0, result.err
        losses.append(result.json()["exported"])
    # Of the standardized target, and of the target: 1e10 times the first.
    assert losses[0]["val_loss"] < 2
    assert losses[1]["val_loss"] > 1e9
    assert losses[0]["val_rmse"] < losses[1]["val_rmse"]
    scale = TableEncoder.from_json(
        str(Trainer.resume(tmp_path / "on").state.properties["onnxtrain.table"])
    ).target_scale_
    assert scale is not None
    # Computed without the validation rows.
    assert scale.mean[0] != pytest.approx(houses()["price"].mean(), rel=1e-9)
    assert losses[0]["val_rmse"] == pytest.approx(scale.deviation[0] * losses[0]["val_loss"] ** 0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("rows", "options", "epochs"),
    [(60, [], 125), (2000, [], 20), (60, ["--epochs", 3], 3), (100, ["--batch-size", 10], 25)],
)
def test_small_tables_get_more_epochs(rows: int, options: list[str], epochs: int) -> None:
    from onnxtrain.cli._network import with_epochs
    from onnxtrain.cli._train_options import NetworkOptions, TrainOptions

    chosen = TrainOptions(
        data=Path("t.csv"),
        net=NetworkOptions(network="mlp"),
        epochs=3 if "--epochs" in options else 10,
        batch_size=10 if "--batch-size" in options else None,
    )
    given = frozenset({"epochs"} if "--epochs" in options else ())
    assert with_epochs(chosen, given, rows).epochs == epochs
    assert with_epochs(chosen.__class__(data=Path("t.csv")), given, rows).epochs == 10
