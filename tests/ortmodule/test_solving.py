"""Matrices without an inverse or a factor raise what eager PyTorch raises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

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


class Determinant(nn.Module):
    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self) -> torch.Tensor:
        """Returns the determinant of a matrix with two eigenvalues of 1 and three that are some thousands."""
        identity = torch.eye(len(self.matrix), dtype=self.matrix.dtype)
        return torch.linalg.det(self.matrix @ self.matrix.t() + identity)


def test_gradients_of_determinants_of_ill_conditioned_matrices() -> None:
    """By determinants of parts of the matrix they are 260 times as far from float64 as eager's."""
    start = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)) * 30
    model = ORTModule(Determinant(start.clone()))
    logarithms = []
    for seed in range(30):
        matrix = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)) * 30
        eager, exact = Determinant(matrix.clone()), Determinant(matrix.double())
        with torch.no_grad():
            model.matrix.copy_(matrix)
        model.zero_grad()
        for module in (model, eager, exact):
            module().backward()
        ours, theirs = ((module.matrix.grad - exact.matrix.grad).norm() for module in (model, eager))
        logarithms.append((ours / theirs).log())
    assert torch.stack(logarithms).mean().exp() < 1.5
    assert model.report().runs_in_onnxruntime


def test_derivatives_of_determinants_in_a_batch_with_singular_matrices() -> None:
    """Of ranks 4, 3, 2 and 4 but nearly 3, against float64: eager's own gradient replaces pivots of 0."""
    torch.manual_seed(0)
    scales = torch.tensor([[1.0, 2, 3, 4], [1, 2, 3, 0], [1, 2, 0, 0], [1, 2, 3, 1e-3]])
    matrices = torch.randn(4, 4, 4) @ torch.diag_embed(scales) @ torch.randn(4, 4, 4)
    weight = torch.randn(4, 4, 4)

    class Determinants(nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return torch.linalg.det(a)

    def by_definition(a: torch.Tensor) -> torch.Tensor:
        orders = itertools.permutations(range(4))
        return sum(_sign(order) * math.prod(a[:, i, j] for i, j in enumerate(order)) for order in orders)

    def derivatives(
        function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        a = matrices.to(dtype).requires_grad_()
        (first,) = torch.autograd.grad(function(a).sum(), a, create_graph=True)
        (second,) = torch.autograd.grad((first * weight.to(dtype)).sum(), a)
        return [first.detach(), second]

    model = ORTModule(Determinants())
    # Derivatives are products of three and of two entries; those of rank 2 are zero.
    lengths = matrices.norm(dim=(-2, -1))
    sizes = [lengths**3, lengths**2 * weight.norm(dim=(-2, -1))]
    got, want = derivatives(model, torch.float32), derivatives(by_definition, torch.float64)
    for ours, exact, size in zip(got, want, sizes, strict=True):
        assert ((ours - exact).norm(dim=(-2, -1)) / size).max() < 1e-5
    assert model.report().runs_in_onnxruntime


def _sign(permutation: tuple[int, ...]) -> int:
    return (-1) ** sum(a > b for a, b in itertools.combinations(permutation, 2))
