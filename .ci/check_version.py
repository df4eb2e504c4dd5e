"""Compares a tag with the version of the packages: `python .ci/check_version.py v0.1.0`.

The version stands in `src/onnxtrain/__init__.py`. onnxtrain-kernels is released with it under the same version, so that
`kernels/pyproject.toml` and the extra [kernels] name it as well.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def versions() -> dict[str, str]:
    """Reads the version of each file that names it."""
    (version,) = re.findall(
        r'^__version__ = "(.+)"$',
        (ROOT / "src/onnxtrain/__init__.py").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    files = [ROOT / "pyproject.toml", ROOT / "kernels" / "pyproject.toml"]
    package, kernels = (tomllib.loads(file.read_text(encoding="utf-8")) for file in files)
    (extra,) = package["project"]["optional-dependencies"]["kernels"]
    return {
        "src/onnxtrain/__init__.py": version,
        "kernels/pyproject.toml": kernels["project"]["version"],
        "extra [kernels] in pyproject.toml": extra.partition("==")[2],
    }


def main(tag: str) -> None:
    """Ends with a message if a file names another version than the tag."""
    wrong = {file: version for file, version in versions().items() if f"v{version}" != tag}
    if wrong:
        named = ", ".join(f"{version} in {file}" for file, version in wrong.items())
        sys.exit(
            f"The tag is {tag}, and the version is {named}. Change the files, and tag the commit that does."
        )


if __name__ == "__main__":
    main(sys.argv[1])
