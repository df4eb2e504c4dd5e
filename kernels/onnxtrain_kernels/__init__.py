"""Native CPU kernels for the ops of domain `onnxtrain`; `library()` is what a session registers."""

import ctypes
import functools
from pathlib import Path
from typing import Any

__all__ = ["FUNCTIONS", "NUMBERED", "draw_bernoulli", "level", "library"]

FUNCTIONS = 5
"""Version of the functions that the kernels compute; onnxtrain uses kernels of its own version only."""

NUMBERED = "onnxtrain.numbered"
"""Session config entry that says how many numbered names of each kind the library registers (`csrc/core/op.h`)."""


def level(asked: str | None = None, without: str = "") -> str:
    """Returns the level of the processor whose kernels sessions get: `baseline`, `avx2`, `avx512`, or "" for none.

    Args:
        asked: the level to use where it is there, e.g. "avx2", instead of the one that ONNXTRAIN_KERNELS_LEVEL names.
        without: instructions to take for missing, separated by commas, e.g. "bmi2,f16c".
    """
    function = _function("onnxtrain_kernels_level", ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p)
    name: bytes = function(None if asked is None else asked.encode(), without.encode())
    return name.decode()


def draw_bernoulli(generator: int, p: float, to: int, count: int) -> bool:
    """Draws as `torch.Tensor.bernoulli_` does on a CPU, and advances the generator.

    Args:
        generator: address of the state that `torch.Generator.get_state` returns, 5,056 bytes; it is changed in place.
        p: probability of 1, from 0 to 1.
        to: address of the results: `count` bytes, each 0 or 1.
        count: how many numbers to draw.

    Returns:
        False if the kernels don't support this processor; then nothing has been drawn.
    """
    arguments = ctypes.c_void_p, ctypes.c_double, ctypes.c_void_p, ctypes.c_size_t
    return bool(_function("onnxtrain_draw_bernoulli", ctypes.c_bool, *arguments)(generator, p, to, count))


@functools.cache
def _function(name: str, returned: Any, *arguments: Any) -> Any:
    """Returns an exported function of the library, with the types of its result and its arguments."""
    function = getattr(ctypes.CDLL(str(library())), name)
    function.argtypes, function.restype = arguments, returned
    return function


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
