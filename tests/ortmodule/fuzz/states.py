"""Statements about what lives outside of the graph: modes, errors, transforms, optimizers, long sums.

The placeholders are those of `Writer.fill`; {v} is the variable that the lines define.
"""

from __future__ import annotations

__all__ = ["ERRORS", "LONG", "MANAGERS", "STATISTICS", "TIES", "TRANSFORMS"]

MANAGERS = (
    "torch.no_grad()",
    "torch.enable_grad()",
    "torch.set_grad_enabled(False)",
    "torch.inference_mode()",
    "torch.autocast('cpu', dtype=torch.bfloat16)",
    "torch.autocast('cpu', enabled=False)",
    "torch.random.fork_rng(devices=[])",
    "sdpa_kernel(SDPBackend.MATH)",
    "torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t)",
    "torch.profiler.record_function('part')",
    "contextlib.nullcontext()",
)
"""Contexts that change what PyTorch does in them."""

ERRORS = (
    "{x1}[torch.tensor([99])]",
    "{x1}.index_select(0, torch.tensor([99]))",
    "F.embedding(torch.tensor([99]), torch.ones(3, 2))",
    "F.nll_loss(torch.ones(2, 3), torch.tensor([7, 0]))",
    "{x1} @ torch.ones(17, 3)",
    "torch.linalg.cholesky(-torch.eye(2) * {x}.detach().abs().sum() - torch.eye(2))",
    "torch.linalg.inv(torch.zeros(2, 2) * {x}.detach().sum())",
    "{x1}.scatter(0, torch.full((1,) * {x1}.dim(), 99), 1.0)",
    "1 / ({x}.detach().sum().item() * 0)",
    "[][0]",
    "fails('on purpose')",
)
"""Expressions that raise: for their data, in Python, and in a function."""

TRANSFORMS = (
    "torch.vmap(lambda t: Square.apply(t))({x1})",
    "torch.vmap(lambda t, u: Square.apply(t) * u)({x1}, {y})",
    "torch.func.grad(lambda t: Square.apply(t).sum())({x})",
    "torch.func.vjp(Square.apply, {x})[1]({y})[0]",
    "torch.func.jvp(Square.apply, ({x},), ({y},))[1]",
    "torch.func.jacrev(lambda t: Square.apply(t).sum())({x})",
    "torch.vmap(torch.func.grad(lambda t: Square.apply(t).sum()))({x1})",
    "torch.func.grad_and_value(lambda t: (Square.apply(t) * {z}.sum()).sum())({x})[0]",
    "torch.func.functional_call(nn.PReLU(), dict(weight={x}.reshape(-1)[:1]), ({y},))",
    "torch.vmap(lambda t: t.sin() * 2)({x1})",
    "torch.func.grad(lambda t: t.sigmoid().square().sum())({x})",
    "torch.func.jvp(torch.tanh, ({x},), ({y},))[1]",
    "torch.func.hessian(lambda t: t.square().sum() * t.sum())({x1}.reshape(-1)[:2])",
    "Square.apply({x})",
    "Marked.apply({x} * 1)",
    "Once.apply({x}) * {y}",
)
"""Transforms of torch.func, most of them around a custom function."""

STATISTICS = ("{v} = {x} * {l}.running_var.sum()", "{v} = {x} + {l}.running_mean.mean()")
"""Statements that read what a BatchNorm {l} keeps."""

_MANY = "({x1}.reshape(-1)[:1] + torch.linspace(0.1, 1, 30000))"

LONG = tuple(
    template.replace("{many}", _MANY)
    for template in (
        "{many}.sum() * 1e-4",
        "{many}.mean()",
        "{many}.var()",
        "{many}.std()",
        "{many}.norm() * 0.01",
        "{many}.cumsum(0)[-3:] * 1e-4",
        "{many}.logsumexp(0)",
        "{many}.softmax(0)[:3] * 1e4",
        "{many}.log_softmax(0)[:3]",
        "F.mse_loss({many}, torch.zeros(30000))",
        "F.layer_norm({many}, (30000,))[:3]",
        "{many}.reshape(3, -1).mean(1)",
        "{many}.prod() * 0 + {x}",
        "{many}.amax()",
    )
)
"""Reductions over more numbers than float32 adds up exactly."""

TIES = (
    "torch.cat([{x1}, {x1}]).topk(2, 0)[0]",
    "torch.cat([{x1}, {x1}]).max(0)[0]",
    "torch.cat([{x1}, {x1}]).amax(0)",
    "torch.cat([{x1}, {x1}]).sort(0, stable=True)[0]",
    "torch.cat([{x1}, {x1}]).cummax(0)[0]",
    "torch.maximum({x}, {x} * 1)",
    "{x}.clamp(min={x}.detach())",
    "(torch.ones_like({x}) * {x}.mean()).max()",
)
"""Selections among equal numbers, of which the gradient takes one or all."""
