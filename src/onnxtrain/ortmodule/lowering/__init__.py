"""Lower a functional ATen graph to an ONNX graph, or to parts of it that alternate with PyTorch."""
