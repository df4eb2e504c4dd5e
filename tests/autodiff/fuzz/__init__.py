"""Random small graphs whose gradients are compared with finite differences; see notes/fuzzing.md."""
