"""Runs the command line: `python -m onnxtrain`."""

from onnxtrain.cli import main

if __name__ == "__main__":
    main()
