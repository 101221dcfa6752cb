"""The cuda backend: CUDA kernels for Pascal, Volta, Turing, Ampere and newer, compiled at run time or ahead.

common/      what kernels of all families share: headers of element types, tiles and architectures
attention/   attention, its backward, caches and merges
linear/      linear attention, token by token and in chunks

A family has its Python and `kernels/`, the CUDA C++ sources.
"""
