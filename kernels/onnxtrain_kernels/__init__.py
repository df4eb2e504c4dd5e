"""Native CPU kernels for the ops of domain `onnxtrain`; `library()` is what a session registers."""

import ctypes
from pathlib import Path

__all__ = ["FUNCTIONS", "NUMBERED", "level", "library"]

FUNCTIONS = 4
"""Version of the functions that the kernels compute; onnxtrain uses kernels of its own version only."""

NUMBERED = "onnxtrain.numbered"
"""Session config entry that says how many numbered names of each kind the library registers (`csrc/core/op.h`)."""


def level(asked: str | None = None, without: str = "") -> str:
    """Returns the level of the processor whose kernels sessions get: `baseline`, `avx2`, `avx512`, or "" for none.

    Args:
        asked: the level to use where it is there, e.g. "avx2", instead of the one that ONNXTRAIN_KERNELS_LEVEL names.
        without: instructions to take for missing, separated by commas, e.g. "bmi2,f16c".
    """
    function = ctypes.CDLL(str(library())).onnxtrain_kernels_level
    function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_char_p), ctypes.c_char_p
    name: bytes = function(None if asked is None else asked.encode(), without.encode())
    return name.decode()


def library() -> Path:
    """Returns the path of the shared object, for `onnxruntime.SessionOptions.register_custom_ops_library`.

    Raises:
        FileNotFoundError: there is none, as this is the package's source and not what pip installs.
    """
    folder = Path(__file__).parent
    for path in folder.iterdir():
        if path.suffix in (".so", ".dylib", ".dll"):
            return path
    raise FileNotFoundError(f"'{folder}' holds no library: it is not built; pip install the package")
