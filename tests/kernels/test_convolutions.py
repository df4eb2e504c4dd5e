"""Convolutions and their gradients by kernel and by function body, beside PyTorch in float64."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from torch.nn import functional

from kernels import against_body
from kernels.against_body import best_level, needs_kernels
from onnxtrain.autodiff import differentiate
from onnxtrain.fusion import Bfloat16ProductPass, NativeOpsPass
from onnxtrain.runtime.kernels import register_kernels

CASES = int(os.environ.get("ONNXTRAIN_FUZZ_CONVOLUTIONS", "15"))
CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


@dataclass(frozen=True)
class Geometry:
    """A convolution of `[batch, group * channels, *size]` with `[group * rows, channels, *kernel]`.

    Transposed: one of `[batch, group * rows, *counts]`, whose result has the shape above.
    """

    batch: int
    group: int
    channels: int
    rows: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    bias: bool = True
    symbolic: bool = False
    wrt: tuple[str, ...] = field(default=("x", "w", "b"))
    transposed: bool = False

    @property
    def counts(self) -> tuple[int, ...]:
        """Positions of the result."""
        axes = zip(self.size, self.kernel, self.strides, self.dilations, self.begins, self.ends, strict=True)
        return tuple((n + b + e - (k - 1) * d - 1) // s + 1 for n, k, s, d, b, e in axes)

    @property
    def behind(self) -> tuple[int, ...]:
        """Positions of the padded input behind the last window: `output_padding` of a transposed convolution."""
        axes = zip(self.size, self.kernel, self.strides, self.dilations, self.begins, self.ends, strict=True)
        return tuple((n + b + e - (k - 1) * d - 1) % s for n, k, s, d, b, e in axes)

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes of the input, the weights, the bias, and the result."""
        image = [self.batch, self.group * self.channels, *self.size]
        windows = [self.batch, self.group * self.rows, *self.counts]
        x, y = (windows, image) if self.transposed else (image, windows)
        return {"x": x, "w": [self.group * self.rows, self.channels, *self.kernel], "b": [y[1]], "y": y}


