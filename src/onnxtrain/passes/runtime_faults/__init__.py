"""Write models around ops that ONNX Runtime computes wrongly, crashes on, or has no kernel for."""
