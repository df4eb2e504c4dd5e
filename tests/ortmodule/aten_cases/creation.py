"""New tensors, and arithmetic on sizes."""

import torch

from ortmodule.aten_case import Case, T

X = T(3, 4)
INTS = torch.tensor([[3, -7, 7], [5, 0, 7]])

CASES = [
    Case("full", lambda x: x + torch.full((3, 1), 2.5) + torch.full((x.shape[0], 1), 2), (X,)),
    Case("full_size", lambda x: x * torch.full((2, 1, 1), x.shape[1]), (X,)),
    Case("zeros", lambda x: (torch.zeros(2, 3), torch.ones(x.shape[1], dtype=torch.int64), x * 1), (X,)),
    Case("likes", lambda x: x * torch.ones_like(x) + torch.zeros_like(x) + torch.full_like(x, 3), (X,)),
    Case("like_dtype", lambda x: (torch.zeros_like(x, dtype=torch.int32), torch.ones_like(x > 0)), (X,)),
    Case("new", lambda x: x.new_zeros(2, x.shape[0]) + x.new_ones(3) + x.new_full((2, 1), 4), (T(3),)),
    Case("empty", lambda x: torch.empty_like(x).fill_(2.0) * x + x.new_empty(4).zero_(), (X,)),
    Case("scalar_tensor", lambda x: x * torch.tensor(2.0) + torch.tensor([1.0, 2.0, 3.0, 4.0]), (X,)),
    Case("arange", lambda x: (torch.arange(5), torch.arange(2, 9, 3), torch.arange(0, 1, 0.25), x * 2), (X,)),
    Case("logspace", lambda x: x * torch.logspace(-1, 1, 5, dtype=x.dtype), (T(3, 5),)),
    Case("arange_size", lambda x: x + torch.arange(x.shape[1]) + torch.arange(x.shape[0])[:, None], (X,)),
    Case("arange_float", lambda x: x * torch.arange(1, x.shape[1] + 1, dtype=torch.float32), (X,)),
    Case("arange_step", lambda x: torch.arange(0, 2 * x.shape[1], 2) + x, (X,)),
    Case(
        "eye",
        lambda x: (x @ torch.eye(4, dtype=x.dtype), torch.eye(x.shape[0], dtype=x.dtype) @ x, torch.eye(2, 3)),
        (X,),
    ),
    Case("linspace", lambda x: x + torch.linspace(0, 1, 4), (X,)),
    Case("tril_indices", lambda x: (torch.tril_indices(3, 3), torch.triu_indices(3, 4, 1), x * 1), (X,)),
    Case("causal_mask", lambda x: torch.full((x.shape[1],) * 2, -1.0).triu(1) + x.t() @ x, (X,)),
    Case("size_arithmetic", lambda x: x * (x.shape[0] * x.shape[1] - 1) + x.numel() // 5, (X,)),
    Case(
        "size_remainder", lambda x: x * (x.shape[0] % 2 + max(x.shape[0], x.shape[1]) - x.shape[1] // 3), (X,)
    ),
    Case("size_fraction", lambda x: x / x.shape[1] ** 0.5 + x * (1 / x.shape[0]), (X,)),
    Case("size_power", lambda x: x * x.shape[0] ** 2 + x * x.shape[1] ** 5, (X,)),
    Case("size_returned", lambda x: (x * 2, x.shape[0] + 1), (X,)),
    Case(
        "position_ids", lambda i: torch.arange(i.shape[1], device=i.device).unsqueeze(0).expand_as(i), (INTS,)
    ),
    Case(
        "arange_fractions_of_sizes", lambda x: x * torch.arange(x.shape[1], -1, -1.0)[: x.shape[1]],
        (T(3, 4),),
    ),
    Case("arange_steps_to_sizes", lambda x: x * torch.arange(0.5, x.shape[1], 0.5)[: x.shape[1]], (T(3, 4),)),
    Case(
        "sum_of_sizes", lambda x, y, z: torch.cat((x, y, z)).view(x.shape[0] + y.shape[0] + z.shape[0], 2, 2),
        (T(3, 4), T(2, 4), T(5, 4)),
    ),
]  # fmt: skip
