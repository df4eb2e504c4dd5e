"""From a functional ATen graph to an ONNX graph."""
