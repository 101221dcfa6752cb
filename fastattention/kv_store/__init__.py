"""KV caches whose memory and layout the library owns. base.py has the interface, KVStore.

dense.py   DenseKVStore: plain tensors, for every backend
packed.py  PackedKVStore: interleaved panels, for the cpu backend
memory.py  allocates their memory
"""

from fastattention.kv_store.base import KVStore
from fastattention.kv_store.dense import DenseKVStore
from fastattention.kv_store.packed import PackedKVStore

__all__ = ["DenseKVStore", "KVStore", "PackedKVStore"]