def plain(
    batch: int, channels: int, rows: int, size: int, kernel: int, stride: int = 1, group: int = 1
) -> Geometry:
    pads = (kernel // 2,) * 2
    return Geometry(
        batch, group, channels, rows, (size,) * 2, (kernel,) * 2, (stride,) * 2, (1, 1), pads, pads
    )


GEOMETRIES = {
    "three channels": plain(3, 3, 8, 16, 3),
    "as many channels as lanes": plain(2, 16, 32, 8, 3),
    "odd channels": plain(2, 17, 13, 7, 3),
    "few pixels a row": plain(9, 20, 32, 5, 3, 2),
    "few pixels a row, rows of two panels": plain(5, 17, 50, 7, 5),
    "few pixels a row, more channels than are summed at once": plain(8, 270, 64, 4, 3, 2),
    "few pixels a row, taps that reach nothing": Geometry(
        6, 1, 18, 64, (7, 8), (2, 2), (3, 3), (1, 1), (0, 0), (0, 1)
    ),
    "few pixels a row, three axes": Geometry(
        3, 1, 32, 64, (3, 6, 7), (2, 3, 2), (1, 2, 2), (2, 1, 1), (1, 0, 2), (0, 1, 1)
    ),
    "few pixels a row, transposed": replace(plain(7, 32, 24, 8, 4, 2), transposed=True),
    "few pixels a row, without bias": Geometry(
        9, 1, 32, 32, (5, 9), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), bias=False, wrt=("x", "w")
    ),
    "one tap": plain(2, 24, 40, 9, 1),
    "one tap, stride 2": plain(2, 8, 8, 9, 1, 2),
    "stride 2": plain(2, 8, 12, 15, 3, 2),
    "stride 3": plain(1, 5, 6, 17, 5, 3),
    "groups": plain(2, 4, 6, 9, 3, group=3),
    "depthwise": plain(2, 1, 1, 12, 3, group=20),
    "depthwise, stride 2": plain(2, 1, 1, 13, 3, 2, group=16),
    "depthwise of 5": plain(1, 1, 1, 33, 5, group=3),
    "depthwise, rows in parts": plain(1, 1, 1, 44, 3, 2, group=18),
    "depthwise, rows in uneven parts": Geometry(
        2, 17, 1, 1, (37, 50), (5, 3), (3, 2), (1, 2), (1, 3), (2, 0)
    ),
    "depthwise, padding beyond the kernel": Geometry(
        1, 3, 1, 1, (4, 5), (2, 2), (2, 1), (1, 1), (3, 4), (2, 3)
    ),
    "depthwise, positions that no tap reads": Geometry(
        1, 3, 1, 1, (9, 9), (2, 2), (3, 3), (1, 1), (0, 0), (0, 0)
    ),
    "depthwise, two filters": plain(2, 1, 2, 9, 3, group=5),
    "batch 1": plain(1, 32, 32, 32, 3),
    "many weights": plain(1, 160, 96, 4, 3),
    "many channels and outputs": plain(2, 170, 150, 8, 3),
    "long rows of tiles": plain(1, 40, 24, 66, 3),
    "no padding": Geometry(2, 1, 32, 40, (12, 21), (3, 3), (1, 1), (1, 1), (0, 0), (0, 0)),
    "one position": Geometry(4, 1, 6, 5, (3, 3), (3, 3), (1, 1), (1, 1), (0, 0), (0, 0)),
    "size 1": plain(1, 1, 1, 1, 1),
    "no samples": plain(0, 3, 4, 6, 3),
    "uneven padding": Geometry(2, 1, 4, 5, (6, 9), (3, 2), (1, 2), (1, 1), (0, 2), (3, 1)),
    "padding beyond the kernel": Geometry(1, 1, 2, 3, (4, 5), (2, 2), (2, 1), (1, 1), (3, 4), (2, 3)),
    "dilation": Geometry(2, 2, 3, 4, (11, 10), (3, 3), (2, 1), (2, 3), (1, 0), (2, 4)),
    "positions that no tap reads": Geometry(1, 1, 3, 2, (9, 9), (2, 2), (3, 3), (1, 1), (0, 0), (0, 0)),
    "one axis": Geometry(2, 1, 5, 7, (40,), (4,), (2,), (1,), (1,), (2,)),
    "one axis, depthwise": Geometry(2, 19, 1, 1, (40,), (3,), (1,), (2,), (2,), (2,)),
    "three axes": Geometry(2, 1, 3, 4, (5, 4, 6), (2, 3, 3), (1, 2, 1), (1, 1, 2), (1, 0, 2), (0, 1, 2)),
    "three axes, depthwise": Geometry(
        1, 5, 1, 1, (3, 6, 5), (2, 3, 3), (1, 1, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1)
    ),
    "three axes, three taps": Geometry(
        2, 1, 20, 24, (5, 6, 7), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)
    ),
    "three axes, three taps, dilated planes": Geometry(
        2, 2, 18, 20, (6, 9, 34), (2, 3, 3), (1, 1, 1), (3, 1, 1), (0, 2, 1), (2, 0, 1)
    ),
    "three axes, many weights": Geometry(
        1, 1, 70, 150, (2, 4, 4), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)
    ),
    "without bias": Geometry(
        2, 1, 4, 5, (6, 9), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), bias=False, wrt=("x", "w")
    ),
    "fixed input": Geometry(2, 1, 4, 5, (6, 9), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), wrt=("w", "b")),
    "fixed input, depthwise": Geometry(
        2, 9, 1, 1, (6, 9), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), wrt=("w", "b")
    ),
    "fixed weights": Geometry(2, 1, 4, 5, (6, 9), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), wrt=("x", "b")),
    "fixed weights, depthwise": Geometry(
        2, 9, 1, 1, (6, 9), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), wrt=("x",)
    ),
    "symbolic batch": Geometry(3, 1, 4, 5, (6, 9), (3, 3), (2, 1), (1, 1), (1, 1), (1, 1), symbolic=True),
}


def gradient_model(g: Geometry, *, bfloat16: bool = False) -> onnx.ModelProto:
    """Returns the convolution and its gradients, with the forward convolution as a function too."""
    batch = "n" if g.symbolic else g.batch
    shapes = {
        name: [batch, *shape[1:]] if name in ("x", "y") else shape
        for name, shape in g.shapes.items()
        if name != "b" or g.bias
    }
    result = shapes.pop("y")
    node = helper.make_node(
        "ConvTranspose" if g.transposed else "Conv",
        list(shapes),
        ["y"],
        strides=g.strides,
        dilations=g.dilations,
        pads=g.begins + g.ends,
        group=g.group,
        **({"output_padding": g.behind} if g.transposed else {}),
    )
    graph = helper.make_graph(
        [node],
        "convolution",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, result)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    joint = ir.from_proto(differentiate(model, of="y", wrt=list(g.wrt), cotangent="ct"))
    NativeOpsPass()(joint)
    if bfloat16:
        Bfloat16ProductPass()(joint)
    return ir.to_proto(joint)


