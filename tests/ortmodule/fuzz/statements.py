"""The statements of a forward: what `expressions` and `layers` offer, in regions that change what they mean."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ortmodule.fuzz import edges, expressions, extremes, memory
from ortmodule.fuzz.held import write_data, write_optimizer, write_statistics
from ortmodule.fuzz.layers import write_layer
from ortmodule.fuzz.regions import write_context, write_switch
from ortmodule.fuzz.transforms import write_transform
from ortmodule.fuzz.writer import Unfit, Writer

__all__ = ["write_block", "write_refused", "write_statement"]

_ATTEMPTS = 12


def write_statement(writer: Writer) -> None:
    """Writes a statement that runs; after some attempts none."""
    for _ in range(_ATTEMPTS):
        kinds, weights = zip(*_KINDS.items(), strict=True)
        write = writer.choose.choices(kinds, weights)[0]
        try:
            if write(writer):
                return
        except Unfit:
            pass


def _expression(table: tuple[str, ...]) -> Callable[[Writer], bool]:
    def write(writer: Writer) -> bool:
        text = writer.fill(writer.choose.choice(table))
        _note_features(writer, text)
        # Now and then in the place of a variable, which loops and optimizers of memory trip over.
        local = [name for name in writer.tensors if not name.startswith("self.")]
        made = writer.choose.choice(local) if local and writer.odds(0.08) else writer.new()
        return writer.write([f"{made} = {text}"], [made])

    return write


def _several(writer: Writer) -> bool:
    if "several results without grad" in writer.off and not writer.grad:
        return False
    template, count = writer.choose.choice(memory.SEVERAL)
    made = [writer.new() for _ in range(count)]
    return writer.write([f"{', '.join(made)} = {writer.fill(template)}"], made)


def _write(writer: Writer) -> bool:
    text = writer.fill(writer.choose.choice(memory.WRITES))
    if not writer.grad and "write without grad" in writer.off and not text.startswith("self."):
        return False
    if "write after break" in writer.off and "break" in writer.features:
        return False
    _note_features(writer, text)
    return writer.write([text], [])


def _parameter_write(writer: Writer) -> bool:
    """Parameters are written to where autograd does not see it."""
    if "write without grad" in writer.off:
        return False
    with writer.region("with torch.no_grad():", torch.no_grad()):
        return writer.write([writer.fill(writer.choose.choice(_PARAMETER_WRITES))], [])


_PARAMETER_WRITES = (
    "{p}.mul_(0.9)",
    "{p}.clamp_(-1, 1)",
    "{p}.add_(0.1)",
    "{p}.copy_({p} * 0.5)",
    "{p}.view(-1)[0] = 0.5",
)


def _no_grad(writer: Writer) -> bool:
    header = writer.choose.choice(["with torch.no_grad():", "with torch.set_grad_enabled(False):"])
    with writer.region(header, torch.no_grad()):
        write_block(writer)
    return True


def _enable_grad(writer: Writer) -> bool:
    if writer.grad:
        return False
    with writer.region("with torch.enable_grad():", torch.enable_grad()):
        write_block(writer)
    return True


def _autocast(writer: Writer) -> bool:
    if "autocast" in writer.features:
        return False
    writer.features.add("autocast")
    header = "with torch.autocast('cpu', dtype=torch.bfloat16):"
    with writer.region(header, torch.autocast("cpu", dtype=torch.bfloat16)):
        write_block(writer)
    return True


def write_block(writer: Writer) -> None:
    """Writes one to three statements."""
    if writer.depth > 2:
        return
    for _ in range(writer.choose.randint(1, 3)):
        write_statement(writer)


_REGIONAL = (
    "{x}.detach()",
    "{x}.detach() * {y}",
    "{x} + ({x}.round() - {x}).detach()",
    "StraightThrough.apply({x})",
    "Scaled.apply({x}, {y})",
    "({x} - {x}.detach()).exp() * {y}",
    "{x}.data * {y}",
    "{x}.detach().clone().requires_grad_() * {y}",
)

_CHECKPOINTED = (
    "checkpoint(lambda t: (t * 2).tanh(), {x}, use_reentrant=False)",
    "checkpoint(F.gelu, {x}, use_reentrant=False)",
    "checkpoint(lambda t, u: F.dropout(t * u, 0.3, self.training), {x}, {y}, use_reentrant=False)",
    "checkpoint(nn.Sequential(nn.Tanh(), nn.Softplus()), {x}, use_reentrant=False)",
    "checkpoint(torch.sigmoid, {x}, use_reentrant=True)",
)


def _checkpointed(writer: Writer) -> bool:
    if "checkpoint" in writer.off:
        return False
    text = writer.fill(writer.choose.choice(_CHECKPOINTED))
    made = writer.new()
    return writer.write([f"{made} = {text}"], [made])


def _higher_order(writer: Writer) -> bool:
    if "cond" in writer.off:
        return False
    made = writer.new()
    text = writer.fill("torch.cond({x}.sum() > 0, lambda t: t + 1, lambda t: t * 2, ({x},))")
    return writer.write([f"{made} = {text}"], [made])


_REFUSED = (
    "{x1}[torch.tensor([99])]",
    "{x1}.gather(0, torch.full((1,) * {x1}.dim(), 99))",
    "{x1}.index_select(0, torch.tensor([99]))",
    "{x1}.scatter_add(0, torch.full((1,) * {x1}.dim(), 99), {x1})",
    "F.nll_loss({x2=}, torch.full(({x2=}.shape[0],), 99))",
    "F.embedding(torch.tensor([99]), {p})",
    "{x1} @ torch.ones(17, 3)",
    "{x1}.view(-1, 17)",
    "{x1}.reshape(17, 3)",
    "torch.cat([{x}, torch.ones(1, 2, 3, 4)])",
    "torch.linalg.cholesky(-torch.eye(2) * {x}.abs().sum())",
    "{x1}[{x1}.dim() + 99]",
    "{x}.sum(7)",
    "self.missing + {x}",
    "{p}.add_(1)",
    "{x}.copy_(torch.ones(17))",
    "{x1}.expand(17, 3, 2, 5, 5, 5, 5)",
    "F.conv2d({x}, torch.ones(1, 1, 1, 1))",
    "{x}.long().mean()",
    "{x} & {x}",
    "F.celu({x}, 0.0)",
    "{x}.sort(dim=7)[0]",
    "{x}.cummax(7)[0]",
    "1 - ({x} > 0)",
    "({x} > 0) - ({x} < 0)",
    "F.smooth_l1_loss({x}, {x} + 1, beta=-1)",
    "F.huber_loss({x}, {x} + 1, delta=0.0)",
    "torch.add({n}, {n}, alpha=0.5)",
    "{n}.var()",
    "{n}.softmax(-1)",
    "{n}.pow(-1)",
    "{x1}.repeat_interleave(torch.tensor([1, -1]), 0)",
    "F.binary_cross_entropy({x}.sigmoid(), torch.full_like({x}, 1.5))",
    "F.embedding_bag(torch.tensor([[0, -1]]), {p})",
    "torch.bincount(torch.tensor([1, -1]))",
    "torch.multinomial(torch.tensor([-1.0, 2.0]), 1)",
    "F.dropout({x}, 1.5)",
    "F.one_hot({n}.abs() + 1, 1)",
    "{x1}.unfold(0, 99, 1)",
    "F.pad({x1}, (-99, 0))",
    "{x1}.split(0)",
    "{x1}.chunk(0)",
    "{x}.std(7)",
    "torch.stack([])",
    "torch.quantile({x}.reshape(-1), 1.5)",
    "F.group_norm({x2}, 7)",
    "F.layer_norm({x1}, (17,))",
    "F.interpolate({x3=}, size=0)",
    "F.max_pool1d({x3=}, 99)",
    "{x1}.scatter(0, torch.zeros((1,) * {x1}.dim()), 1.0)",
    "{x1}.topk(99)[0]",
    "{x1}.kthvalue(99)[0]",
    "{x1}.narrow(0, 0, 99)",
    "{x1}.permute(0, 0)",
    "{x1}.movedim(0, 9)",
    "torch.full_like({x}, 1e40).clamp(max=3.4e39)",
    "torch.linspace(0, 1, -1)",
    "torch.arange(3, 1)",
    "{x1}.masked_fill({n}, 1.0)",
    "torch.where({x}, {x}, {x})",
    "F.nll_loss({x2=}, {x2=}.argmax(1) * 1.0)",
    "torch.einsum('ij,jk->ik', {x2=}, torch.ones(17, 2))",
    "torch.max(torch.zeros(0), 0)[0]",
    "torch.zeros(0).argmax()",
    "{x}.clamp()",
    "{x}.requires_grad_().resize_(3)",
)
_REFUSED_INDICES = (
    "{x1}.index_select(0, torch.tensor([-1]))",
    "{x1}.gather(0, torch.full((1,) * {x1}.dim(), -1))",
    "F.cross_entropy({x2=}, torch.full(({x2=}.shape[0],), -1))",
    "F.nll_loss({x2=}, torch.full(({x2=}.shape[0],), -1))",
    "{x1}.scatter(0, torch.full((1,) * {x1}.dim(), -1), 1.0)",
    "{x1}.index_add(0, torch.tensor([-1]), {x1}[:1])",
    "{x1}.index_copy(0, torch.tensor([-1]), {x1}[:1])",
    "F.embedding(torch.tensor([-1]), {p})",
)


def write_refused(writer: Writer) -> None:
    """Writes a statement that eager PyTorch refuses, without running it."""
    more = () if "negative indices" in writer.off else _REFUSED_INDICES
    # Whether an index into nothing is in range, eager PyTorch decides one way here and another way there.
    writer.takes_empty = False
    try:
        made, text = writer.new(), writer.fill(writer.choose.choice((*_REFUSED, *edges.MIXED, *more)))
    except Unfit:
        return
    finally:
        writer.takes_empty = True
    writer.body.append(f"{made} = {text}")
    writer.refused = made


_BREAKS = (
    "torch._dynamo.graph_break()",
    "float({x}.detach().mean())",
    "print(end='')",
    "{x}.detach().sum().item()",
    "{x1}.tolist()",
)


def _break(writer: Writer) -> bool:
    writer.features.add("break")
    return writer.write([writer.fill(writer.choose.choice(_BREAKS))], [])


_FLOWS = (
    ("{v} = {x} * 2 if self.training else {x} + 1",),
    ("{v} = {x} * 2 if {x}.sum() > 0 else {x} - 1",),
    ("{v} = {x}", "for i in range(3):", "    {v} = {v} * 0.5 + i"),
    ("{v} = {x}.clone()", "for i in range({x1}.shape[0]):", "    {v}[i] += i"),
    ("{v} = torch.stack([row * 2 for row in {x1}])",),
    ("{v} = sum({x1}.unbind(0))",),
    ("{v} = {x}", "while {v}.abs().sum() > 20:", "    {v} = {v} * 0.5"),
    ("if {x}.mean().item() > 0:", "    {v} = {x}.tanh()", "else:", "    {v} = {x}.sin()"),
    ("{v} = {x}", "if self.training:", "    {v} = {v} + {y}"),
    ("{v} = torch.zeros_like({x})", "{v}[:1] = {x}[:1]"),
    ("{v} = torch.zeros({x}.shape)", "{v} += {x}"),
    ("{v} = torch.empty_like({x})", "{v}.copy_({x})", "{v}.mul_({y})"),
    ("{v} = add_one({x})", "{v} = add_one({v})"),
    ("{v} = max(({x}, {y}), key=lambda t: t.numel())",),
    ("{v} = dict(a={x}, b={y})", "{v} = {v}['a'] - {v}['b']"),
    ("{v} = [{x}, {y}]", "{v}.append({v}[0] * 2)", "{v} = torch.cat([t.reshape(-1) for t in {v}])"),
    ("assert {x}.shape[-1] > 0", "{v} = {x} * {x}.shape[-1]"),
    ("{v} = {x} / {x1}.size(0)",),
    ("try:", "    {v} = {x} @ torch.ones(17, 3)", "except RuntimeError:", "    {v} = {x} * 3"),
    ("{v} = {x}", "{v} *= 2", "{v} = {v} + {x}"),
    ("{v}, _ = {x}.clone(), {x}", "_ = {v}.view(-1)", "_.mul_(2)"),
    ("{v} = getattr(self, 'seen', 0) + 1", "self.seen = {v}", "{v} = {x} * {v}"),
    ("{v} = {x} * 2", "self.kept = {v}.detach()"),
    ("{v} = {x} + (self.kept.sum() if hasattr(self, 'kept') else 0)", "self.kept = {v}.detach()"),
)


def _flow(writer: Writer) -> bool:
    made = writer.new()
    text = writer.fill("\n".join(writer.choose.choice(_FLOWS)).replace("{v}", made))
    if ".item()" in text or "> 20" in text or ".sum() > 0" in text:
        writer.features.add("break")
    if writer.depth and "self." in text and not writer.grad:
        return False
    return writer.write(text.splitlines(), [made])


def _rebound(writer: Writer) -> bool:
    """A buffer takes another tensor."""
    name = writer.fill("{b}")
    text = writer.choose.choice(["{b} * 0.9", "{b} + 1", "({b} + {x}.detach().mean())"])
    return writer.write([f"{name} = {writer.fill(text.replace('{b}', name))}"], [])


def _draw(writer: Writer) -> bool:
    """Random numbers of all kinds; those of float64 are others."""
    writer.features.add("draws")
    if writer.odds(0.3):
        return writer.write([writer.fill(writer.choose.choice(edges.UNREAD_DRAWS))], [])
    made = writer.new()
    return writer.write([f"{made} = {writer.fill(writer.choose.choice(edges.DRAWS))}"], [made])


def _read(writer: Writer) -> bool:
    """Numbers that are read from tensors; Dynamo may end its graph there."""
    writer.features.add("break")
    made = writer.new()
    table = edges.INDICES if writer.odds(0.3) else edges.NUMBERS
    return writer.write([f"{made} = {writer.fill(writer.choose.choice(table))}"], [made])


def _note_features(writer: Writer, text: str) -> None:
    if "alpha_dropout" in text or "randperm" in text:
        writer.features.add("draws")
    if any(
        word in text for word in ("[{x1} > 0]", "nonzero", "masked_select", "torch.where({m})", "bincount")
    ):
        writer.features.add("break")


_KINDS: dict[Callable[[Writer], bool], float] = {
    _expression(expressions.POINTWISE): 22,
    _expression(expressions.REDUCTIONS): 9,
    _several: 9,
    _expression(memory.VIEWS): 20,
    _expression(memory.INDEXING): 10,
    _expression(expressions.STRUCTURED): 10,
    _expression(expressions.DTYPES): 9,
    _expression(_REGIONAL): 5,
    _write: 18,
    write_layer: 14,
    _flow: 5,
    _no_grad: 4,
    _enable_grad: 6,
    _parameter_write: 1,
    _autocast: 1.2,
    _checkpointed: 2,
    _higher_order: 0.5,
    _break: 2,
    _read: 5,
    _draw: 2,
    _rebound: 1,
    write_context: 7,
    write_switch: 1.2,
    write_transform: 6,
    write_data: 5,
    write_optimizer: 1.2,
    write_statistics: 3,
    _expression(extremes.LONG): 3,
    _expression(extremes.TIES): 3,
    _expression(extremes.SPECIAL): 3,
    _expression(extremes.EMPTY): 3,
    extremes.write_self_holding: 1,
    extremes.write_lazy: 1,
}
