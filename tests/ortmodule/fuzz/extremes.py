"""Long reductions, ties, special values, tensors without elements, containers that hold themselves, lazy modules.

The placeholders are those of `Writer.fill`.
"""

from __future__ import annotations

from ortmodule.fuzz.writer import Writer

__all__ = ["EMPTY", "LONG", "LONG_ROW", "SPECIAL", "TIES", "write_lazy", "write_self_holding"]

LONG_ROW = "(torch.cos(torch.arange("
"""Start of a row of many numbers."""

_ROW = LONG_ROW + "LENGTH, dtype=FLOAT)) + {c} + {x}.mean())"
_LONG_ROWS = (
    "ROW.mean()",
    "ROW.sum() / LENGTH",
    "ROW.var()",
    "ROW.std(correction=0)",
    "ROW.norm() / LENGTH ** 0.5",
    "ROW.cumsum(0)[-3:] / LENGTH",
    "ROW.logsumexp(0)",
    "ROW.softmax(0)[:4] * LENGTH",
    "ROW.log_softmax(0)[-4:]",
    "F.mse_loss(ROW, torch.zeros(LENGTH, dtype=FLOAT))",
    "F.l1_loss(ROW, torch.full((LENGTH,), 0.3, dtype=FLOAT))",
    "F.binary_cross_entropy_with_logits(ROW, torch.ones(LENGTH, dtype=FLOAT))",
    "F.layer_norm(ROW, (LENGTH,))[:4]",
    "F.rms_norm(ROW, (LENGTH,))[:4]",
    "F.group_norm(ROW.reshape(1, 4, -1), 2).reshape(-1)[:4]",
    "F.batch_norm(ROW.reshape(-1, 4), None, None, training=True)[:2]",
    "(ROW @ torch.ones(LENGTH, dtype=FLOAT)) / LENGTH",
    "torch.var_mean(ROW)[0]",
    "ROW.reshape(4, -1).mean(1)",
    "ROW.reshape(-1, 4).std(0)",
    "F.avg_pool1d(ROW[None, None], LENGTH // 2)[0, 0]",
    "F.cosine_similarity(ROW, torch.ones(LENGTH, dtype=FLOAT), dim=0)",
    "F.kl_div(ROW.log_softmax(0), torch.full((LENGTH,), 1 / LENGTH, dtype=FLOAT), reduction='sum')",
    "F.smooth_l1_loss(ROW, torch.zeros(LENGTH, dtype=FLOAT))",
    "ROW.square().mean().rsqrt()",
)
LONG = tuple(
    row.replace("ROW", _ROW).replace("LENGTH", str(length))
    for row in _LONG_ROWS
    for length in (10_000, 40_000, 100_000)
)

TIES = (
    "{x1}.relu().max({d})[0]",
    "{x1}.relu().amax({d})",
    "{x1}.relu().min({d})[0]",
    "{x1}.relu().max()",
    "{x1}.clamp(-0.5, 0.5).aminmax(dim={d})[1]",
    "{x1}.relu().sort({d}, stable=True)[0]",
    "{x1}.relu().sort({d}, stable=True, descending=True)[0]",
    "{x1}.relu().argsort({d}, stable=True) * 1.0",
    "{x1}.relu().topk({k}, {d})[0]",
    "{x1}.relu().cummax({d})[0]",
    "{x1}.relu().cummin({d})[1] * 1.0",
    "{x1}.clamp(-0.3, 0.3).median()",
    "{x1}.relu().argmax({d}) * 1.0",
    "{x1}.relu().round().unique(return_counts=True)[1].sum() * {x}.mean()",
    "torch.maximum({x}.relu(), {y}.relu())",
    "F.max_pool1d({x3=}.relu(), 2, ceil_mode=True)",
    "F.adaptive_max_pool1d({x3=}.relu(), 1)",
    "{x1}.relu().logcumsumexp({d})",
    "{x1}.relu().quantile(0.5)",
    "torch.searchsorted({x1}.relu().reshape(-1).sort()[0], {x}.relu().reshape(-1)[:3].contiguous()) * 1.0",
)

