"""A store compared with a reference of plain tensors that hold the same tokens, and its invariants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import prepare_dense
from fastattention.attention.validation.common import Options
from fastattention.errors import CacheFullError
from fastattention.offload.kv_store import CooperativeKVStore, MemoryCaps
from fastattention.offload.layer import AttendOptions, Padding
from fastattention.offload.pages import PagePool, PageShape
from fastattention.quantized import dequantize, quantize
from offload.fake_device import FakeDevice

# Tolerances of values near 1, which are rounded once in a part and once when parts are merged.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
NHEADS_K, HEADDIM, HEADDIM_V = 2, 16, 8


def page_shape(
    dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None, page_size: int = 4
) -> PageShape:
    return PageShape(page_size, NHEADS_K, HEADDIM, HEADDIM_V, dtype, cache_dtype)


def latent_shape(
    dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None, page_size: int = 4
) -> PageShape:
    return PageShape(page_size, 1, HEADDIM, HEADDIM_V, dtype, cache_dtype, values_in_keys=True)


@dataclass
class CachePair:
    """A store and its reference. gpu_pages, cpu_pages: budgets of each memory; buffers take some of gpu_pages."""

    num_layers: int = 4
    batch_size: int = 1
    shape: PageShape = field(default_factory=page_shape)
    gpu_pages: int = 40
    cpu_pages: int = 1000
    share: Callable[[int, int], float] = lambda layers, tokens: 0.0
    nheads: int = 2 * NHEADS_K
    options: dict[str, Any] = field(default_factory=dict)  # softcap, sinks
    padding: list[int] | None = None
    topk: int | None = None  # keys that each query selects at random
    device: FakeDevice = field(default_factory=FakeDevice)

    def __post_init__(self) -> None:
        on_device = replace(self.shape, cache_dtype=None)
        self.budget = MemoryCaps(
            self.gpu_pages * on_device.nbytes,
            self.cpu_pages * self.shape.nbytes,
            "raise gpu_memory",
            "raise cpu_memory",
        )
        self.store = CooperativeKVStore(
            self.num_layers, self.batch_size, self.shape, self.device, self.budget, self.share
        )
        poison(self.store)
        watch(self.store, self.device)
        heads = self.shape.nheads_k
        self.k = [torch.zeros(self.batch_size, 0, heads, HEADDIM) for _ in range(self.num_layers)]
        self.v = [torch.zeros(self.batch_size, 0, heads, HEADDIM_V) for _ in range(self.num_layers)]

    @property
    def length(self) -> int:
        return self.k[0].shape[1]

    def steps(self, count: int, tokens: int = 1) -> None:
        for _ in range(count):
            self.attend(tokens)

    def attend(self, tokens: int) -> None:
        """Runs a step of every layer, and compares the results."""
        padding = None if self.padding is None else Padding(self.padding)
        options = AttendOptions(padding=padding, **self.options)
        new: list[tuple[Tensor, Tensor]] = []
        for index in range(self.num_layers):
            q = self._random(tokens, self.nheads, HEADDIM)
            new.append(self._new(tokens))
            indices = None if self.topk is None else self._selected(tokens)
            with Expected(self, index):
                out = self.store.attend(index, q, *new[-1], options._replace(indices=indices))
            self._compare(out, self._plain(index, q, *new[-1], indices))
        self._keep(new)

    def append(self, tokens: int) -> None:
        """Appends a prompt without attention."""
        new = []
        for index in range(self.num_layers):
            new.append(self._new(tokens))
            with Expected(self, index):
                self.store.append(index, *new[-1])
        self._keep(new)

    def truncate(self, length: int) -> None:
        self._remember_rounding()
        self.store.truncate(length)
        self.k, self.v = ([each[:, :length] for each in tensors] for tensors in (self.k, self.v))
        self.check()

    def select(self, rows: Sequence[int]) -> None:
        self.store.select(rows)
        self.k, self.v = ([each[list(rows)] for each in tensors] for tensors in (self.k, self.v))
        self.batch_size = len(rows)
        if self.padding is not None:
            self.padding = [self.padding[row] for row in rows]
        self.check()

    def check(self) -> None:
        """Checks lengths, budgets, and the number of owners of every page."""
        store = self.store
        assert store.length == self.length
        assert all(layer.length == self.length for layer in store._layers)
        assert all(layer.batch_size == self.batch_size for layer in store._layers)
        assert store._gpu.used * store._gpu.shape.nbytes + store._staging.nbytes == store.usage.gpu_bytes
        assert nbytes(store._gpu) + store._staging.nbytes <= self.budget.gpu
        assert store.usage.cpu_bytes <= nbytes(store._host) <= self.budget.cpu
        for pool, tables in (
            (store._gpu, [layer._gpu_table for layer in store._layers]),
            (store._host, [layer._host_table for layer in store._layers]),
        ):
            check_books(pool, [page for table in tables for page in table.all()])
        for layer in store._layers:
            assert layer.num_gpu_pages == layer.gpu_pages_for(0), "pages that hold nothing"
            assert layer.on_cpu or not layer.host_tokens

    def _keep(self, new: list[tuple[Tensor, Tensor]]) -> None:
        for index, (k, v) in enumerate(new):
            self.k[index] = torch.cat((self.k[index], k.float()), dim=1)
            self.v[index] = torch.cat((self.v[index], v.float()), dim=1)
        self.check()

    def _random(self, tokens: int, heads: int, columns: int) -> Tensor:
        return torch.randn(self.batch_size, tokens, heads, columns).to(self.shape.dtype)

    def _new(self, tokens: int) -> tuple[Tensor, Tensor]:
        k = self._random(tokens, self.shape.nheads_k, HEADDIM)
        if self.shape.values_in_keys:
            return k, k[..., :HEADDIM_V]
        return k, self._random(tokens, self.shape.nheads_k, HEADDIM_V)

    def _selected(self, tokens: int) -> Tensor:
        """Positions that each of the newest queries sees, in rising order, then -1. The first one selects none."""
        assert self.topk is not None
        indices = torch.full((self.batch_size, tokens, self.topk), -1, dtype=torch.int32)
        for row in indices.view(-1, self.topk)[1:]:
            seen = torch.randperm(self.length + 1)[: self.topk].sort().values
            row[: len(seen)] = seen
        return indices

    def _held(self, index: int) -> tuple[Tensor, Tensor]:
        """The tokens that the store held of a layer before this step: whole pages in CPU memory are quantized."""
        k, v = self.k[index].clone(), self.v[index].clone()
        cache_dtype, page_size = self.shape.cache_dtype, self.shape.page_size
        if cache_dtype is not None:
            layer = self.store._layers[index]
            end = self.length // page_size * page_size if layer.on_cpu else 0
            for each in (k, v):
                each[:, :end] = dequantize(*quantize(each[:, :end], cache_dtype))
            if self.shape.values_in_keys:
                v = k[..., :HEADDIM_V]
        return k, v

    def _remember_rounding(self) -> None:
        """Keeps the rounding of tokens that are fetched back from quantized pages."""
        if self.shape.cache_dtype is not None:
            for index in range(self.num_layers):
                self.k[index], self.v[index] = self._held(index)

    def _plain(self, index: int, q: Tensor, k: Tensor, v: Tensor, indices: Tensor | None) -> Tensor:
        old_k, old_v = self._held(index)
        k, v = torch.cat((old_k, k.float()), dim=1), torch.cat((old_v, v.float()), dim=1)
        options = Options(causal=True, window_right=0, softcap=self.options.get("softcap", 0.0))
        bias = None
        if self.padding is not None:
            seen = torch.arange(k.shape[1]) >= torch.tensor(self.padding)[:, None]
            bias = torch.where(seen, 0.0, -torch.inf)[:, None, None].expand(-1, 1, q.shape[1], -1)
        if indices is not None:
            columns = torch.where(indices < 0, k.shape[1], indices).long()
            hidden = torch.full((*columns.shape[:2], k.shape[1] + 1), -torch.inf).scatter_(2, columns, 0.0)
            bias = hidden[:, None, :, :-1].contiguous()
        problem, inputs = prepare_dense(q.float(), k, v, options, attn_bias=bias, sinks=self.options.get("sinks"))
        return reference_attention(problem, inputs).out

    def _compare(self, out: Tensor, wanted: Tensor) -> None:
        assert out.dtype is self.shape.dtype
        torch.testing.assert_close(out.double(), wanted, rtol=0.0, atol=TOLERANCE[self.shape.dtype])


class Expected:
    """Expects that a step is refused for lack of room only before its first layer, without any change."""

    def __init__(self, make_pair: CachePair, index: int) -> None:
        self._pair, self._index = make_pair, index

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is CacheFullError and not self._pair.device.faults.fired:
            assert self._index == 0, "refused in the middle of a step"
            self._pair.check()


def nbytes(pool: PagePool) -> int:
    return sum(tensor.nbytes for tensor in pool.pages.tensors())


def check_books(pool: PagePool, held: Sequence[int]) -> None:
    owners = Counter(held)
    assert pool._owners == [owners[page] for page in range(pool.num_pages)]
    unowned = sorted([*pool._free, *(page for _, pages in pool._returned for page in pages)])
    assert unowned == sorted(set(range(pool.num_pages)) - set(owners))


def poison(store: CooperativeKVStore) -> None:
    """Fills memory that has not been written with NaN."""
    buffers = [buffer.pages for buffer in store._staging._buffers]
    for pages in (store._gpu.pages, store._host.pages, *buffers):
        for tensor in pages.tensors():
            tensor.fill_(77 if tensor.dtype is torch.int8 else torch.nan)


def watch(store: CooperativeKVStore, device: FakeDevice) -> None:
    """Counts taking pages among the calls that may fail."""

    def watched(take: Callable[[int], list[int]]) -> Callable[[int], list[int]]:
        return lambda count: device.faults.call(take, count, lose=False)

    for pool in (store._gpu, store._host):
        pool.take = watched(pool.take)  # type: ignore[method-assign, assignment]
