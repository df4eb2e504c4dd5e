"""Matrices without an inverse or a factor raise what eager PyTorch raises."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onnxtrain.ortmodule import ORTModule

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


class Solver(nn.Module):
    def __init__(self, matrix: torch.Tensor, solve: object) -> None:
        super().__init__()
        self.matrix, self.solve = nn.Parameter(matrix), solve

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.solve(self.matrix, x)


SOLVERS = {
    "inv": (torch.tensor([[1.0, 2.0], [2.0, 4.0]]), lambda a, x: torch.linalg.inv(a) @ x),
    "solve": (torch.tensor([[1.0, 2.0], [2.0, 4.0]]), torch.linalg.solve),
    "cholesky": (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), lambda a, x: torch.linalg.cholesky(a) @ x),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_a_matrix_that_cannot_be_solved_raises_pytorchs_words(name: str) -> None:
    matrix, solve = SOLVERS[name]
    x = torch.ones(2, 1)
    with pytest.raises(torch.linalg.LinAlgError) as wanted:
        Solver(matrix, solve)(x)
    model = ORTModule(Solver(matrix, solve))
    with pytest.raises(torch.linalg.LinAlgError) as got:
        model(x)
    assert str(got.value) == str(wanted.value)
    with torch.no_grad():
        model.matrix.copy_(torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
    torch.testing.assert_close(model(x), Solver(model.matrix.detach(), solve)(x))
    assert model.report().runs_in_onnxruntime
