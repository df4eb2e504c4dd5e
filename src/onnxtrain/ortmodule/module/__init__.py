"""The ORTModule class and the engine that compiles its calls."""
