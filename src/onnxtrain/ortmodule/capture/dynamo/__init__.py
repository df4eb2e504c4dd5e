"""Capture a function with Dynamo: settings, and patches of Dynamo for the time of a capture."""
