"""Kernels of attention beside their bodies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
import pytest
import torch

from kernels.against_body import check, needs_kernels, run

pytestmark = needs_kernels
SIZES = [
    (2, 3, 5, 7, 4, 6),
    (1, 1, 1, 1, 1, 1),
    (1, 2, 130, 130, 16, 16),
    (2, 1, 40, 9, 33, 5),
    (1, 1, 300, 260, 8, 8),
]
"""Batch, heads, queries, keys, size of queries and keys, size of values."""
FEW = [(0, 2, 3, 3, 4, 4), (1, 2, 0, 3, 4, 4), (1, 2, 3, 3, 4, 0)]
"""Nothing in one of them."""
_few = [
    pytest.param(
        sizes,
        marks=pytest.mark.xfail(
            ort.__version__.startswith("1.20.") and 0 in sizes[:3],
            reason="onnxruntime 1.20 reduces no elements to one: bodies fail",
            strict=True,
        ),
    )
    for sizes in FEW
]
MASKS = [(), (1,), (7,), (5, 1), (5, 7), (3, 1, 7), (2, 1, 5, 7), (1, 3, 5, 7), (2, 3, 5, 7)]


def inputs(sizes: Sequence[int], seed: int = 0) -> dict[str, np.ndarray]:
    batch, heads, queries, keys, depth, width = sizes
    rng = np.random.default_rng(seed)
    return {
        "q": rng.standard_normal((batch, heads, queries, depth)),
        "k": rng.standard_normal((batch, heads, keys, depth)),
        "v": rng.standard_normal((batch, heads, keys, width)),
    }


def check_gradient(name: str, given: dict[str, np.ndarray], scale: float, forward: str = "") -> None:
    """The kernel beside the body, with the logarithms that the forward op gives."""
    given = {key: value.astype(np.float32) for key, value in given.items()}
    mixed, log_sum = run(forward or name, given, {"scale": scale}, native=True)
    ct = np.random.default_rng(1).standard_normal(mixed.shape).astype(np.float32)
    mask = {key: value for key, value in given.items() if key == "mask"}
    pulled = {"ct": ct, **{key: given[key] for key in "qkv"}, "log_sum": log_sum, **mask}
    size = float(np.linalg.norm(ct))
    check(f"{name}Gradient", pulled, {"scale": scale}, terms=size)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("name", ["Attention", "CausalAttention"])
@pytest.mark.parametrize("sizes", [*SIZES, *_few], ids=str)
def test_attention(name: str, sizes: Sequence[int]) -> None:
    given = inputs(sizes)
    check(name, given, {"scale": 0.3})
    check_gradient(name, given, 0.3)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("name", ["MaskedAttention", "SafeMaskedAttention"])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masked_attention(name: str, shape: Sequence[int]) -> None:
    rng = np.random.default_rng(2)
    mask = np.where(rng.random(shape) < 0.2, -np.inf, rng.standard_normal(shape))
    if shape and shape[-1] == 7:
        mask[..., 0] = 1  # something is left of each row
    elif np.isinf(mask).any():
        mask = np.where(np.isinf(mask), 0.5, mask)
    given = inputs(SIZES[0]) | {"mask": mask}
    check(name, given, {"scale": 0.3})
    check_gradient("MaskedAttention", given, 0.3, forward=name)


def masked_throughout() -> dict[str, np.ndarray]:
    """Of the five queries the second may attend to nothing."""
    mask = np.zeros((5, 7))
    mask[1] = -np.inf
    return inputs(SIZES[0]) | {"mask": mask}


def test_a_query_without_keys() -> None:
    given = masked_throughout()
    safe, log_sum = run("SafeMaskedAttention", given, {"scale": 0.3}, native=True)
    plain = run("MaskedAttention", given, {"scale": 0.3}, native=True)[0]
    assert (safe[:, :, 1] == 0).all()
    assert np.isposinf(log_sum[:, :, 1]).all()
    assert np.isnan(plain[:, :, 1]).all()
    others = [0, 2, 3, 4]
    np.testing.assert_array_equal(safe[:, :, others], plain[:, :, others])
    check("SafeMaskedAttention", given, {"scale": 0.3})
    pulled = {
        "ct": np.ones_like(safe),
        **{key: given[key] for key in "qkv"},
        "log_sum": log_sum,
        "mask": given["mask"],
    }
    for gradient in run("MaskedAttentionGradient", pulled, {"scale": 0.3}, native=True):
        assert np.isfinite(gradient).all()
    check("MaskedAttentionGradient", pulled, {"scale": 0.3})


def test_what_is_no_number_in_a_masked_row_is_seen() -> None:
    given = masked_throughout()
    given["q"][0, 0, 1, 0] = np.nan
    mixed = run("SafeMaskedAttention", given, {"scale": 0.3}, native=True)[0]
    assert np.isnan(mixed[0, 0, 1]).all()
    assert (mixed[1, :, 1] == 0).all()


def test_large_scores() -> None:
    given = inputs(SIZES[0])
    given["q"] *= 300
    check("Attention", given, {"scale": 1.0})
    check("CausalAttention", given, {"scale": 1.0})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": (2, 2, 7, 4)}, "keys must be of the batch"),
        ({"v": (2, 3, 6, 6)}, "values must be of the batch"),
        ({"mask": (5, 6)}, "a mask must have the sizes"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, tuple[int, ...]], message: str) -> None:
    given = inputs(SIZES[0]) | {"mask": np.zeros((5, 7))}
    given |= {key: np.zeros(shape) for key, shape in changed.items()}
    with pytest.raises(Exception, match=message):
        run("MaskedAttention", given, {"scale": 0.3}, native=True)


@pytest.mark.parametrize("name", ["Attention", "CausalAttention", "MaskedAttention", "SafeMaskedAttention"])
def test_no_keys(name: str) -> None:
    """Sums over nothing are zeros, as in PyTorch."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, n, size)) for n, size in ((5, 4), (0, 4), (0, 6)))
    mask = {"mask": np.zeros((5, 0))} if "Masked" in name else {}
    y, log_sum = run(name, {"q": q, "k": k, "v": v} | mask, {"scale": 0.3}, native=True)
    want = torch.nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)))
    np.testing.assert_array_equal(y, want)
    pulled = {"ct": np.ones_like(y), "q": q, "k": k, "v": v, "log_sum": log_sum} | mask
    dq, dk, dv = run(f"{name.removeprefix('Safe')}Gradient", pulled, {"scale": 0.3}, native=True)
    np.testing.assert_array_equal(dq, np.zeros_like(q))
    assert dk.shape == k.shape
    assert dv.shape == v.shape


