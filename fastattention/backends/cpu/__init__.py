"""The cpu backend: a native library in C++ (kernels/), called with ctypes.

attention/, linear/  a folder for each family of operators: what the library serves, and the arguments of a call
selection.py         slots of selected keys, in one call of the library
library.py           finds, loads and calls the library
headers.py           the arguments that the library's headers declare
work_queue.py        a native worker thread, e.g. for prepared calls of attention
torch_threads.py     finds torch's OpenMP team, which the library uses while it is awake
kernels/             the library; api.cpp is its C interface, kernels.cpp is compiled once for each instruction set
"""