_SPECIALS = "torch.tensor([0.0, -0.0, float('inf'), float('-inf'), float('nan'), 1e-41, -1e-41, 1e30, 1.0])"
_OF_SPECIALS = (
    "VALUES.sort(stable=True)[1] * {x}.mean()",
    "VALUES.argmax() * {x}.mean()",
    "VALUES.argmin() * {x}.mean()",
    "VALUES.isnan().sum() * {x}.mean()",
    "VALUES.nan_to_num(0.5, 2.0, -2.0).tanh() * {x}.mean()",
    "VALUES.nansum().clamp(-3, 3).nan_to_num() * {x}.mean()",
    "VALUES.nanmedian() * {x}.mean()",
    "VALUES.cummax(0)[1] * {x}.mean()",
    "VALUES.signbit() * {x}.mean()",
    "(VALUES == VALUES.flip(0)) * {x}.mean()",
    "torch.isin(VALUES, VALUES[4:]) * {x}.mean()",
    "torch.bucketize(VALUES, torch.tensor([-1.0, 0.0, 2.0])) * {x}.mean()",
    "VALUES.unique(return_inverse=True)[1].sum() * {x}.mean()",
    "torch.where(VALUES.isfinite(), VALUES, 0.0).clamp(-1, 1) * {x}.mean()",
    "VALUES.masked_fill(~VALUES.isfinite(), 0.0).clamp(-2, 2) * {x}.mean()",
    "VALUES.count_nonzero() * {x}.mean()",
    "VALUES.topk(3)[1] * {x}.mean()",
    "VALUES[:3].softmax(0).nan_to_num(0.25) * {x}.mean()",
    "({x} - {x}).masked_fill({x} > 0, float('-inf')).softmax(-1).nan_to_num(0.5)",
    "{x1}.masked_fill({x1} > 0.5, float('-inf')).logsumexp({d}).clamp(-5, 5).detach()",
    "{x1}.masked_fill({x1} > 0, float('nan')).nanmean({d}).nan_to_num(0.1).detach()",
    "({x} * 0.0).sign().copysign(-{x})",
    "({x}.relu() * -1.0).signbit() * {x}",
    "(torch.full((4,), torch.iinfo(torch.int64).max) // -1 % 7) * {x}.mean()",
    "(torch.full((3,), torch.iinfo(torch.int32).min, dtype=torch.int32) + 1) // -1 % 7 * {x}.mean()",
    "(torch.tensor([-(2**63), 5]) // torch.tensor([3, 2]) % 7) * {x}.mean()",
    "(torch.full((2,), torch.iinfo(torch.int64).max).sum() % 7) * {x}.mean()",
    "(torch.tensor([2**62, 2**62, 5]).cumsum(0) % 7) * {x}.mean()",
    "(torch.tensor([200, 100], dtype=torch.uint8) + torch.tensor([100, 7], dtype=torch.uint8)) * {x}.mean()",
    "(torch.tensor([-7, 7]) % torch.tensor([-3, 3])) * {x}.mean()",
    "torch.div(torch.tensor([-7, 7]), torch.tensor([2, -2]), rounding_mode='trunc') * {x}.mean()",
    "torch.fmod(torch.tensor([-7, 7]), 3) * {x}.mean()",
    "(torch.tensor([1, -1]) << 3) * {x}.mean()",
)
SPECIAL = tuple(text.replace("VALUES", _SPECIALS) for text in _OF_SPECIALS)

