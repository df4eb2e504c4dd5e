"""Holds `onnxtrain.utils.data`, the samplers that onnxruntime-training had under this name."""
