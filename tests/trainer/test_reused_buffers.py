"""Streams, data sets and transforms that fill one buffer again and again train as those that make new arrays do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx.parser
import pytest

from onnxtrain import Trainer
from onnxtrain.trainer import SAM, SWA

_MODEL = onnx.parser.parse_model("""
    <ir_version: 10, opset_import: ["": 21]>
    line (float[n, 1] x) => (float[n, 1] y) <float[1, 1] w = {0.1}> { y = MatMul(x, w) }
""")
_X = np.random.default_rng(1).normal(size=(10, 1)).astype("f4")
_Y = np.random.default_rng(2).normal(size=(10, 1)).astype("f4")
# A short batch in the middle: `drop_last` looks ahead to know whether it is the last one.
_CUTS = [(0, 2), (2, 3), (3, 5), (5, 7), (7, 9), (9, 10)]


class _Loader:
    """Gives batches, in two buffers that it keeps or in new arrays."""

    def __init__(self, reuse: bool, as_tensors: bool = False) -> None:
        self.reuse = reuse
        self.convert: Callable[[Any], Any] = lambda array: array
        if as_tensors:
            self.convert = pytest.importorskip("torch").from_numpy
        self.x, self.y = np.empty((2, 1), "f4"), np.empty((2, 1), "f4")

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for start, stop in _CUTS:
            x, y = (self.x, self.y) if self.reuse else (np.empty((2, 1), "f4"), np.empty((2, 1), "f4"))
            x[: stop - start], y[: stop - start] = _X[start:stop], _Y[start:stop]
            yield self.convert(x[: stop - start]), self.convert(y[: stop - start])


class _Samples:
    """Gives samples by index, in a buffer that it keeps or in new arrays; the inputs by name if `named`."""

    def __init__(self, reuse: bool, named: bool = False) -> None:
        self.reuse, self.named, self.x = reuse, named, np.empty(1, "f4")

    def __len__(self) -> int:
        return len(_X)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x = self.x if self.reuse else np.empty(1, "f4")
        x[:] = _X[index]
        return {"x": x} if self.named else x, _Y[index]


class _Scale:
    """Transform that returns a buffer that it keeps for each size of a batch, or new arrays."""

    def __init__(self, reuse: bool) -> None:
        self.reuse, self.buffers = reuse, dict[int, Any]()

    def __call__(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        new = np.empty_like(inputs)
        x = self.buffers.setdefault(len(inputs), new) if self.reuse else new
        x[:] = inputs * 2
        return x, targets


def _fit(data: Any, *targets: Any, **options: Any) -> list[dict[str, float]]:
    """Trains on data, and returns the record of the epochs with the weight that they end with."""
    # The last metric depends on which prediction belongs to which target.
    trainer = Trainer(
        _MODEL,
        "mse",
        "sgd",
        0.05,
        metrics=["mae", lambda p, t: float((p * t * np.arange(len(t))[:, None]).sum())],
    )
    history = trainer.fit(data, *targets, epochs=2, verbose=False, **options)
    return [*history.epochs, {"w": trainer.parameters["w"].data.item()}]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize(
    "source", ["stream", "tensors", "samples", "named samples", "transform", "stream and transform"]
)
def test_a_buffer_that_is_filled_again_trains_as_new_arrays_do(
    source: str, accumulate: int, drop_last: bool
) -> None:
    results = []
    for reuse in (False, True):
        options: dict[str, Any] = {
            "accumulate": accumulate,
            "drop_last": drop_last,
            "callbacks": [SAM(), SWA(1)],
        }
        data: tuple[Any, ...] = (_Loader(reuse, as_tensors=source == "tensors"),)
        if "samples" in source:
            data, options["batch_size"] = (_Samples(reuse, named=source == "named samples"),), 3
        if source == "transform":
            data, options["batch_size"] = (_X, _Y), 3
        if "transform" in source:
            options["transform"] = _Scale(reuse)
        results.append(_fit(*data, **options))
    assert results[0] == results[1]


def test_validation_from_the_buffer_of_the_training_stream_leaves_its_batches_alone() -> None:
    shared = _Loader(reuse=True)
    results = [
        _fit(training, validation=validation, evaluate_every=1, drop_last=True, accumulate=2)
        for training, validation in ((_Loader(reuse=False), _Loader(reuse=False)), (shared, shared))
    ]
    assert results[0] == results[1]


def test_one_sample_buffer_of_an_iterable_dataset_is_read_sample_by_sample() -> None:
    torch = pytest.importorskip("torch")

    class Samples(torch.utils.data.IterableDataset):  # type: ignore[misc]  # PyTorch may be missing
        def __init__(self, reuse: bool) -> None:
            self.samples = _Samples(reuse)

        def __iter__(self) -> Iterator[Any]:
            return (self.samples[index] for index in range(len(self.samples)))

    assert _fit(Samples(False), batch_size=4) == _fit(Samples(True), batch_size=4)


def test_evaluation_and_predictions_of_a_reused_buffer_are_those_of_new_arrays() -> None:
    trainer = Trainer(_MODEL, "mse", metrics=["r2"])
    assert trainer.evaluate(_Loader(True)) == trainer.evaluate(_Loader(False))
    assert trainer.evaluate(_Loader(True))["loss"] == pytest.approx(
        float(((_X * 0.1 - _Y) ** 2).mean()), rel=1e-5
    )
    np.testing.assert_allclose(trainer.predict(_Loader(True)), _X * np.float32(0.1), rtol=1e-6)


def test_a_transform_in_place_leaves_the_arrays_of_a_list_of_batches_alone() -> None:
    batches = [(_X[:4].copy(), _Y[:4].copy()), (_X[4:].copy(), _Y[4:].copy())]

    def triple(inputs: Any, targets: Any) -> tuple[Any, Any]:
        inputs *= 3
        targets += 1
        return inputs, targets

    _fit(batches, transform=triple)
    np.testing.assert_array_equal(np.concatenate([x for x, _ in batches]), _X)
    np.testing.assert_array_equal(np.concatenate([y for _, y in batches]), _Y)
