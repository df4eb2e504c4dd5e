"""Finds the manifest in a folder of artifacts, which names the other files."""

from __future__ import annotations

from pathlib import Path

from onnxtrain.errors import CheckpointError

MANIFEST = "manifest.json"


def find_manifest(directory: Path) -> str | None:
    """Finds the manifest in a directory: `manifest.json`, else the only file with a prefix before that name.

    Returns:
        The name of the file, e.g. "net_manifest.json"; None without a manifest.

    Raises:
        CheckpointError: Several files have a prefix.
    """
    # `generate_artifacts(prefix="my_")` writes "my_manifest.json".
    names = sorted(path.name for path in directory.glob(f"*{MANIFEST}"))
    if MANIFEST in names:
        return MANIFEST
    if len(names) > 1:
        raise CheckpointError(
            f"Opening the training run in '{directory}': there are several ({', '.join(names)}). Move each with its "
            "files to a directory of its own."
        )
    return names[0] if names else None
