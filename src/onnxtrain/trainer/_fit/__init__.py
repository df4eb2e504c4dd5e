"""Runs fits: training state, loop over the epochs, optimizer steps."""
