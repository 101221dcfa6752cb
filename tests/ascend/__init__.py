"""The ascend backend without an NPU: `make test-ascend`.

lowering.py       a launch -> the MLIR that Triton-Ascend hands to the vendor's compiler
llvm.py           that MLIR -> machine code of this processor, by LLVM
runtime.c         what the machine code calls: memory, and copies, checked
executor.py       runs it for every program of a launch
engine.py         backends for the list of cases that run so
matrix.py         every kind of call that the kernels serve
static_checks.py  reads MLIR for what a run on a processor does not show
buffers.py        counts what a kernel holds in the buffers of an AI Core
build_cache.py    made files, kept by content in build/ascend
vendor/           the operators of torch_npu
"""
