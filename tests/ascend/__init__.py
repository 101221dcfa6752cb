"""Tests of the ascend backend without an NPU: `make test-ascend`.

lowering.py       a launch -> the MLIR that Triton-Ascend hands to the vendor's compiler
llvm.py           that MLIR -> machine code of this processor, by LLVM
runtime.c         what the machine code calls: memory, and copies, checked
executor.py       runs it for every program of a launch
engine.py         backends that run the list of cases in this way
matrix.py         every kind of call that the kernels serve
static_checks.py  checks MLIR for faults that a run on a processor does not show
buffers.py        counts the bytes that a kernel holds in the buffers of an AI Core
build_cache.py    a cache of built files in build/ascend, keyed by content
vendor/           the operators of torch_npu
"""
