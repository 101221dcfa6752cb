"""Code that several backends share, none of it specific to one device.

params.py, layout.py  arguments of kernels: C structures, pointers and strides
bounded.py            caches that do not grow without end
tile_range.py, .hpp   which keys a query sees, for Python, Triton, C++ and CUDA
kv_append.py          append to a KV cache and rotary embedding, in torch
merge.py              merge of attention over parts of the keys, in torch
panel_cache.py        the interleaved panel layout of PackedKVStore
"""
