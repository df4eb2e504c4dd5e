"""Distinguishes parameters from constants and op settings, and turns initializers into inputs and back."""
