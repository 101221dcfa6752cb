"""The cpu backend: a native library in C++ (kernels/), called with ctypes.

backend.py        what the library serves
plan.py           a call of the library, set up once for all calls like it
library.py        finds, loads and calls the library
params.py         the arguments of a call
prepared.py       calls that are set up now and run later
work_queue.py     a native worker thread for such calls
torch_threads.py  finds torch's OpenMP team, which the library uses while it is awake
kernels/          the library; api.cpp is its C interface, kernels.cpp is compiled once for each instruction set
"""
