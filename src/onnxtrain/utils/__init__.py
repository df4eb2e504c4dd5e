"""What onnxruntime-training had under this name and training loops use: `onnxtrain.utils.data`."""
