"""Programs that train artifacts, and cases to train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .cases import Case, Host
from .nets import ADAPTERS, NETS
from .programs import PROGRAMS, NotHere, Program
from .programs import cpp as build_cpp


def quick_cpp(folder: Path) -> Program:
    """The example in C++ with the warnings of -O3, compiled in half of the time."""
    return build_cpp(folder, "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG")


BUILDERS = PROGRAMS | {"cpp": quick_cpp}


@pytest.fixture(scope="module")
def without_kernels() -> Iterator[None]:
    """Native kernels round in another order than the bodies, which other hosts run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXTRAIN_KERNELS", "off")
        yield


def fixture_of(name: str) -> Any:
    """Returns a fixture that builds a program and runs it, or skips the test if it cannot be run here."""

    @pytest.fixture(scope="session", name=name)
    def program(tmp_path_factory: pytest.TempPathFactory) -> Host:
        try:
            return BUILDERS[name](tmp_path_factory.mktemp(name)).run
        except NotHere as reason:
            pytest.skip(str(reason))

    return program


python, device, node, cpp, java, csharp = map(fixture_of, BUILDERS)


@pytest.fixture(params=["device", "cpp"])
def host(request: pytest.FixtureRequest) -> Host:
    """Each of the example hosts."""
    result: Host = request.getfixturevalue(request.param)
    return result


@pytest.fixture(scope="session")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Makes the case of a net or of adapters, once."""
    cases: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in cases:
            net = next(net for net in [*NETS, *ADAPTERS] if net.name == name)
            cases[name] = Case(net, tmp_path_factory.mktemp(name))
        return cases[name]

    return case
