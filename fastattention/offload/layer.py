"""The cache of one layer: pages in CPU memory first, then pages on the device, and attention to both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattention.attention.interface import fast_attn_with_kvcache
from fastattention.attention.selected import fast_attn_selected_func
from fastattention.attention.validation import KvCacheArguments, Options
from fastattention.offload.cpu_attention import prepare_attention
from fastattention.offload.device import Copy, CpuWork, Device, Event
from fastattention.offload.lengths import LengthTensors
from fastattention.offload.memory import ceil_div
from fastattention.offload.pages import PagePool, Pages, PageShape, allocate_pages, runs
from fastattention.quantized import quantize


class Padding:
    """Padding tokens at the start of each sequence."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        self._longest = max(counts, default=0)
        self._made: dict[tuple[int, int, torch.device], Tensor] = {}  # layers and steps ask for the same tensors

    def within(self, begin: int, end: int, device: torch.device) -> Tensor | None:
        """cache_leftpad of tokens begin to end - 1 by themselves: int32 (batch_size,), or None when all are seen."""
        if self._longest <= begin:
            return None
        key = (begin, min(end, self._longest), device)
        if key not in self._made:
            hidden = [min(max(count - begin, 0), end - begin) for count in self.counts]
            self._made[key] = torch.tensor(hidden, dtype=torch.int32, device=device)
        return self._made[key]


class AttendOptions(NamedTuple):
    """How queries attend. They are the newest tokens, and causal."""

    softmax_scale: float | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None  # on the device
    padding: Padding | None = None
    # int32 (batch_size, seqlen_q, topk) on the device: positions of the keys that each query sees, then -1
    indices: Tensor | None = None

    def leftpad(self, begin: int, end: int, device: torch.device) -> Tensor | None:
        """cache_leftpad of tokens begin to end - 1."""
        return None if self.padding is None else self.padding.within(begin, end, device)


class PageTable:
    """Pages of every sequence, equally many, in order, and their block_table on the device that reads them."""

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.pages: list[list[int]] = [[] for _ in range(batch_size)]
        self._device = device
        self._tensors: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self.pages[0]) if self.pages else 0

    def all(self) -> list[int]:
        """Pages of all sequences."""
        return [page for sequence in self.pages for page in sequence]

    def change(self, pages: Sequence[Sequence[int]]) -> None:
        """Replaces the pages."""
        self.pages = [list(sequence) for sequence in pages]
        self._tensors.clear()

    def extend(self, taken: Sequence[int]) -> None:
        """Adds pages, equally many for every sequence; those of the first sequence come first."""
        each = len(taken) // max(len(self.pages), 1)
        if each:
            self.change([old + list(taken[row * each : (row + 1) * each]) for row, old in enumerate(self.pages)])

    def block_table(self) -> Tensor:
        """int32 (batch_size, pages a sequence)."""
        return self.on(self._device)

    def on(self, device: torch.device) -> Tensor:
        """The block_table for another device that reads the pages."""
        if device not in self._tensors:
            table = torch.tensor(self.pages, dtype=torch.int32, device="cpu").view(len(self.pages), -1)
            self._tensors[device] = table.to(device, non_blocking=True)
        return self._tensors[device]


