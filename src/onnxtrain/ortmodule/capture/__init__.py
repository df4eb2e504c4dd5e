"""Captures PyTorch functions with Dynamo, and describes aliases, writes, gradients and layouts in their graphs."""
