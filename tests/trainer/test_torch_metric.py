"""Metrics that are functions of PyTorch tensors, beside scikit-learn's."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score

from onnxtrain import Trainer
from onnxtrain.errors import InputError
from onnxtrain.trainer import torch_metric


def _f1(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Macro F1: of the whole set, it is no mean over batches."""
    guess = scores.argmax(1)
    hits = torch.stack([((guess == k) & (y == k)).sum() for k in range(3)])
    wrong = torch.stack([((guess == k) ^ (y == k)).sum() for k in range(3)])
    return (2 * hits / (2 * hits + wrong)).mean()


class _Stateful:
    """Adds up over calls until it is reset, as metrics of torchmetrics do."""

    def __init__(self) -> None:
        self.total = torch.tensor(0.0)

    def reset(self) -> None:
        self.total = torch.tensor(0.0)

    def __call__(self, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.total = self.total + F.cross_entropy(scores, y)
        return self.total


def _trainer(metrics: list[Any]) -> Trainer:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        net (float[n, 3] x) => (float[n, 3] scores) <float[3, 3] w = {1,2,0, 0,1,2, 2,0,1}> { scores = MatMul(x, w) }"""
    )
    return Trainer(model, "cross_entropy", metrics=metrics)


def test_torch_metric_is_of_the_whole_set() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 3)).astype(np.float32), rng.integers(0, 3, 50)
    metrics = [
        torch_metric(_f1),
        torch_metric(_Stateful(), name="nll"),
        torch_metric(partial(_f1), name="again"),
    ]
    trainer = _trainer(metrics)
    for _ in range(2):
        result = trainer.evaluate(x, y, batch_size=8)
        scores = trainer.predict(x)
        assert result["_f1"] == pytest.approx(f1_score(y, scores.argmax(1), average="macro"), rel=1e-6)
        assert result["again"] == result["_f1"]
        assert result["nll"] == pytest.approx(result["loss"], rel=1e-5)


def test_what_is_not_a_torch_metric_is_refused() -> None:
    with pytest.raises(InputError, match="pass a function"):
        torch_metric(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="pass name="):
        torch_metric(lambda scores, y: 0)
    x, y = np.zeros((4, 3), np.float32), np.zeros(4, np.int64)
    with pytest.raises(InputError, match=r"'each' returned .*must return one number"):
        _trainer([torch_metric(lambda scores, y: scores, name="each")]).evaluate(x, y)
