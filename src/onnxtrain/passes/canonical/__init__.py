"""Converts a model to the canonical form that gradient rules, losses and fusion expect.

`pipeline.canonicalize` runs the passes of this package in order, and documents the form.
"""
