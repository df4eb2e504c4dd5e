"""The on-device runtime: training with only numpy, onnxruntime and safetensors. Users import from `onnxtrain.api`."""

# The package can be installed without onnxruntime (ONNXTRAIN_ONNXRUNTIME="" in hatch_build.py), for use with builds
# that are in no package index.
try:
    import onnxruntime as _onnxruntime  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "onnxruntime":
        raise
    raise ModuleNotFoundError(
        "onnxtrain needs onnxruntime, which is not installed. Install one build: pip install onnxruntime, "
        "or onnxruntime-gpu for CUDA (never both: they install into the same folder).",
        name=error.name,
    ) from error
