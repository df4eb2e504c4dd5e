"""ONNXTRAIN_KERNELS and the installed package decide which sessions use native kernels."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxtrain.errors import InputError
from onnxtrain.runtime import kernels


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    kernels._installed.cache_clear()
    yield
    kernels._installed.cache_clear()


def _install(monkeypatch: pytest.MonkeyPatch, functions: int) -> None:
    package = types.ModuleType("onnxtrain_kernels")
    package.FUNCTIONS = functions
    package.library = lambda: Path("kernels.so")
    monkeypatch.setitem(sys.modules, "onnxtrain_kernels", package)


@pytest.mark.parametrize(
    ("value", "path"), [(None, "kernels.so"), ("on", "kernels.so"), ("AUTO ", "kernels.so"), ("off", None)]
)
def test_the_variable_turns_kernels_off(
    monkeypatch: pytest.MonkeyPatch, value: str | None, path: str | None
) -> None:
    _install(monkeypatch, kernels.FUNCTIONS)
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(kernels.VARIABLE, value)
    assert kernels.kernel_library() == path


def test_an_unknown_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "yes")
    with pytest.raises(InputError, match="ONNXTRAIN_KERNELS='yes': expected 'auto'"):
        kernels.kernel_library()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxtrain_kernels", None)
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    assert kernels.kernel_library() is None
    monkeypatch.setenv(kernels.VARIABLE, "on")
    with pytest.raises(InputError, match="onnxtrain-kernels is not installed"):
        kernels.kernel_library()


def test_kernels_of_other_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, kernels.FUNCTIONS + 1)
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    with pytest.warns(RuntimeWarning, match="training runs without native kernels"):
        assert kernels.kernel_library() is None


def test_a_package_that_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def library() -> Path:
        raise FileNotFoundError("'onnxtrain_kernels' holds no library: it is not built")

    _install(monkeypatch, kernels.FUNCTIONS)
    monkeypatch.setattr(sys.modules["onnxtrain_kernels"], "library", library)
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    assert kernels.kernel_library() is None
    monkeypatch.setenv(kernels.VARIABLE, "on")
    with pytest.raises(InputError, match="it is not built"):
        kernels.kernel_library()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            "avx2",
            "ONNXTRAIN_KERNELS_LEVEL='avx2': the package has no kernels of this level, or the processor lacks",
        ),
        (
            "AVX",
            "ONNXTRAIN_KERNELS_LEVEL='AVX': there is no such level; expected one of 'baseline', 'avx2', 'avx512'",
        ),
    ],
)
def test_a_level_that_sessions_do_not_get(monkeypatch: pytest.MonkeyPatch, wanted: str, message: str) -> None:
    _install(monkeypatch, kernels.FUNCTIONS)
    monkeypatch.setattr(sys.modules["onnxtrain_kernels"], "level", lambda: "baseline", raising=False)
    kernels._warn_of_level.cache_clear()
    with pytest.warns(RuntimeWarning, match=re.escape(message)) as warned:
        kernels._warn_of_level(wanted, "kernels.so")
    assert str(warned[0].message).endswith("Using the kernels of level 'baseline'")


def test_the_levels_are_those_of_the_library() -> None:
    text = (Path(__file__).parents[2] / "kernels/csrc/processor.cpp").read_text(encoding="utf-8")
    (names,) = re.findall(r'constexpr const char\* all\[\] = \{"", (.*)\};', text)
    assert tuple(name.strip('"') for name in names.split(", ")) == kernels.LEVELS
