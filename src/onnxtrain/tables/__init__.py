"""Encodes the columns of tables as arrays, and writes the encoding in front of a model."""
