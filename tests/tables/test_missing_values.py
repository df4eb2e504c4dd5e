"""Missing values of a table are empty fields and the texts of `--missing`, alike in .csv and .parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd
import pytest

import models
from onnxtrain.errors import InputError
from onnxtrain.tables import TableEncoder

HERE = "(counted from 1, without the header)"


def write(tmp_path: Path, text: str, name: str = "t.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def learn(path: Path, **options: Any) -> tuple[TableEncoder, np.ndarray]:
    """The encoder of a table, and the encoded table."""
    encoder = TableEncoder(**options)
    return encoder, encoder.fit_transform(path)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_none_na_and_null_are_texts(tmp_path: Path, suffix: str) -> None:
    """pandas.read_csv takes all three for missing by default, and --impute made them the most frequent category."""
    frame = pd.DataFrame({"c": ["None", "NA", "null", "x", "x", "x"], "v": [1, 2, 3, 4, 5, 6]})
    path = tmp_path / f"t.{suffix}"
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path, index=False)
    encoder, x = learn(path, encode="ordinal", impute="mean")
    assert encoder.columns_[0].categories == ["NA", "None", "null", "x"]
    np.testing.assert_array_equal(x[:, 0], [1, 0, 2, 3, 3, 3])
    encoder, x = learn(path, encode="ordinal", impute="mean", missing=["NA", "null"])
    assert encoder.columns_[0].categories == ["None", "x"]
    np.testing.assert_array_equal(x[:, 0], [0, 1, 1, 1, 1, 1])
    with pytest.raises(InputError, match=r"column 'c', row 2 .*the value is missing"):
        learn(path, encode="ordinal", missing="NA")


def test_a_run_on_csv_takes_parquet(run: Any, tmp_path: Path) -> None:
    """Categories, ids with zeros in front, whole numbers with gaps and truth values mean the same in both files."""
    onnx.save(models.mlp(features=7, classes=2), tmp_path / "net.onnx")
    frame = pd.DataFrame(
        {
            "id": ["007", "008", "009", "010"] * 8,
            "c": ["NA", "x", None, "None"] * 8,
            "count": pd.array([1, None, 3, 4] * 8, dtype="Int64"),
            "member": [True, False, True, True] * 8,
            "zip": [1011, 2022, 1011, 2022] * 8,
            "y": ["no", "yes", "no", "null"] * 8,
        }
    )
    frame["y"] = frame["y"].replace("null", "yes")
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet", index=False)
    result = run(
        *(
            "train",
            tmp_path / "net.onnx",
            "--data",
            tmp_path / "t.csv",
            "--target",
            "y",
            "--impute",
            "median",
        ),
        *("--one-hot", "--categorical", "zip", "--id", "id", "--loss", "cross_entropy", "--epochs", 2),
        *("--validation", tmp_path / "t.parquet", "-o", tmp_path / "run", "--json"),
    )
    assert result.code == 0, result.err
    exported = result.json()["exported"]
    assert exported["loss"] == exported["val_loss"]
    tables = []
    for suffix in ("csv", "parquet"):
        out = tmp_path / f"p_{suffix}.csv"
        assert run("predict", tmp_path / "run", "--data", tmp_path / f"t.{suffix}", "-o", out).code == 0
        tables.append(out.read_text())
        model = run(
            "predict",
            tmp_path / "run" / "trained.onnx",
            "--data",
            tmp_path / f"t.{suffix}",
            "-o",
            tmp_path / "m.csv",
        )
        assert model.code == 0, model.err
        left, right = (pd.read_csv(path, dtype={"id": str}) for path in (out, tmp_path / "m.csv"))
        assert list(left["id"]) == list(right["id"]) == list(frame["id"])
        assert list(left["class"]) == list(right["class"])
        numbers = [name for name in left if name not in ("id", "class")]
        np.testing.assert_allclose(left[numbers], right[numbers], rtol=1e-5, atol=1e-6)
    assert tables[0] == tables[1]


def test_the_exported_file_knows_what_is_missing(run: Any, tmp_path: Path) -> None:
    """Texts of --missing, too; what training refuses ends a run of the file with an error that names the column."""
    onnx.save(models.mlp(features=2, classes=2), tmp_path / "net.onnx")
    path = write(tmp_path, "c,v,y\nx,1,0\nNA,2,1\nx,,0\nz,4,1\n")
    result = run(
        *("train", tmp_path / "net.onnx", "--data", path, "--target", "y", "--impute", "mean", "--ordinal"),
        *("--missing", "NA", "--loss", "cross_entropy", "--epochs", 1, "-o", tmp_path / "run"),
    )
    assert result.code == 0, result.err
    session = ort.InferenceSession(tmp_path / "run" / "trained.onnx")

    def logits(c: str, v: float) -> np.ndarray:
        return session.run(["logits"], {"c": np.array([c], object), "v": np.array([v])})[0]

    np.testing.assert_array_equal(logits("NA", 1.0), logits("x", 1.0))
    np.testing.assert_array_equal(logits("", np.nan), logits("x", 7 / 3))
    for c, v, message in (
        ("None", 1.0, "column 'c': a value is none of the categories"),
        ("x", np.inf, "column 'v'"),
    ):
        with pytest.raises(Exception, match=message):
            logits(c, v)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("\ufeffa,b\n1,2\n3,4\n", [[1, 2], [3, 4]]),  # as Excel writes it
        ('a,b\n"1","2"\n 3 ,4e0\n', [[1, 2], [3, 4]]),
        ("a,b\n-1,.5\n+3,4.\n", [[-1, 0.5], [3, 4]]),
        ("a,b\nTrue,FALSE\nfalse,true\n", [[1, 0], [0, 1]]),
        ("a,b\n007,9007199254740993\n010,1\n", [[7, 9007199254740993.0], [10, 1]]),
        ("a\n1\n\n3\n", [[1], [2], [3]]),  # the second row is no gap between rows: its only field is empty
        ('a,b\n1,""\n3,4\n', [[1, 4], [3, 4]]),
        ("a,b\n1,2\n\n3,4\n\n", [[1, 2], [3, 4]]),
    ],
)
def test_numbers_in_csv(tmp_path: Path, text: str, values: list[list[float]]) -> None:
    _, x = learn(write(tmp_path, text), impute="mean")
    np.testing.assert_array_equal(x, values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n1\nnan\n", f"column 'a', row 2 {HERE}: 'nan' is not a number, but row 1 has '1'. If it stands for a "
         "missing value, pass missing='nan' when training, and impute='median' to fill missing values."),
        ("a\n1\nN/A\n", "pass missing='N/A' when training, and impute='median' to fill missing values. "
         "If the column holds categories, pass categorical='a'."),
        ("a\nold\n1\n", f"column 'a', row 1 {HERE}: 'old' is not a number, but row 2 has '1'"),
        ("a\n1\n1,5\n", "Reading the table"),
        ("a,a\n1,2\n", "several columns have the same name: a"),
        ("a\n1\n-inf\n", f"column 'a', row 2 {HERE}: -inf is infinite (1 such values)"),
        ("a\n1\n1e999\n", "is infinite"),
        ("a,b\n1,\n2,\n", "column 'b' has no values"),
        ("a,b\n1,2,3\n4,5,6\n", "rows have more fields than the header, which has 2"),
    ],
)  # fmt: skip
def test_what_is_no_number_is_told_by_its_place(tmp_path: Path, text: str, message: str) -> None:
    for options in ({}, {"encode": "ordinal"}, {"encode": "one-hot", "impute": "mean"}):
        with pytest.raises(InputError) as error:
            learn(write(tmp_path, text), **options)
        assert message in str(error.value)


def test_nan_of_another_table_is_told_too(tmp_path: Path) -> None:
    encoder, _ = learn(write(tmp_path, "a\n1\n2\n"), impute="mean")
    other = write(tmp_path, "a\n1\nnan\n", "other.csv")
    with pytest.raises(
        InputError, match=r"column 'a', row 2 .*'nan' is not a number. If it stands for a missing"
    ):
        encoder.transform(other)


def test_text_labels_are_texts(tmp_path: Path) -> None:
    """A class may be called "NA"; numbers beside texts need a word from the user."""

    def labels(rows: str, **options: Any) -> tuple[list[str] | None, list[int]]:
        path = write(tmp_path, f"v,y\n{rows}")
        encoder = TableEncoder(target="y", **options).fit(path)
        return encoder.classes_, encoder.transform_target(path).tolist()

    assert labels("1,NA\n2,None\n3,NA\n") == (["NA", "None"], [0, 1, 0])
    with pytest.raises(InputError, match=r"column 'y', row 2 .*'nan' is not a number, but row 1 has '0'"):
        labels("1,0\n2,nan\n3,1\n")
    assert labels("1,0\n2,nan\n3,1\n", categorical="y") == (["0", "1", "nan"], [0, 2, 1])
    with pytest.raises(InputError, match="the target is missing"):
        labels("1,a\n2,\n3,b\n")
