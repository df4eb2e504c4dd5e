"""Contains `onnxtrain.utils.data`, the samplers that onnxruntime-training has under this name."""
