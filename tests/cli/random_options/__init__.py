"""Random option sets of the command line; `test_random_options.py` describes the judge."""
