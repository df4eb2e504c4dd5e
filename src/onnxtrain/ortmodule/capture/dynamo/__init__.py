"""Captures functions with Dynamo, under ORTModule's settings, and with patches of Dynamo during a capture."""
