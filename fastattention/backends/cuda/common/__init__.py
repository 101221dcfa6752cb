"""Code and headers that kernels of all families share."""
