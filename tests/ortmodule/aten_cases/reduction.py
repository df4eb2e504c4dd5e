"""Reductions."""

import torch

from ortmodule.aten_case import Case, T

INTS = torch.tensor([[3, -7, 7], [5, 0, 7]])
ZEROS = torch.tensor([[1.0, 0.0, 3.0], [0.0, 0.0, 2.0]], requires_grad=True)
X = T(3, 4, 5)

WRAPPING = torch.tensor([2**62, 2**62, 5, 2**53 + 1, -3, 2**40, -(2**63), 7, 1, 3, 2**31, 1]).view(2, 3, 2)

CASES = [
    Case("sum", lambda x: (x.sum(), x.sum(1), x.sum((0, -1)), x.sum(-1, keepdim=True)), (X,)),
    Case("sum_ints", lambda i: (i.sum(), i.int().sum(0), (i > 0).sum(), i.sum(dtype=torch.float32)), (INTS,)),
    Case("mean", lambda x: (x.mean(), x.mean(1), x.mean((0, -1)), x.mean(-1, keepdim=True)), (X,)),
    Case("mean_ints", lambda i: i.mean(0, dtype=torch.float32), (INTS,)),
    Case("sum_scalar", lambda x: x.sum() + x.sum(0), (T(),)),
    Case("prod", lambda x: (x.prod(), x.prod(1), x.prod(-1, keepdim=True)), (T(3, 4),)),
    Case("prod_zeros", lambda x: x.prod(1), (ZEROS,)),
    # A product of an unknown number of integers runs in PyTorch.
    Case("prod_ints", lambda i: (i.prod(), i.prod(0)), (INTS,), dynamic=False),
    Case(
        "prod_ints_wrap",
        lambda i: (i.prod(), i.prod(0), i.prod(1, keepdim=True), i.prod(dtype=torch.int32)),
        (WRAPPING,),
        dynamic=False,
    ),
    Case(
        "sum_ints_wrap",
        lambda i: (i.sum(), i.sum(0), i.sum((2, 0)), i.sum((0, 1), keepdim=True), i.sum(dtype=torch.int32)),
        (WRAPPING,),
    ),
    Case("sum_of_selected_ints", lambda i: (i[i > 0].sum(), i[i != i].sum()), (WRAPPING,), dynamic=False),
    Case("std_large", lambda x: (x.std(), x.std(1), *torch.std_mean(x, 0)), (T(3, 4, low=-2e20, high=2e20),)),
    Case("std_small", lambda x: (x.std(), x.std(1)), (T(3, 4, low=-2e-25, high=2e-25),)),
    Case("any", lambda i: ((i > 6).any(), (i > 6).any(1), i.any(0, keepdim=True)), (INTS,)),
    Case("is_any_true", lambda i: (torch._is_any_true(i > 6), torch._is_all_true(i > 6)), (INTS,)),
    Case("all", lambda i: ((i > 6).all(), (i > -6).all(1), i.all(0)), (INTS,)),
    Case("count_nonzero", lambda i: (i.count_nonzero(), i.count_nonzero(1)), (INTS,)),
    Case("var", lambda x: (x.var(), x.var(1), x.var((0, 2), correction=0, keepdim=True)), (X,)),
    Case("std", lambda x: (x.std(), x.std(1), x.std((0, 2), correction=0, keepdim=True)), (X,)),
    Case("std_of_constant", lambda x: (x * 0).std(1), (T(3, 4),)),
    Case("var_mean", lambda x: (*torch.var_mean(x, 1), *torch.var_mean(x)), (X,)),
    Case("std_mean", lambda x: torch.std_mean(x, (0, 2), keepdim=True), (X,)),
    Case("norm", lambda x: (x.norm(), x.norm(dim=1), x.norm(1, dim=2, keepdim=True)), (X,)),
    Case("norm_of_zero", lambda x: (x * 0).norm(dim=1) + (x * 0).norm(3, dim=1), (T(3, 4),)),
    Case("norm_order", lambda x: torch.linalg.vector_norm(x, 3, dim=(0, 1)), (X,)),
    Case("norm_inf", lambda x: (x.norm(float("inf"), dim=1), x.norm(-float("inf"))), (X,)),
    Case("norm_0", lambda x: x.norm(0, dim=1) * x.sum(), (ZEROS,)),
    Case("normalize", torch.nn.functional.normalize, (X,)),
    Case("cosine_similarity", torch.nn.functional.cosine_similarity, (T(3, 4), T(3, 4))),
    Case("logsumexp", lambda x: (x.logsumexp(1), x.logsumexp((0, 2), keepdim=True)), (X,)),
    Case("nansum", lambda x: x.nansum(1), (X,)),
    Case("dist", torch.dist, (T(3, 4), T(3, 4))),
    Case("trace", torch.trace, (T(4, 4),)),
]
