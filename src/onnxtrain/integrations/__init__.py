"""Connects onnxtrain's artifacts to other frameworks. Each needs its own extra, e.g. `onnxtrain[flower]`."""
