"""`python -m onnxtrain.cli`."""

from onnxtrain.cli import main

main()
