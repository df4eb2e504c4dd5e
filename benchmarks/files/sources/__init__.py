"""Sources of files, a module for each kind."""
