"""Training on stock ONNX Runtime: a training step is itself an ordinary ONNX model."""

__version__ = "0.1.0"
