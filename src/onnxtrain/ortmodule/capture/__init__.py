"""Captures a PyTorch function with Dynamo; describes the graph's aliases, in-place writes, gradients and layouts."""
