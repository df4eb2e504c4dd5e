"""Programs that differentiate, each in an environment of its own."""
