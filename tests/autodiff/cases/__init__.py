"""Tables of gradient tests, one module per family of rules; each has a list `CASES`."""
