"""Makes the call of a public function from a case, always with the same values."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastattention import fast_attn_func, fast_attn_varlen_func, fast_attn_with_kvcache
from fastattention.attention.problem import Inputs, Problem
from fastattention.attention.validation import KvCacheArguments, Options, prepare_dense, prepare_kvcache, prepare_varlen
from fastattention.cli.check.cases import Case
from fastattention.quantized import quantize

BLOCK = 64  # tokens of a block of a block mask, in both directions
SPARE = 3  # tokens of a cache beyond its longest sequence
CACHES = ("k_cache", "v_cache")  # tensors that an append writes
DIFFERENTIATED = ("q", "k", "v", "sinks")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """A call of a public function. A new one is made for each run, because it may write its caches."""

    function: Callable[..., Any]
    tensors: dict[str, Tensor]
    scalars: dict[str, Any]

    def on(self, device: str) -> Call:
        """The same call with its tensors on `device`. Values that are views of the keys stay so."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        if _shares_memory(self.tensors.get("k_cache"), self.tensors.get("v_cache")):
            moved["v_cache"] = moved["k_cache"][..., : self.tensors["v_cache"].shape[-1]]
        return replace(self, tensors=moved)

    def arguments(self) -> dict[str, Any]:
        """Arguments of the function, with return_lse."""
        return {**self.tensors, **self.scalars}

    def prepare(self) -> tuple[Problem, Inputs]:
        """The validated call, for the reference."""
        scalars = dict(self.scalars)
        left, right = scalars.pop("window_size")
        block = scalars.pop("block_size", 0)
        options = Options(**scalars, window_left=left, window_right=right, block_m=block, block_n=block)
        if self.function is fast_attn_func:
            return prepare_dense(**self.tensors, options=options)
        if self.function is fast_attn_varlen_func:
            return prepare_varlen(**self.tensors, max_seqlen_q=None, max_seqlen_k=None, options=options)
        return prepare_kvcache(KvCacheArguments(**self.tensors), options)

    def __str__(self) -> str:
        """The call as source text, with shapes in place of tensors."""
        scalars = {name: value for name, value in self.scalars.items() if value not in (False, 0.0, (-1, -1))}
        shapes = [f"{name}={tuple(tensor.shape)}" for name, tensor in self.tensors.items()]
        return (
            f"{self.function.__name__}({', '.join([*shapes, *(f'{name}={value}' for name, value in scalars.items())])})"
        )


