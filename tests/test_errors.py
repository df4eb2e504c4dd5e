"""The exception tree."""

from __future__ import annotations

import pytest

from onnxtrain import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_handlers_written_for_onnxruntime_training_catch_every_error(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.OnnxTrainError)
    assert str(error("what happened")) == "what happened"
    with pytest.raises(RuntimeError):
        raise error("what happened")
