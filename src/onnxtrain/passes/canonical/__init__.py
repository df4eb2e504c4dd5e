"""Bring a model to the canonical form that rules, losses and fusion work on.

Canonical: one of few opsets, no model-local functions, no sequences or branches that are known when the model is built,
dtypes and shapes annotated. `pipeline.canonicalize` runs the passes in order.
"""
