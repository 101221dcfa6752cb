"""Compiles, caches and launches CUDA kernels; nothing here knows of attention but variants.py.

variants.py  the kernels that calls ask for, to compile ahead
compiler.py  NVRTC: sources to cubins
cache.py     cubins on disk
module.py    loaded cubins and launches
streams.py   copies, flags and waits on streams
"""
