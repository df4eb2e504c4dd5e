"""Text files of other dialects: recognized, given, or refused, and compared with the table that was written."""

from __future__ import annotations

import gzip
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from onnxtrain.errors import CheckpointError, InputError
from onnxtrain.tables import Dialect, TableEncoder, read_table


def prices(rows: int = 40) -> pd.DataFrame:
    """Numbers with fractions, whole numbers, gaps, and texts with accents and commas."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "größe": rng.normal(80, 20, rows).round(1),
            "rooms": rng.integers(1, 6, rows),
            "town": rng.choice(["Köln", "Paris", "Zürich, Stadt"], rows),
            "price": (rng.normal(3e5, 1e5, rows)).round(2),
        }
    )
    frame.loc[3, "größe"] = np.nan
    return frame


def encoded(path: Path, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    table = read_table(path, **options)
    encoder = TableEncoder(target="price", impute="median", encode="one-hot").fit(table)
    return encoder.transform(table), encoder.transform_target(table)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(("separator", "decimal"), [*itertools.product(",;\t|", ".,")])
@pytest.mark.parametrize("suffix", [".csv", ".tsv.gz"])
def test_what_pandas_writes_is_recognized(
    separator: str, decimal: Any, encoding: str, suffix: str, tmp_path: Path
) -> None:
    frame = prices()
    path = tmp_path / f"t{suffix}"
    frame.to_csv(path, sep=separator, decimal=decimal, encoding=encoding, index=False)
    table = read_table(path)
    assert table.dialect == Dialect(
        separator=separator, decimal=decimal, encoding=encoding.removesuffix("-sig")
    )
    frame.to_parquet(tmp_path / "t.parquet")
    for found, expected in zip(encoded(path), encoded(tmp_path / "t.parquet"), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("text", "separator", "decimal", "values"),
    [
        # One mark only is possible.
        ("a;y\n1,5;0\n-2;1\n", ";", ",", [1.5, -2]),
        ('a,y\n"1,5",0\n"0,25",1\n', ",", ",", [1.5, 0.25]),
        ("a;y\n0.500;0\n2.250;1\n", ";", ".", [0.5, 2.25]),
        # Thousands, by a second group, by both marks, by another column, by apostrophes and no-break spaces.
        ("a;y\n1.234.567;0\n12;1\n", ";", ",", [1234567, 12]),
        ("a;y\n1.234,5;0\n1.000;1\n", ";", ",", [1234.5, 1000]),
        ('a,y\n"1,234",0.5\n"12,000",1\n', ",", ".", [1234, 12000]),
        ("a;y\n1'234.5;0\n12;1\n", ";", ".", [1234.5, 12]),
        ("a;y\n1\u202f234,5;0\n12;1\n", ";", ",", [1234.5, 12]),
        ("a;y\n1 234,5;0\n2 000;1\n", ";", ",", [1234.5, 2000]),
        # With commas between the fields, a point is a decimal point.
        ("a,y\n1.234,0\n2.500,1\n", ",", ".", [1.234, 2.5]),
        # Other spellings of numbers.
        ("a;y\n1,5e3;0\n,5;1\n", ";", ",", [1500, 0.5]),
        # Excel's declaration, which is no row.
        ("sep=|\na|y\n1.5|0\n2|1\n", "|", ".", [1.5, 2]),
        # A quoted name with another separator; a name with one that the rows lack.
        ('"a";"y, z"\n1,5;0\n2;1\n', ";", ",", [1.5, 2]),
        ("a;b,y\n1,2\n", ",", ".", None),
    ],
)
def test_numbers_are_read_as_they_are_meant(
    text: str, separator: str, decimal: str, values: list[float] | None, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    table = read_table(path)
    assert table.dialect is not None
    assert (table.dialect.separator, table.dialect.decimal) == (separator, decimal)
    if values is not None:
        np.testing.assert_array_equal(table.values("a").numbers, values)
        assert table.values("a").has_only_numbers


@pytest.mark.parametrize(
    ("text", "message", "answers"),
    [
        (
            "a;y\n1.234;0\n2.500;1\n",
            "column 'a': '1.234' may be 1234 or 1.234. Pass decimal=',' or decimal='.'",
            {",": [1234, 2500], ".": [1.234, 2.5]},
        ),
        (
            'a,y\n"1,234",0\n"2,500",1\n',
            "column 'a': '1,234' may be 1234 or 1.234. Pass decimal=',' or decimal='.'",
            {",": [1.234, 2.5], ".": [1234, 2500]},
        ),
        (
            "a;y\n1,5;0.5\n2;1\n",
            "column 'a' has '1,5', as with a decimal comma, but column 'y' has '0.5', as with a decimal point",
            {",": [1.5, 2]},
        ),
    ],
)
def test_numbers_of_two_meanings_are_asked_for(
    text: str, message: str, answers: dict[Any, list[float]], tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(message)):
        read_table(path)
    for decimal, values in answers.items():
        np.testing.assert_array_equal(read_table(path, decimal=decimal).values("a").numbers, values)
        # What an earlier file was, decides.
        like = Dialect(decimal=decimal)
        np.testing.assert_array_equal(read_table(path, like=like).values("a").numbers, values)


def test_fields_of_two_meanings_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("name, first;age\nSmith, John;34\n")
    message = (
        "its fields may be separated by comma (2 columns) or semicolon (2 columns). Pass separator='comma'"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        read_table(path)
    assert read_table(path, separator="semicolon").columns == ["name, first", "age"]
    assert read_table(path, separator=",").columns == ["name", " first;age"]
    assert read_table(path, like=Dialect(separator=";")).columns == ["name, first", "age"]
    # The name of the file declares tabs.
    path = tmp_path / "t.tsv"
    path.write_text("name, first\tage\nSmith, John\t34\n")
    assert read_table(path).columns == ["name, first", "age"]


def test_other_encodings_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    frame = prices()
    frame.to_csv(path, sep=";", encoding="cp1252", index=False)
    with pytest.raises(
        InputError, match=r"not in the encoding utf-8\. Pass encoding='cp1252' if it contains 'größe'"
    ):
        read_table(path)
    table = read_table(path, encoding="windows-1252")
    assert table.dialect == Dialect(separator=";", encoding="cp1252")
    assert table.columns[0] == "größe"
    assert list(table.column("town")) == list(frame["town"])
    # An earlier file decides, unless this one is in UTF-8.
    assert read_table(path, like=table.dialect).columns[0] == "größe"
    frame.to_csv(tmp_path / "u.csv", sep=";", index=False)
    assert read_table(tmp_path / "u.csv", like=table.dialect).dialect == Dialect(separator=";")
    # Beyond the part of the file in which the separator is looked for.
    text = "a;y\n" + "1;2\n" * 300_000 + "é;2\n"
    path.write_bytes(text.encode("cp1252"))
    with pytest.raises(InputError, match="Pass encoding='cp1252' if it contains 'é'"):
        read_table(path)
    path.write_bytes("a;y\n1,5;2\n".encode("utf-16-le"))
    with pytest.raises(
        InputError, match=r"null characters\. If it is a text in UTF-16, pass encoding='utf-16-le'"
    ):
        read_table(path)
    assert read_table(path, encoding="utf-16-le").columns == ["a", "y"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"separator": ";;"}, "separator must be a character such as ';', or one of comma, semicolon, tab, pipe"),
        ({"separator": "a"}, "separator must be a character"),
        ({"decimal": "'"}, "decimal must be '.' or ',', received \"'\""),
        ({"encoding": "klingon"}, "encoding must be an encoding such as utf-8, utf-16, cp1252 or latin-1"),
        ({"encoding": "hex"}, "encoding must be an encoding such as"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a\n1\n")
    with pytest.raises(InputError, match=re.escape(message)):
        read_table(path, **options)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, content, message in (
        ("t.csv", b"PK\3\4junk", "it is a zip archive, such as an Excel workbook"),
        ("t.csv", b"a;y\n1;2;3\n", "rows have more fields than the header, which has 2 at separator=';'"),
        ("t.csv.gz", gzip.compress(b"a,y\n1,2\n")[:-9], "Reading the table"),
        ("t.xlsx", b"", "must end in .csv, .tsv, .csv.gz, .tsv.gz or .parquet"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=re.escape(message)):
            read_table(tmp_path / name)
    prices().to_parquet(tmp_path / "t.parquet")
    with pytest.raises(InputError, match="separator, decimal are for text files such as"):
        read_table(tmp_path / "t.parquet", separator=";", decimal=",")


def test_a_number_of_the_other_mark_is_no_number(tmp_path: Path) -> None:
    """Neither is it read as 1.5, nor as 15."""
    path = tmp_path / "t.csv"
    path.write_text("a;y\n1.5;0\n2,5;1\n")
    table = read_table(path, decimal=",")
    with pytest.raises(InputError, match=r"row 1 .*'1.5' is not a number, but row 2 has '2,5'"):
        TableEncoder(target="y").fit(table)


def test_categories_and_texts_keep_their_spelling(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("code;version;size;y\n1,234;1.2.3;-999,0;0,5\nx7;4.5.6;2,50;1\n")
    table = read_table(path)
    encoder = TableEncoder(target="y", encode="one-hot", categorical="size", missing="-999", impute="value=0")
    encoder.inputs = ["version", "size"]
    encoder.fit(table)
    assert [c.categories for c in encoder.columns_] == [["1.2.3", "4.5.6"], ["0", "2.5"]]  # type: ignore[attr-defined]
    # A column with a text has no thousands: as with a decimal point, it is an error unless it is categorical.
    with pytest.raises(InputError, match="'x7' is not a number"):
        TableEncoder(target="y", inputs="code", encode="one-hot").fit(table)
    codes = TableEncoder(target="y", inputs="code", encode="one-hot", categorical="code").fit(table)
    assert codes.columns_[0].categories == ["1,234", "x7"]  # type: ignore[attr-defined]


def test_an_encoder_remembers_how_its_table_was_read(tmp_path: Path) -> None:
    first, second = tmp_path / "a.csv", tmp_path / "b.csv"
    first.write_bytes("a;t;y\n1,5;é;0\n2;x;1\n".encode("cp1252"))
    encoder = TableEncoder(target="y", encode="one-hot").fit(read_table(first, encoding="cp1252"))
    encoder = TableEncoder.from_json(encoder.to_json())
    assert encoder.dialect_ == Dialect(separator=";", decimal=",", encoding="cp1252")
    # On its own, this file could be 1234 or 1.234, and é is no UTF-8.
    second.write_bytes("a;t\n1.234;é\n".encode("cp1252"))
    np.testing.assert_array_equal(encoder.transform(second), [[1234, 0, 1]])
    # A file that shows another dialect is read in that.
    second.write_text("a,t\n1.5,é\n", encoding="utf-8")
    np.testing.assert_array_equal(encoder.transform(second), [[1.5, 0, 1]])
    for text in ('"separator": "ab"', '"encoding": "zip"', '"decimal": "x"', '"pickle": 1'):
        damaged = re.sub(r'"separator": ";"', lambda _, text=text: text, encoder.to_json())  # type: ignore[misc]
        with pytest.raises(CheckpointError, match="is not an encoding of a table"):
            TableEncoder.from_json(damaged, "run")