EMPTY = (
    "{x1}[:0].sum() + {x}",
    "{x1}[:0].mean(0).nan_to_num(0.5)",
    "{x1}[:0].prod(0)",
    "{x1}[:0].norm() + {x}",
    "{x1}[:0].std().nan_to_num(0.5) + {x}.mean()",
    "torch.cat([{x1}[:0], {x1}])",
    "{x1}[:0].softmax(-1)",
    "{x1}[:0].cumsum(0)",
    "{x1}[:0].sort(0)[0]",
    "{x1}[:0].relu().flip(0)",
    "torch.logsumexp({x1}[:0].reshape(0, 1), 1)",
    "torch.einsum('ij,jk->ik', {x2=}[:0], {x2=}.t())",
    "torch.einsum('ij,ik->jk', {x2=}[:0], {x2=}[:0])",
    "{x2=}[:0].t() @ {x2=}[:0] + 1",
    "{x2=}[:, :0] @ {x2=}[:, :0].t()",
    "torch.complex({x1}[:0], {x1}[:0]).abs()",
    "torch.view_as_real(torch.complex({x1}[:0], {x1}[:0]))",
    "torch.complex({x}, {y}).angle().clamp(-3, 3).detach()",
    "{x1}.scatter(0, torch.zeros((0,) * {x1}.dim(), dtype=torch.int64), 1.0)",
    "{x1}.index_add(0, torch.zeros(0, dtype=torch.int64), {x1}[:0])",
    "{x1}.index_select(0, torch.zeros(0, dtype=torch.int64))",
    "{x1}[torch.zeros(0, dtype=torch.int64)].sum(0)",
    "{x1}[{x1} > 1e9].sum() + {x}",
    "F.linear({x1}[:0], torch.ones(2, {x1}.shape[-1], dtype=FLOAT))",
    "F.layer_norm({x1}[:0], {x1}.shape[-1:])",
    "F.mse_loss({x1}[:0], {x1}[:0]).nan_to_num(0.5) + {x}.mean()",
    "torch.stack([{x1}[:0]] * 2)",
    "{x1}.unfold(0, 1, 1)[:0]",
    "F.pad({x1}[:0], (1, 1))",
    "{x1}[:0].nonzero() * 1.0",
    "{x1}[:0].repeat(*[2] * {x1}.dim())",
    "torch.zeros(0, dtype=FLOAT).new_full((2,), 3.0) * {x}.mean()",
)


_SELF_HOLDING = (
    ("box = [{x}]", "box.append(box)", "{v} = box[1][1][0] * 2"),
    ("box = dict(value={x})", "box['self'] = box", "{v} = box['self']['self']['value'] * 2"),
    ("box = [{x}, [{y}]]", "box[1].append(box)", "{v} = box[1][1][0] + box[1][0]"),
    ("self.box = [self]", "{v} = {x} * len(self.box)"),
    ("self.box = []", "self.box.append(self.box)", "{v} = {x} * len(self.box[0])"),
    ("box = [{x}]", "box.append(lambda: box[0] * 2)", "{v} = box[1]()"),
    ("self.box = dict(net=self)", "{v} = {x} + self.box['net'].training"),
)


def write_self_holding(writer: Writer) -> bool:
    """Writes a container that holds itself."""
    made = writer.new()
    text = writer.fill("\n".join(writer.choose.choice(_SELF_HOLDING)).replace("{v}", made))
    return writer.write(text.splitlines(), [made])


_LAZY = (
    (1, "nn.LazyLinear(3)"),
    (1, "nn.LazyLinear(2, bias=False)"),
    (2, "nn.LazyBatchNorm1d()"),
    (3, "nn.LazyConv1d(2, 2)"),
    (3, "nn.LazyInstanceNorm1d(affine=True)"),
    (4, "nn.LazyConv2d(2, 2)"),
    (1, "nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(2))"),
)


def write_lazy(writer: Writer) -> bool:
    """Writes a layer whose parameters the first call makes, from numbers that are others in float64."""
    rank, constructor = writer.choose.choice(_LAZY)
    name = writer.float(rank, rank if rank > 1 else 5)
    if 0 in writer.value(name).shape:
        return False
    layer, made = f"self.{writer.new('l')}", writer.new()
    writer.declare(f"{layer} = {constructor}")
    if writer.write([f"{made} = {layer}({name})"], [made]):
        writer.features.add("draws")
        writer.features.add("lazy")
        return True
    writer.init.pop()
    delattr(writer.scope["self"], layer.removeprefix("self."))
    return False
