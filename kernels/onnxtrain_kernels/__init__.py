"""Native CPU kernels for the ops of domain `onnxtrain`; `library()` is what a session registers."""

from pathlib import Path

__all__ = ["FUNCTIONS", "library"]

FUNCTIONS = 1
"""Version of the functions that the kernels compute; onnxtrain uses kernels of its own version only."""


def library() -> Path:
    """Returns the path of the shared object, for `onnxruntime.SessionOptions.register_custom_ops_library`.

    Raises:
        FileNotFoundError: there is none, as this is the package's source and not what pip installs.
    """
    folder = Path(__file__).parent
    for path in folder.iterdir():
        if path.suffix in (".so", ".dylib"):
            return path
    raise FileNotFoundError(f"'{folder}' holds no library: it is not built; pip install the package")
