"""One clear error for bad data of each container, before anything is trained where that can be known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import onnx
import pandas
import polars
import pytest
import scipy.sparse
import torch

from onnxtrain import Trainer
from onnxtrain.errors import InputError
from onnxtrain.losses import CrossEntropyLoss
from onnxtrain.trainer import Callback, pack_tokens
from trainer import problems

PROBLEM = problems.classes(samples=24)
X, Y = PROBLEM.x, PROBLEM.y
NAN = np.where(np.arange(96).reshape(24, 4) == 41, np.nan, X).astype(np.float32)
INFINITE = np.where(np.arange(96).reshape(24, 4) == 41, -np.inf, X).astype(np.float32)
COLUMNS = list("abcd")


def table(library: Any, **columns: Any) -> Any:
    return library.DataFrame({name: X[:, i] for i, name in enumerate(COLUMNS)} | columns)


def loader(x: Any, y: Any, size: int = 8) -> Any:
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y)), batch_size=size
    )


def hugging_face(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict({name: list(values) for name, values in columns.items()})


def exhausted() -> Iterator[Any]:
    iterator = iter([(X, Y)])
    next(iterator)
    return iterator


class Ragged(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return X[index][: 4 - (index == 17)], Y[index]


class Empty(Ragged):
    def __len__(self) -> int:
        return 0


class MaskedSamples(Ragged):
    def __getitem__(self, index: int) -> Any:
        return masked(X)[index], Y[index]


def masked(array: Any) -> Any:
    """Masks sample 5."""
    mask = np.zeros(array.shape, bool)
    mask[5] = True
    return np.ma.array(array, mask=mask)


Make = Callable[[], Any]
MISSING = X[:, 1].copy()
MISSING[7] = np.nan
ENDLESS = X[:, 1].astype(np.float64)
ENDLESS[7] = np.inf
CASES: dict[str, tuple[Make, Any, str]] = {
    # frames
    "pandas: too few columns": (
        lambda: table(pandas)[["a", "b"]], Y, "'x' takes 4 columns, but the frame has 2: a, b",
    ),
    "polars: too many columns": (
        lambda: table(polars, e=X[:, 0]), Y, "takes 4 columns, but the frame has 5: a, b, c, d, e",
    ),
    "pandas: no target column": (lambda: table(pandas), None, "the frame has no column labels; it has a, b"),
    "pandas: unknown target": (lambda: table(pandas), "kind", "the frame has no column kind"),
    "pandas: missing": (
        lambda: table(pandas, b=MISSING), Y,
        r"column 'b' has no value in row 7 \(1 missing\). Fill them \(frame.fillna",
    ),
    "pandas: missing, other index": (
        lambda: table(pandas, b=MISSING).set_index(pandas.Index([f"r{i}" for i in range(24)])),
        Y,
        r"column 'b' has no value in row 7 \(index 'r7'\)",
    ),
    "pandas: missing, nullable": (
        lambda: table(pandas, c=pandas.array([None, *range(23)], "Int64")), Y,
        "column 'c' has no value in row 0",
    ),
    "polars: null": (
        lambda: table(polars, b=[None if i == 7 else 1.0 for i in range(24)]),
        Y,
        r"column 'b' has no value in row 7 \(1 missing\). Fill them \(frame.fill_null",
    ),
    "polars: NaN": (lambda: table(polars, b=MISSING), Y, "column 'b' has no value in row 7"),
    "pandas: infinity": (
        lambda: table(pandas, b=ENDLESS), Y, r"column 'b' is infinite in row 7 \(1 such values\)",
    ),
    "polars: infinity": (lambda: table(polars, b=ENDLESS), Y, "column 'b' is infinite in row 7"),
    "arrays: infinity": (lambda: INFINITE, Y, r"The input 'x' contains infinity \(first in sample 10\)"),
    "DataLoader: infinity": (
        lambda: loader(INFINITE, Y), None,
        r"Batch 2 of epoch 1: The input 'x' contains infinity \(first in sample 2\)",
    ),
    "pandas: text": (
        lambda: table(pandas, a=["red"] * 24), Y,
        r"column 'a' contains categories or strings \(.*'red'\), not numbers. Encode it first: pandas.get_dummies",
    ),
    "pandas: category": (
        lambda: table(pandas, a=pandas.Categorical(["u", "v"] * 12)), Y,
        r"column 'a' contains categories or strings \(category such as 'u'\)",
    ),
    "pandas: time": (
        lambda: table(pandas, a=pandas.date_range("2020-01-01", periods=24)), Y,
        r"column 'a' contains times \(datetime64",
    ),
    "polars: text": (
        lambda: table(polars, a=["red"] * 24), Y, r"Encode it first: frame.to_dummies\('name'\)",
    ),
    "polars: lazy": (lambda: table(polars).lazy(), Y, r"pass frame.collect\(\)"),
    "pandas: labels are text": (
        lambda: table(pandas), pandas.Series(["u", "v", "w"] * 8, name="kind"),
        r"column 'kind' contains categories or strings.*pandas.factorize",
    ),
    "pandas: labels are floats": (
        lambda: table(pandas), pandas.Series(Y.astype(float)),
        "'labels' should be int64, received dtype float64. Class labels are integers",
    ),
    "polars: length": (lambda: table(polars), polars.Series(Y[:5]), r"\(x: 24, labels: 5\)"),
    # loaders and streams
    "DataLoader: NaN": (
        lambda: loader(NAN, Y), None, r"Batch 2 of epoch 1: The input 'x' contains NaN \(first in sample 2\)",
    ),
    "DataLoader: labels of another type": (
        lambda: loader(X, Y.astype(float)), None,
        "The first batch: The target 'labels' should be int64, received dtype float64",
    ),
    "DataLoader: label out of range": (lambda: loader(X, Y + 1), None, "class labels must be 0 to 2"),
    "DataLoader: wrong width": (lambda: loader(X[:, :3], Y), None, "axis 1 must be 4"),
    "DataLoader: beside targets": (lambda: loader(X, Y), Y, "targets are passed in addition to a DataLoader"),
    "dict: names": (lambda: [{"x": X, "y": Y}], None, r"has x, y \(missing: labels\). Rename"),
    "stream: no targets": (lambda: lambda: iter([X, X]), None, "needs targets"),
    "stream: lengths": (
        lambda: [(X[:8], Y[:8]), (X[:8], Y[:7])], None,
        r"Batch 2 of epoch 1: .*different numbers of samples \(x: 8, labels: 7\)",
    ),
    "stream: ragged": (
        lambda: [(X[:8], Y[:8]), ([[1.0, 2.0], [3.0]], Y[:2])], None,
        "Batch 2 of epoch 1: The input 'x' is not an array of one shape",
    ),
    "stream: four entries": (
        lambda: [(X, Y, Y, Y)], None, "should be .inputs, targets.*received a tuple of 4",
    ),
    "stream: empty": (lambda: lambda: iter([]), None, "has no batch"),
    "stream: empty batch": (lambda: [(X[:0], Y[:0])], None, "There are no samples"),
    "stream: weights come later": (
        lambda: [(X[:8], Y[:8]), (X[:8], Y[:8], np.ones(8))], None,
        "Batch 2 of epoch 1: it has sample weights, but the first batch had none",
    ),
    "iterator: exhausted": (exhausted, None, "The iterator is exhausted"),
    # data sets
    "Dataset: ragged": (
        Ragged, None, r"sample 17 has shape \[3\], and sample \d+ has \[4\].*cannot be stacked",
    ),
    "Dataset: empty": (Empty, None, r"The dataset \(Empty\) has no samples"),
    "Hugging Face: names": (
        lambda: hugging_face(x=X.tolist(), label=Y), None, r"has x, label \(missing: labels\)",
    ),
    "Hugging Face: text": (
        lambda: hugging_face(x=["a"] * 24, labels=Y), None, "'x' should be float32, received dtype <U1",
    ),
    "Hugging Face: splits": (
        lambda: datasets.DatasetDict({"train": hugging_face(x=X.tolist(), labels=Y)}), None,
        r"a dict of datasets \(train\). Choose one: data\['train'\]",
    ),
    # arrays of other kinds
    "masked": (lambda: masked(X), Y, r"input 'x': values are missing: 4 of 96 elements of a masked array are"),
    "masked rows": (lambda: list(masked(X)), Y, "input 'x': values are missing: 4 of 4 elements"),
    "masked labels": (lambda: X, masked(Y), r"target 'labels': values are missing: 1 of 24.*the first at index \[5\]"),
    "masked batch": (
        lambda: [(X[:8], Y[:8]), (masked(X), Y)], None, "Batch 2 of epoch 1: The input 'x': values are missing",
    ),
    "masked sample": (lambda: MaskedSamples(), None, "sample 5: values are missing"),
    "sparse": (lambda: scipy.sparse.csr_matrix(X), Y, r"input 'x' is sparse \(csr_matrix\). Convert it with .toarray"),
    "structured": (
        lambda: np.array(list(map(tuple, X)), "f4,f4,f4,f4"), Y, "a structured array. Convert its fields to columns",
    ),
    "objects with gaps": (
        lambda: np.where(X > 1, None, X.astype(object)), Y, "not a rectangular array of numbers, or values are missing",
    ),
    "no data": (lambda: torch.empty(24, 4, device="meta"), Y, "on device 'meta' has no data"),
    "one number": (lambda: np.float32(1), Y, "'x' has no batch axis"),
    "an object beside targets": (object, Y, "targets are passed in addition to a object"),
    "an object": (object, None, "The data is a object. Pass arrays, a frame"),
}  # fmt: skip


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(PROBLEM.model, "cross_entropy")


@pytest.mark.parametrize("name", CASES)
def test_one_clear_error(name: str, trainer: Trainer) -> None:
    make, targets, message = CASES[name]
    before = {key: p.data.copy() for key, p in trainer.parameters}
    with pytest.raises(InputError, match=message):
        trainer.fit(make(), targets, shuffle="ragged" in name, verbose=False)
    if trainer.resumes_fit:  # found in a later batch: those before it have been trained on
        trainer.abandon_fit()
        assert "Batch 2" in message or "stacked" in message
    else:
        assert all(np.array_equal(p.data, before[key]) for key, p in trainer.parameters)
    with pytest.raises(InputError, match=message.replace(" of epoch 1", "")):
        trainer.evaluate(make(), targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 2}, "epochs=2, but the data is an iterator, which can be read only once"),
        (
            {"epochs": 3, "steps_per_epoch": 1},
            r"ended after 0 of the 1 batches of epoch 3 that steps_per_epoch asks for",
        ),
        ({"batch_size": 8}, "batch_size is passed, but the data already comes in batches"),
        ({"validation": 0.5}, "validation=0.5 cannot be split off a stream"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be an integer >= 1"),
        ({"sample_weight": np.ones(24)}, "sample_weight are passed in addition to a generator"),
    ],
)
def test_an_iterator_that_cannot_serve_is_an_error(
    options: dict[str, Any], message: str, trainer: Trainer
) -> None:
    with pytest.raises(InputError, match=message):
        trainer.fit(((X, Y) for _ in range(2)), verbose=False, **options)
    trainer.abandon_fit()


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (3, "transform must be a function"),
        (lambda x: x, r"must take \(inputs, targets\).*received a function of \(x\)"),
        (lambda x, y: x, r"transform must return \(inputs, targets\), received ndarray"),
        (lambda x, y: (x[:, :2], y), r"Batch 1 of epoch \d: .*axis 1 must be 4"),
        (lambda x, y: (x[:-1], y), r"Batch 1 of epoch \d: .*\(x: 23, labels: 24\)"),
        (lambda x, y: (x * np.float32("nan"), y), r"Batch 1 of epoch \d: The input 'x' contains NaN"),
    ],
)
def test_a_transform_that_fails_is_an_error(transform: Any, message: str, trainer: Trainer) -> None:
    with pytest.raises(InputError, match=message):
        trainer.fit(X, Y, transform=transform, verbose=False)
    assert not trainer.resumes_fit


def test_columns_of_floats_are_not_cut_to_whole_numbers() -> None:
    """Columns for an input of int64 are not cut to whole numbers."""
    model = onnx.parser.parse_model("""
      <ir_version: 10, opset_import: ["": 21]>
      words (int64[n, 2] ids) => (float[n, 3] y)
      <float[5, 3] w = {1.,0.,0., 0.,1.,0., 0.,0.,1., 1.,1.,0., 0.,1.,1.}, int64[1] axes = {1}>
      { e = Gather(w, ids)  y = ReduceSum <keepdims = 0> (e, axes) }""")
    trainer = Trainer(model, "cross_entropy")
    good = pandas.DataFrame({"a": np.array([1, 2], np.int8), "b": [0, 4]})
    assert trainer.predict(good).tolist() == [[1.0, 1.0, 0.0], [0.0, 1.0, 2.0]]
    with pytest.raises(InputError, match=r"column 'b' is float64, but the input 'ids' takes int64"):
        trainer.predict(good.assign(b=[0.5, 1.0]))
    with pytest.raises(InputError, match=r"column 'b' contains values that do not fit into int64"):
        trainer.predict(good.assign(b=np.array([0, 2**64 - 1], np.uint64)))


def test_user_errors_are_not_hidden(trainer: Trainer) -> None:
    def broken() -> Iterator[Any]:
        yield X, Y
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        trainer.fit(broken, verbose=False)
    trainer.abandon_fit()


@pytest.mark.parametrize(
    "convert",
    [
        np.ma.array,
        lambda array: array.view(np.matrix),
        np.asfortranarray,
        lambda array: np.ascontiguousarray(array[::-1])[::-1],
        lambda array: array.astype(array.dtype.newbyteorder(">")),
        lambda array: np.broadcast_to(array, array.shape),
        lambda array: array.astype(object),
    ],
    ids=[
        "nothing is masked",
        "matrix",
        "Fortran order",
        "negative strides",
        "big endian",
        "read-only",
        "objects",
    ],
)
def test_arrays_of_other_kinds_train_as_plain_ones_do(convert: Any) -> None:
    line = problems.line()
    results = []
    for x, y in ((line.x, line.y), (convert(line.x), convert(line.y))):
        trainer = Trainer(line.model, line.loss, learning_rate=0.1, metrics=[])
        trainer.fit(x, y, batch_size=4, verbose=False)
        results.append([*(p.data.copy() for _, p in trainer.parameters), trainer.predict(x)])
    for plain, other in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample_weight": masked(np.ones(24))}, "weights 'sample_weight': values are missing"),
        ({"validation": (masked(X), Y)}, "Validation data: The input 'x': values are missing"),
        ({"class_weight": np.ma.array(np.ones(3), mask=[0, 1, 0])}, "class_weight: values are missing"),
        (
            {"transform": lambda x, y: (masked(x), y)},
            r"Batch 1 of epoch \d: The input 'x': values are missing",
        ),
    ],
    ids=["weights", "validation", "class weights", "transform"],
)
def test_masked_values_of_other_arguments_are_refused(
    arguments: dict[str, Any], message: str, trainer: Trainer
) -> None:
    with pytest.raises(InputError, match=message):
        trainer.fit(X, Y, verbose=False, **arguments)
    with pytest.raises(InputError, match="values are missing"):
        trainer.predict(masked(X))
    with pytest.raises(InputError, match="sequence 1: values are missing"):
        pack_tokens([[1, 2], masked(np.arange(8))], 2)


@pytest.mark.parametrize(
    ("data", "options", "steps"),
    [
        ((X, np.full(24, -100)), {"epochs": 2}, 2),
        (([(X, np.full(24, -100))],), {"epochs": 2}, 2),
        (([(X, Y, np.zeros(24))],), {}, 1),
        ((X, Y), {"class_weight": np.zeros(3)}, 1),
    ],
    ids=["ignored labels", "a stream of ignored labels", "weights of a stream", "class weights"],
)
def test_a_fit_in_which_no_sample_counts_is_an_error_and_changes_nothing(
    data: Any, options: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    trainer = Trainer(PROBLEM.model, CrossEntropyLoss(ignore_index=-100), directory=tmp_path / "run")
    called = Count()
    with pytest.raises(
        InputError, match=r"No parameter was updated, because no label .*\(ignore_index\), .* weight of 0"
    ):
        trainer.fit(*data, callbacks=[called], verbose=False, **options)
    # The error says so of a fit that went through its data to the end.
    assert called.epochs == steps
    for same in (trainer, Trainer.resume(tmp_path / "run")):
        assert not same.history.epochs
        assert not same.resumes_fit
    # A part of the data that does not count is fine.
    some = np.where(np.arange(24) < 20, -100, Y)
    assert np.isfinite(trainer.fit(X, some, batch_size=4, shuffle=False, verbose=False).epochs[0]["loss"])


class Count(Callback):
    """Counts the epochs."""

    epochs = 0

    def on_epoch_end(self, trainer: Trainer, history: object) -> None:
        self.epochs += 1


def test_a_batch_of_no_samples_is_an_error() -> None:
    trainer = Trainer(problems.line(batch=0).model, "mse")
    with pytest.raises(InputError, match="exported with a batch of 0 samples: x, target"):
        trainer.fit(problems.line().x, problems.line().y, verbose=False)


def test_inputs_of_different_batch_sizes_are_refused() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        net (float[4, 3] x, float[2, 3] z) => (float[4, 1] y) <float[3, 1] w = {1., 2., 3.}> {
            a = MatMul(x, w)  s = ReduceSum<keepdims = 0>(z)  y = Add(a, s)
        }""")
    data = [np.zeros((4, 3), "f4"), np.zeros((4, 3), "f4")]
    with pytest.raises(InputError, match=r"different sizes along axis 0 \(\[2, 4\]\).*: x, z, target"):
        Trainer(model, "mse").fit(data, np.zeros((4, 1), "f4"), verbose=False)