PERMS = [(2, 0, 3, 1, 4), (2, 1, 3, 0, 4), (0, 1, 2, 3, 4), (3, 2, 0, 1, 4)]
"""Permutations of a tensor of queries, keys and values to [3, batch, heads, positions, size]."""
QKV_SIZES = [(2, 3, 7, 4), (1, 1, 1, 1), (1, 2, 130, 33), (1, 1, 300, 8), (3, 2, 16, 32)]
"""Batch, heads, positions, size."""


def packed(sizes: Sequence[int], perm: Sequence[int]) -> tuple[np.ndarray, dict[str, object]]:
    """A tensor of queries, keys and values, and the attributes of attention of it."""
    inverse = np.argsort(perm)
    x = np.random.default_rng(0).standard_normal((3, *sizes)).transpose(inverse)
    return x, {"scale": 0.3, "perm": list(perm), "y_perm": [int(i) - 1 for i in inverse if i > 0]}


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("perm", PERMS, ids=str)
@pytest.mark.parametrize("name", ["Attention", "CausalAttention", "MaskedAttention", "SafeMaskedAttention"])
@pytest.mark.parametrize("sizes", QKV_SIZES, ids=str)
def test_qkv_attention(name: str, sizes: Sequence[int], perm: Sequence[int]) -> None:
    x, attributes = packed(sizes, perm)
    mask = {}
    if "Masked" in name:
        mask["mask"] = np.random.default_rng(2).standard_normal((sizes[1], sizes[2], sizes[2]))
    check(f"Qkv{name}", {"x": x} | mask, attributes)
    y, log_sum = run(f"Qkv{name}", {"x": x} | mask, attributes, native=True)
    ct = np.random.default_rng(1).standard_normal(y.shape)
    order = {
        "scale": 0.3,
        "perm": list(perm),
        "inverse": [int(i) for i in np.argsort(perm)],
        "ct_perm": [int(i) for i in np.argsort(attributes["y_perm"])],
    }
    pulled = {"ct": ct, "x": x, "log_sum": log_sum} | mask
    check(f"Qkv{name.removeprefix('Safe')}Gradient", pulled, order, terms=float(np.linalg.norm(ct)))


@pytest.mark.parametrize("perm", PERMS[:2], ids=str)
def test_qkv_attention_has_the_bits_of_attention(perm: Sequence[int]) -> None:
    sizes = (2, 3, 70, 20)
    x, attributes = packed(sizes, perm)
    q, k, v = x.transpose(perm)
    y, log_sum = run("QkvAttention", {"x": x}, attributes, native=True)
    plain = run("Attention", {"q": q, "k": k, "v": v}, {"scale": 0.3}, native=True)
    np.testing.assert_array_equal(y, plain[0].transpose(attributes["y_perm"]))
    np.testing.assert_array_equal(log_sum, plain[1])


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 3, 0, 4), (2, 0, 3, 4)], ids=str)
def test_qkv_attention_of_nothing(sizes: Sequence[int]) -> None:
    x, attributes = packed(sizes, PERMS[0])
    y, log_sum = run("QkvAttention", {"x": x}, attributes, native=True)
    assert y.shape == (sizes[0], sizes[2], sizes[1], sizes[3])
    assert log_sum.shape == sizes[:3]
    order = {"scale": 0.3, "perm": list(PERMS[0]), "inverse": [1, 3, 0, 2, 4], "ct_perm": [0, 2, 1, 3]}
    (dx,) = run("QkvAttentionGradient", {"ct": y, "x": x, "log_sum": log_sum}, order, native=True)
    assert dx.shape == x.shape


@pytest.mark.parametrize(
    ("shape", "perm", "message"),
    [
        ((2, 7, 3, 3), [2, 0, 3, 1], "x must have five axes"),
        ((2, 7, 3, 3, 4), [2, 0, 3, 4, 1], "x must have five axes"),
        ((2, 7, 3, 3, 4), [2, 0, 0, 1, 4], "name each axis once"),
        ((2, 7, 3, 3, 4), [2, 0, 8, 1, 4], "name each axis once"),
        ((2, 7, 3, 3, 4), [2, 0, -1, 1, 4], "name each axis once"),
        ((2, 7, 2, 3, 4), [2, 0, 3, 1, 4], "must be of queries, keys and values"),
    ],
)
def test_qkv_of_other_axes_is_refused(shape: tuple[int, ...], perm: list[int], message: str) -> None:
    attributes = {"scale": 0.3, "perm": perm, "y_perm": [0, 2, 1, 3]}
    with pytest.raises(Exception, match=message):
        run("QkvAttention", {"x": np.ones(shape)}, attributes, native=True)
