"""Connects artifacts of onnxtrain to frameworks of others. Each needs an extra of its own, e.g. `onnxtrain[flower]`."""
