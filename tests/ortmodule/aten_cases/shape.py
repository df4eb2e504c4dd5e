"""Views, joins, repeats and padding."""

import torch
import torch.nn.functional as F

from ortmodule.aten_case import Case, T

X = T(3, 4, 5)
INTS = torch.tensor([[3, -7, 7], [5, 0, 7]])

CASES = [
    Case("view", lambda x: (x.view(12, 10), x.view(-1), x.reshape(3, -1, 2)), (T(3, 4, 10),)),
    Case("view_sizes", lambda x: x.view(x.shape[0] * x.shape[1], x.shape[2]), (X,)),
    Case("view_heads", lambda x: x.view(x.size(0), x.size(1), 2, -1).transpose(1, 2), (T(3, 4, 6),)),
    Case("flatten", lambda x: (x.flatten(1), x.flatten(), x.unflatten(1, (2, 2))), (X,)),
    Case("reshape_transposed", lambda x: x.transpose(0, 1).reshape(4, -1), (X,)),
    Case("t", lambda x: x.t() @ x, (T(3, 4),)),
    Case("t_vector", lambda x: x.t() * 2, (T(3),)),
    Case("permute", lambda x: x.permute(2, 0, -2), (X,)),
    Case("movedim", lambda x: (x.movedim(0, -1), x.swapaxes(0, 2), x.mT), (X,)),
    Case("squeeze", lambda x: (x.squeeze(), x.squeeze(1), x.squeeze(0), x.squeeze((1, 3))), (T(3, 1, 4, 1),)),
    Case("unsqueeze", lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x[:, None]), (X,)),
    Case("expand", lambda x: (x.expand(3, 4), x.expand(2, -1, 4), x.expand(3, 1)), (T(3, 1),)),
    Case("expand_sizes", lambda x, y: x.expand(y.shape[0], -1) * y, (T(1, 4), T(3, 4))),
    Case("expand_as", lambda x, y: x.expand_as(y) * y, (T(4), T(3, 4))),
    Case("repeat", lambda x: (x.repeat(2, 3), x.repeat(2, 1, 1), x.tile(2)), (T(3, 4),)),
    Case("repeat_interleave", lambda x: (x.repeat_interleave(2, 1), x.repeat_interleave(3)), (T(3, 4),)),
    Case("cat", lambda x, y: (torch.cat((x, y), 1), torch.cat((x, x), -1)), (T(3, 4), T(3, 2))),
    Case("cat_promoted", lambda x, i: torch.cat((x, i)), (T(3, 3), INTS)),
    Case("cat_empty", lambda x: torch.cat((torch.zeros(0), x)), (T(3, 4),)),
    Case("stack", lambda x, y: (torch.stack((x, y)), torch.stack((x, y), -1)), (T(3, 4), T(3, 4))),
    Case("split", lambda x: x.split(2, 1), (T(3, 5),)),
    Case("split_sizes", lambda x: x.split([1, 3, 1], 1), (T(3, 5),)),
    Case("split_by_size", lambda x, y: torch.cat(x.split(y.shape[0], 1)[::-1], 1), (T(3, 5), T(2))),
    Case("split_one", lambda x: x.split(9, 1)[0] * 2, (T(3, 5),)),
    Case("chunk", lambda x: (x.chunk(3, 1), x.chunk(2)[1])[0], (T(3, 6),)),
    Case("unbind", lambda x: (x.unbind(1)[0] * 2, x.unbind(0)[2], x.unbind(1)[3]), (X,)),
    Case("slice", lambda x: (x[1:], x[:, :-1], x[..., 1:4:2], x[:, 1:99], x[-2:]), (X,)),
    Case("slice_sizes", lambda x, y: x[:, : y.shape[0]] * 2, (T(3, 5), T(4))),
    Case("slice_all", lambda x: x[:] * x[0:3], (T(3, 5),)),
    Case("select", lambda x: (x[0], x[:, -1], x[..., 2], x.select(1, 1)), (X,)),
    Case("select_last_position", lambda x: x[:, x.shape[1] - 1], (X,)),
    Case("narrow", lambda x: x.narrow(1, 1, 2), (X,)),
    Case("flip", lambda x: (x.flip(0), x.flip((1, -1)), x.fliplr()), (X,)),
    Case("roll", lambda x: (x.roll(1, 0), x.roll((-1, 7), (1, 2)), x.roll(3)), (X,)),
    Case("rot90", lambda x: x.rot90(), (T(3, 4),)),
    Case("tril", lambda x: (x.tril(), x.triu(1), x.tril(-1)), (T(2, 4, 4),)),
    Case("tril_mask", lambda x: torch.ones_like(x, dtype=torch.bool).tril(), (T(3, 4, grad=False),)),
    Case("tril_int8", lambda i: i.to(torch.int8).tril(), (INTS,)),
    Case("diagonal", lambda x: (x.diagonal(), x.diagonal(1, 1, 2), x.diagonal(-1, -2, -1)), (X,)),
    Case("diag", lambda x: (torch.diag(x), torch.diag_embed(x, 1)), (T(3),)),
    Case("unfold", lambda x: (x.unfold(1, 2, 1), x.unfold(-1, 3, 2)), (T(3, 5, 7),)),
    # A view of an input is made by PyTorch outside of the graph, one of a result in it.
    Case("unfold_result", lambda x: ((2 * x).unfold(1, 2, 1), (3 * x).unfold(-1, 3, 2)), (T(3, 5, 7),)),
    Case("unfold_scalar", lambda x: (2 * x).unfold(0, 1, 1), (T(),)),
    Case("as_strided", lambda x: x.as_strided(x.shape, (x.shape[1], 1)) * 2, (T(3, 4),)),
    Case("pad", lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 1, 2, 0), value=3.5), F.pad(x, (-1, 1))), (X,)),
    Case("pad_bool", lambda i: F.pad(i > 0, (1, 1), value=True), (INTS,)),
    Case("pad_reflect", lambda x: F.pad(x, (1, 2), mode="reflect"), (T(2, 3, 4),)),
    Case("pad_reflect_2d", lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"), (T(2, 3, 4, 5),)),
    Case("pad_reflect_3d", lambda x: F.pad(x, (1, 0, 1, 1, 0, 1), mode="reflect"), (T(1, 2, 3, 2, 3),)),
    Case("pad_replicate_3d", lambda x: F.pad(x, (1, 2, 2, 1, 0, 1), mode="replicate"), (T(1, 2, 3, 2, 3),)),
    Case("pad_replicate", lambda x: F.pad(x, (1, 2), mode="replicate"), (T(2, 3, 4),)),
    Case("pad_replicate_2d", lambda x: F.pad(x, (1, 2, 2, 1), mode="replicate"), (T(2, 3, 4, 5),)),
    Case("pad_circular", lambda x: F.pad(x, (1, 2), mode="circular"), (T(2, 3, 4),)),
    Case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (T(2, 8, 3, 4),)),
    Case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (T(2, 3, 4, 6),)),
    Case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), (T(2, 4, 3, 3),)),
    Case("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), (T(3), T(4))),
    Case("diff", lambda x: x.diff(dim=1), (T(3, 4),)),
    Case("einsum", lambda x, y: torch.einsum("bij,kj->bik", x, y), (X, T(2, 5))),
    # ONNX Runtime moves transposes past a Pad.
    Case(
        "pad_between_transposes",
        lambda x: F.pad(x.transpose(1, 2), (0, 1)).transpose(1, 2).neg().transpose(1, 2),
        (T(2, 3, 4, 5),),
    ),
    Case(
        "pad_all_between_transposes",
        lambda x: F.pad(x.transpose(1, 2), (0, 1, 2, 3, 1, 0, 2, 2)).transpose(1, 2).neg().transpose(1, 2),
        (T(2, 3, 4, 5),),
    ),
]
