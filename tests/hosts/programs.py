"""Programs that train artifacts from a command line (docs/devices/own-host.md): how each is built and run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnxruntime as ort

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "hosts"
WEB = ROOT / "web"

JAVA_PACKAGE = "ONNXRUNTIME_JAR"
"""Environment variable: the class path of ONNX Runtime's package for Java. Without it a stand-in takes its place."""


class NotHere(Exception):
    """Something that a program needs is not installed; the message names it."""


@dataclass(frozen=True)
class Program:
    """A program and how it is run.

    Attributes:
        command: command line, to which arguments are appended.
        environment: variables beside those of this process.
        stand_in: True if Python runs the models in place of ONNX Runtime's package for the language.
    """

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    stand_in: bool = False

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Runs the program to its end."""
        return run([*self.command, *map(str, arguments)], self.environment)


def run(command: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env=os.environ | (environment or {}),
    )


def need(*tools: str) -> None:
    """Raises NotHere if a command is not installed."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise NotHere(f"needs {' and '.join(missing)}")


def python(_: Path) -> Program:
    """The on-device API."""
    return Program([sys.executable, str(Path(__file__).with_name("python_host.py"))])


def device(_: Path) -> Program:
    """The example in Python, which needs numpy and onnxruntime only."""
    return Program([sys.executable, str(EXAMPLES / "device.py")])


def cpp(folder: Path, *flags: str) -> Program:
    """The example in C++, compiled with these flags of CMake."""
    need("cmake", "c++")
    # Windows has a .dll, macOS a .dylib; wheels call it libonnxruntime.so.1.32.0.
    libraries = [
        path
        for pattern in ("libonnxruntime.so*", "libonnxruntime*.dylib", "onnxruntime.dll")
        for path in (Path(ort.__file__).parent / "capi").glob(pattern)
    ]
    if not libraries:
        raise NotHere("the package onnxruntime has no shared library of its own")
    for command in (
        ["cmake", "-S", EXAMPLES / "cpp", "-B", folder, f"-DONNXRUNTIME_LIBRARY={libraries[0]}", *flags],
        ["cmake", "--build", folder, "--config", "Release"],
    ):
        done = run([str(part) for part in command])
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning" not in done.stdout + done.stderr
    found = (
        path for path in folder.rglob("onnxtrain_host*") if path.is_file() and path.suffix in ("", ".exe")
    )
    return Program([str(next(found))])


def compile_web(folder: Path) -> None:
    """Compiles the npm package into a folder."""
    need("node")
    if not (WEB / "node_modules" / "onnxruntime-node").is_dir():
        raise NotHere("needs the packages of web/: make web/node_modules/.installed")
    compiler = WEB / "node_modules" / "typescript" / "bin" / "tsc"
    done = run(["node", str(compiler), "-p", str(WEB / "tsconfig.json"), "--outDir", str(folder)])
    assert done.returncode == 0, done.stdout


def node(folder: Path) -> Program:
    """The npm package on onnxruntime-node."""
    compile_web(folder)
    # Node takes .js files for ES modules by the package that they lie in.
    shutil.copy(WEB / "package.json", folder)
    return Program(["node", str(WEB / "test" / "host.mjs")], {"ONNXTRAIN_WEB": str(folder / "index.js")})


def stand_in() -> dict[str, str]:
    """Variables by which stand-ins for ONNX Runtime in other languages find Python."""
    server = Path(__file__).with_name("ort_server.py")
    return {"ORT_SERVER": f"{sys.executable}\n{server}"}


def java(folder: Path) -> Program:
    """The example in Java, compiled against ONNX Runtime's package if `ONNXRUNTIME_JAR` names it."""
    need("javac")
    package = os.environ.get(JAVA_PACKAGE, "")
    sources = [*(EXAMPLES / "java").glob("*.java")]
    if not package:
        sources += Path(__file__).with_name("java").rglob("*.java")
    flags = ["--release", "11", "-Xlint:all", "-Werror", "-d", str(folder)]
    done = run(["javac", *flags, *(["-cp", package] if package else []), *map(str, sources)])
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join(filter(None, [str(folder), package]))
    # The second compiler only makes fast what runs long.
    command = ["java", "-XX:TieredStopAtLevel=1", "-Dfile.encoding=UTF-8", "-cp", path, "Host"]
    return Program(command) if package else Program(command, stand_in(), stand_in=True)


def csharp(folder: Path) -> Program:
    """The example in C#, compiled with Mono against a stand-in for ONNX Runtime's package."""
    need("mcs", "mono")
    program = folder / "host.exe"
    sources = [*(EXAMPLES / "csharp").glob("*.cs"), *Path(__file__).with_name("csharp").glob("*.cs")]
    flags = ["-langversion:7", "-warn:4", "-warnaserror", "-r:System.Core.dll", "-r:System.Numerics.dll"]
    done = run(["mcs", *flags, f"-out:{program}", *map(str, sources)])
    assert done.returncode == 0, done.stdout + done.stderr
    return Program(["mono", str(program)], stand_in(), stand_in=True)


PROGRAMS: dict[str, Callable[[Path], Program]] = {
    build.__name__: build for build in (python, device, node, cpp, java, csharp)
}
"""Builds each program in an empty folder; raises NotHere if it cannot be run on this machine."""
