"""Builds the training, eval and inference models from a forward graph with a loss."""
