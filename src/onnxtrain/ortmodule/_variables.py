"""Warns of environment variables of onnxruntime-training's ORTModule that onnxtrain ignores, with advice for each."""

from __future__ import annotations

import os
import warnings

LOG_LEVEL = "ORTMODULE_LOG_LEVEL"
SAVE_ONNX_PATH = "ORTMODULE_SAVE_ONNX_PATH"
FALLBACK_POLICY = "ORTMODULE_FALLBACK_POLICY"
CAPTURE_ALL = "ORTMODULE_CAPTURE_ALL"

_PREFIX = "ORTMODULE_"
_ALWAYS = "0", "1"
_TRITON = "onnxtrain has no Triton kernels"
_TUNING = "onnxtrain tunes no kernels"
_SPARSITY = "padding is computed with: pack or sort the samples"

# `docs/pytorch/migrate.md` lists the same variables; a test compares the names.
VARIABLES: dict[str, tuple[tuple[str, ...], str]] = {
    "ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT": (("1",), "functions and checkpoints are always captured"),
    "ORTMODULE_CACHE_DIR": ((), "no captured graph is kept on disk; the time is in model.report()"),
    "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT": (_ALWAYS, "no module is copied"),
    "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER": (("1",), "DebugOptions(save_onnx=True) shows what is computed"),
    "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": (
        ("1",),
        "a torch.autograd.Function keeps its backward: call its code instead",
    ),
    "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER": (("0",), _SPARSITY),
    "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT": (
        ("0",),
        "gradients come together at the end of a graph's backward",
    ),
    "ORTMODULE_ENABLE_SPARSE_OPTIMIZER": (("0",), _SPARSITY),
    "ORTMODULE_ENABLE_TUNING": (("0",), _TUNING),
    "ORTMODULE_MAX_TUNING_DURATION_MS": ((), _TUNING),
    "ORTMODULE_MEMORY_OPT_LEVEL": (("0",), "use torch.utils.checkpoint"),
    "ORTMODULE_ONNX_OPSET_VERSION": (
        ("21",),
        "graphs are written for opset 21, which every supported runtime takes",
    ),
    "ORTMODULE_PRINT_INPUT_DENSITY": (("0",), "nothing counts padding"),
    "ORTMODULE_PRINT_MEMORY_STATS": (("0",), "use a memory profiler"),
    "ORTMODULE_TRITON_CONFIG_FILE": ((), _TRITON),
    "ORTMODULE_TRITON_DEBUG": (("0",), _TRITON),
    "ORTMODULE_TUNING_RESULTS_PATH": ((), _TUNING),
    "ORTMODULE_USE_EFFICIENT_ATTENTION": (("0",), "attention is computed by ONNX operators"),
    "ORTMODULE_USE_FLASH_ATTENTION": (("0",), "attention is computed by ONNX operators"),
    "ORTMODULE_USE_TRITON": (("0",), _TRITON),
}
"""Maps each ignored variable to the values that match onnxtrain's behavior, and to advice for all other values.

E.g. `ORTMODULE_ENABLE_TUNING=0` needs no warning: it disables kernel tuning, which onnxtrain doesn't have.
"""

_warned_of: set[tuple[str, str]] = set()


def warn_of_ignored_variables() -> None:
    """Warns about each environment variable `ORTMODULE_*` that is set but ignored, once per variable and value.

    A value that matches onnxtrain's behavior causes no warning (see :data:`VARIABLES`).
    """
    honoured = (CAPTURE_ALL, FALLBACK_POLICY, LOG_LEVEL, SAVE_ONNX_PATH)
    for name, value in sorted(os.environ.items()):
        # Every ORTModule calls this function: a model with many ORTModules would repeat the warning.
        if not name.startswith(_PREFIX) or name in honoured or (name, value) in _warned_of:
            continue
        # Unknown variables are warned of, too: most are misspelled.
        harmless, advice = VARIABLES.get(name, ((), "it is not one that onnxruntime-training documents"))
        if value not in harmless:
            _warned_of.add((name, value))
            warnings.warn(
                f"{name}={value} was a setting of onnxruntime-training and has no effect in onnxtrain: {advice}. "
                f"onnxtrain reads {', '.join(honoured)}",
                stacklevel=4,
            )
