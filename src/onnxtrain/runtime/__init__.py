"""Training on the device: numpy, onnxruntime and safetensors only. Users import from `onnxtrain.api`."""
