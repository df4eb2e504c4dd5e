"""Completes the metadata of pyproject.toml when a wheel or an sdist is built: dependencies, description, addresses.

`pip install .` depends on `onnxruntime`. Where another build is wanted, it takes its place:

    ONNXTRAIN_ONNXRUNTIME=onnxruntime-gpu pip install .

An empty value leaves ONNX Runtime out, for builds that no index has.

On platforms that have a wheel of `onnxtrain-kernels`, a release also depends on it. A checkout does not, because its
kernels are in no index: `make kernels` compiles them. The workflow that builds the wheels of a release sets

    ONNXTRAIN_RELEASE=1

The description is README.md. An index shows it away from the repository, where relative links lead nowhere: they become
links to the files of this version at the address that `ONNXTRAIN_REPOSITORY_URL` holds, or their text alone if it holds
none.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "ONNXTRAIN_ONNXRUNTIME"
DEFAULT = "onnxruntime"
MINIMUM = "1.20"
ADDRESS = "ONNXTRAIN_REPOSITORY_URL"
RELEASE = "ONNXTRAIN_RELEASE"
# The platforms with a wheel of onnxtrain-kernels (kernels/README.md): elsewhere pip would compile it.
KERNELS_MARKER = (
    'sys_platform == "linux" and platform_machine == "x86_64" or '
    'sys_platform == "linux" and platform_machine == "aarch64" or '
    'sys_platform == "darwin" and platform_machine == "arm64" or '
    'sys_platform == "win32" and platform_machine == "AMD64"'
)
# Fenced blocks and code spans stay as they are: `model[0](x)` is no link.
CODE_OR_RELATIVE_LINK = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]+`)|\[(?P<label>[^\]]*)\]\((?P<target>(?!\w+:|#)[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def absolute_links(markdown: str, address: str, version: str) -> str:
    """Returns Markdown whose relative links lead to the repository, or are their text if `address` is empty.

    Args:
        markdown: text with links relative to the root of the repository, e.g. "[guide](docs/guides/feed-your-data.md)".
        address: of the repository, e.g. "https://example.org/onnxtrain".
        version: of the package; the commit of a release has the tag "v" + version.
    """

    def link(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        place = f"{address}/blob/v{version}/{match['target']}"
        return f"[{match['label']}]({place})" if address else match["label"]

    return CODE_OR_RELATIVE_LINK.sub(link, markdown)


class OnnxtrainMetadataHook(MetadataHookInterface):
    """Sets what pyproject.toml declares as dynamic, except for the version."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets dependencies, readme and urls.

        Raises:
            ValueError: ONNXTRAIN_ONNXRUNTIME holds no name of a distribution, with or without versions.
        """
        metadata["dependencies"] = self.dependencies()
        if os.environ.get(RELEASE, "").strip() not in ("", "0"):
            (kernels,) = metadata["optional-dependencies"]["kernels"]
            metadata["dependencies"].append(f"{kernels}; {KERNELS_MARKER}")
        address = os.environ.get(ADDRESS, "").strip().rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute_links(text, address, metadata["version"]),
        }
        changes = f"{address}/blob/v{metadata['version']}/CHANGELOG.md"
        metadata["urls"] = {"Source": address, "Changelog": changes} if address else {}

    def dependencies(self) -> list[str]:
        """Lists what a device needs, ONNX Runtime last."""
        chosen = os.environ.get(VARIABLE, DEFAULT).strip()
        if chosen and not re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", chosen):
            raise ValueError(
                f"{VARIABLE}={chosen!r}: expected a name as 'onnxruntime-gpu' or 'onnxruntime-gpu==1.23.2'"
            )
        if re.fullmatch(r"[A-Za-z0-9._-]+", chosen):
            chosen = f"{chosen}>={MINIMUM}"
        return [*self.config["device"], *([chosen] if chosen else [])]
