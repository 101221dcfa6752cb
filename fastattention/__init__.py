"""fastattention: exact FlashAttention-class attention for the hardware FlashAttention leaves behind.

A call passes through attention/interface.py (the public function), engine/operator.py (its cached plan) and backends/
(the computation). docs/internals/architecture.md follows one.

attention/     public functions, validation, Problem and Inputs, operators, reference of attention
linear/        the same of linear attention
convolution/   the same of the short convolution in front of linear attention
indexer/       the same of indexers, which choose the keys of each query
engine/        what serves any operator: registry, plans, operators of torch, autograd, explanations
backends/      kernels by device: cpu, cuda, ascend; sdpa and torch are fallbacks in operations of torch
gpu_runtime/   compiles, loads and launches CUDA kernels
sparse.py      patterns of block masks
quantized.py   int8 and float8 caches
kv_store/      KV caches whose memory the library owns
offload/       a KV cache split between a device and the CPU
distributed/   tensor parallelism: attention overlapped with its all-reduce
integrations/  Hugging Face Transformers, and code written for flash_attn
cli/           the command line
environment.py every environment variable
errors.py      exceptions
"""

from importlib.metadata import version

from fastattention.attention.interface import (
    explain,
    fast_attn_func,
    fast_attn_kvpacked_func,
    fast_attn_qkvpacked_func,
    fast_attn_varlen_func,
    fast_attn_varlen_kvpacked_func,
    fast_attn_varlen_qkvpacked_func,
    fast_attn_with_kvcache,
)
from fastattention.attention.latent import fast_attn_latent_func
from fastattention.attention.merge import merge_attn_states
from fastattention.attention.selected import fast_attn_selected_func
from fastattention.engine.explain import Explanation
from fastattention.errors import (
    ArgumentError,
    CacheFullError,
    CompileError,
    FastAttentionError,
    LibraryError,
    UnsupportedError,
)
from fastattention.kv_store import DenseKVStore, KVStore, PackedKVStore
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
    "fast_attn_latent_func",
    "fast_attn_qkvpacked_func",
    "fast_attn_selected_func",
    "fast_attn_varlen_func",
    "fast_attn_varlen_kvpacked_func",
    "fast_attn_varlen_qkvpacked_func",
    "fast_attn_with_kvcache",
    "get_num_threads",
    "merge_attn_states",
    "set_num_threads",
]

# Subpackages and modules that users import from; the others are internal.
_PUBLIC_MODULES = ("convolution", "distributed", "indexer", "integrations", "linear", "offload", "sparse")


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted((*__all__, *_PUBLIC_MODULES, "__version__"))
