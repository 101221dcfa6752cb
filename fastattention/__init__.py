"""fastattention: exact FlashAttention-class attention for the hardware FlashAttention leaves behind."""

from importlib.metadata import version

from fastattention.dispatch import Explanation
from fastattention.errors import (
    ArgumentError,
    CacheFullError,
    CompileError,
    FastAttentionError,
    LibraryError,
    UnsupportedError,
)
from fastattention.interface import (
    explain,
    fast_attn_func,
    fast_attn_kvpacked_func,
    fast_attn_qkvpacked_func,
    fast_attn_varlen_func,
    fast_attn_varlen_kvpacked_func,
    fast_attn_varlen_qkvpacked_func,
    fast_attn_with_kvcache,
)
from fastattention.kv_store import DenseKVStore, KVStore, PackedKVStore
from fastattention.merge import merge_attn_states
from fastattention.threads import get_num_threads, set_num_threads

__version__ = version("fastattention")

__all__ = [
    "ArgumentError",
    "CacheFullError",
    "CompileError",
    "DenseKVStore",
    "Explanation",
    "FastAttentionError",
    "KVStore",
    "LibraryError",
    "PackedKVStore",
    "UnsupportedError",
    "explain",
    "fast_attn_func",
    "fast_attn_kvpacked_func",
    "fast_attn_qkvpacked_func",
    "fast_attn_varlen_func",
    "fast_attn_varlen_kvpacked_func",
    "fast_attn_varlen_qkvpacked_func",
    "fast_attn_with_kvcache",
    "get_num_threads",
    "merge_attn_states",
    "set_num_threads",
]
