"""Calls the fused operators of torch_npu, and knows which calls they serve exactly.

limits.py     why_not: what the operators take, each limit with its source
masks.py      a window as sparse_mode, pre_tokens, next_tokens; which queries have no keys
operators.py  one call of an operator: its arguments by name, checked, since the vendor checks little
prefill.py    dense and variable-length sequences
gradients.py  their gradients
selected.py   latents that each query selects, which come as pages of one token
cache.py      keys and values in a cache, rows or pages, int8 or not; also dense sequences, whose cache is full
indexer.py    no attention: the keys of the greatest index scores, with limits of its own
linear_all_reduce.py  no attention: the product that follows it and the sum over ranks, as one operator

torch_npu has two operators of attention. npu_fused_infer_attention_score is documented for inference and takes caches;
npu_fusion_attention is documented for training, and takes varlen calls, float32, sinks and any head dimension. Calls
that autograd follows go to the second, whose gradients npu_fusion_attention_grad computes. A third,
npu_sparse_flash_attention, is for latents and the keys that each query selects of them.
Nothing here imports torch_npu: whoever has tensors on an NPU has imported it, and it registers torch.ops.npu.
"""

from fastattention.backends.ascend.vendor.dispatch import backward, forward, why_rather_not
from fastattention.backends.ascend.vendor.indexer import index, why_not_index
from fastattention.backends.ascend.vendor.limits import is_selected, why_not
from fastattention.backends.ascend.vendor.linear_all_reduce import linear_all_reduce, why_not_linear_all_reduce
from fastattention.backends.ascend.vendor.operators import why_unavailable

__all__ = [
    "backward",
    "forward",
    "index",
    "is_selected",
    "linear_all_reduce",
    "why_not",
    "why_not_index",
    "why_not_linear_all_reduce",
    "why_rather_not",
    "why_unavailable",
]
