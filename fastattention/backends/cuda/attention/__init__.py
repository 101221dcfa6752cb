"""Attention on CUDA.

backend.py               what is served, by which kernels
launches.py              the kernels and grids of a problem, and the parameters of its calls
call.py                  allocates results, fills in addresses and launches
heuristics.py            chooses the variant of the forward kernel
decode_heuristics.py     chooses the variant of the decode kernel, and its split of the keys
config.py                the variants; variants.py lists those that calls ask for
params.py                the arguments of kernels
scratch.py               memory that decodes share
merging.py               the launch of the merge of parts
"""
