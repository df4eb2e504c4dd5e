"""Run a lowered graph: ONNX Runtime sessions, forward and backward, and what PyTorch runs between them."""
