"""Gradients of a batch of no samples: torch gives zeros."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnxruntime as ort
import pytest
import torch

from autodiff.case import Case
from autodiff.test_rules import CASES, _feeds, _session, _torch_outputs_and_gradients
from onnxtrain.autodiff import differentiate
from runtimes import keeps_nothing

pytestmark = pytest.mark.skipif(
    not keeps_nothing(),
    reason=f"onnxruntime {ort.__version__} gives sums over no axes of no elements an element",
)
CONVOLUTIONS = [case for case in CASES if case.op in ("Conv", "ConvTranspose")]


@pytest.mark.parametrize("symbolic", ["batch", "sizes"])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: case.id)
def test_gradients_of_a_convolution_are_those_of_torch(case: Case, symbolic: str) -> None:
    tensors = [torch.from_numpy(array) for array in case.arrays(np.dtype(np.float32))]
    tensors[0] = tensors[0][:0]
    for tensor in tensors:
        tensor.requires_grad_()
    expected = torch.autograd.grad(case.twin(*tensors).sum(), tensors)

    shapes = dataclasses.replace(case, symbolic={0: (0,)}) if symbolic == "batch" else case
    wrt = [f"x{i}" for i in case.wrt]
    names = [f"{name}_grad" for name in wrt]
    model = differentiate(shapes.model(np.dtype(np.float32), symbolic=True), "loss", wrt)
    feeds = _feeds(case, np.float32, _torch_outputs_and_gradients(case)[1])
    session = _session(model)
    session.run(names, feeds)  # leaves numbers in memory that the next run gets
    got = session.run(names, feeds | {"x0": feeds["x0"][:0], "w0": feeds["w0"][:0]})
    for value, want in zip(got, expected, strict=True):
        np.testing.assert_array_equal(value, want.numpy())
