"""Connects onnxtrain's artifacts to other frameworks. Each integration needs an extra, e.g. `onnxtrain[flower]`."""
