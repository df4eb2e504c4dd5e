"""Infer dtypes, ranks and shapes, remove outdated ones, and rewrite ops whose shapes onnx infers wrongly."""
