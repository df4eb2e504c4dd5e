"""Turns a forward graph with a loss into the training, eval and inference models."""
