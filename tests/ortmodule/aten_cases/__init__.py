"""Tables of PyTorch functions to run through the lowering; each module has a list `CASES`."""
