"""`TableEncoder` beside scikit-learn's transformers: arrays, spellings, descriptions, and models with the encoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pandas as pd
import polars as pl
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

import models
from cli.test_tables import NUMBERS, TEXTS, passengers, write
from onnxtrain import Trainer
from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.runtime.dtypes import BY_NAME
from onnxtrain.runtime.manifest import InputSpec
from onnxtrain.tables import PROPERTY, CategoryColumn, Table, TableEncoder, read_table


@pytest.mark.parametrize("impute", ["mean", "median"])
@pytest.mark.parametrize("encode", ["one-hot", "ordinal"])
def test_encoding_is_scikit_learns(impute: str, encode: Any) -> None:
    """Fitted to one table and applied to another: the arrays of scikit-learn's transformers."""
    first, second = passengers(), passengers(seed=1)
    encoder = TableEncoder(
        target="fate", inputs=[*NUMBERS, *TEXTS], impute=impute, encode=encode, scale=True
    ).fit(first)
    encoder = TableEncoder.from_json(encoder.to_json())
    texts = OneHotEncoder(sparse_output=False) if encode == "one-hot" else OrdinalEncoder()
    reference = ColumnTransformer(
        [
            ("n", make_pipeline(SimpleImputer(strategy=impute), StandardScaler()), NUMBERS),
            ("t", make_pipeline(SimpleImputer(strategy="most_frequent", missing_values=None), texts), TEXTS),
        ]
    )
    known = [frame.astype(dict.fromkeys(TEXTS, object)) for frame in (first, second)]
    for frame in known:
        frame["town"] = frame["town"].where(frame["town"].notna(), None)
    expected = reference.fit(known[0]).transform(known[1])
    np.testing.assert_allclose(encoder.transform(second), expected.astype(float), rtol=1e-12)
    np.testing.assert_array_equal(encoder.transform_target(second), (second["fate"] == "saved").astype(int))


def fitted(**more: Any) -> TableEncoder:
    return TableEncoder(target="fate", impute="median", encode="one-hot", scale=True, **more).fit(
        passengers()
    )


def test_paths_and_frames_of_other_libraries_are_tables(tmp_path: Path) -> None:
    frame = passengers()
    expected = fitted().transform(frame)
    for table in (
        write(frame, tmp_path / "t.csv"),
        str(write(frame, tmp_path / "t.parquet")),
        pl.from_pandas(frame),
        Table(frame),
    ):
        np.testing.assert_array_equal(fitted().transform(table), expected)
    with pytest.raises(InputError, match=r"the file name must end in \.csv, .* or \.parquet"):
        read_table(tmp_path / "t.xlsx")


def test_a_table_of_another_dialect_is_read_by_pandas(tmp_path: Path) -> None:
    (tmp_path / "eu.csv").write_text("a;y\n1,5;no\n2,5;yes\n")
    table = pd.read_csv(tmp_path / "eu.csv", sep=";", decimal=",")
    np.testing.assert_array_equal(TableEncoder(target="y").fit_transform(table), [[1.5], [2.5]])


def test_training_and_attaching_in_python(tmp_path: Path, run: Any) -> None:
    """The steps of the page: the attached model predicts from raw columns as the trainer does from encoded ones."""
    frame = passengers()
    encoder = fitted()
    x, y = encoder.transform(frame), encoder.transform_target(frame)
    trainer = Trainer(
        models.mlp(features=x.shape[1], classes=2), loss="cross_entropy", directory=tmp_path / "run"
    )
    trainer.state.properties[PROPERTY] = encoder.to_json()
    trainer.fit(x, y, epochs=3, verbose=False)
    trainer.export(tmp_path / "network.onnx")
    model = encoder.attach(tmp_path / "network.onnx", logits="logits", activation="softmax")
    assert isinstance(model, onnx.ModelProto)
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString())
    logits, probability, chosen = session.run(None, encoder.raw_columns(frame))
    expected = trainer.predict(x)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(probability.sum(axis=1), 1, rtol=1e-6)
    assert list(chosen) == list(np.array(encoder.classes_)[np.argmax(expected, axis=1)])
    # The shell encodes tables for a run begun in Python, and for the file.
    table = write(frame, tmp_path / "t.csv")
    trainer.save(tmp_path / "run")
    onnx.save(model, tmp_path / "model.onnx")
    found = run("evaluate", tmp_path / "run", "--data", table, "--json").json()
    assert found["loss"] == pytest.approx(trainer.evaluate(x, y)["loss"])
    assert run("predict", tmp_path / "model.onnx", "--data", table, "-o", tmp_path / "p.csv").code == 0
    assert list(pd.read_csv(tmp_path / "p.csv")["class"]) == list(chosen)


