"""Statements between Python and the graph: numbers read from tensors, random numbers, mixed dtypes.

The placeholders are those of `Writer.fill`.
"""

from __future__ import annotations

__all__ = ["DRAWS", "INDICES", "MIXED", "NUMBERS", "UNREAD_DRAWS"]

NUMBERS = (
    "{x} * {y}.max().item()",
    "{x} * {y}.detach().max().item()",
    "{x} * float({y}.detach().sum())",
    "{x} / (1 + {y}.norm().item())",
    "{x} * min(1.0, 1.0 / (1e-6 + {y}.norm().item()))",
    "{x} - max({x}.mean().item(), {y}.mean().item())",
    "{x}.square().mean() / (1 + {x}.square().mean().item())",
    "torch.add({x}, {z}, alpha={x}.mean().item())",
    "torch.lerp({x}, {y}, {x}.abs().mean().item())",
    "torch.addcmul({x}, {y}, {y}, value={x}.mean().item())",
    "{x}.clamp(max={y}.mean().item())",
    "torch.full_like({x}, {y}.max().item()) + {x}",
    "{x}.sum() * torch.full(({k},), {x}.sum().item())",
    "{x} * torch.tensor({y}.max().item())",
    "{x} * torch.tensor([{y}.max().item(), 1.0])[0]",
    "{x}.masked_fill({x} > 0, {y}.min().item())",
    "torch.where({x} > 0, {x}, {y}.mean().item())",
    "F.leaky_relu({x}, {y}.sigmoid().mean().item())",
    "F.pad({x1}, (1, 0), value={y}.mean().item())",
    "({x}.abs() + 0.1) ** (1 + {y}.sigmoid().mean().item())",
    "({x} / (0.1 + {y}.abs().max().item()) * 7).round() + {x}",
    "{x} * {p}.abs().max().item()",
    "{x} * {b}.sum().item()",
    "{x} * int({y}.sum())",
    "{x} * bool({y}.sum() > 0)",
    "{x} * round({y}.mean().item(), 2)",
    "{x} * sum({x1}.reshape(-1)[:2].tolist())",
    "{x} * (2 * {y}.mean().item() - {x}.mean().item() ** 2)",
)

INDICES = (
    "{x2=}[:, {x2=}[0].argmax().item()]",
    "{x2=}[{x2=}[:, 0].argmax().item(), {x2=}[0].argmax().item()]",
    "{x1}[..., {x1}.reshape(-1, {x1}.shape[-1])[0].argmax().item()]",
    "{x1}[None, {x1}.reshape({x1}.shape[0], -1).sum(1).argmax().item()]",
    "{x1}[{x1}.reshape({x1}.shape[0], -1).sum(1).argmax().item()]",
    "{x1}[: int({x1}.sum() > 0.0123) + 1]",
    "{x1}.narrow(0, {x1}.reshape({x1}.shape[0], -1).sum(1).argmax().item(), 1)",
    "{x1}.roll(int({x1}.mean() > 0.0123), 0)",
    "{x1}.select(0, {x1}.reshape({x1}.shape[0], -1).sum(1).argmin().item())",
)

DRAWS = (
    "F.rrelu({x}, training=True)",
    "F.rrelu({x}, training=self.training)",
    "torch.bernoulli({x}.sigmoid()) * {y}",
    "torch.poisson({x}.abs().clamp(max=9)) * {y}",
    "torch.normal({x}, {x}.abs() + 0.1)",
    "torch.normal({x}, 0.5)",
    "torch.binomial(torch.full_like({x}, 5.0), {x}.detach().sigmoid()) + {x}",
    "torch._standard_gamma({x}.abs() + 0.5)",
    "torch.empty_like({x}).geometric_(0.4) + {x}",
    "torch.empty_like({x}).log_normal_().clamp(max=9) + {x}",
    "torch.empty_like({x}).cauchy_().clamp(-9, 9) + {x}",
    "torch.empty_like({x}).exponential_() * {x}",
    "torch.empty_like({x}).random_(1, 7) * {x}",
    "torch.randint_like({x}, 7) * {x}",
    "F.gumbel_softmax({x1}, dim={d})",
    "F.feature_alpha_dropout({x2}, 0.4, training=True)",
    "torch.multinomial({x2=}.softmax(-1), 2, replacement=True)",
)

UNREAD_DRAWS = (
    "torch.poisson({x}.abs().clamp(max=9))",
    "torch.bernoulli({x}.sigmoid())",
    "torch.binomial(torch.full_like({x}, 5.0), {x}.detach().sigmoid())",
    "torch.empty_like({x}).geometric_(0.4)",
    "torch.empty_like({x}).cauchy_()",
    "F.rrelu({x}, training=True)",
    "torch.rand_like({x})",
    "torch._standard_gamma({x}.abs() + 0.5)",
)
"""Draws whose results nobody reads, but which later draws depend on."""

MIXED = (
    "{x2=}.double() @ {x2=}.t()",
    "{x2=}.to(torch.bfloat16) @ {x2=}.t()",
    "F.linear({x1}.double(), {p})",
    "F.linear({x1}, {p}.to(torch.bfloat16))",
    "{x1}.index_add(0, torch.tensor([0]), {x1}[:1].to(torch.bfloat16))",
    "{x1}.index_copy(0, torch.tensor([0]), {x1}[:1].to(torch.bfloat16))",
    "torch.lerp({x}, {x}.to(torch.bfloat16), 0.3)",
    "torch.mv({x2=}, {x2=}[0].half())",
    "{x1}.scatter_add(0, torch.zeros((1,) * {x1}.dim(), dtype=torch.int64), {x1}.half())",
    "{x1}.gather(0, torch.zeros((1,) * {x1}.dim(), dtype=torch.int32))",
    "torch.bmm({x3=}, {x3=}.mT.half())",
    "F.cross_entropy({x2=}, {x2=}.argmax(-1).int())",
)
"""Expressions that eager PyTorch refuses for their dtypes."""
