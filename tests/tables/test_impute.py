"""Gaps and unknown categories of tables, column by column, beside scikit-learn's SimpleImputer and OneHotEncoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pandas as pd
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

import models
from onnxtrain.cli._tables import parse_impute
from onnxtrain.errors import InputError
from onnxtrain.tables import CategoryColumn, TableEncoder, read_table
from onnxtrain.trainer.data._arrays import split_order

NUMBERS, TEXTS = ["age", "fare", "rooms"], ["port", "cabin"]


def passengers(rows: int, seed: int) -> pd.DataFrame:
    """Passengers with gaps; "NA" is a port, and the most frequent number of rooms is a tie."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(30, 10, rows).round(1),
            "fare": rng.exponential(20, rows).round(2),
            "rooms": np.resize([4.0, 2.0, 2.0, 4.0, 7.0], rows),
            "port": rng.choice(["NA", "Oslo", "Kiel"], rows, p=[0.5, 0.3, 0.2]),
            "cabin": rng.choice(["A", "B"], rows),
            "deck": rng.choice([1, 2, 5], rows),
            "fate": rng.choice(["drowned", "saved"], rows, p=[0.8, 0.2]),
        }
    )
    for name in [*NUMBERS, *TEXTS]:
        frame.loc[rng.choice(rows, rows // 6, replace=False), name] = None
    return frame


@pytest.fixture
def table(tmp_path: Path) -> Path:
    passengers(120, 0).to_csv(tmp_path / "t.csv", index=False)
    return tmp_path / "t.csv"


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame as scikit-learn wants it: None where a text is missing."""
    texts = frame[TEXTS].astype(object)
    return frame[[*NUMBERS, "deck"]].astype(float).join(texts.where(texts.notna(), None))


def encoder_of(**more: Any) -> TableEncoder:
    values: dict[str, Any] = {"target": "fate", "encode": "one-hot", "categorical": ["deck"]}
    return TableEncoder(**values | more)


RULES = {
    "*": "median",
    "fare": "mean",
    "rooms": "most_frequent",
    "cabin": "value=none",
    "port": "most_frequent",
}


def pipeline(**encoder: Any) -> ColumnTransformer:
    def number(strategy: str) -> Any:
        return make_pipeline(SimpleImputer(strategy=strategy), StandardScaler())

    def text(**imputer: Any) -> Any:
        imputer |= {"missing_values": None}
        return make_pipeline(SimpleImputer(**imputer), OneHotEncoder(sparse_output=False, **encoder))

    return ColumnTransformer(
        [
            ("age", number("median"), ["age"]),
            ("fare", number("mean"), ["fare"]),
            ("rooms", number("most_frequent"), ["rooms"]),
            ("port", text(strategy="most_frequent"), ["port"]),
            ("cabin", text(strategy="constant", fill_value="none"), ["cabin"]),
            ("deck", OneHotEncoder(sparse_output=False, **encoder), ["deck"]),
        ]
    )


def test_each_column_has_its_own_rule(table: Path) -> None:
    encoder = encoder_of(impute=RULES, scale=True).fit(table)
    reference = pipeline().fit(plain(passengers(120, 0)))
    for frame, name in ((passengers(120, 0), "t.csv"), (passengers(50, 1), "other.csv")):
        frame.to_csv(table.with_name(name), index=False)
        x = encoder.transform(table.with_name(name))
        np.testing.assert_allclose(x, reference.transform(plain(frame)), rtol=1e-12, atol=1e-12)
    columns = {column.name: column for column in encoder.columns_}
    assert columns["port"].categories == ["Kiel", "NA", "Oslo"]  # type: ignore[attr-defined]
    assert columns["cabin"].categories == ["A", "B", "none"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", ["mean", "median", "most_frequent", "value=3.5"])
def test_a_rule_without_a_column_is_for_all(table: Path, rule: str) -> None:
    """A mean of categories is the most frequent one; a number is a category as well."""
    encoder = encoder_of(impute=rule).fit(table)
    found = {column.name: column.fill for column in encoder.columns_}
    frame, constant = plain(passengers(120, 0)), rule.startswith("value=")
    strategy = "constant" if constant else rule
    imputer = SimpleImputer(strategy=strategy, fill_value=3.5 if constant else None).fit(frame[NUMBERS])
    assert [found[name] for name in NUMBERS] == pytest.approx(list(imputer.statistics_))
    texts = SimpleImputer(strategy="most_frequent", missing_values=None).fit(frame[TEXTS])
    assert [found[name] for name in TEXTS] == (["3.5", "3.5"] if constant else list(texts.statistics_))


@pytest.mark.parametrize("stratify", [False, True])
def test_statistics_are_those_of_the_rows_that_are_trained_on(table: Path, stratify: bool) -> None:
    """The number of inputs does not depend on the split: a category of the other rows has an input, too."""
    frame = passengers(120, 0)
    labels = (frame["fate"] == "saved").to_numpy(int) if stratify else None
    rows, others = split_order(120, 0.3, 5, labels)
    frame.loc[others, "age"] = 1000
    frame.loc[others[0], "port"] = "Rome"
    frame.to_csv(table, index=False)
    encoder = encoder_of(impute=RULES, scale=True).fit(table, rows=rows)
    reference = pipeline().fit(plain(frame).iloc[rows])
    port = encoder.columns_[3]
    assert isinstance(port, CategoryColumn)
    assert port.width == 4
    np.testing.assert_allclose(
        np.delete(encoder.transform(table)[rows], 3 + port.categories.index("Rome"), axis=1),
        reference.transform(plain(frame).iloc[rows]),
        rtol=1e-12,
        atol=1e-12,
    )
    mask = np.isin(np.arange(len(frame)), rows)
    assert encoder_of(impute=RULES, scale=True).fit(table, rows=mask).to_json() == encoder.to_json()
    whole = encoder_of(impute=RULES, scale=True).fit(table)
    assert whole.columns_[0].mean > encoder.columns_[0].mean + 100  # type: ignore[attr-defined]


def test_the_shell_splits_the_rows_that_the_encoding_was_not_learned_from(run: Any, table: Path) -> None:
    """The value that fills a gap is the mean of the rows that the trainer trains on, not of all."""
    onnx.save(models.mlp(features=3, classes=2), table.with_name("net.onnx"))
    command = ("train", table.with_name("net.onnx"), "--data", table, "--target", "fate", "--impute", "mean")
    command = (*command, "--inputs", "age,fare,rooms", "--scale", "--loss", "cross_entropy", "--epochs", 1)
    for more in ((), ("--stratify",), ("--mixup", 0.2)):
        shown = run(
            *command, "--validation", 0.25, "--seed", 3, *more, "--overwrite", "-o", table.with_name("run")
        )
        assert shown.code == 0, shown.err
        frame = passengers(120, 0)
        labels = (frame["fate"] == "saved").to_numpy(int) if more == ("--stratify",) else None
        rows, _ = split_order(120, 0.25, 3, labels)
        expected = SimpleImputer(strategy="mean").fit(frame[NUMBERS].iloc[rows]).statistics_
        session = ort.InferenceSession(table.with_name("run") / "trained.onnx")
        logits = [
            session.run(
                ["logits"], {name: np.array([value]) for name, value in zip(NUMBERS, values, strict=True)}
            )
            for values in (expected, [np.nan] * 3)
        ]
        np.testing.assert_allclose(logits[0], logits[1], rtol=1e-6)


def unknown_rows(path: Path) -> pd.DataFrame:
    frame = passengers(6, 2).fillna({"port": "Oslo", "cabin": "A", "age": 1, "fare": 2, "rooms": 2})
    frame.loc[1, "port"] = "Rome"
    frame.loc[2, "deck"] = 9
    frame.loc[3, ["port", "deck"]] = ["None", 7]
    frame.to_csv(path, index=False)
    return frame


def test_unknown_categories_are_ignored_as_in_scikit_learn(table: Path) -> None:
    other = table.with_name("other.csv")
    frame = unknown_rows(other)
    x = encoder_of(impute=RULES, scale=True, unknown_category="ignore").fit(table).transform(other)
    reference = pipeline(handle_unknown="ignore").fit(plain(passengers(120, 0)))
    np.testing.assert_allclose(x, reference.transform(plain(frame)), rtol=1e-12, atol=1e-12)
    refusing = encoder_of(impute=RULES).fit(table)
    with pytest.raises(
        InputError,
        match=r"column 'port', row 2 .*'Rome' is not a category of the training data: Kiel, NA, Oslo. Train with "
        r"unknown_category='ignore' or unknown_category='own' to accept other categories",
    ):
        refusing.transform(other)


@pytest.mark.parametrize("encode", ["one-hot", "ordinal"])
def test_unknown_categories_may_have_an_encoding_of_their_own(table: Path, encode: str) -> None:
    encoder = encoder_of(encode=encode, inputs=["port", "deck"], unknown_category="own", impute="mean")
    other = table.with_name("other.csv")
    frame = unknown_rows(other)
    x = encoder.fit(table).transform(other)
    ordinal = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=3)
    filled = passengers(120, 0).fillna({"port": "NA"})[["port", "deck"]]
    codes = ordinal.fit(filled).transform(frame[["port", "deck"]])
    expected = np.concatenate([np.eye(4)[codes[:, i].astype(int)] for i in range(2)], axis=1)
    np.testing.assert_array_equal(x, expected if encode == "one-hot" else codes)


@pytest.mark.parametrize("policy", ["error", "ignore", "own"])
def test_the_exported_file_treats_unknown_categories_alike(run: Any, table: Path, policy: str) -> None:
    width = 3 + 3 + 3 + (policy == "own") * 3
    onnx.save(models.mlp(features=width, classes=2), table.with_name("net.onnx"))
    # Without gaps in training "none" is itself unknown when it fills one.
    frame = passengers(120, 0)
    frame["cabin"] = frame["cabin"].fillna("C")
    frame.to_csv(table, index=False)
    command = ("train", table.with_name("net.onnx"), "--data", table, "--target", "fate", "--one-hot")
    command = (
        *command,
        "--inputs",
        "port,cabin,deck",
        "--categorical",
        "deck",
        "--impute",
        "port=most_frequent",
    )
    command = (
        *command,
        "--impute",
        "cabin=value=none",
        "--unknown-category",
        policy,
        "--loss",
        "cross_entropy",
    )
    shown = run(*command, "--epochs", 1, "-o", table.with_name("run"))
    assert shown.code == 0, shown.err
    others = {
        "error": "one-hot ",
        "ignore": "one-hot, others as zeros",
        "own": "one-hot, one more for others",
    }
    assert shown.err.count(f"3 categories, {others[policy]}") == 3
    other = unknown_rows(table.with_name("other.csv"))
    other.loc[4, "cabin"] = None
    other.to_csv(table.with_name("other.csv"), index=False)
    outputs = []
    for source in ("run", "run/trained.onnx"):
        out = table.with_name("p.csv")
        result = run("predict", table.parent / source, "--data", table.with_name("other.csv"), "-o", out)
        assert result.code == (policy == "error"), result.err
        if policy == "error":
            assert "'Rome' is not a category of the training data" in result.err
            continue
        outputs.append(pd.read_csv(out)[["logits_drowned", "logits_saved"]].to_numpy())
    session = ort.InferenceSession(table.with_name("run") / "trained.onnx")

    def logits(**texts: str) -> Any:
        feeds = {"port": "Oslo", "cabin": "A", "deck": "1"} | texts
        return session.run(["logits"], {name: np.array([text], object) for name, text in feeds.items()})[0]

    np.testing.assert_array_equal(logits(port=""), logits(port="NA"))
    # A missing value without a rule stays an error, whatever becomes of unknown categories.
    with pytest.raises(Exception, match=r"column 'deck': a value is .*missing"):
        logits(deck="")
    if policy == "error":
        with pytest.raises(Exception, match="column 'port': a value is none of the categories"):
            logits(port="Rome")
        return
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(logits(port="Rome"), logits(port="None"))
    np.testing.assert_array_equal(logits(cabin=""), logits(cabin="Z"))
    # One-hot zeros: the scores are those of the other columns alone.
    w1, b1, w2, b2 = (models_weights(table)[name] for name in ("w1", "b1", "w2", "b2"))
    row = np.zeros(width)
    size = width // 3
    row[[2, size]] = 1
    if policy == "own":
        row[-1] = 1
    np.testing.assert_allclose(logits(deck="9")[0], np.tanh(row @ w1 + b1) @ w2 + b2, rtol=1e-4, atol=1e-5)


def test_a_value_of_a_rule_needs_no_remark(run: Any, table: Path) -> None:
    """A category "NA" of the table does, also where it fills gaps as the most frequent one."""
    onnx.save(models.mlp(features=6, classes=2), table.with_name("net.onnx"))
    command = ("train", table.with_name("net.onnx"), "--data", table, "--target", "fate", "--one-hot")
    command = (*command, "--inputs", "port,cabin", "--impute", "mean", "--impute", "cabin=value=none")
    shown = run(*command, "--loss", "cross_entropy", "--epochs", 1, "-o", table.with_name("run"))
    assert shown.code == 0, shown.err
    assert "Column 'port': 'NA' is a category. If it stands for a missing value" in shown.err
    assert "Column 'cabin'" not in shown.err


def models_weights(table: Path) -> dict[str, np.ndarray]:
    tensors = onnx.load(table.with_name("run") / "trained.onnx").graph.initializer
    floats = [tensor for tensor in tensors if tensor.data_type == onnx.TensorProto.FLOAT]
    return {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in floats}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"impute": "mode"}, "impute is 'mode'; pass mean, median, most_frequent or value=VALUE for all columns"),
        ({"impute": {"age": "mode"}}, "impute is 'mode'; pass mean,"),
        ({"impute": {"height": "mean"}}, "has no column 'height'; its columns are age, fare,"),
        ({"impute": {"port": "mean"}}, "impute={'port': 'mean'}: the column 'port' contains categories, which have no"),
        ({"impute": {"age": "value=old"}},
         "impute={'age': 'value=old'}: the column 'age' contains numbers, but 'old' is not a number."),
        ({"impute": "value=inf"}, "impute='value=inf': the column 'age' contains numbers, but 'inf' is not a number."),
        ({"impute": {"fate": "most_frequent"}}, "fate in impute is not an input."),
        ({"impute": {"age": "mean"}}, "column 'fare', row "),
        ({"impute": "mean", "encode": "ordinal", "unknown_category": "ignore"}, "Choose unknown_category='own'"),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit_are_told(table: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        encoder_of(**given).fit_transform(table)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["mode"], "--impute is 'mode'; pass mean, median, most_frequent or value=VALUE for all columns"),
        (["age=mode"], "--impute is 'age=mode'; pass mean,"),
        (["height=mean"], "has no column 'height'; its columns are age, fare,"),
        (["mean", "median"], "--impute gives two rules for all columns: mean and median."),
        (["age=mean", "age=value=1"], "two rules for the column 'age': age=mean and age=value=1."),
    ],
)
def test_options_that_are_no_rules_are_told(table: Path, texts: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_impute(texts, read_table(table))
    assert message in str(error.value)


def test_names_with_signs_and_a_column_called_value(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a=b,value,c\n1,,2\n,5,\n3,7,2\n")
    table = read_table(tmp_path / "t.csv")
    rules = parse_impute(["a=b=median", "value=mean", "value=9"], table)
    assert rules == {"a=b": "median", "value": "mean", "*": "value=9"}
    encoder = TableEncoder(impute=rules).fit(table)
    assert [column.fill for column in encoder.columns_] == [2.0, 6.0, 9.0]


def test_a_run_whose_validation_part_holds_all_values_is_refused(tmp_path: Path) -> None:
    rows, others = split_order(10, 0.3, 0)
    frame = pd.DataFrame({"a": [np.nan] * 10, "y": ["u", "v"] * 5})
    frame.loc[others, "a"] = 1.0
    frame.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(InputError, match="column 'a' has no values in the rows that are trained on"):
        TableEncoder(target="y", impute="mean").fit(tmp_path / "t.csv", rows=rows)


def test_the_split_of_the_test_is_no_accident() -> None:
    """As many rows as scikit-learn would split off; which ones is the trainer's choice."""
    rows, others = split_order(120, 0.3, 5)
    assert len(others) == len(train_test_split(np.arange(120), test_size=0.3)[1])
    assert sorted([*rows, *others]) == list(range(120))
