"""The ascend backend: Triton kernels for Ascend NPUs, and the fused operators of torch_npu.

backend.py    checks a call and chooses between kernels and operators
indexer.py    the backend of the indexer, which has an operator of torch_npu only
device.py     what torch_npu says of this machine
call.py       a problem and its tensors as launches of the kernels
kernels.py    the Triton kernels; mask_tile.py has the mask that all tiles share
tiling.py     chooses tile sizes with the simulator
chips.py      hardware figures
simulator/    predicts the time of a call on an Ascend chip
vendor/       calls of torch_npu's operators
"""
