"""Checks wheels of onnxtrain-kernels: their contents, what they need of the system, and two ops of the library in each.

    pip install ziglang auditwheel twine check-wheel-contents
    apt-get install --no-install-recommends musl qemu-user wine wine64
    python kernels/cross/check.py wheels/*.whl

Other processors and systems than this one's are emulated. Programs for Linux on aarch64 need the C libraries, glibc and
musl, of Debian's arm64: `tests/aarch64/run.sh root` unpacks them below build/aarch64/root. Nothing here runs programs
for macOS, so that wheels for it are only read.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from build import TARGETS, Target

CROSS = Path(__file__).parent
ROOT = CROSS.parents[1]
RUNNERS: dict[str, list[str]] = {
    "linux-x86_64": [],
    "linux-aarch64": ["qemu-aarch64", "-L", str(ROOT / "build/aarch64/root")],
    "musl-x86_64": [],
    "musl-aarch64": ["qemu-aarch64", "-L", str(ROOT / "build/aarch64/root")],
    "windows-x86_64": ["wine"],
}
"""Per platform, the command in front of a program for it; a platform without an entry is not run."""


def run(*command: str | Path, **variables: str) -> None:
    """Runs a command with some environment variables; a status other than 0 ends the program."""
    print("$", *command, flush=True)
    done = subprocess.run(command, env=os.environ | variables, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} ended with status {done.returncode}")


def platform_of(wheel: Path) -> str:
    """Returns the name of a wheel's platform in build.py, e.g. "linux-x86_64"."""
    tags = wheel.stem.split("-")[-1].split(".")
    for name, target in TARGETS.items():
        if target.tag in tags:
            return name
    sys.exit(f"{wheel.name} is for no platform of {', '.join(target.tag for target in TARGETS.values())}")


def library_in(archive: zipfile.ZipFile) -> str:
    """Returns the name of the library in a wheel."""
    (library,) = (name for name in archive.namelist() if Path(name).suffix in (".so", ".dylib", ".dll"))
    return library


def check_needed(wheel: Path) -> None:
    """Checks that a wheel for musl needs its C library alone.

    Zig links with musl's own name, libc.so. auditwheel accepts only Alpine's, e.g. libc.musl-x86_64.so.1. musl loads
    itself for both.
    """
    from elftools.elf.elffile import ELFFile  # auditwheel depends on it

    with zipfile.ZipFile(wheel) as archive, archive.open(library_in(archive)) as file:
        dynamic = ELFFile(file).get_section_by_name(".dynamic")
        needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
    print(f"needs {', '.join(needed)}", flush=True)
    if needed != ["libc.so"]:
        sys.exit(f"{wheel.name} needs {', '.join(needed)}, and not libc.so alone")


def check_symbols(wheel: Path, target: Target) -> None:
    """Compares the C library that a wheel needs, as auditwheel reads its symbols, with the one that its tag names."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    shown = " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    found = re.search(r'consistent with the following platform tag: "(\w+)"', shown)
    if not found:
        sys.exit(f"{wheel.name} fits no platform tag, as auditwheel says: {shown}")
    (kind, *version), (wanted, *newest) = (
        re.match(r"(\w+?)_(\d+)_(\d+)_", tag).groups() for tag in (found[1], target.tag)
    )
    print(f"auditwheel show: needs {found[1]}", flush=True)
    if kind != wanted or [*map(int, version)] > [*map(int, newest)]:
        sys.exit(f"{wheel.name} needs {found[1]}, and its tag promises {target.tag}")


def make_probe(target: Target, folder: Path) -> Path:
    """Compiles probe.cpp for a platform, dynamically linked with its C library."""
    probe = folder / "probe.exe"
    options = [f"--target={target.triple}", "-std=c++17", "-O3", "-DNDEBUG", "-fPIC", "-s"]
    options += ["-dynamic"] if "musl" in target.triple else []
    include = f"-I{CROSS.parent / 'csrc'}"
    run(CROSS / "zig-c++", *options, include, CROSS / "probe.cpp", "-o", probe, PYTHON=sys.executable)
    return probe


def check(wheel: Path) -> None:
    """Checks a wheel; what is wrong with it ends the program."""
    name = platform_of(wheel)
    print(f"\n== {wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB)", flush=True)
    run(sys.executable, "-m", "twine", "check", "--strict", wheel)
    run(sys.executable, "-m", "check_wheel_contents", wheel)
    target = TARGETS[name]
    if "musl" in target.triple:
        check_needed(wheel)
    elif target.system == "Linux":
        check_symbols(wheel, target)
    with tempfile.TemporaryDirectory() as folder:
        if name not in RUNNERS:
            print(f"{name}: not run, as nothing here runs programs for it")
            return
        with zipfile.ZipFile(wheel) as archive:
            library = library_in(archive)
            archive.extract(library, folder)
        probe = make_probe(target, Path(folder))
        # Wine has pages of messages, which say nothing about the library.
        run(*RUNNERS[name], probe, Path(folder) / library, WINEDEBUG="-all")


def main() -> None:
    """Checks the wheels that the arguments name."""
    parser = argparse.ArgumentParser(description="Check wheels of onnxtrain-kernels.")
    parser.add_argument("wheels", nargs="+", type=Path, help="Files, e.g. wheels/*.whl.")
    for wheel in parser.parse_args().wheels:
        check(wheel)


if __name__ == "__main__":
    main()
