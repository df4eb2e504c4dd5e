"""Whatever holds the data, training on it is bit-equal to training on the arrays that it holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import polars
import pytest
import torch

from onnxtrain import Trainer
from onnxtrain.errors import InputError
from trainer import problems
from trainer.test_resume import InterruptAt, state

PROBLEM = problems.classes(samples=60)
X, Y = PROBLEM.x, PROBLEM.y
PARTS = [slice(start, start + 16) for start in range(0, 60, 16)]
BATCHES = [(X[part], Y[part]) for part in PARTS]
COLUMNS = list("abcd")


def make_trainer(directory: Path | None = None, **options: Any) -> Trainer:
    return Trainer(PROBLEM.model, "cross_entropy", learning_rate=1e-2, directory=directory, **options)


def parameters(trainer: Trainer) -> dict[str, bytes]:
    return {name: parameter.data.tobytes() for name, parameter in trainer.parameters}


class Samples(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return zip(torch.tensor(X), torch.tensor(Y), strict=True)


def tensors() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))


def hugging_face() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": X.tolist(), "labels": Y.tolist(), "text": ["?"] * 60})


def frame(library: Any) -> Any:
    return library.DataFrame({**{name: X[:, i] for i, name in enumerate(COLUMNS)}, "labels": Y})


STREAMS: dict[str, Callable[[], Any]] = {
    "list of batches": lambda: BATCHES,
    "list of lists": lambda: [list(batch) for batch in BATCHES],
    "dicts by name": lambda: [{"labels": y, "x": x, "other": 1} for x, y in BATCHES],
    "function": lambda: lambda: iter(BATCHES),
    "generator": lambda: (batch for batch in BATCHES * 2),
    "tensors": lambda: [(torch.tensor(x, requires_grad=True), torch.tensor(y)) for x, y in BATCHES],
    "frames": lambda: [frame(pandas).iloc[part] for part in PARTS],
    "DataLoader": lambda: torch.utils.data.DataLoader(tensors(), batch_size=16),
    "DataLoader of dicts": lambda: torch.utils.data.DataLoader(
        hugging_face().with_format("torch").remove_columns("text"), batch_size=16
    ),
    "Hugging Face batches": lambda: hugging_face().with_format("numpy").to_iterable_dataset().batch(16),
}
SETS: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    "memmap": lambda path: (_memmap(path), Y),
    "float64": lambda path: (X.astype(np.float64), Y.astype(np.uint8)),
    "torch tensors": lambda path: (torch.tensor(X), torch.tensor(Y)),
    "dict of all names": lambda path: ({"x": X, "labels": Y}, None),
    "map-style Dataset": lambda path: (tensors(), None),
    "Hugging Face Dataset": lambda path: (hugging_face(), None),
    "pandas with targets": lambda path: (frame(pandas), None),
    "polars with targets": lambda path: (frame(polars), None),
    "pandas and a Series": lambda path: (frame(pandas)[COLUMNS], pandas.Series(Y, name="any")),
    "polars and a Series": lambda path: (frame(polars)[COLUMNS], polars.Series("any", Y)),
    "name of a column": lambda path: (frame(pandas).rename(columns={"labels": "kind"}), "kind"),
}


def _memmap(path: Path) -> np.memmap[Any, Any]:
    array = np.memmap(path / "x.bin", np.float64, "w+", shape=X.shape)
    array[:] = X
    return array


@pytest.mark.parametrize("name", STREAMS)
def test_stream_is_the_arrays_in_their_order(name: str) -> None:
    expected, trainer = make_trainer(), make_trainer()
    options: dict[str, Any] = {"epochs": 2, "verbose": False}
    if name == "generator":
        options["steps_per_epoch"] = 4
    expected.fit(X, Y, batch_size=16, shuffle=False, epochs=2, verbose=False, validation=(X, Y))
    history = trainer.fit(STREAMS[name](), validation=BATCHES, **options)
    assert parameters(trainer) == parameters(expected)
    assert history.last["loss"] == expected.history.last["loss"]
    assert history.last["val_loss"] == pytest.approx(expected.history.last["val_loss"], rel=1e-6)
    assert trainer.evaluate(STREAMS[name]()) == expected.evaluate(BATCHES)
    np.testing.assert_array_equal(
        trainer.predict(STREAMS[name]())[:60], np.concatenate([expected.predict(x) for x, _ in BATCHES])
    )


@pytest.mark.parametrize("name", SETS)
def test_set_is_shuffled_and_split_as_the_arrays_are(name: str, tmp_path: Path) -> None:
    expected, trainer = make_trainer(), make_trainer()
    inputs, targets = SETS[name](tmp_path)
    options: dict[str, Any] = {"epochs": 2, "batch_size": 16, "validation": 0.2, "verbose": False}
    expected.fit(X, Y, **options)
    trainer.fit(inputs, targets, **options)
    assert parameters(trainer) == parameters(expected)
    assert trainer.history == expected.history
    assert trainer.evaluate(inputs, targets) == expected.evaluate(X, Y)
    if name == "name of a column":
        inputs = inputs.drop(columns=targets)
    np.testing.assert_array_equal(trainer.predict(inputs), expected.predict(X))


def test_samples_that_come_one_by_one_are_grouped() -> None:
    for stream in (Samples(), hugging_face().to_iterable_dataset()):
        expected, trainer = make_trainer(), make_trainer()
        expected.fit(X, Y, batch_size=16, shuffle=False, verbose=False)
        trainer.fit(stream, batch_size=16, verbose=False)
        assert parameters(trainer) == parameters(expected)


def test_several_inputs_and_columns_by_name() -> None:
    rng = np.random.default_rng(0)
    left, right, target = (rng.standard_normal((12, n)).astype(np.float32) for n in (2, 3, 1))
    trainer = Trainer(problems.two_inputs(), "mse", loss_input_names=["sum"], frozen_params=["v"])
    expected = trainer.evaluate([left, right], target)
    flat = torch.utils.data.TensorDataset(*map(torch.tensor, (left, right, target)))
    for data in (
        flat,
        torch.utils.data.DataLoader(flat, batch_size=12),
        [([left, right], target)],
        [({"right": right, "left": left}, target)],
    ):
        assert trainer.evaluate(data) == expected
    predicted = trainer.predict([left, right])
    for data in (flat, [(left, right)], [([left, right],)], [{"left": left, "right": right}]):
        np.testing.assert_array_equal(trainer.predict(data)["sum"], predicted["sum"])
    table = pandas.DataFrame({"y": target[:, 0]})
    assert trainer.evaluate([left, right], table["y"]) == expected  # [n] for a target of [n, 1]


def test_memmap_is_not_read_as_a_whole(tmp_path: Path) -> None:
    """A fault in a file is found in its batch, after the batches before it were trained on."""
    array = _memmap(tmp_path)
    array[50, 2] = np.nan
    trainer = make_trainer()
    trainer.check_data(array, Y)
    with pytest.raises(
        InputError, match=r"Batch 4 of epoch 1: The input 'x' contains NaN \(first in sample 2\)"
    ):
        trainer.fit(array, Y, batch_size=16, shuffle=False, verbose=False)
    expected = make_trainer()
    expected.fit(X[:48], Y[:48], batch_size=16, shuffle=False, verbose=False)
    assert parameters(trainer) == parameters(expected)


def test_an_incomplete_last_batch_can_be_dropped() -> None:
    loader = torch.utils.data.DataLoader(tensors(), batch_size=16)
    for inputs, targets, options in ((X, Y, {"batch_size": 16}), (loader, None, {}), (BATCHES, None, {})):
        expected, trainer = make_trainer(), make_trainer()
        expected.fit(X[:48], Y[:48], batch_size=16, shuffle=False, epochs=2, verbose=False)
        history = trainer.fit(
            inputs, targets, drop_last=True, shuffle=False, epochs=2, verbose=False, **options
        )
        assert parameters(trainer) == parameters(expected)
        assert history["loss"] == expected.history["loss"]
    with pytest.raises(InputError, match="leaves no data: 60 samples"):
        trainer.fit(X, Y, batch_size=64, drop_last=True, verbose=False)


def test_steps_per_epoch_goes_through_a_stream_pass_after_pass() -> None:
    expected, trainer = make_trainer(), make_trainer()
    history = trainer.fit(BATCHES, epochs=4, steps_per_epoch=3, accumulate=2, verbose=False)
    assert len(history) == 4
    order = (BATCHES * 6)[:24]
    expected.fit(order, accumulate=2, verbose=False)
    assert parameters(trainer) == parameters(expected)
    arrays = make_trainer()
    assert len(arrays.fit(X, Y, epochs=2, batch_size=16, steps_per_epoch=2, verbose=False)) == 2
    with pytest.raises(InputError, match="asks for 5 batches, but 60 samples make only 4 of 16"):
        arrays.fit(X, Y, batch_size=16, steps_per_epoch=5, verbose=False)


def test_fixed_batch_takes_streams_of_its_size(caplog: pytest.LogCaptureFixture) -> None:
    problem, fixed = problems.line(samples=42), problems.line(samples=42, batch=8)
    batches = [(problem.x[i : i + 8], problem.y[i : i + 8]) for i in range(0, 42, 8)]
    trainer = Trainer(fixed.model, "mse", "sgd", learning_rate=0.05)
    dynamic = Trainer(problem.model, "mse", "sgd", learning_rate=0.05)
    trainer.fit(batches, validation=batches, verbose=False)
    dynamic.fit(batches[:5], validation=batches, verbose=False)
    np.testing.assert_allclose(trainer.parameters["w"].data, dynamic.parameters["w"].data, rtol=1e-6)
    assert trainer.history.last["val_loss"] == pytest.approx(dynamic.history.last["val_loss"], rel=1e-5)
    np.testing.assert_allclose(trainer.predict(batches), dynamic.predict(problem.x), rtol=1e-5)
    with pytest.raises(InputError, match="has 21 samples, but the model takes exactly 8"):
        trainer.fit([(problem.x[:21], problem.y[:21])], verbose=False)


def augment(x: Any, y: Any) -> tuple[Any, Any]:
    """Draws from every generator of the process."""
    noise = np.random.standard_normal(x.shape) + random.random() + float(torch.rand(()))
    return (x + 0.1 * noise).astype(np.float32), y


class Augmented(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return augment(X[index], Y[index])


def shuffled_batches() -> Iterator[Any]:
    order = np.random.permutation(60)
    for part in PARTS:
        yield augment(X[order[part]], Y[order[part]])


def loader(**options: Any) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(Augmented(), batch_size=16, **options)


def own_generator() -> torch.utils.data.DataLoader[Any]:
    return loader(shuffle=True, generator=torch.Generator().manual_seed(5))


def with_rng(x: Any, y: Any, rng: np.random.Generator) -> Any:
    return augment(x + rng.standard_normal(x.shape).astype(np.float32), y)


RESUMED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "arrays with a transform": (lambda: X, {"targets": Y, "transform": with_rng, "batch_size": 16}),
    "Dataset": (Augmented, {"batch_size": 16}),
    "weights": (lambda: X, {"targets": Y, "sample_weight": np.arange(60) % 3, "batch_size": 16}),
    "function": (lambda: shuffled_batches, {}),
    "function, passes": (lambda: shuffled_batches, {"steps_per_epoch": 3, "epochs": 4, "drop_last": True}),
    "shuffled DataLoader": (lambda: loader(shuffle=True), {"transform": augment}),
    "DataLoader with a generator": (own_generator, {}),
    "DataLoader with a generator, passes": (own_generator, {"steps_per_epoch": 3, "epochs": 4}),
    "DataLoader with workers": (lambda: loader(shuffle=True, num_workers=1), {"epochs": 2}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resume_within_an_epoch_is_bit_equal(name: str, tmp_path: Path) -> None:
    make, options = RESUMED[name]
    options = {"epochs": 3, "verbose": False} | options
    whole = make_trainer()
    whole.fit(make(), **options)
    steps = whole.state._store.optimizer.step  # type: ignore[union-attr]
    for step in (1, steps // 2 + 1) if "workers" not in name else (3,):
        directory = tmp_path / str(step)
        make_trainer(directory).fit(make(), callbacks=[InterruptAt(step)], **options)
        random.seed(step)
        np.random.seed(step)
        torch.manual_seed(step)
        resumed = Trainer.resume(directory)
        assert resumed.resumes_fit
        resumed.fit(make(), **options)
        assert state(resumed) == state(whole)
        assert resumed.history == whole.history


def test_numbers_of_the_program_are_left_alone() -> None:
    np.random.seed(3)
    random.seed(3)
    torch.manual_seed(3)
    expected = np.random.random(), random.random(), float(torch.rand(()))
    np.random.seed(3)
    random.seed(3)
    torch.manual_seed(3)
    for data in (Augmented(), loader(shuffle=True), shuffled_batches):
        make_trainer().fit(data, verbose=False)
    make_trainer().fit(X, Y, transform=augment, verbose=False)
    assert (np.random.random(), random.random(), float(torch.rand(()))) == expected


def test_iterator_is_not_resumed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit((b for b in BATCHES), callbacks=[InterruptAt(2)], verbose=False)
    with pytest.raises(InputError, match="an iterator cannot be rewound to the batch where it stopped"):
        trainer.fit((b for b in BATCHES), verbose=False)
    trainer.fit(BATCHES, verbose=False)
    assert len(trainer.history) == 1


def test_generators_that_are_not_those_of_before_are_told(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(own_generator(), callbacks=[InterruptAt(2)], verbose=False)
    trainer._state.position.stream = "AAAA"
    with pytest.raises(InputError, match="saved states of 1 generators do not fit the 1 of this data"):
        trainer.fit(own_generator(), verbose=False)


def test_other_data_than_before_is_told(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(BATCHES, callbacks=[InterruptAt(3)], verbose=False)
    with pytest.raises(InputError, match="interrupted after 3 batches of epoch 1, and this data has 2"):
        trainer.fit(BATCHES[:2], verbose=False)
    with pytest.raises(InputError, match="drop_last False, now True"):
        trainer.fit(BATCHES, drop_last=True, verbose=False)


def test_transform_is_called_in_training_only_with_what_was_passed() -> None:
    raw = np.random.default_rng(0).integers(0, 255, (60, 4)).astype(np.uint8)
    seen: list[Any] = []

    def scale(x: Any, y: Any) -> Any:
        seen.append((x.copy(), y.copy()))
        x //= 2  # its own copy
        return x.astype(np.float32) / 128, y

    trainer, expected = make_trainer(), make_trainer()
    before = raw.copy()
    trainer.fit(raw, Y, transform=scale, batch_size=16, shuffle=False, validation=(X, Y), verbose=False)
    np.testing.assert_array_equal(raw, before)
    assert len(seen) == 4
    np.testing.assert_array_equal(np.concatenate([x for x, _ in seen]), raw)
    np.testing.assert_array_equal(np.concatenate([y for _, y in seen]), Y)
    ready = (raw // 2).astype(np.float32) / 128
    expected.fit(ready, Y, batch_size=16, shuffle=False, validation=(X, Y), verbose=False)
    assert parameters(trainer) == parameters(expected)
    assert trainer.history == expected.history


def test_transform_sees_several_inputs_by_name() -> None:
    def swap(inputs: Any, target: Any, *, rng: np.random.Generator) -> Any:
        assert set(inputs) == {"left", "right"}
        assert isinstance(rng, np.random.Generator)
        return inputs, target

    trainer = Trainer(problems.two_inputs(), "mse", loss_input_names=["sum"], frozen_params=["v"])
    left, right = np.ones((8, 2), np.float32), np.ones((8, 3), np.float32)
    trainer.fit([left, right], np.ones((8, 1), np.float32), transform=swap, verbose=False)


def test_schedule_needs_a_number_of_steps() -> None:
    trainer = make_trainer(scheduler="cosine")
    with pytest.raises(InputError, match="steps_per_epoch"):
        trainer.fit(lambda: iter(BATCHES), verbose=False)
    assert not trainer.resumes_fit
    trainer.fit(lambda: iter(BATCHES), steps_per_epoch=4, verbose=False)
    sized = make_trainer(scheduler="cosine")
    sized.fit(BATCHES, verbose=False)
    assert parameters(sized) == parameters(trainer)
