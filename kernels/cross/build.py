"""Builds wheels of onnxtrain-kernels for other platforms on this one: Linux (glibc and musl), macOS and Windows.

    pip install build ziglang
    python kernels/cross/build.py --output wheels               # all of them
    python kernels/cross/build.py --output wheels windows-x86_64 macos-arm64

The package ziglang holds Clang with the headers and link stubs of all these systems, so that nothing else is needed.
Each library is linked with a static libc++ whose symbols are hidden. Published wheels are built by cibuildwheel on each
system (.github/workflows/wheels.yml); these find out beforehand whether the sources compile, link and run there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Target:
    """A platform: what Zig, CMake and wheels call it."""

    triple: str
    system: str
    processor: str
    tag: str


TARGETS = {
    "linux-x86_64": Target("x86_64-linux-gnu.2.28", "Linux", "x86_64", "manylinux_2_28_x86_64"),
    "linux-aarch64": Target("aarch64-linux-gnu.2.28", "Linux", "aarch64", "manylinux_2_28_aarch64"),
    "musl-x86_64": Target("x86_64-linux-musl", "Linux", "x86_64", "musllinux_1_2_x86_64"),
    "musl-aarch64": Target("aarch64-linux-musl", "Linux", "aarch64", "musllinux_1_2_aarch64"),
    "macos-arm64": Target("aarch64-macos.13.0", "Darwin", "arm64", "macosx_13_0_arm64"),
    "windows-x86_64": Target("x86_64-windows-gnu", "Windows", "AMD64", "win_amd64"),
    "windows-arm64": Target("aarch64-windows-gnu", "Windows", "ARM64", "win_arm64"),
}


def settings(target: Target, build: Path, baseline_only: bool) -> dict[str, str]:
    """Returns the settings that scikit-build-core gets for a platform.

    Args:
        target: the platform.
        build: folder of its objects.
        baseline_only: whether to leave out the levels that not every x86-64 processor has.
    """
    definitions = {
        "CMAKE_SYSTEM_NAME": target.system,
        "CMAKE_SYSTEM_PROCESSOR": target.processor,
        "CMAKE_CXX_COMPILER": str(Path(__file__).with_name("zig-c++")),
        "CMAKE_CXX_COMPILER_TARGET": target.triple,
        # CMake's trials of the compiler link nothing: Zig would first compile a libc++ for them, without optimization.
        "CMAKE_TRY_COMPILE_TARGET_TYPE": "STATIC_LIBRARY",
        # CMake looks for these where it makes libraries for macOS and Windows. Nothing here calls them.
        "CMAKE_INSTALL_NAME_TOOL": "true",
        "CMAKE_RC_COMPILER": "true",
        "ONNXTRAIN_LEVELS": "baseline" if baseline_only else "all",
    }
    return {
        "wheel.tags": f"py3-none-{target.tag}",
        "build-dir": str(build),
        **{f"cmake.define.{name}": value for name, value in definitions.items()},
    }


def build_wheel(name: str, output: Path, build: Path, baseline_only: bool) -> None:
    """Builds the wheel of one platform; what it compiled before and has not changed is compiled no more."""
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(output), str(KERNELS)]
    for key, value in settings(TARGETS[name], build / name, baseline_only).items():
        command.append(f"--config-setting={key}={value}")
    subprocess.run(
        command, check=True, env=os.environ | {"PYTHON": sys.executable, "CMAKE_GENERATOR": "Ninja"}
    )


def main() -> None:
    """Builds the wheels that the arguments name."""
    parser = argparse.ArgumentParser(description="Build wheels of onnxtrain-kernels for other platforms.")
    parser.add_argument("targets", nargs="*", help=f"Platforms. Default: all of {', '.join(TARGETS)}.")
    parser.add_argument(
        "--output", type=Path, default=Path("wheels"), help="Folder for the wheels. Default: wheels."
    )
    parser.add_argument(
        "--build", type=Path, default=KERNELS.parent / "build" / "cross", help="Folder of objects."
    )
    parser.add_argument(
        "--baseline-only",
        action="store_true",
        help="Leave out the levels avx2 and avx512 of x86-64: a trial of a platform in a third of the time.",
    )
    chosen = parser.parse_args()
    if unknown := set(chosen.targets) - set(TARGETS):
        parser.error(f"no platform {', '.join(sorted(unknown))}: choose from {', '.join(TARGETS)}")
    for name in chosen.targets or TARGETS:
        build_wheel(name, chosen.output.resolve(), chosen.build.resolve(), chosen.baseline_only)


if __name__ == "__main__":
    main()
