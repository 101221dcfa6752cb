"""KV stores: keys and values of a batch of sequences in memory that the library owns, laid out as suits it best."""

from fastattention.kv_store.base import KVStore
from fastattention.kv_store.dense import DenseKVStore
from fastattention.kv_store.packed import PackedKVStore

__all__ = ["DenseKVStore", "KVStore", "PackedKVStore"]