def run(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray], *, native: bool, threads: int = 2
) -> list[np.ndarray]:
    """Returns the outputs; with kernels in a model without function bodies, so that nothing else can compute them."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    if native:
        register_kernels(options)
        model = onnx.ModelProto.FromString(model.SerializeToString())
        del model.functions[:]
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return session.run(None, {name: value for name, value in feeds.items() if name in names})


def inputs_of(g: Geometry, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"ct" if name == "y" else name: shape for name, shape in g.shapes.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def expected(g: Geometry, feeds: dict[str, np.ndarray], *, bfloat16: bool = False) -> list[np.ndarray]:
    """Returns y and the gradients by PyTorch in float64; in bfloat16 of factors that PyTorch rounds."""
    x, w, b, ct = (torch.from_numpy(feeds[name]) for name in ("x", "w", "b", "ct"))
    if bfloat16:
        x, w, ct = (value.bfloat16() for value in (x, w, ct))
    x, w, b, ct = (value.double() for value in (x, w, b, ct))
    leaves = {"x": x.requires_grad_(), "w": w.requires_grad_(), "b": b.requires_grad_()}
    pads = [n for pair in reversed(list(zip(g.begins, g.ends, strict=True))) for n in pair]
    if g.transposed:
        # PyTorch has no more positions behind the last window than the stride allows, and no uneven padding.
        whole = TRANSPOSED[len(g.size)](x, w, None, g.strides, 0, g.behind, g.group, g.dilations)
        y = functional.pad(whole, [-n for n in pads])
        y = y + b.reshape([-1, *[1] * len(g.size)]) if g.bias else y
    else:
        y = CONVOLUTIONS[len(g.size)](
            functional.pad(x, pads), w, b if g.bias else None, g.strides, 0, g.dilations, g.group
        )
    gradients = list(torch.autograd.grad(y, [leaves[name] for name in g.wrt], ct))
    if "b" in g.wrt and "w" not in g.wrt:  # a sum of its own, of what is not rounded
        gradients[g.wrt.index("b")] = torch.from_numpy(feeds["ct"]).double().sum([0, *range(2, ct.ndim)])
    return [value.detach().numpy() for value in (y, *gradients)]


def check(g: Geometry, seed: int = 0, *, bfloat16: bool = False) -> None:
    bfloat16 &= g.channels > 1 or g.group == 1  # depthwise ones stay
    bfloat16 &= not g.transposed
    model, feeds = gradient_model(g, bfloat16=bfloat16), inputs_of(g, seed)
    called = {node.op_type for node in model.graph.node if node.domain == "onnxtrain"}
    forward = f"Convolution{'Bfloat16' * bfloat16}{'Transpose' * g.transposed}_float"
    # Small planes of depthwise convolutions have a body of matrix products.
    depthwise = g.channels == 1 and not g.transposed and not bfloat16
    assert forward in called or (depthwise and "DepthwiseConvolution0_float" in called)
    assert ["Bfloat16" in name for name in called if "Gradient" in name] == [bfloat16]
    exact = expected(g, feeds, bfloat16=bfloat16)
    body, kernel = run(model, feeds, native=False), run(model, feeds, native=True)
    again = run(model, feeds, native=True, threads=1)
    for name, reference, standard, own, one in zip(("y", *g.wrt), exact, body, kernel, again, strict=True):
        assert own.shape == standard.shape == reference.shape, f"{name} of {g}"
        np.testing.assert_array_equal(own, one, err_msg=f"{name} of {g}: not the same on one thread")
        for computed in (own, standard):
            distance = float(np.linalg.norm(computed - reference))
            assert distance <= 2e-6 * float(np.linalg.norm(reference)) + 1e-12, f"{name} of {g}"


@pytest.mark.sample(every=3)
@needs_kernels
@pytest.mark.parametrize("name", GEOMETRIES)
def test_convolution(name: str) -> None:
    check(GEOMETRIES[name])


@pytest.mark.sample(every=3)
@needs_kernels
@pytest.mark.parametrize("name", GEOMETRIES)
def test_transposed_convolution(name: str) -> None:
    check(replace(GEOMETRIES[name], transposed=True))


@pytest.mark.sample(every=3)
@needs_kernels
@pytest.mark.parametrize("name", GEOMETRIES)
def test_convolution_in_bfloat16(name: str) -> None:
    check(GEOMETRIES[name], bfloat16=True)


@needs_kernels
@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_bfloat16_at_every_level_of_the_processor(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the instructions for bfloat16, and in float32 where there are none."""
    monkeypatch.setenv("ONNXTRAIN_KERNELS_LEVEL", best_level(level))
    for name in (
        "odd channels",
        "stride 2",
        "groups",
        "long rows of tiles",
        "batch 1",
        "three axes",
        "no samples",
    ):
        check(GEOMETRIES[name], bfloat16=True)


