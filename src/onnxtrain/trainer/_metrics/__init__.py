"""Metrics, and the averages of loss and metrics over a data set."""
