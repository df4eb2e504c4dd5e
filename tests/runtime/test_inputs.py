"""Checks of arguments: later calls refuse what a first call refuses, and labels of every dtype."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from onnxtrain.errors import InputError
from onnxtrain.runtime.inputs import check_labels
from onnxtrain.runtime.manifest import ClassLabels
from runtime import handmade
from runtime.test_module import build


def _with_shape(array, shape):
    changed = array.copy()
    changed.shape = shape
    return changed


REFUSED = {
    "masked": lambda x, y: (np.ma.masked_less(x, 0), y),
    "another dtype": lambda x, y: (x.astype(np.float64), y),
    "another rank": lambda x, y: (_with_shape(x, (1, *x.shape)), y),
    "fewer labels": lambda x, y: (x, y[:-1]),
    "another width": lambda x, y: (x[:, :-1].copy(), y),
    "a label above": lambda x, y: (x, y + 3),
    "a label below": lambda x, y: (x, y - 2),
    "a list": lambda x, y: (x.tolist(), y),
    "fewer inputs": lambda x, y: (x,),
    "more inputs": lambda x, y: (x, y, y),
    "an OrtValue of another type": lambda x, y: (ort.OrtValue.ortvalue_from_numpy(y), y),
}


@pytest.mark.parametrize("case", REFUSED)
def test_later_calls_are_checked_like_the_first(case, batch):
    arguments = REFUSED[case](*batch)
    messages = []
    for calls in (0, 2):
        _, module = build(handmade.mlp())
        for _ in range(calls):
            module(*batch)
        with pytest.raises(InputError) as error:
            module(*arguments)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_later_calls_accept_what_the_first_accepts(batch):
    x, labels = batch
    run = handmade.mlp()
    others = {
        "not contiguous": (np.asfortranarray(x), labels),
        "of another byte order": (x.astype(">f4"), labels.astype(">i8")),
        "another batch": (x[:2], labels[:2]),
        "OrtValues": tuple(map(ort.OrtValue.ortvalue_from_numpy, batch)),
        "one OrtValue": (ort.OrtValue.ortvalue_from_numpy(x), labels),
        "a subclass": (np.ma.array(x), labels),
    }
    for name, arguments in others.items():
        _, module = build(run)
        expected = np.asarray(_array(module(*arguments)[0]))
        _, module = build(run)
        for _ in range(2):
            module(*batch)
            np.testing.assert_array_equal(_array(module(*arguments)[0]), expected, err_msg=name)
        module(*batch)


def _array(value):
    return value.numpy() if isinstance(value, ort.OrtValue) else value


@pytest.mark.parametrize("extra_output", [False, True])
@pytest.mark.parametrize("as_values", [False, True])
def test_losses_survive_later_calls(batch, extra_output, as_values):
    _, module = build(handmade.mlp(extra_output=extra_output))
    x, labels = batch
    losses, copies = [], []
    for scale in (1, 2, 3, 4):
        arguments = (np.float32(scale) * x, labels)
        if as_values:
            arguments = tuple(map(ort.OrtValue.ortvalue_from_numpy, arguments))
        result = module(*arguments)
        loss = result[0] if extra_output else result
        assert isinstance(loss, ort.OrtValue if as_values else np.ndarray)
        losses.append(loss)
        copies.append(_array(loss).copy())
        assert copies[-1].shape == ()
    for loss, copy in zip(losses, copies, strict=True):
        np.testing.assert_array_equal(_array(loss), copy)


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u4", "u8", ">i4"])
@pytest.mark.parametrize("count", [None, 1, 5, 100, 127, 128, 256, 100_000])
@pytest.mark.parametrize("ignored", [None, -100, 255, 3])
def test_labels_of_every_dtype(dtype, count, ignored):
    limits = np.iinfo(dtype)
    values = [
        -100,
        -1,
        0,
        3,
        4,
        5,
        99,
        100,
        126,
        127,
        128,
        254,
        255,
        256,
        99_999,
        100_000,
        limits.min,
        limits.max,
    ]
    for value in values:
        if not limits.min <= value <= limits.max:
            continue
        allowed = value == ignored or (value >= 0 and (count is None or value < count))
        for labels in (
            np.array([0, value, 0], dtype),
            np.array(value, dtype),
            np.array([[0, value]], dtype)[:, ::-1],
        ):
            if allowed:
                check_labels("y", labels, ClassLabels(count, ignored))
            else:
                with pytest.raises(InputError, match=rf"received {value} at index"):
                    check_labels("y", labels, ClassLabels(count, ignored))
    check_labels("y", np.zeros((0, 3), dtype), ClassLabels(count, ignored))
