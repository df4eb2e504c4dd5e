"""Determines how eager PyTorch's autograd would treat a captured graph."""
