"""Custom autograd functions and modules under the transforms of `torch.func`.

The placeholders are those of `Writer.fill`; `CUSTOM` is one of `FUNCTIONS`.
"""

from __future__ import annotations

from ortmodule.fuzz.writer import Writer

__all__ = ["FUNCTIONS", "TRANSFORMED", "write_transform"]

FUNCTIONS = ("SetUp.apply", "VmapRule.apply", "Once.apply", "Dirty.apply", "Halves.apply", "Scaling.apply")
_FORWARD_MODE = ("SetUp.apply", "VmapRule.apply")
_UNDER_VMAP = ("SetUp.apply", "VmapRule.apply", "Scaling.apply")

PLAIN = (
    "CUSTOM({x})",
    "CUSTOM({x} * 1.5)",
    "CUSTOM({x}) * {y}",
    "CUSTOM(CUSTOM({x}).tanh())",
    "CUSTOM(self.p0) + {z}.mean()",
    "torch.autograd.grad(CUSTOM(q := {x} * 1.5).square().sum(), q, create_graph=True)[0]",
)
TRANSFORMED = (
    "torch.vmap(CUSTOM)({x1})",
    "torch.vmap(lambda r: CUSTOM(r * 1.5).sum())({x1})",
    "torch.vmap(torch.vmap(CUSTOM))({x2})",
    "torch.vmap(lambda r, s: CUSTOM(r) * s)({x1}, {y})",
    "torch.vmap(lambda r: CUSTOM(r) * 2, in_dims=-1, out_dims=0)({x1})",
    "torch.func.grad(lambda t: (CUSTOM(t) * ({x} + 1)).sum())({x})",
    "torch.func.grad_and_value(lambda t: CUSTOM(t).square().sum())({x})[0]",
    "torch.func.vjp(CUSTOM, {x})[1]({y})[0]",
    "torch.func.vjp(lambda t: CUSTOM(t).sin(), {x})[1](torch.ones_like({x}))[0] * {y}",
    "torch.func.jacrev(lambda t: CUSTOM(t).reshape(-1)[:3])({x1}).sum(0)",
    "torch.vmap(torch.func.grad(lambda r: CUSTOM(r).square().sum()))({x1})",
    "torch.func.grad(lambda t: torch.func.grad(lambda u: CUSTOM(u).pow(3).sum())(t).sum())({x})",
)
FORWARD = (
    "torch.func.jvp(CUSTOM, ({x},), ({y},))[1]",
    "torch.func.jvp(lambda t: CUSTOM(t).tanh() * t, ({x},), (torch.ones_like({x}),))[1]",
    "torch.func.jacfwd(lambda t: CUSTOM(t).reshape(-1)[:3])({x1}).sum(0)",
)
WITHOUT = (
    "torch.func.grad(lambda t: F.layer_norm(t, t.shape[-1:]).pow(3).sum())({x1})",
    "torch.vmap(lambda r: F.dropout(r, 0.3, self.training), randomness='different')({x1})",
    "torch.vmap(lambda r: F.dropout(r, 0.3, self.training), randomness='same')({x1})",
    "torch.func.hessian(lambda t: t.tanh().prod())({x1}.reshape(-1)[:3])",
    "torch.func.jacrev(torch.softmax)({x1}.reshape(-1)[:4], -1)",
    "torch.func.linearize(torch.sin, {x})[1]({y})",
    "torch.autograd.grad((p := {x} * 1.5).tanh().square().sum(), p, create_graph=True)[0]",
    "torch.func.functionalize(lambda t: t.clone().mul_(2).view(-1)[:2])({x})",
)


def write_transform(writer: Writer) -> bool:
    choose = writer.choose
    functional = writer.odds(0.12) and writer.layers
    if functional:
        layer = choose.choice(writer.layers)
        values = f"{{name: p * 0.5 for name, p in {layer}.named_parameters()}}"
        text = f"torch.func.functional_call({layer}, {values}, ({writer.float(1)},))"
    else:
        table, functions = choose.choices(
            [(PLAIN, FUNCTIONS), (TRANSFORMED, _UNDER_VMAP), (FORWARD, _FORWARD_MODE), (WITHOUT, FUNCTIONS)],
            [3, 6, 2, 3],
        )[0]
        text = choose.choice(table).replace("CUSTOM", choose.choice(functions))
        text = writer.fill(text)
    made = writer.new()
    return writer.write([f"{made} = {text}"], [made])
