"""What differentiates, each in an environment of its own."""
