"""Makes a graph smaller or faster without changing its results."""
