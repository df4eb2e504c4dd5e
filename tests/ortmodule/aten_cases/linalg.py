"""Products of matrices and vectors."""

import torch
import torch.nn.functional as F

from ortmodule.aten_case import Case, T

CASES = [
    Case("mm", torch.mm, (T(2, 3), T(3, 4))),
    Case("bmm", torch.bmm, (T(2, 3, 4), T(2, 4, 5))),
    Case("mv", torch.mv, (T(2, 3), T(3))),
    Case("mv_of_transposed", lambda a, b: torch.mv(a.t(), b), (T(3, 2), T(3))),
    Case("matmul_of_transposed_and_vector", lambda a, b: a.mT @ b, (T(2, 4, 3), T(4))),
    Case("dot", torch.dot, (T(5), T(5))),
    Case("matmul_broadcast", torch.matmul, (T(2, 3, 4, 5), T(5, 6))),
    Case("linear", F.linear, (T(2, 3, 4), T(5, 4), T(5))),
    Case("linear_without_bias", F.linear, (T(2, 3, 4), T(5, 4))),
    Case("linear_vector", F.linear, (T(4), T(5, 4), T(5))),
    Case("addmm", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (T(4), T(2, 3), T(3, 4))),
    Case("addmm_beta_zero", lambda c, a, b: torch.addmm(c, a, b, beta=0), (T(4), T(2, 3), T(3, 4))),
    Case(
        "baddbmm",
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
        (T(3, 5), T(2, 3, 4), T(2, 4, 5)),
    ),
    Case("addbmm", torch.addbmm, (T(3, 5), T(2, 3, 4), T(2, 4, 5))),
    Case("addmv_of_transposed", lambda c, a, b: torch.addmv(c, a.t(), b), (T(2), T(3, 2), T(3))),
    Case("addmv", lambda c, a, b: torch.addmv(c, a, b, alpha=0.5), (T(2), T(2, 3), T(3))),
    Case("addr", lambda c, a, b: torch.addr(c, a, b, beta=2), (T(2, 3), T(2), T(3))),
    Case("bilinear_form", F.bilinear, (T(2, 3), T(2, 4), T(5, 3, 4), T(5))),
    Case("einsum_batch", lambda a, b: torch.einsum("bij,bkj->bik", a, b), (T(2, 3, 4), T(2, 5, 4))),
    Case("cdist", lambda a, b: (torch.cdist(a, b), torch.cdist(a, b, 1.0)), (T(2, 3, 4), T(2, 5, 4))),
    Case("cdist_inf", lambda a, b: torch.cdist(a, b, float("inf")), (T(3, 4), T(5, 4))),
    Case("cdist_of_itself", lambda a: torch.cdist(a, a), (T(3, 4),), tolerance=1e-4),  # of equal points
    Case("pdist", lambda x: (F.pdist(x), F.pdist(x, 1.0)), (T(5, 3),)),
    Case("pdist_inf", lambda x: F.pdist(x, float("inf")), (T(4, 3),)),
    Case("pdist_of_two_rows", F.pdist, (T(2, 3),), dynamic=False),
    Case("pdist_of_equal_rows", lambda x: F.pdist(torch.cat((x, x))), (T(2, 3),)),
]
