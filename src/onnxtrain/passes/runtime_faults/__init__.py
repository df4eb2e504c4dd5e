"""Rewrites ops that ONNX Runtime computes wrongly, crashes on, or has no kernel for.

Each module names the versions that have the fault. `pipeline.apply_workarounds` runs the passes before a model is used.
"""
