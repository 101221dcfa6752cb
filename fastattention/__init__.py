"""fastattention: exact FlashAttention-class attention for the hardware FlashAttention leaves behind.

A call passes through these modules in order: interface.py (the public functions), dispatch.py (its cached plan),
backends/ (the computation). For a new plan validation/ turns its arguments into a Problem and Inputs, and the first
backend without a reason against the Problem is chosen.

interface.py, ops.py  the public functions, and their torch operators under torch.compile
validation/           checks of arguments
problem.py            Problem and Inputs, what a backend gets
dispatch.py           finds or makes the plan of a call, or explains it
backends/             cpu, cuda, ascend and sdpa
reference.py          the executable specification that tests compare with
merge.py              merging of attention over parts of the keys
quantized.py          int8 and float8 caches
kv_store/             KV caches whose memory the library owns
offload/              a KV cache split between a device and the CPU
distributed/          tensor parallelism: attention overlapped with its all-reduce
integrations/         Hugging Face Transformers, and code written for flash_attn
cli/                  the command line
config.py, errors.py  environment variables and exceptions
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
from fastattention.attention.merge import merge_attn_states
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
    "fast_attn_qkvpacked_func",
    "fast_attn_varlen_func",
    "fast_attn_varlen_kvpacked_func",
    "fast_attn_varlen_qkvpacked_func",
    "fast_attn_with_kvcache",
    "get_num_threads",
    "merge_attn_states",
    "set_num_threads",
]
