"""The ascend backend: kernels for Ascend NPUs in Triton, and the fused operators of torch_npu."""
