"""Training on the device: numpy, onnxruntime and safetensors only. Users import from `onnxtrain.api`."""

try:
    import onnxruntime as _onnxruntime  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "onnxruntime":
        raise
    raise ModuleNotFoundError(
        "onnxruntime is not installed, which all of onnxtrain runs on. Install one of its builds: pip install "
        "onnxruntime, or onnxruntime-gpu for CUDA (never two of them side by side: they share one folder).",
        name=error.name,
    ) from error
