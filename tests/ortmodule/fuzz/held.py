"""Writes to parameters and buffers that autograd does not see, optimizers, and statistics of norms.

The placeholders are those of `Writer.fill`.
"""

from __future__ import annotations

from torch import nn

from ortmodule.fuzz.writer import Unfit, Writer

__all__ = ["write_data", "write_optimizer", "write_statistics"]

_LINES = (
    "{p}.data = {p}.data * 0.9",
    "{p}.data.mul_(0.9)",
    "{p}.data[:1] = 0.5",
    "{p}.data.copy_({p}.detach().tanh())",
    "{p}.detach().mul_(0.9)",
    "{p}.detach().reshape(-1)[:1].zero_()",
    "{p}.data.view(-1)[:1].add_({x}.detach().mean())",
    "{b}.data = {b} + 1",
    "{b}.data.add_(1)",
    "{b}.copy_({b} * 0.9 + {x}.detach().mean())",
    "{b}.view(-1)[:1].add_({x}.detach().mean())",
    "{b}.t().mul_(0.5) if {b}.dim() < 3 else None",
    "{b}.lerp_({b} + 1, 0.1)",
    "torch.nn.init.constant_({p}, 0.1)",
    "torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector([{p}]) * 0.9, [{p}])",
    "torch._foreach_mul_([{b}], 0.9)",
    "{p}.data.sub_({p}.grad, alpha=0.1) if {p}.grad is not None else None",
    "{p}.grad = None",
)
_SWAPS = (
    "self.p0.data, self.p2.data = self.p2.data, self.p0.data",
    "self.p0.data = self.p2.data",
    "self.p2.data.copy_(self.p0)",
    "self.p2.data.lerp_(self.p0.data, 0.1)",
)
_UNDER_NO_GRAD = (
    "{p}.copy_({p} * 0.5 + {x}.mean())",
    "{p}.lerp_({p} * 0.9, 0.5)",
    "{p}.view(-1)[:1].copy_({x}.reshape(-1)[:1])",
    "{p}.add_({p}, alpha=-0.1)",
    "{b}.copy_({p}.mean() + {b} * 0.9)",
    "{b}.mul_(0.9).add_({x}.mean(), alpha=0.1)",
    "torch._foreach_lerp_([{p}], [{p} * 0.5], 0.1)",
)


def write_data(writer: Writer) -> bool:
    """Writes to a parameter or buffer, or swaps the memory of two parameters and may swap it back."""
    choose = writer.choose
    if "self.p2" in writer.tensors and writer.odds(0.5):
        swap = choose.choice(_SWAPS)
        if not writer.write([swap], []):
            return False
        made = writer.new()
        used = writer.write([f"{made} = {writer.float()} * self.p0.mean()"], [made])
        if "," in swap and writer.odds(0.7):
            writer.write([swap], [])
        return used
    if writer.odds(0.4):
        text = writer.fill(choose.choice(_UNDER_NO_GRAD))
        with writer.region("with torch.no_grad():", writer.value("torch.no_grad()")):
            return writer.write([text], [])
    return writer.write([writer.fill(choose.choice(_LINES))], [])


_OPTIMIZERS = (
    "torch.optim.SGD({parameters}, lr=0.1)",
    "torch.optim.SGD({parameters}, lr=0.1, momentum=0.9)",
    "torch.optim.Adam({parameters}, lr=0.01)",
    "torch.optim.AdamW({parameters}, lr=0.01, foreach=True)",
    "torch.optim.RMSprop({parameters}, lr=0.01)",
)


def write_optimizer(writer: Writer) -> bool:
    """Writes a step of an optimizer that the module holds; there are gradients from the second call on."""
    if "self.p0" not in writer.tensors:
        raise Unfit
    if not hasattr(writer.scope["self"], "steps"):
        optimizer = writer.choose.choice(_OPTIMIZERS).replace("{parameters}", "[self.p0]")
        writer.declare(f"self.steps = {optimizer}")
    lines = ["self.steps.step()"]
    if writer.odds(0.4):
        lines.append(f"self.steps.zero_grad(set_to_none={writer.choose.choice(['True', 'False'])})")
    return writer.write(lines, [])


_READS = (
    "{l}.running_mean * 2",
    "({l}.running_var - 1).abs().sum()",
    "{x}.mean() * {l}.running_mean",
    "{x}.mean() / ({l}.running_var + 1e-5).sqrt()",
    "{x} * {l}.num_batches_tracked",
    "{l}.running_mean.clone() + {x}.mean()",
    "{l}.running_var.detach() * {x}.sum()",
)


def write_statistics(writer: Writer) -> bool:
    """Writes a BatchNorm, or takes one that is there, and reads its running statistics."""
    net = writer.scope["self"]
    norms = [
        f"self.{name}"
        for name, layer in net.named_children()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None
    ]
    if not norms or writer.odds(0.4):
        name = writer.float(2, 3)
        size = writer.value(name).shape[1]
        layer, made = f"self.{writer.new('l')}", writer.new()
        kind = writer.choose.choice(["", ", momentum=0.5", ", momentum=None", ", affine=False"])
        writer.declare(f"{layer} = nn.BatchNorm1d({size}{kind})")
        if not writer.write([f"{made} = {layer}({name})"], [made]):
            writer.init.pop()
            delattr(net, layer.removeprefix("self."))
            return False
        norms = [layer]
    made = writer.new()
    text = writer.choose.choice(_READS).replace("{l}", writer.choose.choice(norms))
    return writer.write([f"{made} = {writer.fill(text)}"], [made])
