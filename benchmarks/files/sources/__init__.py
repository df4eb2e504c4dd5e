"""Where files come from, a module for each kind."""
