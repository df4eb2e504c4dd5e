"""Compiles ONNX Runtime's package for Java from its source, around the library of the Python package onnxruntime.

    apt-get source --download-only onnxruntime    # of Debian 13 or newer, or a checkout of ONNX Runtime
    tar xf onnxruntime_*.orig.tar.xz
    python tests/hosts/onnxruntime_jar.py onnxruntime-* onnxruntime.jar
    ONNXRUNTIME_JAR=$PWD/onnxruntime.jar pytest -q tests/hosts/test_vectors.py -k java

For Linux. Instead, the jar from Maven Central will do: com.microsoft.onnxruntime:onnxruntime.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import onnxruntime as ort


def build(source: Path, jar: Path) -> None:
    """Writes the jar: classes, the library of the wheel, and the one between both, which is written in C."""
    library = next((Path(ort.__file__).parent / "capi").glob("libonnxruntime.so*"))
    home = Path(shutil.which("javac") or "").resolve().parents[1]
    main = source / "java" / "src" / "main"
    with tempfile.TemporaryDirectory() as folder:
        classes, headers = Path(folder, "classes"), Path(folder, "headers")
        machine = {"x86_64": "x64"}.get(platform.machine(), platform.machine())
        natives = classes / "ai" / "onnxruntime" / "native" / f"linux-{machine}"
        natives.mkdir(parents=True)
        headers.mkdir()
        # CMake writes this one; what it defines is only read where a provider is built in.
        (headers / "onnxruntime_config.h").touch()
        java = [path for part in ("java", "jvm") for path in (main / part).rglob("*.java")]
        run("javac", "--release", "11", "-nowarn", "-h", headers, "-d", classes, *java)
        # Training was removed from the library.
        c = [path for path in (main / "native").glob("*.c") if "Training" not in path.name]
        api = source / "include" / "onnxruntime"
        training = source / "orttraining" / "orttraining" / "training_api" / "include"
        include = [headers, home / "include", home / "include" / "linux"]
        include += [source / "include", api, api / "core" / "session", training]
        run(
            *("cc", "-shared", "-fPIC", "-O2", "-w", f'-DORT_VERSION="{ort.__version__}"'),
            *(f"-I{path}" for path in include),
            *(*c, library, "-o", natives / "libonnxruntime4j_jni.so"),
        )
        shutil.copy(library, natives / "libonnxruntime.so")
        run("jar", "--create", "--file", jar.absolute(), "-C", classes, ".")


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of ONNX Runtime's source")
    parser.add_argument("jar", type=Path, help="file to write")
    build(**vars(parser.parse_args()))
