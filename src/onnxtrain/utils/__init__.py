"""Contains `onnxtrain.utils.data`, the counterpart of `onnxruntime.training.utils.data`."""
