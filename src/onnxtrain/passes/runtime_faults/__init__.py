"""Rewrite ops that ONNX Runtime computes wrongly, crashes on, or has no kernel for.

Each module names the version in which the fault was seen. `pipeline.suit_runtime` runs the passes before a model is
used.
"""