def test_attach_changes_no_model_of_the_caller() -> None:
    encoder = fitted()
    proto = models.mlp(features=8, classes=2)
    given = ir.from_proto(proto)
    attached = encoder.attach(given)
    assert isinstance(attached, ir.Model)
    assert [value.name for value in given.graph.inputs] == [value.name for value in proto.graph.input]
    assert [value.name for value in attached.graph.inputs] == [column.name for column in encoder.columns_]
    assert [value.name for value in attached.graph.outputs] == ["logits"]
    with pytest.raises(InputError, match=r"has 8 values per row \(age, sex \(2\), .*of the model takes 3"):
        encoder.attach(models.mlp(features=3, classes=2))
    # A model with one input per column was trained with a number per category.
    assert len(encoder.columns_) == 5
    with pytest.raises(InputError, match="one number: encode='ordinal'"):
        encoder.attach(models.mlp(features=5, classes=2))


@pytest.mark.parametrize("opset", [11, 17, 21])
def test_outputs_and_ops_of_older_networks_are_kept(opset: int) -> None:
    """An output `probability` of the network stays; a network of opset 11 has another Squeeze than the encoding."""
    network = onnx.parser.parse_model(
        f"""<ir_version: 7, opset_import: ["": {opset}]>
        net (float[n] age) => (float[n, 2] logits, float[n, 1] probability)
        <float[1, 2] w = {{1, -1}}, int64[2] column = {{-1, 1}}>
        {{ probability = Reshape(age, column) logits = MatMul(probability, w) }}"""
    )
    frame = passengers()
    encoder = TableEncoder(target="fate", inputs="age", impute="mean", scale=True).fit(frame)
    model = encoder.attach(network, logits="logits", activation="softmax")
    session = ort.InferenceSession(model.SerializeToString())
    assert [value.name for value in session.get_outputs()] == ["logits", "probability", "class"]
    _, probability, chosen = session.run(None, encoder.raw_columns(frame))
    x = encoder.transform(frame)
    np.testing.assert_allclose(probability, x, rtol=1e-5, atol=1e-6)
    assert list(chosen) == [encoder.classes_[int(value < 0)] for value in x[:, 0]]


