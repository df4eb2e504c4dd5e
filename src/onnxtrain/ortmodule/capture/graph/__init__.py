"""Rewrites a captured graph, and describes the memory of its inputs and outputs."""
