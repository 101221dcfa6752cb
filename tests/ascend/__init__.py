"""The ascend backend without an NPU: `make test-ascend`.

lowering.py       a launch -> the MLIR that Triton-Ascend hands to the vendor's compiler
executor.py       that MLIR -> machine code of this processor, by LLVM; runs it
runtime.c         what the machine code calls
static_checks.py  reads kernels and their MLIR for what a run on a processor does not show
build_cache.py    made files, kept by content in build/ascend
vendor/           the operators of torch_npu
"""
