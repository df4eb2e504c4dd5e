"""Computes metrics, and averages of losses and metrics over a dataset."""
