"""Validation: turns the arguments of a public function into a Problem and its Inputs, or raises ArgumentError.

`common.py` checks what all functions share. `prefill.py` and `kvcache.py` make Problems from shapes, dtypes, devices
and strides, once for all calls that share a plan. `lengths.py` checks in every call what may differ then: values
of cu_seqlens, cache_seqlens and page indices, which only the CPU can read without a synchronization, and caches that
share memory. Nothing is written before all checks have passed.
"""

from fastattention.attention.validation.common import KvCacheArguments, Options, PanelCache
from fastattention.attention.validation.kvcache import prepare_kvcache
from fastattention.attention.validation.prefill import prepare_dense, prepare_prefill, prepare_varlen

__all__ = [
    "KvCacheArguments",
    "Options",
    "PanelCache",
    "prepare_dense",
    "prepare_kvcache",
    "prepare_prefill",
    "prepare_varlen",
]
