"""Validation: turns the arguments of a public function into a Problem and its Inputs, or raises ArgumentError.

`common.py` checks what all functions share. `prefill.py` and `kvcache.py` make Problems from shapes, dtypes and devices
alone, cached per combination of them, so that a repeated call pays for one dictionary look-up. `lengths.py` checks
numbers (cu_seqlens, cache_seqlens, page indices), which only the CPU can do without a synchronisation. Nothing is
written before all have passed.
"""

from fastattention.validation.common import KvCacheArguments, Options
from fastattention.validation.kvcache import PanelCache, prepare_kvcache
from fastattention.validation.prefill import prepare_dense, prepare_prefill, prepare_varlen

__all__ = [
    "KvCacheArguments",
    "Options",
    "PanelCache",
    "prepare_dense",
    "prepare_kvcache",
    "prepare_prefill",
    "prepare_varlen",
]
