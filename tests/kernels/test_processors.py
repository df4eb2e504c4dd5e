"""Kernels choose the processor's level of instructions, and nothing else of the processor changes a result."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnxruntime as ort
import pytest

from kernels import against_body, test_convolutions
from kernels.against_body import LEVELS, best_level, needs_kernels, run
from kernels.every_kernel import forget_sessions, recorded_calls, results_of_bodies
from kernels.test_convolutions import Geometry, gradient_model, inputs_of, plain
from onnxtrain.runtime import kernels
from onnxtrain.runtime.kernels import _NUMBERED, kernel_library, register_kernels

pytestmark = needs_kernels
OF_AVX2 = ["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe", "osxsave"]
OF_AVX512 = ["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]


def _level(asked: str | None = None, without: str = "") -> str:
    import onnxtrain_kernels

    return onnxtrain_kernels.level(asked, without)


@pytest.fixture
def every_level() -> None:
    if _level("baseline") != "baseline":
        pytest.skip("the kernels are compiled for this processor only")


@pytest.mark.thorough
@pytest.mark.usefixtures("every_level")
@pytest.mark.parametrize("level", LEVELS)
def test_every_kernel_at_every_level(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its body. Where there is no such level the best one is tested again."""
    monkeypatch.setenv("ONNXTRAIN_KERNELS_LEVEL", best_level(level))
    forget_sessions()
    try:
        for (name, inputs, attributes), bodies in zip(recorded_calls(), results_of_bodies(), strict=True):
            for own, body in zip(run(name, inputs, attributes, native=True), bodies, strict=True):
                np.testing.assert_array_equal(np.isfinite(own), finite := np.isfinite(body), err_msg=name)
                distance = np.linalg.norm(own[finite].astype(np.float64) - body[finite])
                assert distance <= 1e-5 * np.linalg.norm(body[finite]) + 1e-6, name
        for name in ("odd channels", "stride 2", "groups", "long rows of tiles", "depthwise, stride 2"):
            for transposed in (False, True):
                test_convolutions.check(replace(test_convolutions.GEOMETRIES[name], transposed=transposed))
    finally:
        forget_sessions()


def test_the_calls_are_of_every_kernel() -> None:
    path = kernel_library()
    assert path is not None
    with open(path, "rb") as file:
        names = {name.decode() for name in re.findall(rb"\b([A-Z]\w+)#?_float\0", file.read())}
    names.discard(
        "KernelInfoGetAttribute"
    )  # of ONNX Runtime's interface, in a library with debugging information
    of_convolutions = {name for name in names if name.startswith("Convolution")}
    assert len(of_convolutions) == 12
    # These have tests of their own, as they are functions with a number.
    names -= {name.partition("#")[0] for name in _NUMBERED}
    # Linkers keep a name that is the end of another one within that one.
    called = {name for name, *_ in recorded_calls()}
    # The number before a name may end with a byte that is a letter: 128.0 with "C".
    assert {name for name in names - of_convolutions if name[1:] not in called} <= called


@pytest.mark.usefixtures("every_level")
@pytest.mark.parametrize("missing", OF_AVX2)
def test_avx2_needs_all_of_its_instructions(missing: str) -> None:
    assert _level("avx2", missing) == _level("avx512", missing) == best_level("baseline")


@pytest.mark.usefixtures("every_level")
@pytest.mark.parametrize("missing", OF_AVX512)
def test_avx512_needs_all_of_its_instructions(missing: str) -> None:
    assert _level("avx512", missing) == best_level("avx2")


def test_a_level_that_was_not_compiled_is_left_out() -> None:
    """`make kernels` compiles the best level only, which runs whatever is asked for."""
    compiled = {level for level in LEVELS if _level(level) == level}
    assert _level() in compiled
    assert {_level(level) for level in LEVELS} == compiled
    if compiled == {"avx512"}:
        assert _level(None, "avx512f") == ""


def test_no_kernels_below_the_baseline() -> None:
    below = "sse4.2,popcnt" if _level() in ("avx2", "avx512") else ""
    assert _level(None, below) == ("" if below else "baseline")