@needs_kernels
@pytest.mark.parametrize("group", [1, 7])
def test_a_depthwise_convolution_in_bfloat16(group: int) -> None:
    """As a function, which no pass writes."""
    rng = np.random.default_rng(0)
    inputs = {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in (("x", (2, 7, 9, 8)), ("w", (7, 7 // group, 3, 3)), ("b", (7,)))
    }
    attributes = {"strides": [1, 1], "dilations": [1, 1], "pads": [1, 1, 1, 1], "group": group}
    against_body.check("ConvolutionBfloat16", inputs, attributes)


def _random_geometry(rng: np.random.Generator) -> Geometry:
    while True:
        rank = int(rng.choice([1, 2, 2, 2, 3]))
        depthwise = rng.random() < 0.3
        group = int(rng.integers(1, 40 if depthwise else 4))
        channels, rows = (1, 1) if depthwise else map(int, rng.integers(1, 40, 2))
        longest = {1: 60, 2: 20, 3: 7}[rank]

        def axes(low: int, high: int, rank: int = rank) -> tuple[int, ...]:
            return tuple(int(n) for n in rng.integers(low, high + 1, rank))

        wrt = [("x", "w", "b"), ("x", "w"), ("w",), ("w", "b"), ("x",), ("x", "b")][rng.integers(6)]
        g = Geometry(
            int(rng.integers(1, 4)),
            group,
            channels,
            rows,
            axes(1, longest),
            axes(1, 4),
            axes(1, 3),
            axes(1, 2),
            axes(0, 3),
            axes(0, 3),
            bias="b" in wrt or bool(rng.integers(2)),
            symbolic=bool(rng.integers(2)),
            wrt=wrt,
        )
        if min(g.counts) > 0:
            return g


def _random_of_three_taps(rng: np.random.Generator) -> Geometry:
    """With enough channels, and a kernel of 3 x 3, or more such planes, for minimal filtering."""
    size = tuple(int(n) for n in rng.integers(1, 50 if rng.random() < 0.3 else 18, 2))
    depth = (int(rng.integers(1, 6)),) if rng.random() < 0.3 else ()
    planes, apart = (tuple(int(n) for n in rng.integers(1, 4, len(depth))) for _ in range(2))
    pads = [tuple(int(n) for n in rng.integers(0, 4, 2)) for _ in range(2)]
    around = [tuple(int(n) for n in rng.integers(0, 4, len(depth))) for _ in range(2)]
    ones = (1,) * len(depth)
    g = Geometry(
        int(rng.integers(1, 6)),
        int(rng.choice([1, 1, 2])),
        *map(int, rng.integers(18, 70, 2)),
        (*depth, *size),
        (*planes, 3, 3),
        (*ones, 1, 1),
        (*apart, 1, 1),
        (*around[0], *pads[0]),
        (*around[1], *pads[1]),
        symbolic=bool(rng.integers(2)),
        wrt=[("x", "w", "b"), ("x", "w"), ("w",), ("w", "b"), ("x",)][rng.integers(5)],
    )
    return g if min(g.counts) > 0 else _random_of_three_taps(rng)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("part", range(4))
@needs_kernels
def test_convolutions_of_three_taps(part: int) -> None:
    """`ONNXTRAIN_FUZZ_CONVOLUTIONS` is the number of cases."""
    for seed in range(part, CASES, 4):
        g = _random_of_three_taps(np.random.default_rng([seed, 3]))
        check(replace(g, transposed=seed % 3 == 1), seed, bfloat16=seed % 3 == 0)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("part", range(4))
@needs_kernels
def test_convolutions_of_random_geometry(part: int) -> None:
    """`ONNXTRAIN_FUZZ_CONVOLUTIONS` is the number of cases."""
    for seed in range(part, CASES, 4):
        g = _random_geometry(np.random.default_rng(seed))
        check(replace(g, transposed=seed % 3 == 1), seed, bfloat16=seed % 3 == 0)
