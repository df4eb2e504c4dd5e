"""Capture a PyTorch function with Dynamo, and describe the graph: views, writes to inputs, gradients, memory layout."""
