"""Compiles, loads and launches CUDA kernels. Nothing here knows of attention.

variant.py      what can be compiled and launched
chips.py        limits of GPUs
compiler.py     NVRTC: sources to cubins
cache.py        cubins on disk
module.py       loaded cubins and launches
device.py       whether kernels run on a device, and launches on its current stream
streams.py      copies, flags and waits on streams
peer_memory.py  memory that the GPUs of one host share, and flags in it
watchdog.py     ends processes whose GPU waits for ever
"""
