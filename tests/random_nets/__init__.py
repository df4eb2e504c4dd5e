"""Random networks of ordinary layers, trained with and without native kernels and in float64, beside PyTorch."""