def test_the_next_best_level_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that no level has stands for one that this processor lacks."""
    assert _level("avx1024") == _level("avx512") == best_level("avx512")
    monkeypatch.setenv("ONNXTRAIN_KERNELS_LEVEL", "avx1024")
    kernels._warn_of_level.cache_clear()
    names = "expected one of 'baseline', 'avx2', 'avx512'. Using the kernels of level"
    with pytest.warns(RuntimeWarning, match=f"='avx1024': .*{names} '{best_level('avx512')}'"):
        register_kernels(ort.SessionOptions())


def test_no_kernel_asks_for_the_number_of_processors() -> None:
    """Work is cut by its size: what reads their number would make sums of other parts on another machine."""
    path = kernel_library()
    assert path is not None
    with open(path, "rb") as file:
        content = file.read()
    asking = (b"get_nprocs", b"sched_getaffinity", b"pthread_getaffinity_np", b"sysconf", b"sysctlbyname")
    assert [name for name in asking if name in content] == []


def _normals(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def _composite(name: str, *inputs: np.ndarray, **attributes: object) -> Callable[[int], list[np.ndarray]]:
    feeds = dict(zip(against_body.COMPOSITES[name].inputs, inputs, strict=True))
    return lambda threads: run(name, feeds, attributes, native=True, threads=threads)


def _convolution(
    *sizes: int, bfloat16: bool = False, transposed: bool = False
) -> Callable[[int], list[np.ndarray]]:
    return _of_geometry(replace(plain(*sizes), transposed=transposed), bfloat16=bfloat16)


def _volumes(batch: int, channels: int, rows: int, size: int) -> Callable[[int], list[np.ndarray]]:
    ones = (1,) * 3
    return _of_geometry(Geometry(batch, 1, channels, rows, (size,) * 3, (3,) * 3, ones, ones, ones, ones))


def _of_geometry(geometry: Geometry, *, bfloat16: bool = False) -> Callable[[int], list[np.ndarray]]:
    model, feeds = gradient_model(geometry, bfloat16=bfloat16), inputs_of(geometry, 0)
    return lambda threads: test_convolutions.run(model, feeds, native=True, threads=threads)


WITH_SUMS_OF_PARTS = {
    "minimal filtering": lambda: _convolution(8, 32, 32, 28, 3),
    "minimal filtering of volumes": lambda: _volumes(3, 32, 32, 16),
    "taps": lambda: _convolution(6, 6, 8, 41, 5),
    "taps, many weights": lambda: _convolution(2, 64, 64, 17, 5),
    "transposed": lambda: _convolution(6, 6, 8, 41, 5, 2, transposed=True),
    "taps in bfloat16": lambda: _convolution(6, 6, 8, 41, 5, bfloat16=True),
    "depthwise": lambda: _convolution(9, 1, 1, 15, 3, 1, 20),
    "layer norm": lambda: _composite(
        "LayerNormalizationGradient",
        *(_normals(*shape) for shape in ((900, 64), (900, 64), (64,), (900, 1), (900, 1))),
    ),
    "attention": lambda: _composite(
        "AttentionGradient",
        *[_normals(1, 1, 400, 16)] * 4,
        np.full((1, 1, 400), 9, np.float32),
        scale=0.25,
    ),
    "LSTM": lambda: _composite(
        "LSTM",
        *(
            _normals(*shape)
            for shape in ((3, 33, 9), (1, 80, 9), (1, 80, 20), (1, 160), (1, 33, 20), (1, 33, 20))
        ),
        hidden_size=20,
    ),
    "recurrent weights": lambda: _composite(
        "RecurrentWeightGradient",
        *(
            _normals(*shape)
            for shape in ((40, 9, 300), (40, 9, 300), (40, 9, 50), (40, 1, 9, 70), (1, 9, 70))
        ),
    ),
    "product": lambda: _composite("MatrixProduct", _normals(150, 600), _normals(600, 70), transA=0, transB=0),
    "quantized product": lambda: _composite(
        "Uint4Product",
        _normals(250, 600),
        np.full((600, 640), 5, np.uint8),
        _normals(600, 20),
        np.full((600, 20), 3, np.uint8),
        block_size=32,
    ),
    "embedding": lambda: _composite(
        "EmbeddingGradient",
        _normals(3000, 40),
        np.random.default_rng(0).integers(-1500, 1500, 3000),
        np.array([1500, 40]),
    ),
}


@pytest.mark.parametrize("name", WITH_SUMS_OF_PARTS)
def test_the_same_bits_on_any_number_of_threads_and_processors(name: str) -> None:
    of_threads = WITH_SUMS_OF_PARTS[name]()
    expected = of_threads(1)
    for threads in (2, 3, 16):
        for value, reference in zip(of_threads(threads), expected, strict=True):
            np.testing.assert_array_equal(value, reference)
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if processors:
        os.sched_setaffinity(0, [min(processors)])
        try:
            for value, reference in zip(of_threads(2), expected, strict=True):
                np.testing.assert_array_equal(value, reference)
        finally:
            os.sched_setaffinity(0, processors)
