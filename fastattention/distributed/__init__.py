"""Attention over the ranks of a tensor-parallel group, its all-reduce hidden under the attention of later rows."""

from fastattention.distributed.attention_out_proj import (
    attention_out_proj_allreduce,
    attention_out_proj_allreduce_with_kvcache,
)
from fastattention.distributed.deferred import DeferredAttention, deferred_attn, deferred_attn_with_kvcache
from fastattention.distributed.style import NotTiledWarning, TilingAllReduce

__all__ = [
    "DeferredAttention",
    "NotTiledWarning",
    "TilingAllReduce",
    "attention_out_proj_allreduce",
    "attention_out_proj_allreduce_with_kvcache",
    "deferred_attn",
    "deferred_attn_with_kvcache",
]
