"""Tables of other dialects in the shell: recognized, told, remembered with the run, and read again in the same way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest

import models
from cli.test_tables import passengers, train, write
from onnxtrain import Trainer
from onnxtrain.tables import PROPERTY, Dialect, TableEncoder


@pytest.fixture
def net(tmp_path: Path) -> Path:
    onnx.save(models.mlp(features=8, classes=2), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


OPTIONS = ["--one-hot", "--impute", "mean", "--epochs", 2]


@pytest.mark.thorough
def test_a_run_is_the_same_in_every_dialect(run: Any, net: Path, tmp_path: Path) -> None:
    frame = passengers()
    files = {"a.csv": write(frame, tmp_path / "a.csv")}
    for name, settings in (
        ("b.csv", {"sep": ";", "decimal": ","}),
        ("c.tsv", {"sep": "\t", "encoding": "utf-16"}),
        ("d.csv.gz", {"sep": "|"}),
    ):
        files[name] = tmp_path / name
        frame.to_csv(files[name], index=False, **settings)
    results = {}
    for name, path in files.items():
        result = train(run, net, path, *OPTIONS, "--overwrite")
        assert result.code == 0, result.err
        results[name] = result.json()["epochs"][-1]["loss"]
        # Any other file is read in its own dialect.
        for other in files.values():
            found = run("evaluate", tmp_path / "run", "--data", other, "--json")
            assert found.code == 0, found.err
            assert found.json()["loss"] == pytest.approx(result.json()["exported"]["loss"], rel=1e-6)
        for source in ("run", "run/trained.onnx"):
            assert (
                run("predict", tmp_path / source, "--data", files["b.csv"], "-o", tmp_path / "p.csv").code
                == 0
            )
            assert len(pd.read_csv(tmp_path / "p.csv")) == len(frame)
    assert len(set(results.values())) == 1


def test_the_summary_says_how_a_file_was_read(run: Any, net: Path, tmp_path: Path) -> None:
    frame = passengers()
    path = tmp_path / "b.csv"
    frame.to_csv(path, index=False, sep=";", decimal=",")
    result = train(run, net, path, *OPTIONS)
    assert 'b.csv: 120 rows, fields separated by ";", decimal comma' in " ".join(result.err.split())
    encoder = TableEncoder.from_json(str(Trainer.resume(tmp_path / "run").state.properties[PROPERTY]))
    assert encoder.dialect_ == Dialect(separator=";", decimal=",")
    # A file of another dialect is told, one of the same is not.
    other = write(frame, tmp_path / "c.csv")
    told = run("evaluate", tmp_path / "run", "--data", other)
    assert f"'{other}': fields separated by commas, decimal point" in told.err
    assert "separated" not in run("evaluate", tmp_path / "run", "--data", path).err


def test_what_was_given_holds_for_a_resumed_run_and_settles_other_files(
    run: Any, net: Path, tmp_path: Path
) -> None:
    """Without the options, this file has an unknown encoding, and numbers of two meanings."""
    frame = passengers().drop(columns="age")
    frame["town"] = frame["town"].replace("C", "Köln")
    frame["fare"] = (frame["fare"].round() + 1).map("{:.0f}.500".format)
    frame["member"] = frame["member"].astype(int)
    path = tmp_path / "b.csv"
    frame.to_csv(path, index=False, sep=";", encoding="cp1252")
    onnx.save(models.mlp(features=7, classes=2), net)
    missing = train(run, net, path, *OPTIONS)
    assert "Pass --encoding cp1252 if it contains 'Köln'" in " ".join(missing.err.split())
    missing = train(run, net, path, *OPTIONS, "--encoding", "cp1252")
    assert "Pass --decimal , or --decimal ." in " ".join(missing.err.split())
    assert not (tmp_path / "run").exists()
    given = ["--encoding", "cp1252", "--decimal", ".", "--separator", "semicolon"]
    result = train(run, net, path, *OPTIONS, *given)
    assert result.code == 0, result.err
    assert run("evaluate", tmp_path / "run", "--data", path).code == 0
    more = run("train", tmp_path / "run", "--data", path, "--epochs", 1, "--json")
    assert more.code == 0, more.err
    parquet = frame.assign(fare=frame["fare"].astype(float))
    parquet.to_parquet(tmp_path / "b.parquet")
    assert run("train", tmp_path / "run", "--data", tmp_path / "b.parquet", "--epochs", 1).code == 0
    refused = run("evaluate", tmp_path / "run", "--data", tmp_path / "b.parquet", "--decimal", ",")
    assert "--decimal are for text files such as .csv" in refused.err
    assert "--decimal , (it was .)" in run("train", tmp_path / "run", "--data", path, "--decimal", ",").err
    # As the other mark: another number. The options of the command win.
    values = [
        json.loads(run("evaluate", tmp_path / "run", "--data", path, "--json", *options).out)["loss"]
        for options in ([], ["--decimal", ","])
    ]
    assert values[0] != values[1]
    again = run("train", "--config", tmp_path / "run" / "run.toml", "-o", tmp_path / "again", "--json")
    assert again.json()["exported"] == result.json()["exported"]


def test_a_fraction_is_split_and_a_second_file_has_its_own_dialect(
    run: Any, net: Path, tmp_path: Path
) -> None:
    frame = passengers()
    path = tmp_path / "b.csv"
    frame.to_csv(path, index=False, sep=";", decimal=",")
    other = write(passengers(60, seed=1), tmp_path / "v.csv")
    result = train(run, net, path, *OPTIONS, "--validation", other)
    assert result.code == 0, result.err
    assert np.isfinite(result.json()["epochs"][-1]["val_loss"])
