"""CUDA kernels for Pascal, Volta, Turing and everything from Ampere on, compiled at run time or ahead."""
