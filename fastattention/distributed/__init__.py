"""Attention over the ranks of a tensor-parallel group, its all-reduce hidden under the attention of later rows."""

from fastattention.distributed.attention_linear import (
    attention_linear_allreduce,
    attention_linear_allreduce_with_kvcache,
)

__all__ = ["attention_linear_allreduce", "attention_linear_allreduce_with_kvcache"]
