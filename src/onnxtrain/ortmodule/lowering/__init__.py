"""Lowers functional ATen graphs to ONNX. Graphs with unsupported ops are split between ONNX Runtime and PyTorch."""
