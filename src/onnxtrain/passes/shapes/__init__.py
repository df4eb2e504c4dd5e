"""Infers dtypes, ranks and shapes, removes outdated ones, and rewrites ops whose shapes onnx infers wrongly."""
