"""The cuda backend: CUDA kernels for Pascal, Volta, Turing, Ampere and newer, compiled at run time or ahead.

backend.py               what is served, by which kernels
plan.py                  the kernels and grids of a problem, and the parameters of its calls
call.py                  allocates results, fills in addresses and launches
heuristics.py            chooses the variant of the forward kernel
decode_heuristics.py     chooses the variant of the decode kernel, and its split of the keys
kernel_config.py         the variants and their macros; variants.py lists those that calls ask for
params.py                the arguments of kernels
memory.py, scratch.py    tensors as kernels need them, and memory that decodes share
merging.py               the launch of the merge of parts
kernels/                 the CUDA C++ sources; arch/ has what differs among architectures
"""
