"""Programs that train artifacts, and cases to train."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import onnxruntime as ort
import pytest

from .cases import HOSTS, Case, Host
from .nets import NETS

WEB = Path(__file__).parents[2] / "web"


@pytest.fixture(scope="module")
def without_kernels() -> Iterator[None]:
    """Native kernels round in another order than the bodies, which other hosts run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXTRAIN_KERNELS", "off")
        yield


@pytest.fixture(scope="session")
def python() -> Host:
    """Runs the on-device API in a new process."""
    script = Path(__file__).with_name("python_host.py")
    return lambda *arguments: run([sys.executable, str(script), *map(str, arguments)])


@pytest.fixture(scope="session")
def device() -> Host:
    """Runs `device.py` in a new process."""
    return lambda *arguments: run([sys.executable, str(HOSTS / "device.py"), *map(str, arguments)])


@pytest.fixture(scope="session")
def cpp(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """Compiles the program in C++ and runs it."""
    missing = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    # Windows has a .dll, macOS a .dylib; wheels call it libonnxruntime.so.1.32.0.
    libraries = [
        path
        for pattern in ("libonnxruntime.so*", "libonnxruntime*.dylib", "onnxruntime.dll")
        for path in (Path(ort.__file__).parent / "capi").glob(pattern)
    ]
    if not libraries:
        pytest.skip("the package onnxruntime has no shared library of its own")
    build = tmp_path_factory.mktemp("cpp")
    quick = "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"  # with warnings as in -O3, in half of the time
    for command in (
        ["cmake", "-S", HOSTS / "cpp", "-B", build, f"-DONNXRUNTIME_LIBRARY={libraries[0]}", quick],
        ["cmake", "--build", build, "--config", "Release"],
    ):
        done = run([str(part) for part in command])
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning" not in done.stdout + done.stderr
    program = next(
        path for path in build.rglob("onnxtrain_host*") if path.is_file() and path.suffix in ("", ".exe")
    )
    return lambda *arguments: run([str(program), *map(str, arguments)])


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """Compiles the npm package and runs it on onnxruntime-node."""
    if shutil.which("node") is None:
        pytest.skip("needs Node.js")
    if not (WEB / "node_modules" / "onnxruntime-node").is_dir():
        pytest.skip("needs the packages of web/: make web/node_modules/.installed")
    built = tmp_path_factory.mktemp("web")
    compiler = WEB / "node_modules" / "typescript" / "bin" / "tsc"
    done = run(["node", str(compiler), "-p", str(WEB / "tsconfig.json"), "--outDir", str(built)])
    assert done.returncode == 0, done.stdout
    # Node takes .js files for ES modules by the package that they lie in.
    shutil.copy(WEB / "package.json", built)
    script, environment = WEB / "test" / "host.mjs", {"ONNXTRAIN_WEB": str(built / "index.js")}
    return lambda *arguments: run(["node", str(script), *map(str, arguments)], environment)


def stand_in() -> dict[str, str]:
    """Variables by which stand-ins for ONNX Runtime in other languages find Python."""
    server = Path(__file__).with_name("ort_server.py")
    return {"ORT_SERVER": f"{sys.executable}\n{server}"}


@pytest.fixture(scope="session")
def java(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """Compiles the program in Java against a stand-in for ONNX Runtime's package, and runs it."""
    if shutil.which("javac") is None:
        pytest.skip("needs javac, Java 11 or newer")
    build = tmp_path_factory.mktemp("java")
    sources = [*(HOSTS / "java").glob("*.java"), *Path(__file__).with_name("java").rglob("*.java")]
    done = run(["javac", "--release", "11", "-Xlint:all", "-Werror", "-d", str(build), *map(str, sources)])
    assert done.returncode == 0, done.stderr
    # The second compiler only makes fast what runs long.
    command = ["java", "-XX:TieredStopAtLevel=1", "-Dfile.encoding=UTF-8", "-cp", str(build), "Host"]
    return lambda *arguments: run([*command, *map(str, arguments)], stand_in())


@pytest.fixture(scope="session")
def csharp(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """Compiles the program in C# with Mono against a stand-in for ONNX Runtime's package, and runs it."""
    missing = [tool for tool in ("mcs", "mono") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    program = tmp_path_factory.mktemp("csharp") / "host.exe"
    sources = [*(HOSTS / "csharp").glob("*.cs"), *Path(__file__).with_name("csharp").glob("*.cs")]
    flags = ["-langversion:7", "-warn:4", "-warnaserror", "-r:System.Core.dll", "-r:System.Numerics.dll"]
    done = run(["mcs", *flags, f"-out:{program}", *map(str, sources)])
    assert done.returncode == 0, done.stdout + done.stderr
    return lambda *arguments: run(["mono", str(program), *map(str, arguments)], stand_in())


@pytest.fixture(params=["device", "cpp"])
def host(request: pytest.FixtureRequest) -> Host:
    """Each of the example hosts."""
    result: Host = request.getfixturevalue(request.param)
    return result


@pytest.fixture(scope="session")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Makes the case of a net, once."""
    cases: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in cases:
            net = next(net for net in NETS if net.name == name)
            cases[name] = Case(net, tmp_path_factory.mktemp(name))
        return cases[name]

    return case


def run(command: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program and wait for its end."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | (environment or {}),
    )
