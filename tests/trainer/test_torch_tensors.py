"""Tensors of PyTorch as data, in all forms that numpy does not convert itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from onnxtrain import Trainer
from onnxtrain.errors import InputError

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

X = np.arange(12, dtype=np.float32).reshape(4, 3)
FORMS = {
    "requires_grad": lambda: torch.tensor(X, requires_grad=True),
    "of a graph": lambda: torch.tensor(X, requires_grad=True) * 1,
    "negative": lambda: torch.complex(torch.tensor(X), -torch.tensor(X)).conj().imag,
    "part of a conjugate": lambda: torch.complex(torch.tensor(X), torch.tensor(X)).conj().real,
    "bfloat16": lambda: torch.tensor(X).bfloat16(),
    "float16": lambda: torch.tensor(X).half(),
    "transposed": lambda: torch.tensor(X.T.copy()).T,
    "expanded": lambda: torch.tensor(X)[:, :],
    "parameter": lambda: torch.nn.Parameter(torch.tensor(X)),
}


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 3] x) => (float[n, 3] y) <float[3] w = {1, 2, 3}> { y = Mul(x, w) }""")
    return Trainer(model, "mse")


@pytest.mark.parametrize("form", FORMS)
def test_their_numbers_are_read(form: str, trainer: Trainer) -> None:
    tensor = FORMS[form]()
    if form == "negative":
        assert tensor.is_neg()
    np.testing.assert_allclose(trainer.predict(tensor), X * [1, 2, 3])
    # Samples go another way.
    samples = torch.utils.data.TensorDataset(tensor)
    np.testing.assert_allclose(trainer.predict(samples), X * [1, 2, 3])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.empty(4, 3, device="meta"), r"shape \[4, 3\] on device 'meta' has no data"),
        (lambda: torch.tensor(X).to_sparse(), r"shape \[4, 3\] is sparse .*to_dense"),
        (lambda: torch.tensor(X).to_sparse_csr(), r"shape \[4, 3\] is sparse .*to_dense"),
        (lambda: torch.tensor(X, dtype=torch.complex64), "should be float32, received dtype complex64"),
    ],
    ids=["meta", "sparse", "sparse csr", "complex"],
)
def test_those_without_dense_real_numbers_are_refused(make: Any, message: str, trainer: Trainer) -> None:
    with pytest.raises(InputError, match=message):
        trainer.predict(make())
    with pytest.raises(InputError, match=message):
        trainer.fit(make(), make(), verbose=False)