class Layer:
    """The cache of one layer. All sequences hold the same number of tokens.

    Attending and appending take pages, which the caller has made sure are available.
    """

    def __init__(self, batch_size: int, device: Device, gpu: PagePool, host: PagePool, lengths: LengthTensors) -> None:
        self.length = 0
        self.on_cpu = False  # whether whole pages are sent to CPU memory
        self.downloaded: Event = None
        self._device, self._gpu, self._host, self._lengths = device, gpu, host, lengths
        self._page_size = gpu.shape.page_size
        self._gpu_table = PageTable(batch_size, device.torch_device)
        self._host_table = PageTable(batch_size, torch.device("cpu"))

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return len(self._gpu_table.pages)

    @property
    def host_tokens(self) -> int:
        """Tokens of every sequence in CPU memory, whole pages."""
        return len(self._host_table) * self._page_size

    @property
    def host_pages(self) -> list[list[int]]:
        """Pages of every sequence in CPU memory."""
        return self._host_table.pages

    @property
    def num_gpu_pages(self) -> int:
        """Pages on the device, of all sequences."""
        return len(self._gpu_table) * self.batch_size

    @property
    def num_gpu_pages_owned(self) -> int:
        """Pages on the device; a page that several sequences share counts once."""
        return len(set(self._gpu_table.all()))

    def gpu_pages_for(self, tokens: int) -> int:
        """Pages on the device for the present tokens and `tokens` more of each sequence."""
        return self.batch_size * ceil_div(self.length - self.host_tokens + tokens, self._page_size)

    def host_bytes(self, begin: int) -> int:
        """Bytes of CPU memory from token `begin` on."""
        return self.batch_size * (self.host_tokens - begin) * self._host.shape.token_bytes

    def append(self, k: Tensor, v: Tensor) -> None:
        """Appends k and v, (batch_size, seqlen_new, nheads_k, headdim or headdim_v), and attends to nothing."""
        self._append(k, v)
        self.finish(k.shape[1])

    def attend_on_device(self, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions, return_lse: bool) -> Any:
        """Appends k and v and attends to the tokens on the device: out, or (out, lse). `finish` advances the length."""
        self._grow(k.shape[1])
        before, end = self._gpu_tokens, self.length + k.shape[1]
        leftpad = options.leftpad(self.host_tokens, end, q.device)
        new_k: Tensor | None
        new_v: Tensor | None
        if leftpad is not None and options.padding is not None and max(options.padding.counts) > self.length:
            # Padding ends among the new tokens, so they must be appended first.
            none = q[:, :0]
            fast_attn_with_kvcache(none, *self._gpu.pages[:2], k, v, **self._where(before))
            before, new_k, new_v = before + k.shape[1], None, None
        else:
            new_k, new_v = k, v
        return fast_attn_with_kvcache(
            q, *self._gpu.pages[:2], new_k, new_v, cache_leftpad=leftpad, softmax_scale=options.softmax_scale,
            causal=True, softcap=options.softcap, sinks=options.sinks, return_lse=return_lse, **self._where(before),
        )  # fmt: skip

    def attend_to_selected(self, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        """`attend_on_device` where options.indices say which tokens are seen, and all are on the device."""
        assert options.indices is not None
        self._append(k, v)
        k_pages, v_pages, *_ = self._gpu.pages
        lengths = self._lengths.of(self.batch_size, self.length + k.shape[1])
        return fast_attn_selected_func(
            q, k_pages, v_pages, options.indices, options.softmax_scale, softcap=options.softcap, sinks=options.sinks,
            seqused_k=lengths, block_table=self._gpu_table.block_table(),
        )  # fmt: skip

    def attend_to_uploaded(self, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        """`attend_to_selected` for many queries: all tokens in CPU memory come to the device for this call."""
        assert options.indices is not None
        self._append(k, v)
        shape, held = self._gpu.shape, self._gpu_tokens + k.shape[1]
        here = torch.arange(held, dtype=torch.int64, device=q.device).expand(self.batch_size, -1)
        keys = torch.cat((self._uploaded(), self._gpu_rows(here)), dim=1).unsqueeze(2)
        return fast_attn_selected_func(
            q, keys, keys[..., : shape.headdim_v], options.indices, options.softmax_scale, softcap=options.softcap,
            sinks=options.sinks,
        )  # fmt: skip

    def attend_to_gathered(self, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        """`attend_to_selected` on both sides, for few queries. The device reads those in CPU memory over the link."""
        indices = options.indices
        assert indices is not None
        self._append(k, v)
        if self.downloaded is not None:
            self._device.wait(self.downloaded)
        batch_size, seqlen_q, topk = indices.shape
        shape, positions = self._gpu.shape, indices.flatten(1)
        # The others are read of token 0, and not used.
        on_host = (positions >= 0) & (positions < self.host_tokens)
        rows = torch.where(
            on_host[..., None],
            self._host_rows(torch.where(on_host, positions, 0)),
            self._gpu_rows((positions - self.host_tokens).clamp(min=0)),
        )
        keys = rows.view(batch_size * seqlen_q, topk, 1, shape.headdim)
        out = fast_attn_with_kvcache(
            q.flatten(0, 1)[:, None], keys, keys[..., : shape.headdim_v],
            cache_seqlens=(indices >= 0).sum(-1, dtype=torch.int32).flatten(), softmax_scale=options.softmax_scale,
            softcap=options.softcap, sinks=options.sinks,
        )  # fmt: skip
        return out.view(batch_size, seqlen_q, *out.shape[2:])

    def _gpu_rows(self, positions: Tensor) -> Tensor:
        """Keys on the device, (batch_size, tokens, headdim), by their positions there."""
        rows = _rows_of(positions, self._gpu_table.block_table(), self._page_size)
        return _gathered(self._gpu.pages.k.flatten(0, 2), rows)

    def _host_rows(self, positions: Tensor) -> Tensor:
        """Keys in CPU memory, which the device reads over the link, as it holds keys."""
        k, k_scale = self._host.reached(self._device)
        rows = _rows_of(positions, self._host_table.on(positions.device), self._page_size)
        found = _gathered(k, rows)
        if k_scale is not None:
            found = found.float() * k_scale[rows][..., None]
        return found.to(self._gpu.shape.dtype)

    def _uploaded(self) -> Tensor:
        """All keys in CPU memory, (batch_size, host_tokens, headdim), as the device holds keys."""
        pages = allocate_pages(self._host.shape, len(self._host_table.all()), self._on_device)
        copies = [
            Copy(to[position : position + count], source[page : page + count])
            for position, page, count in runs(self._host_table.all(), self._host.slab_pages)
            for to, source in zip(pages.tensors(), self._host.pages.tensors(), strict=True)
        ]
        # The memory may have been another tensor's, which is still read.
        after = [event for event in (self._device.mark(), self.downloaded) if event is not None]
        self._device.wait(self._device.upload(copies, after).end)
        found = pages.k if pages.k_scale is None else pages.k.float() * pages.k_scale[..., None]
        return found.to(self._gpu.shape.dtype).view(self.batch_size, self.host_tokens, -1)

    def _on_device(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device.torch_device)

    def _append(self, k: Tensor, v: Tensor) -> None:
        """Appends to the pages on the device; `finish` advances the length."""
        self._grow(k.shape[1])
        no_queries = k.new_empty(k.shape[0], 0, *k.shape[2:])
        fast_attn_with_kvcache(no_queries, *self._gpu.pages[:2], k, v, **self._where(self._gpu_tokens))

    def prepare_on_cpu(
        self, q: Tensor, begin: int, options: AttendOptions, out: Tensor, lse: Tensor, num_threads: int
    ) -> CpuWork:
        """Attention over tokens `begin` to host_tokens, which the CPU can run once q is in its memory."""
        end = self.host_tokens
        counts = [0] * self.batch_size if options.padding is None else options.padding.counts
        leftpad = torch.tensor([min(max(count, begin), end) for count in counts], dtype=torch.int32, device="cpu")
        k, v, k_scale, v_scale = self._host.pages
        arguments = KvCacheArguments(
            q, k, v, cache_seqlens=end, cache_leftpad=leftpad, block_table=self._host_table.block_table(),
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        return prepare_attention(
            arguments, Options(options.softmax_scale, softcap=options.softcap), out, lse, num_threads
        )

    def finish(self, tokens: int) -> None:
        """Ends a call of `attend_on_device` that appended `tokens`."""
        self.length += tokens
        if self.on_cpu:
            self._send_down()

    def demote(self) -> None:
        """Sends whole pages to CPU memory, now and as they fill."""
        self._send_down()
        self.on_cpu = True

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens of every sequence; there must be a page for each sequence."""
        if length < self.host_tokens:
            self._fetch_back(length)
        keep = ceil_div(length - self.host_tokens, self._page_size)
        after = self._device.mark()
        self._gpu.release((page for pages in self._gpu_table.pages for page in pages[keep:]), after)
        self._gpu_table.change([pages[:keep] for pages in self._gpu_table.pages])
        self.length = length

    def select(self, rows: Sequence[int], after: Event) -> None:
        """Sequence i becomes a copy of sequence rows[i]. Pages are shared; unused ones are free after the event."""
        for pool, table in ((self._gpu, self._gpu_table), (self._host, self._host_table)):
            old = table.all()
            chosen = [table.pages[row] for row in rows]
            for pages in chosen:
                pool.share(pages)
            pool.release(old, after)
            table.change(chosen)

    @property
    def num_pages_to_copy(self) -> int:
        """Pages that the next append copies first."""
        return len(self._to_copy())

    @property
    def _gpu_tokens(self) -> int:
        return self.length - self.host_tokens

    def _where(self, tokens: int) -> dict[str, Any]:
        """Arguments that tell a call where the first `tokens` of every sequence are on the device."""
        lengths = self._lengths.of(self.batch_size, tokens)
        return {"cache_seqlens": lengths, "block_table": self._gpu_table.block_table()}

    def _grow(self, tokens: int) -> None:
        """Makes room for `tokens` more of every sequence."""
        self._copy_shared()
        self._gpu_table.extend(self._gpu.take(self.gpu_pages_for(tokens) - self.num_gpu_pages))

    def _to_copy(self) -> list[int]:
        """Sequences that share a partly filled last page with a later sequence, which keeps it."""
        if not self._gpu_tokens % self._page_size:
            return []
        last = [pages[-1] for pages in self._gpu_table.pages]
        return [row for row, page in enumerate(last) if page in last[row + 1 :]]

    def _copy_shared(self) -> None:
        rows = self._to_copy()
        if not rows:
            return
        pages = [list(sequence) for sequence in self._gpu_table.pages]
        olds = [pages[row][-1] for row in rows]
        for row, old, new in zip(rows, olds, self._gpu.take(len(rows)), strict=True):
            for tensor in self._gpu.pages.tensors():
                tensor[new].copy_(tensor[old])
            pages[row][-1] = new
        self._gpu_table.change(pages)
        self._gpu.release(olds, None)  # none of them becomes free: other sequences keep them

    def _send_down(self) -> None:
        """Moves the whole pages on the device to CPU memory."""
        count = self._gpu_tokens // self._page_size
        if not count:
            return
        leaving = [page for pages in self._gpu_table.pages for page in pages[:count]]
        targets = self._host.take(len(leaving))
        try:
            self.downloaded = self._device.download(list(self._copies_down(leaving, targets)))
        except BaseException:
            self._host.release(targets, None)  # any downloads into them end before later ones begin
            raise
        self._host_table.extend(targets)
        self._gpu_table.change([pages[count:] for pages in self._gpu_table.pages])
        self._gpu.release(leaving, self.downloaded)

    def _copies_down(self, leaving: Sequence[int], targets: Sequence[int]) -> Iterator[Copy]:
        for position, page, count in runs(leaving, self._gpu.slab_pages):
            sources = _stored(self._gpu.pages, page, count, self._host.shape)
            for offset, target, length in runs(targets[position : position + count], self._host.slab_pages):
                for to, source in zip(self._host.pages.tensors(), sources.tensors(), strict=True):
                    yield Copy(to[target : target + length], source[offset : offset + length])

    def _fetch_back(self, length: int) -> None:
        """Copies the page in which `length` ends back to the device, and frees the pages after it."""
        whole, rest = divmod(length, self._page_size)
        after = self._device.mark()
        self._gpu.release(self._gpu_table.all(), after)
        self._gpu_table.change([[] for _ in self._gpu_table.pages])
        if rest:
            last = [pages[whole] for pages in self._host_table.pages]
            self._gpu_table.extend(self._gpu.take(len(last)))
            self._restore(last, self._gpu_table.all())
        self._host.release((page for pages in self._host_table.pages for page in pages[whole:]), self._device.mark())
        self._host_table.change([pages[:whole] for pages in self._host_table.pages])

    def _restore(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies pages from CPU memory to the device."""
        if self.downloaded is not None:
            self._device.wait(self.downloaded)
        for source, target in zip(sources, targets, strict=True):
            k, v, k_scale, v_scale = self._host.pages
            sides = list(zip(self._gpu.pages[:2], (k, v), (k_scale, v_scale), strict=True))
            for to, pages, scale in sides[:1] if self._host.shape.values_in_keys else sides:
                numbers = pages[source].to(self._device.torch_device)
                if scale is not None:
                    numbers = numbers.float() * scale[source].to(self._device.torch_device).unsqueeze(-1)
                to[target].copy_(numbers)


def _stored(pages: Pages, page: int, count: int, shape: PageShape) -> Pages:
    """Some neighbouring pages as CPU memory holds them, in pages of `shape`."""
    k, v = pages.k[page : page + count], pages.v[page : page + count]
    if shape.cache_dtype is None:
        return Pages(k, v, None, None)
    # Heads come first when quantized, which keeps the results contiguous in that order.
    quantized = (
        quantize(each.transpose(1, 2), shape.cache_dtype) for each in ((k,) if shape.values_in_keys else (k, v))
    )
    (k, k_scale), *other = ((each.transpose(1, 2), scale.transpose(1, 2)) for each, scale in quantized)
    v, v_scale = other[0] if other else (k[..., : shape.headdim_v], k_scale)
    return Pages(k, v, k_scale, v_scale)


def _rows_of(positions: Tensor, table: Tensor, page_size: int) -> Tensor:
    """The rows of tokens among those of all pages: int64 (batch_size, tokens), as positions."""
    positions = positions.long()
    return table.gather(1, positions // page_size).long() * page_size + positions % page_size


def _gathered(keys: Tensor, rows: Tensor) -> Tensor:
    """keys[rows], in words of eight bytes: reads over a link are as wide as the lanes of a warp together."""
    if keys.shape[-1] * keys.itemsize % 8:
        return keys[rows]
    return keys.view(torch.int64)[rows].view(keys.dtype)
