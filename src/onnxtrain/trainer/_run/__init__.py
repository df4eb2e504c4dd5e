"""The training run: its models, files, position and history, in a directory from which it can be resumed."""