def test_missing_texts_and_fills_are_matched_by_spelling() -> None:
    """A Boolean is missing only as it is spelled; a fill is the category however it is spelled."""
    frame = pd.DataFrame({"c": ["True", "x", "true", "x", "-999", "-999.0"]}, dtype=object)
    encoder = TableEncoder(missing=["true", "-999"], impute="most_frequent", encode="ordinal").fit(frame)
    network = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[n, 1] c) => (float[n, 1] y) { y = Identity(c) }"""
    )
    session = ort.InferenceSession(encoder.attach(network).SerializeToString())
    for texts in (["True", "x", "true", "", "-999.0"], ["x", "True"]):
        table = pd.DataFrame({"c": texts}, dtype=object)
        (found,) = session.run(None, {"c": table["c"].to_numpy(object)})
        np.testing.assert_array_equal(found, encoder.transform(table))
    stores = pd.DataFrame({"store": [1.0, None, 2.0]})
    column = TableEncoder(impute="value=2.0", categorical="store", encode="one-hot").fit(stores).columns_[0]
    assert isinstance(column, CategoryColumn)
    assert (column.categories, column.fill) == (["1", "2"], "2")


def test_sentences_are_no_categories() -> None:
    sentences = [f"the hotel number {k} was lovely" for k in range(6)]
    with pytest.raises(InputError, match=r"'the hotel number 0 was lovely' is text.* input_ids=") as error:
        TableEncoder(inputs=["text"]).fit(pd.DataFrame({"text": sentences}))
    assert "one-hot" not in str(error.value)
    # Few values that repeat are categories, also if they are long.
    with pytest.raises(InputError, match="encode='one-hot'"):
        TableEncoder(inputs=["text"]).fit(pd.DataFrame({"text": sentences[:2] * 3}))
    TableEncoder(inputs=["text"], encode="one-hot").fit(pd.DataFrame({"text": sentences}))


def test_errors_name_the_arguments_of_python() -> None:
    frame = passengers()
    for encoder, message in (
        (TableEncoder(target="fate"), "the value is missing. Fill such values by impute='median'"),
        (TableEncoder(inputs=["sex"]), "Encode columns of texts by encode='one-hot' or encode='ordinal'"),
        (TableEncoder(inputs=["age"], target="age"), "age cannot be both in inputs and the target"),
        (TableEncoder(inputs=["age"], categorical="sex"), "sex in categorical is neither an input nor the target"),
        (TableEncoder(inputs=["weight"]), "has no column 'weight'"),
    ):  # fmt: skip
        with pytest.raises(InputError) as error:
            encoder.fit_transform(frame[["age", "fate"]] if encoder.target == ["fate"] else frame)
        assert message in str(error.value)
    with pytest.raises(InputError, match="has no columns besides fate"):
        TableEncoder(target="fate").fit(frame[["fate"]])
    with pytest.raises(InputError, match="several columns have the same name: age"):
        TableEncoder().fit(pd.concat([frame, frame[["age"]]], axis=1))
    with pytest.raises(InputError, match="has no rows"):
        TableEncoder().fit(frame[:0])
    with pytest.raises(InputError, match="not fitted yet"):
        TableEncoder().transform(frame)
    spec = [InputSpec(name, BY_NAME["float32"], (None, 1)) for name in ("age", "height")]
    with pytest.raises(
        InputError, match=r"several inputs \(age, height\).* no column 'height' among its inputs"
    ):
        fitted().arrays(frame, spec)


@pytest.mark.parametrize("damage", ["version", "columns", "settings"])
def test_a_damaged_description_is_one_message(damage: str) -> None:
    content = json.loads(fitted().to_json())
    content[damage] = {"version": 2, "columns": [{"type": "Eval"}], "settings": {"limit": 3}}[damage]
    with pytest.raises(
        CheckpointError, match=r"Reading 'run': its property 'onnxtrain\.table' is not an encoding"
    ):
        TableEncoder.from_json(json.dumps(content), "run")


def test_whole_targets_are_labels_and_others_quantities() -> None:
    frame = pd.DataFrame({"a": [1, 2], "n": [0.0, 3.0], "price": [0.5, 2.0]})
    assert TableEncoder(target="n").fit(frame).transform_target(frame).dtype == np.int64
    both = TableEncoder(target=["n", "price"]).fit(frame).transform_target(frame)
    np.testing.assert_array_equal(both, frame[["n", "price"]])


def _spelled(values: np.ndarray, kind: str) -> Any:
    """The column of numbers or truth values as different programs write it."""
    whole = pd.Series(values).astype("Int64" if values.dtype == float else "boolean")
    return {
        "as it is": lambda: pd.Series(values),
        "nullable": lambda: whole,
        "category": lambda: whole.astype("category"),
        "texts": lambda: whole.astype(str).where(whole.notna(), None),
        "texts of floats": lambda: pd.Series(values).astype(str).where(pd.notna(values), None),
        "lower case": lambda: whole.astype(str).str.lower().where(whole.notna(), None),
        "upper case": lambda: whole.astype(str).str.upper().where(whole.notna(), None),
    }[kind]()


SPELLINGS = ["as it is", "nullable", "category", "texts", "texts of floats", "lower case", "upper case"]


@pytest.mark.parametrize("values", ["numbers", "truths"])
def test_categories_of_numbers_and_truth_values_are_one_however_a_file_spells_them(
    values: str, tmp_path: Path
) -> None:
    """2.0 of pandas' .csv, "2", and 2 or 2.0 of .parquet; True, true and TRUE: as scikit-learn encodes the numbers."""
    rng = np.random.default_rng(0)
    column = rng.integers(1, 12, 60).astype(float) if values == "numbers" else rng.random(60) < 0.5
    if values == "numbers":
        column[:4] = np.nan
    filled = column if values == "truths" else np.where(np.isnan(column), pd.Series(column).mode()[0], column)
    # In the order of their texts, in which "10" comes before "2".
    texts = np.array([str(int(value)) for value in filled], object)[:, None]
    encoded = OneHotEncoder(sparse_output=False).fit_transform(texts)
    paths = []
    for kind in SPELLINGS:
        for suffix in (".csv", ".parquet"):
            paths.append(tmp_path / f"{kind}{suffix}")
            write(pd.DataFrame({"c": _spelled(column, kind)}), paths[-1])
    for learned in paths:
        encoder = TableEncoder(encode="one-hot", categorical="c", impute="most_frequent").fit(learned)
        for path in paths:
            message = f"{learned.name}, {path.name}"
            np.testing.assert_array_equal(encoder.transform(path), encoded, err_msg=message)


def test_codes_that_look_like_numbers_stay_what_they_are(tmp_path: Path) -> None:
    """Leading zeros, versions beside texts, identifiers of more than 53 bits, blanks."""
    for codes in (
        ["01234", "1234"],
        ["1", "1.0", "1.0-beta"],
        [str(2**60 + 1), str(2**60 + 2)],
        [" a", "a", "a b"],
    ):
        for suffix in (".csv", ".parquet"):
            path = write(pd.DataFrame({"c": codes}), tmp_path / f"t{suffix}")
            column = TableEncoder(encode="ordinal", categorical="c").fit(path).columns_[0]
            assert isinstance(column, CategoryColumn)
            assert column.categories == sorted(codes)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("dtype", [float, int, str])
def test_a_number_that_stands_for_missing_values_is_found_however_it_is_spelled(
    suffix: str, dtype: Any, tmp_path: Path
) -> None:
    path = write(pd.DataFrame({"a": pd.Series([1.0, -999.0, 3.0]).astype(dtype)}), tmp_path / f"t{suffix}")
    categorical = "a" if dtype is str else ()
    encoder = TableEncoder(missing="-999", impute="mean", categorical=categorical, encode="ordinal")
    column = encoder.fit(path).columns_[0]
    if isinstance(column, CategoryColumn):
        assert column.categories == ["1", "3"]
    else:
        assert column.fill == 2.0
