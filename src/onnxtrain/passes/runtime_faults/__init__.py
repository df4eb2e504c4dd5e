"""Rewrites ops that ONNX Runtime computes wrongly, that crash it, or that lack a kernel.

Each module names the versions that have the fault. `pipeline.apply_workarounds` runs the passes before a model is used.
"""
