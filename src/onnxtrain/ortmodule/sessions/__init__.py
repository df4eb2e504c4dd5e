"""Runs lowered graphs: ONNX Runtime sessions for forward and backward, and the parts that PyTorch runs between them."""
