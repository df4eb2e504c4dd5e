"""Pairs of texts from files, frames and lists, and the tokenizer beside a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pytest
import tokenizers

from onnxtrain.errors import InputError
from onnxtrain.texts import TextPairs, TextTokenizer
from onnxtrain.trainer.data._texts import as_pairs
from texts import small

TWO = [("a cat", "sleeps, here"), ('a "dog"', "runs\nfast")]


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


CSV = 'anchor,positive\na cat,"sleeps, here"\n"a ""dog""","runs\nfast"\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", CSV),
        ("bom.csv", "\ufeff" + CSV),
        ("a.tsv", 'anchor\tpositive\na cat\tsleeps, here\n"a ""dog"""\t"runs\nfast"\n'),
        (
            "a.jsonl",
            "".join(json.dumps(dict(zip(("query", "answer"), row, strict=True))) + "\n" for row in TWO),
        ),
        ("lists.jsonl", "".join(json.dumps(row) + "\n\n" for row in TWO)),
        ("others.csv", CSV.replace("anchor,positive", "name,line")),
        ("more.csv", 'id,question,answer\n1,a cat,"sleeps, here"\n2,"a ""dog""","runs\nfast"\n'),
    ],
)
def test_files(tmp_path: Path, name: str, content: str) -> None:
    pairs = TextPairs.read(write(tmp_path, name, content))
    assert pairs.texts == TWO
    assert pairs.scores is pairs.weights is None
    assert pairs.digest() == TextPairs(TWO).digest()
    assert pairs.digest() != TextPairs(TWO, [0.0, 1.0]).digest()


def test_scores_weights_and_negatives_of_a_file(tmp_path: Path) -> None:
    content = "sentence1,sentence2,score,weight\na,b,0.5,2\nc,d,1,1\n"
    pairs = TextPairs.read(write(tmp_path, "a.csv", content))
    assert (pairs.texts, pairs.scores, pairs.weights) == ([("a", "b"), ("c", "d")], [0.5, 1.0], [2.0, 1.0])
    content = "n,negative_2,positive,anchor,negative_1\n1,w,x,y,z\n"
    path = write(tmp_path, "b.csv", content)
    assert TextPairs.read(path).texts == [("y", "x", "w", "z")]
    assert TextPairs.read(path, ["positive", "anchor"], "n")[0] == (("x", "y"), None, 1.0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "anchor,positive\na\n", "line 2 has 1 fields, and the header has 2"),
        ("a.csv", "a,b,c,d\n1,2,3,4\n", "it has the columns a, b, c, d. Name those with the anchor"),
        ("a.csv", "id,text\n1,a\n", "it has the columns id, text. Name those"),
        ("a.csv", "a,a\n1,2\n", "several columns have the same name"),
        ("a.csv", "anchor,positive\n", "it has no samples"),
        ("a.csv", "", "it has no samples"),
        ("a.csv", "anchor,positive\na, \n", "sample 1 has an empty text"),
        ("a.csv", "anchor,positive,score\na,b,high\n", "the score of sample 1 is 'high'"),
        ("a.csv", 'anchor,positive\n"a,b\n', "unexpected end of data"),
        ("a.jsonl", '{"anchor": "a", "positive": null}\n', "sample 1 has None in place of a text"),
        ("a.jsonl", '{"anchor": "a"}\n{"anchor"\n', "line 2"),
        ("a.jsonl", "3\n", "line 1 is neither"),
        (
            "a.jsonl",
            '{"anchor": "a", "positive": "b"}\n{"anchor": "a"}\n',
            "sample 2 does not have the columns",
        ),
        ("a.xlsx", "", "pass a .csv, .tsv or .jsonl file"),
        ("a.csv", None, "No such file"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name if content is None else write(tmp_path, name, content)
    with pytest.raises(InputError) as error:
        TextPairs.read(path)
    assert message in str(error.value)
    assert "Reading texts from" in str(error.value)


def test_a_file_of_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"anchor,positive\n\xe4,b\n")
    with pytest.raises(InputError, match="Reading texts from"):
        TextPairs.read(tmp_path / "a.csv")


@pytest.mark.parametrize(
    "data",
    [
        TWO,
        [list(row) for row in TWO],
        [{"anchor": a, "positive": b} for a, b in TWO],
        {"anchor": [a for a, _ in TWO], "positive": [b for _, b in TWO]},
        pandas.DataFrame(TWO, columns=["query", "answer"]),
        polars.DataFrame(TWO, schema=["query", "answer"], orient="row"),
        TextPairs(TWO),
    ],
    ids=lambda data: type(data).__name__,
)
def test_forms_of_pairs(data: Any) -> None:
    pairs = as_pairs(data)
    assert pairs is not None
    assert pairs.texts == TWO
    weighted = as_pairs(data, None, np.array([1, 2]))
    assert weighted is not None
    assert weighted.weights == [1.0, 2.0]


@pytest.mark.thorough
def test_dataset_of_hugging_face() -> None:
    import datasets

    pairs = as_pairs(
        datasets.Dataset.from_dict({"anchor": [a for a, _ in TWO], "positive": [b for _, b in TWO]})
    )
    assert pairs is not None
    assert pairs.texts == TWO


