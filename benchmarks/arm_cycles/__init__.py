"""Cycles of the kernels for 64-bit Arm, ours and those of torch's libraries, counted in machine code by llvm-mca."""
