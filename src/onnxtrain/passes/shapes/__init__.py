"""Infer dtypes, ranks and shapes, and forget the shapes that no longer hold."""