def test_anchors_and_positives_are_pairs() -> None:
    anchors, positives = zip(*TWO, strict=True)
    for kind in (list, tuple, np.array, pandas.Series):
        pairs = as_pairs(kind(anchors), kind(positives))
        assert pairs is not None
        assert pairs.texts == TWO
    with pytest.raises(InputError, match="pass fit"):
        as_pairs(list(anchors))
    with pytest.raises(InputError, match="2 anchors and 1 positives"):
        as_pairs(list(anchors), ["a"])


def test_scores_in_tuples_and_as_targets() -> None:
    for pairs in (as_pairs([("a", "b", 0.5), ("c", "d", 1)]), as_pairs([("a", "b"), ("c", "d")], [0.5, 1])):
        assert pairs is not None
        assert (pairs.texts, pairs.scores) == ([("a", "b"), ("c", "d")], [0.5, 1.0])


def test_arrays_of_tokens_are_no_texts() -> None:
    assert as_pairs({"input_ids": np.zeros((2, 2, 3), int)}, np.zeros((2, 2), int)) is None
    assert as_pairs([(np.zeros(3), np.zeros(3))]) is None


# ---- tokenizers -----------------------------------------------------------------------------------------


def test_arrays_are_those_of_the_package(tmp_path: Path) -> None:
    small.write(tmp_path)
    texts = ["red cat", "old new dog runs", "tree"]
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    reference.enable_padding()
    wanted = reference.encode_batch(texts)
    arrays = TextTokenizer(tmp_path).arrays(
        texts, ["input_ids", "attention_mask", "token_type_ids", "position_ids"]
    )
    assert arrays["input_ids"].tolist() == [entry.ids for entry in wanted]
    assert arrays["attention_mask"].tolist() == [entry.attention_mask for entry in wanted]
    assert not arrays["token_type_ids"].any()
    assert (arrays["position_ids"] == np.arange(6)).all()


def test_padding_token_of_the_file(tmp_path: Path) -> None:
    tokenizer = small.tokenizer()
    tokenizer.enable_padding(pad_id=3)
    assert (
        TextTokenizer(tokenizer).arrays(["cat", "red cat"], ["input_ids", "attention_mask"])["input_ids"][
            0, -1
        ]
        == 3
    )


@pytest.mark.parametrize(
    ("files", "given", "length"),
    [
        ({}, None, None),
        ({"tokenizer_config.json": {"model_max_length": 5}}, None, 5),
        ({"tokenizer_config.json": {"model_max_length": 1e30}}, None, None),
        (
            {
                "tokenizer_config.json": {"model_max_length": 5},
                "sentence_bert_config.json": {"max_seq_length": 4},
            },
            None,
            4,
        ),
        ({"sentence_bert_config.json": {"max_seq_length": 4}}, 3, 3),
    ],
)
def test_limit_of_the_files_beside_the_model(
    tmp_path: Path, files: dict[str, Any], given: int | None, length: int | None
) -> None:
    small.write(tmp_path)
    for name, content in files.items():
        write(tmp_path, name, json.dumps(content))
    tokenizer = TextTokenizer.beside(tmp_path, given)
    assert tokenizer is not None
    assert tokenizer.max_length == length
    shape = tokenizer.arrays(["red red red red red red"], ["input_ids"])["input_ids"].shape
    assert shape == (1, length or 8)
    again = TextTokenizer.from_json(tokenizer.json, tokenizer.max_length)
    assert again.arrays(["red red red red red red"], ["input_ids"])["input_ids"].shape == shape


def test_wrong_tokenizers_are_refused(tmp_path: Path) -> None:
    assert TextTokenizer.beside(tmp_path) is None
    for content in ("{", "{}", "3"):
        with pytest.raises(InputError, match="Opening the tokenizer"):
            TextTokenizer(write(tmp_path, "tokenizer.json", content))
    with pytest.raises(InputError, match=r"Pass the path of a tokenizer.json file"):
        TextTokenizer(tmp_path / "missing.json")
    with pytest.raises(InputError, match="is a int"):
        TextTokenizer(3)
    for length in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="max_length"):
            TextTokenizer(small.tokenizer(), length)  # type: ignore[arg-type]


def test_texts_that_cannot_be_tokenized_are_refused() -> None:
    tokenizer = small.tokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A", special_tokens=[])
    opened = TextTokenizer(tokenizer)
    with pytest.raises(InputError, match="the text '' has no tokens"):
        opened.arrays(["cat", ""], ["input_ids", "attention_mask"])
    with pytest.raises(InputError, match="a text is 3"):
        opened.arrays(["cat", 3], ["input_ids"])  # type: ignore[list-item]
    with pytest.raises(InputError, match="tokenizing the texts"):
        opened.arrays(["\ud800"], ["input_ids"])
    with pytest.raises(InputError, match="no input 'attention_mask' to mask"):
        opened.arrays(["cat", "red cat"], ["input_ids"])
