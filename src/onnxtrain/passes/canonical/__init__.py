"""Bring a model to the canonical form: one opset, no functions, standard ops only, known shapes."""
