"""Captures functions with Dynamo, with ORTModule's settings and, during a capture, with patches to Dynamo."""
