"""One training step of one net in every engine: the parts of `benchmarks/run.py`."""
