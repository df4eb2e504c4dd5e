"""Determines what eager autograd would do in a captured graph."""
