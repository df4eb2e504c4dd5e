"""Runs lowered graphs in ONNX Runtime sessions, for forward and backward, with parts in PyTorch between them."""
