"""The backends, one folder each: what computes attention on one kind of hardware.

base.py      Backend: the interface that each implements
registry.py  chooses the backend of a call
common/      code that several backends share
cpu/         native kernels in C++ for x86-64 and 64-bit Arm
cuda/        kernels in CUDA C++
ascend/      kernels in Triton for Ascend NPUs, and torch_npu's operators
sdpa/        torch's own attention: the fallback on any device

A backend never imports another one.
"""