def build_call(case: Case) -> Call:
    """The call of `case`, with tensors of its own on the CPU."""
    draw = _Draw(case)
    function: Callable[..., Any]
    if case.layout == "dense":
        function, tensors = fast_attn_func, draw.dense()
    elif case.layout == "varlen":
        function, tensors = fast_attn_varlen_func, draw.varlen()
    else:
        function, tensors = fast_attn_with_kvcache, draw.cache()
    scalars = {"causal": case.causal, "window_size": case.window, "softcap": case.softcap, "return_lse": case.lse}
    if case.layout != "cache":
        scalars["dropout_p"] = case.dropout_p
    tensors |= draw.of_scores()
    if case.blocks:
        rows, columns = (-(-max(lengths) // BLOCK) for lengths in (case.seqlens_q, case.seqlens_k))
        tensors["block_mask"] = draw.uniform(1, case.nheads, rows, columns) < 0.5
        scalars["block_size"] = BLOCK
    if case.gradients:
        for name in set(DIFFERENTIATED) & set(tensors):
            tensors[name].requires_grad_()
    return Call(function, tensors, scalars)


def spans_of(case: Case, call: Call) -> Iterator[Call]:
    """Smaller calls that compute the rows of the spans of a long causal prompt."""
    q, k, v = (call.tensors[name] for name in ("q", "k", "v"))
    for begin, end in case.spans:
        yield replace(call, tensors={"q": q[:, begin:end], "k": k[:, :end], "v": v[:, :end]})


class _Draw:
    """Draws the tensors of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.generator = torch.Generator(_CPU).manual_seed(zlib.crc32(repr(case).encode()))
        self.headdim_v = case.headdim if case.headdim_v is None else case.headdim_v

    def uniform(self, *shape: int) -> Tensor:
        """Uniform float32 values from 0 to 1."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float32, device=_CPU)

    def dense(self) -> dict[str, Tensor]:
        """q, k and v."""
        batch_size, seqlen_q, seqlen_k = len(self.case.seqlens_q), self.case.seqlens_q[0], self.case.seqlens_k[0]
        return {"q": self._queries(batch_size, seqlen_q), **self._keys("k", "v", batch_size, seqlen_k)}

    def varlen(self) -> dict[str, Tensor]:
        """q, k, v, their offsets, and the pages of k and v."""
        case = self.case
        tensors = {"q": self._queries(sum(case.seqlens_q))}
        if case.page_block_size is None:
            tensors |= self._keys("k", "v", sum(case.seqlens_k))
        else:
            tensors |= self._pages("k", "v", max(case.seqlens_k))
        for name, lengths in (("cu_seqlens_q", case.seqlens_q), ("cu_seqlens_k", case.seqlens_k)):
            tensors[name] = _int32([0, *lengths]).cumsum(0).to(torch.int32)
        return tensors

    def cache(self) -> dict[str, Tensor]:
        """q, caches that are NaN where no token is, lengths, and the tokens to append."""
        case, batch_size = self.case, len(self.case.seqlens_k)
        capacity = max(case.seqlens_k) + case.seqlen_new + SPARE
        tensors = {"q": self._queries(batch_size, case.seqlens_q[0]), "cache_seqlens": _int32(case.seqlens_k)}
        if case.page_block_size is None:
            tensors |= self._keys("k_cache", "v_cache", batch_size, capacity)
        else:
            tensors |= self._pages("k_cache", "v_cache", capacity)
        if case.leftpad is not None:
            tensors["cache_leftpad"] = _int32(case.leftpad)
        self._hide_unused(tensors)
        if case.seqlen_new:
            tensors |= self._keys("k", "v", batch_size, case.seqlen_new)
        if case.rotary_dim:
            angles = 6.3 * self.uniform(capacity, case.rotary_dim // 2)
            tensors |= {"rotary_cos": angles.cos().to(case.dtype), "rotary_sin": angles.sin().to(case.dtype)}
        return tensors

    def of_scores(self) -> dict[str, Tensor]:
        """Slopes, sinks and bias."""
        case, tensors = self.case, {}
        if case.alibi:
            tensors["alibi_slopes"] = 0.3 * self.uniform(case.nheads)
        if case.sinks:
            tensors["sinks"] = 3.0 * self.uniform(case.nheads)
        if case.bias:
            tensors["attn_bias"] = self.uniform(case.nheads, case.seqlens_q[0], case.seqlens_k[0])
        return tensors

    def _hide_unused(self, tensors: dict[str, Tensor]) -> None:
        """Writes NaN to every slot of a cache without a token, and quantizes the cache."""
        case = self.case
        used = torch.zeros(tensors["k_cache"].shape[:2], dtype=torch.bool, device=_CPU)
        for index, length in enumerate(case.seqlens_k):
            start = 0 if case.leftpad is None else case.leftpad[index]
            positions = torch.arange(start, length, device=_CPU)
            if case.page_block_size is None:
                used[index, positions] = True
            else:
                pages = tensors["block_table"][index, positions // case.page_block_size].long()
                used[pages, positions % case.page_block_size] = True
        for name in ("k", "v"):
            cache = tensors[f"{name}_cache"]
            if case.stored is not None:
                cache, scale = quantize(cache, case.stored)
                tensors[f"{name}_cache"], tensors[f"{name}_scale"] = cache, scale
                cache = scale
            cache[~used] = torch.nan

    def _queries(self, *tokens: int) -> Tensor:
        return self._normal(*tokens, self.case.nheads, self.case.headdim)

    def _keys(self, k: str, v: str, *tokens: int) -> dict[str, Tensor]:
        keys = self._normal(*tokens, self.case.nheads_k, self.case.headdim)
        if self.case.values_in_keys:
            return {k: keys, v: keys[..., : self.headdim_v]}
        return {k: keys, v: self._normal(*tokens, self.case.nheads_k, self.headdim_v)}

    def _pages(self, k: str, v: str, capacity: int) -> dict[str, Tensor]:
        """Pages in random order, and one that no sequence uses."""
        size = self.case.page_block_size
        assert size is not None
        batch_size, blocks = len(self.case.seqlens_k), -(-capacity // size)
        table = torch.randperm(batch_size * blocks + 1, generator=self.generator, device=_CPU)[: batch_size * blocks]
        return {
            **self._keys(k, v, batch_size * blocks + 1, size),
            "block_table": table.view(batch_size, blocks).to(torch.int32),
        }

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device=_CPU).to(self.case.dtype)


def _shares_memory(k: Tensor | None, v: Tensor | None) -> bool:
    return k is not None and v is not None and k.data_ptr() == v.data_ptr()


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=_CPU)
