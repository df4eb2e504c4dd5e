"""Wraps a `torch.nn.Module`: the ORTModule class, and the engine that compiles and runs its calls."""
