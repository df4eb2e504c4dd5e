"""Rewrite a captured graph, and describe the memory of its inputs and outputs."""
