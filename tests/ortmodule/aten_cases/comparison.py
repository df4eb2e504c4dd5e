"""Comparisons, logic and bits."""

import torch

from ortmodule.aten_case import Case, T

A = torch.tensor([[-7, 7, 0], [5, 0, -1]])
B = torch.tensor([3, 0, -1])
BOTH = (A, B)

CASES = [
    Case("compare", lambda x, y: (x == y, x != y, x < y, x <= y, x > y, x >= y), BOTH),
    Case("compare_number", lambda x: (x == 0, x != 0.5, x < 1, x <= 0, x > 0.5, x >= 5), (A,)),
    Case("compare_promoted", lambda i, x: (i > x, x == i, i.int() < i, i.float() > 0), (A, T(3, grad=False))),
    Case("compare_bools", lambda i: ((i > 0) == (i > 5), (i > 0) < (i > -5), (i > 0) == 1), (A,)),
    Case("compare_size", lambda i: i < i.shape[0], (A,)),
    Case(
        "logical", lambda a, b: (a.logical_and(b), a.logical_or(b), a.logical_xor(b), a.logical_not()), BOTH
    ),
    Case("logical_float", lambda x: (x.logical_not(), x.logical_and(x > 0)), (T(4, 5, grad=False),)),
    Case("bitwise", lambda a, b: (a & b, a | b, a ^ b, ~a, a & 3), BOTH),
    Case(
        "bitwise_bool", lambda a, b: ((a > 0) & (b > 0), (a > 0) | (b > 0), (a > 0) ^ (b > 0), ~(a > 0)), BOTH
    ),
    Case(
        "shifts",
        lambda a, b: (a << b, a >> b, a << 3, a >> 2, 5 << b, -5 >> b),
        (
            torch.tensor([0, 1, -1, 5, -5, 2**62, -(2**63), 2**63 - 1])[:, None],
            torch.tensor([0, 1, 2, 31, 62, 63, 64, -1]),
        ),
    ),
    *(
        Case(
            f"shifts_{str(dtype).removeprefix('torch.')}",
            lambda a, b: (a << b, a >> b),
            (
                torch.tensor([0, 1, 3, -1, -5, 100]).to(dtype)[:, None],
                torch.tensor([0, 1, 2, 7, 8, 31, -1]).to(dtype),
            ),
        )
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)
    ),
    Case(
        "special_numbers",
        lambda x: (x.isnan(), x.isinf(), x.isfinite()),
        (torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0]),),
    ),
    Case("special_ints", lambda i: (i.isnan(), i.isinf(), i.isfinite()), (A,)),
    Case("isin", lambda a, b: (torch.isin(a, b), torch.isin(a, b[:1], invert=True)), BOTH),
    Case(
        "isin_many",
        lambda a, b: (torch.isin(a, b), torch.isin(a.int(), b.short()), torch.isin(a, b, invert=True)),
        (torch.tensor([[3, -1, 0], [39, 40, 7]]), torch.arange(20) * 2),
    ),
    Case(
        "isin_many_floats",
        lambda a, b: (torch.isin(a, b), torch.isin(a, b.int())),
        (
            torch.tensor([torch.nan, torch.inf, -torch.inf, 3.0, 3.5, -0.0, 9.0]),
            torch.tensor([*range(15), torch.nan, torch.inf, 2.0, torch.nan, 3.0]),
        ),
        dynamic=(0,),
    ),
    Case(
        "isin_of_what_is_found",
        lambda a, b: (torch.isin(a, b[b > 3]), torch.isin(a, b[b > 99])),
        (torch.arange(7.0), torch.arange(5.0)),
    ),
    Case("isclose", lambda x: torch.isclose(x, x + 1e-9), (T(4, grad=False),)),
]
