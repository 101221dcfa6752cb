"""What computes linear attention: CUDA kernels, the native CPU library, or operations of torch."""
