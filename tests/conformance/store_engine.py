"""An engine that serves the calls of kvcache cases by a store, so that tests of every engine run on it too."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from conformance.engines import ENGINES, Engine
from fastattention import DenseKVStore, KVStore, PackedKVStore
from fastattention.attention.problem import Problem
from fastattention.testing.calls import Call
from fastattention.testing.case import Case, KvCacheCase
from fastattention.testing.memory import whole_memory

# Arguments of a call with a cache that a store lacks, or has of its own.
_OF_CACHES = ("k_cache", "v_cache", "cache_seqlens", "cache_batch_idx", "block_table", "cache_leftpad")


class StoreEngine(Engine):
    """A backend under a kind of store, which is made from a call's caches; its tokens are written back there."""

    @property
    def kind(self) -> type[KVStore]:
        raise NotImplementedError

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        out, lse = self._attended(call, return_lse=True)
        return out, lse

    def run_without_lse(self, call: Call) -> Tensor:
        out: Tensor = self._attended(call)
        return out

    def refusal(self, problem: Problem) -> str | None:
        return None

    def _attended(self, call: Call, **options: Any) -> Any:
        arguments = {name: value for name, value in call.arguments.items() if name not in _OF_CACHES}
        k, v, seqlens = logical_caches(call)
        store = filled_store(self.kind, k, v, seqlens, self.backend)
        result = store.attend(**arguments, **options, backend=self.backend)
        seqlen_new = 0 if arguments.get("k") is None else arguments["k"].shape[1]
        assert store.seqlens.tolist() == [length + seqlen_new for length in seqlens]
        for name, tokens in zip(("k_cache", "v_cache"), store.read(), strict=True):
            _write_back(call, name, tokens, [length + seqlen_new for length in seqlens])
        return result


class DenseStoreEngine(StoreEngine):
    @property
    def name(self) -> str:
        return f"dense-store-{super().name}"

    @property
    def kind(self) -> type[KVStore]:
        return DenseKVStore


class PackedStoreEngine(StoreEngine):
    @property
    def name(self) -> str:
        return f"packed-store-{super().name}"

    @property
    def kind(self) -> type[KVStore]:
        return PackedKVStore


DENSE_STORE_ENGINES = [DenseStoreEngine(*engine) for engine in ENGINES if engine.backend in ("cpu", "sdpa")]
PACKED_STORE_ENGINES = [PackedStoreEngine(*engine) for engine in ENGINES if engine.backend == "cpu"]


def has_store(case: Case) -> bool:
    """Whether a store can hold the cache of a case: it has no left padding, and is not quantized."""
    return isinstance(case, KvCacheCase) and case.leftpad is None and case.stored == "as_q"


def logical_caches(call: Call) -> tuple[Tensor, Tensor, list[int]]:
    """(k, v, lengths) of a call's caches: (batch_size, capacity, nheads_k, headdim), NaN beyond the lengths."""
    problem, inputs = call.prepare()
    assert inputs.cache_seqlens is not None
    seqlens: list[int] = inputs.cache_seqlens.tolist()
    shape = (problem.batch_size, problem.seqlen_k, problem.nheads_k)
    caches = [inputs.q.new_full((*shape, headdim), torch.nan) for headdim in (problem.headdim, problem.headdim_v)]
    for to, name in zip(caches, ("k_cache", "v_cache"), strict=True):
        for sequence, length in enumerate(seqlens):
            to[sequence, :length] = call.arguments[name][_places(call, sequence, length)]
    return caches[0], caches[1], seqlens


def filled_store(kind: type[KVStore], k: Tensor, v: Tensor, seqlens: list[int], backend: str) -> KVStore:
    """A store of the first `seqlens` tokens of k and v. All its other memory is NaN."""
    batch_size, capacity, nheads_k, headdim = k.shape
    store = kind(batch_size, capacity, nheads_k, headdim, v.shape[-1], dtype=k.dtype)
    for memory in vars(store).values():
        if isinstance(memory, Tensor) and memory.is_floating_point():
            whole_memory(memory).fill_(torch.nan)
    store.append(k, v, backend=backend)
    store.truncate(torch.tensor(seqlens, dtype=torch.int32))
    return store


def _places(call: Call, sequence: int, length: int) -> tuple[Tensor, Tensor]:
    """Indices of the first two axes of the caches for the first positions of a sequence."""
    positions = torch.arange(length)
    table, rows = call.arguments.get("block_table"), call.arguments.get("cache_batch_idx")
    if table is not None:
        size = call.arguments["k_cache"].shape[1]
        return table[sequence, : math.ceil(length / size)].long()[positions // size], positions % size
    row = sequence if rows is None else int(rows[sequence])
    return torch.full_like(positions, row), positions


def _write_back(call: Call, name: str, tokens: Tensor, seqlens: list[int]) -> None:
    for sequence, length in enumerate(seqlens):
        call.arguments[name][_places(call, sequence, length)] = tokens[sequence, :length]
