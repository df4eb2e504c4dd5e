"""Layers: each declares a module in `__init__` and calls it."""

from __future__ import annotations

from ortmodule.fuzz.writer import Writer

__all__ = ["LAYERS", "write_layer"]

# Rank of the input, constructor ({f} last size, {g} size of axis 1), call ({l} the layer, {x} the input), results
LAYERS: tuple[tuple[int, str, str, int], ...] = (
    (1, "nn.Linear({f}, 4)", "{l}({x})", 1),
    (1, "nn.Linear({f}, {f}, bias=False)", "{l}({x})", 1),
    (1, "nn.Sequential(nn.Linear({f}, 5), nn.ReLU(), nn.Linear(5, {f}))", "{l}({x})", 1),
    (1, "nn.Sequential(nn.Linear({f}, 4), nn.ReLU(inplace=True), nn.Dropout(0.2))", "{l}({x})", 1),
    (1, "nn.LayerNorm({f})", "{l}({x})", 1),
    (1, "nn.RMSNorm({f})", "{l}({x})", 1),
    (1, "Add({f})", "{l}({x})", 1),
    (1, "nn.PReLU()", "{l}({x})", 1),
    (1, "nn.Dropout(0.4)", "{l}({x})", 1),
    (1, "nn.ModuleList([nn.Linear({f}, {f}), nn.Tanh()])", "{l}[1]({l}[0]({x}))", 1),
    (1, "nn.ModuleDict(dict(a=nn.Linear({f}, 3)))", "{l}['a']({x})", 1),
    (1, "parametrizations.weight_norm(nn.Linear({f}, 4))", "{l}({x})", 1),
    (1, "parametrizations.spectral_norm(nn.Linear({f}, 4))", "{l}({x})", 1),
    (2, "nn.BatchNorm1d({g})", "{l}({x})", 1),
    (2, "nn.BatchNorm1d({g}, momentum=None)", "{l}({x})", 1),
    (2, "nn.BatchNorm1d({g}, track_running_stats=False)", "{l}({x})", 1),
    (2, "nn.BatchNorm1d({g}, affine=False)", "{l}({x})", 1),
    (2, "nn.Bilinear({f}, {f}, 3)", "{l}({x}, {x})", 1),
    (3, "nn.Conv1d({g}, 4, 2, padding=1)", "{l}({x})", 1),
    (3, "nn.Conv1d({g}, {g}, 3, padding='same', groups={g})", "{l}({x})", 1),
    (3, "nn.ConvTranspose1d({g}, 3, 2)", "{l}({x})", 1),
    (3, "nn.BatchNorm1d({g})", "{l}({x})", 1),
    (3, "nn.InstanceNorm1d({g}, affine=True)", "{l}({x})", 1),
    (3, "nn.LSTM({f}, 3, batch_first=True)", "{l}({x})[0]", 1),
    (3, "nn.LSTM({f}, 3)", "(lambda r: (r[0], r[1][0], r[1][1]))({l}({x}))", 3),
    (3, "nn.LSTM({f}, 2, bidirectional=True)", "{l}({x})[0]", 1),
    (3, "nn.GRU({f}, 3, batch_first=True)", "{l}({x})", 2),
    (3, "nn.GRU({f}, 3, num_layers=2, dropout=0.3)", "{l}({x})", 2),
    (3, "nn.RNN({f}, 3)", "{l}({x})", 2),
    (3, "nn.MultiheadAttention({f}, 1, batch_first=True)", "{l}({x}, {x}, {x})", 2),
    (3, "nn.MultiheadAttention({f}, 1, dropout=0.2)", "{l}({x}, {x}, {x}, need_weights=False)[0]", 1),
    (3, "nn.TransformerEncoderLayer({f}, 1, 5, dropout=0.1, batch_first=True)", "{l}({x})", 1),
    (3, "nn.TransformerEncoderLayer({f}, 1, 5, 0.0, norm_first=True)", "{l}({x})", 1),
    (2, "nn.LSTMCell({f}, 3)", "{l}({x})", 2),
    (2, "nn.GRUCell({f}, 3)", "{l}({x})", 1),
    (4, "nn.Conv2d({g}, 4, 3, padding=1)", "{l}({x})", 1),
    (4, "nn.Conv2d({g}, {g}, 3, groups={g}, stride=2, padding=1, bias=False)", "{l}({x})", 1),
    (4, "nn.Conv2d({g}, 2, 2, dilation=2)", "{l}({x})", 1),
    (4, "nn.ConvTranspose2d({g}, 3, 2, stride=2)", "{l}({x})", 1),
    (4, "nn.BatchNorm2d({g})", "{l}({x})", 1),
    (4, "nn.Sequential(nn.Conv2d({g}, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))", "{l}({x})", 1),
    (4, "nn.GroupNorm(1, {g})", "{l}({x})", 1),
    (4, "nn.MaxPool2d(2)", "{l}({x})", 1),
    (4, "nn.AdaptiveAvgPool2d(2)", "{l}({x})", 1),
    (4, "nn.Dropout2d(0.3)", "{l}({x})", 1),
    (4, "nn.Upsample(scale_factor=2, mode='nearest')", "{l}({x})", 1),
)

_OF_INDICES = (
    ("nn.Embedding(7, 4)", "{l}({n}.abs() % 7)"),
    ("nn.Embedding(7, 4, padding_idx=2)", "{l}({n}.abs() % 7)"),
    ("nn.Embedding(7, 4, max_norm=1.0)", "{l}({n}.abs() % 7)"),
    ("nn.EmbeddingBag(7, 4, mode='sum')", "{l}({n}.abs().reshape(1, -1) % 7)"),
)


def write_layer(writer: Writer) -> bool:
    """Writes a layer and its call, or the second call of a layer that is there."""
    if writer.layers and writer.odds(0.15):
        layer = writer.choose.choice(writer.layers)
        made = writer.new()
        return writer.write([f"{made} = {layer}({writer.float(1)})"], [made])
    if writer.odds(0.12):
        constructor, call = writer.choose.choice(_OF_INDICES)
        number = writer.fill("{n}")
        count, made_names = 1, [writer.new()]
        text = call.replace("{n}", number)
    else:
        rank, constructor, call, count = writer.choose.choice(LAYERS)
        exact = rank > 1
        name = writer.float(rank, rank if exact else 5)
        shape = writer.value(name).shape
        if 0 in shape:
            return False
        constructor = constructor.replace("{f}", str(shape[-1])).replace(
            "{g}", str(shape[min(1, len(shape) - 1)])
        )
        made_names = [writer.new() for _ in range(count)]
        text = call.replace("{x}", name)
    layer = f"self.{writer.new('l')}"
    writer.declare(f"{layer} = {constructor}")
    if writer.write([f"{', '.join(made_names)} = {text.replace('{l}', layer)}"], made_names):
        if count == 1 and "[" not in text:
            writer.layers.append(layer)
        return True
    writer.init.pop()
    delattr(writer.scope["self"], layer.removeprefix("self."))
    return False
