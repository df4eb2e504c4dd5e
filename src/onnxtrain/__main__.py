"""`python -m onnxtrain`: the command line."""

from onnxtrain.cli import main

if __name__ == "__main__":
    main()
