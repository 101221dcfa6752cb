"""What kernels of all families share."""
