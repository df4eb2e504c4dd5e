"""Shows a fit: progress bars, one line per epoch, notebook tables and plots."""
