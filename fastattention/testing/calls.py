"""From a case and a dtype to the call of a public function that it stands for, always with the same values."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattention import fast_attn_func, fast_attn_varlen_func, fast_attn_with_kvcache
from fastattention.attention.mask_tiles import PairMask
from fastattention.attention.problem import Inputs, Problem
from fastattention.attention.validation import KvCacheArguments, Options, prepare_dense, prepare_kvcache, prepare_varlen
from fastattention.quantized import quantize
from fastattention.sparse import from_pairs
from fastattention.testing.caches import Cache, Pages, Rows
from fastattention.testing.case import Bias, Case, DenseCase, KvCacheCase, Memory, VarlenCase
from fastattention.testing.memory import nothing, place

# Arguments that an append writes.
WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale")
SEED = 0  # of torch's generator before each call with dropout


@dataclass(frozen=True)
class Call:
    """One call of a public function: tensors of its own, to be made once because it may write its caches."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    buffers: dict[str, Tensor]  # the whole memory of each tensor among the arguments
    new_slots: tuple[Tensor, Tensor] | None = None  # where the call writes its caches: indices of their first two axes

    def run(self, backend: str) -> tuple[Tensor, Tensor]:
        """(out, lse) of the public function."""
        torch.manual_seed(SEED)
        out, lse = self.function(**self.arguments, return_lse=True, backend=backend)
        return out, lse

    def run_without_lse(self, backend: str) -> Tensor:
        """Out of the public function when nobody asks for lse: a backend may take another way then."""
        torch.manual_seed(SEED)
        out: Tensor = self.function(**self.arguments, backend=backend)
        return out

    def prepare(self) -> tuple[Problem, Inputs]:
        """The validated call, for the reference."""
        rest = dict(self.arguments)
        window_left, window_right = rest.pop("window_size")
        scalars = {name: rest.pop(name) for name in ("softmax_scale", "causal", "softcap")}
        block_m, block_n = rest.pop("block_size", (0, 0))
        options = Options(
            **scalars, window_left=window_left, window_right=window_right, block_m=block_m, block_n=block_n,
            qk_dtype=rest.pop("qk_dtype", None), dropout_p=rest.pop("dropout_p", 0.0), return_lse=True,
            rotary_interleaved=rest.pop("rotary_interleaved", True), num_splits=rest.pop("num_splits", 0),
            deterministic=rest.pop("deterministic", False),
        )  # fmt: skip
        if isinstance(mask := rest.get("block_mask"), PairMask):
            rest |= {"block_mask": mask.kept, "tile_index": mask.tile_index, "tile_bits": mask.tile_bits}
            options = options._replace(block_m=mask.block_size[0], block_n=mask.block_size[1])
        if self.function is fast_attn_func:
            return prepare_dense(options=options, **rest)
        if self.function is fast_attn_varlen_func:
            return prepare_varlen(options=options, **rest)
        return prepare_kvcache(KvCacheArguments(**rest), options)

    def __str__(self) -> str:
        """As a reader would write it, tensors by their shapes. Scalars with their plainest value are left out."""
        plain = (None, False, 0, (-1, -1))
        shown = {
            name: tuple(value.shape) if isinstance(value, Tensor) else value
            for name, value in self.arguments.items()
            if isinstance(value, Tensor) or value not in plain
        }
        return f"{self.function.__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"


def build_call(case: Case, dtype: torch.dtype) -> Call:
    """The call `case` stands for. Its values depend on the case alone, so each test can have tensors of its own."""
    return _Builder(case, dtype).call()


def call_without_values(case: Case, dtype: torch.dtype) -> Call:
    """The same call for questions that only shapes decide: its tensors hold whatever was in memory."""
    return _WithoutValues(case, dtype).call()


@functools.cache
def problem_of(case: Case, dtype: torch.dtype) -> Problem:
    """The problem that the call of `case` poses."""
    problem, _ = call_without_values(case, dtype).prepare()
    return problem


class _Builder:
    """Draws the tensors of one case and remembers their buffers."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case = case
        self.dtype = dtype
        words = repr(case)
        for newer in (
            ", blocks=None",
            ", qk_dtype=None",
            ", key_offset=0.0",
            ", dropout_p=0.0",
            ", pairs=1.0",
            ", quantized=None",
        ):
            words = words.replace(newer, "")  # cases that are older than this field keep their values
        self.generator = torch.Generator("cpu").manual_seed(zlib.crc32(words.encode()))
        self.buffers: dict[str, Tensor] = {}

    def call(self) -> Call:
        case = self.case
        if isinstance(case, DenseCase):
            return self.dense(case)
        if isinstance(case, VarlenCase):
            return self.varlen(case)
        assert isinstance(case, KvCacheCase)
        return self.kvcache(case)

    def dense(self, case: DenseCase) -> Call:
        b, sq, sk = case.batch_size, case.seqlen_q, case.seqlen_k
        stored_q, stored_k = (1 if how == "one_batch_expanded" else b for how in (case.memory_q, case.memory_k))
        sizes = {"b": b, "h": case.nheads, "q": sq, "k": sk}
        arguments = {
            "q": self._placed("q", self._queries(stored_q, sq), case.memory_q).expand(b, -1, -1, -1),
            **self._keys_and_values("", self._keys(stored_k, sk), self._values(stored_k, sk), case.memory_k),
            "attn_bias": self._bias(sizes, _true(1).expand(b, case.nheads, sq, sk)),
            **self._shared_arguments(b),
            **self._options(),
            **self._blocks(b, sq, sk),
        }
        arguments |= {name: arguments[name].expand(b, -1, -1, -1) for name in ("k", "v")}
        return Call(fast_attn_func, arguments, self.buffers)

    def varlen(self, case: VarlenCase) -> Call:
        slack = case.slack or 0
        max_seqlen_q, max_seqlen_k = (max(lengths, default=0) + slack for lengths in (case.seqlens_q, case.seqlens_k))
        total_q, total_k = sum(case.seqlens_q), sum(case.seqlens_k)
        lengths_k = [
            length for length, queries in zip(case.seqlens_k, case.seqlens_q, strict=True) for _ in range(queries)
        ]
        used = torch.arange(max_seqlen_k, device="cpu") < _int64(lengths_k)[:, None]
        used = used.expand(case.nheads, total_q, max_seqlen_k)
        if case.page_block_size is None:
            k, v, table = self._keys(total_k), self._values(total_k), None
        else:
            pages = Pages(case.seqlens_k, case.page_block_size, max_seqlen_k, 0, self.generator)
            k, v, table = self._filled(pages, [(0, length) for length in case.seqlens_k])
        arguments = {
            "q": self._placed("q", self._queries(total_q), case.memory_q),
            **self._stored("", case.cache_dtype, k, v),
            "cu_seqlens_q": self._kept("cu_seqlens_q", _offsets(case.seqlens_q)),
            "cu_seqlens_k": self._kept("cu_seqlens_k", _offsets(case.seqlens_k)),
            "max_seqlen_q": None if case.slack is None else max_seqlen_q,
            "max_seqlen_k": None if case.slack is None else max_seqlen_k,
            "block_table": self._kept("block_table", table),
            "attn_bias": self._bias({"h": case.nheads, "t": total_q, "k": max_seqlen_k}, used),
            **self._shared_arguments(case.batch_size),
            **self._options(),
            **self._blocks(case.batch_size, max_seqlen_q, max_seqlen_k),
        }
        return Call(fast_attn_varlen_func, arguments, self.buffers)

    def kvcache(self, case: KvCacheCase) -> Call:
        b, before = case.batch_size, case.cache_seqlens
        after = [length + case.seqlen_new for length in before]
        leftpad = case.leftpad or (0,) * b
        cache = self._cache(case, after)
        k_cache, v_cache, index = self._filled(cache, zip(leftpad, before, strict=True))
        seqlens_k = _int64(after) - _int64(leftpad)
        used = (torch.arange(cache.capacity, device="cpu") < seqlens_k[:, None])[:, None, None, :]
        used = used.expand(b, case.nheads, case.seqlen_q, cache.capacity)
        arguments = {
            "q": self._placed("q", self._queries(b, case.seqlen_q), case.memory_q),
            **self._stored("_cache", case.cache_dtype, k_cache, v_cache),
            "cache_seqlens": self._cache_seqlens(case, cache.capacity),
            "cache_leftpad": None if case.leftpad is None else self._kept("cache_leftpad", _int32(leftpad)),
            "block_table" if isinstance(cache, Pages) else "cache_batch_idx": self._kept("index", index),
            "attn_bias": self._bias({"b": b, "h": case.nheads, "q": case.seqlen_q, "k": cache.capacity}, used),
            "rotary_interleaved": case.rotary_interleaved,
            "num_splits": case.num_splits,
            **self._shared_arguments(b),
            **self._new_tokens(case),
        }
        new_slots = cache.slots(zip(before, after, strict=True)) if case.seqlen_new else None
        return Call(fast_attn_with_kvcache, arguments, self.buffers, new_slots)

    def _stored(self, suffix: str, dtype: torch.dtype | None, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Keys and values as they are, or quantized with scales. Unused tokens, which are NaN, have NaN scales."""
        how = self.case.memory_k
        if dtype is None:
            return self._keys_and_values(suffix, k, v, how)
        scales: dict[str, Tensor] = {}
        caches: dict[str, Tensor] = {}
        for name, cache in (("k", k), ("v", v)):
            unused = cache.isnan()
            stored, scale = quantize(cache, dtype)
            caches[name] = torch.where(unused, nothing(stored.dtype), stored.float()).to(stored.dtype)
            placed = self._placed(f"{name}_scale", scale.unsqueeze(-1), how)
            scales[f"{name}_scale"] = placed.squeeze(-1)
        return scales | self._keys_and_values(suffix, caches["k"], caches["v"], how)

    def _cache(self, case: KvCacheCase, after: Sequence[int]) -> Cache:
        needed = max(after, default=0) + case.spare
        if case.page_block_size is None:
            return Rows(case.batch_size, needed, case.batch_idx, self.generator)
        full_pages = min(case.cache_seqlens, default=0) // case.page_block_size
        return Pages(after, case.page_block_size, needed, min(case.shared_pages, full_pages), self.generator)

    def _cache_seqlens(self, case: KvCacheCase, capacity: int) -> Tensor | int | None:
        if case.lengths == "tensor":
            return self._kept("cache_seqlens", _int32(case.cache_seqlens))
        assert len(set(case.cache_seqlens)) == 1, "cache_seqlens can be one int, or None, for equal lengths only"
        if case.lengths == "int":
            return case.cache_seqlens[0]
        assert case.cache_seqlens[0] == capacity, "cache_seqlens=None means that the cache is full"
        return None

    def _new_tokens(self, case: KvCacheCase) -> dict[str, Tensor | None]:
        if case.seqlen_new == 0:
            return {}
        k, v = self._keys(case.batch_size, case.seqlen_new), self._values(case.batch_size, case.seqlen_new)
        arguments: dict[str, Tensor | None] = {**self._keys_and_values("", k, v, case.memory_q)}
        if case.rotary_dim:
            # Positions without a token of this call are NaN.
            tokens = max(case.seqlen_new, case.seqlen_q)
            used = ~_true(max(case.cache_seqlens, default=0) + tokens + 2)
            for length in case.cache_seqlens:
                used[length : length + tokens] = True
            angles = 6.3 * self._uniform(len(used), case.rotary_dim // 2)
            angles[~used] = torch.nan
            arguments["rotary_cos"] = self._kept("rotary_cos", angles.cos().to(self.dtype))
            arguments["rotary_sin"] = self._kept("rotary_sin", angles.sin().to(self.dtype))
        return arguments

    def _filled(self, cache: Cache, spans: Iterable[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor | None]:
        """(k, v, index): caches that hold values at the given positions of each sequence, and NaN elsewhere."""
        k, v = self._keys(*cache.shape), self._values(*cache.shape)
        unused = _true(*cache.shape)
        unused[cache.slots(spans)] = False
        k[unused] = torch.nan
        v[unused] = torch.nan
        return k, v, cache.index

    def _shared_arguments(self, batch_size: int) -> dict[str, Any]:
        case = self.case
        slopes = sinks = None
        if case.alibi != "none":
            shape = (case.nheads,) if case.alibi == "per_head" else (batch_size, case.nheads)
            slopes = 0.3 * self._uniform(*shape)
        if case.sinks:
            sinks = 3.0 * self._gaussian(case.nheads)
        return {
            "softmax_scale": case.softmax_scale,
            "causal": case.causal,
            "window_size": case.window,
            "softcap": case.softcap,
            "alibi_slopes": self._kept("alibi_slopes", slopes),
            "sinks": self._kept("sinks", sinks),
        }

    def _options(self) -> dict[str, Any]:
        """qk_dtype, dropout_p and deterministic, where the case has them."""
        case = self.case
        options = {"qk_dtype": case.qk_dtype, "dropout_p": case.dropout_p, "deterministic": case.deterministic}
        return {name: value for name, value in options.items() if value}

    def _blocks(self, batch_size: int, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
        """The arguments block_mask and block_size, if the case has them."""
        blocks = self.case.blocks
        if blocks is None:
            return {}
        rows, columns = (-(-seqlen // size) for seqlen, size in zip((seqlen_q, seqlen_k), blocks.size, strict=True))
        sizes = {"b": batch_size, "h": self.case.nheads, "1": 1}
        outer = [sizes[axis] for axis in blocks.axes]
        mask = self._uniform(*outer, rows, columns) < blocks.density
        if blocks.pairs < 1.0:
            block_m, block_n = blocks.size
            kept = mask.repeat_interleave(block_m, 2)[:, :, :seqlen_q].repeat_interleave(block_n, 3)[..., :seqlen_k]
            return {"block_mask": from_pairs(kept & self._pairs(*kept.shape), block_size=blocks.size)}
        if blocks.strided:
            mask = mask.transpose(2, 3).contiguous().transpose(2, 3)
        return {"block_mask": self._kept("block_mask", mask), "block_size": blocks.size}

    def _pairs(self, *shape: int) -> Tensor:
        """Visible pairs: some tiles of 64 x 64 are whole, others show nothing, and the rest is drawn pair by pair."""
        assert self.case.blocks is not None
        rows, columns = (-(-size // 64) for size in shape[2:])
        whole, hidden = (
            drawn.repeat_interleave(64, 2)[:, :, : shape[2]].repeat_interleave(64, 3)[..., : shape[3]]
            for drawn in (self._uniform(*shape[:2], rows, columns) < share for share in (0.2, 0.2))
        )
        return (whole | (self._uniform(*shape) < self.case.blocks.pairs)) & ~hidden

    def _bias(self, sizes: dict[str, int], used: Tensor) -> Tensor | None:
        """attn_bias with NaN for keys that no sequence has. used: bool, in the full shape; sizes: of every axis."""
        bias = self.case.bias
        if bias is None:
            return None
        shape = tuple({"1": 1, **sizes}[axis] for axis in bias.axes)
        values = self._gaussian(*shape)
        dtype = self.dtype if bias.dtype_of_q else torch.float32
        hiding = torch.finfo(dtype).min if bias.finite else -torch.inf
        values[_hidden(bias, values, self.generator)] = hiding
        leading = used.dim() - len(shape)
        broadcast = [axis for axis in range(used.dim()) if axis < leading or shape[axis - leading] == 1]
        for axis in broadcast:
            used = used.any(dim=axis, keepdim=True)
        values[~used.reshape(shape)] = torch.nan
        values = values.to(dtype)
        self.buffers["attn_bias"] = buffer = values.transpose(-1, -2).contiguous() if bias.strided else values
        return buffer.transpose(-1, -2) if bias.strided else buffer

    def _queries(self, *tokens: int) -> Tensor:
        return self._normal(self.case.magnitude, *tokens, self.case.nheads, self.case.headdim)

    def _keys(self, *tokens: int) -> Tensor:
        keys = self._normal(self.case.magnitude, *tokens, self.case.nheads_k, self.case.headdim)
        if self.case.key_offset == 0.0:
            return keys
        return keys + self._normal(self.case.key_offset, self.case.nheads_k, self.case.headdim)

    def _values(self, *tokens: int) -> Tensor:
        return self._normal(1.0, *tokens, self.case.nheads_k, self.case.headdim_of_v)

    def _normal(self, magnitude: float, *shape: int) -> Tensor:
        return (magnitude * self._gaussian(*shape)).to(self.dtype)

    def _gaussian(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def _keys_and_values(self, suffix: str, k: Tensor, v: Tensor, how: Memory) -> dict[str, Tensor]:
        """K and v in memory of their own, or v as the first columns of k."""
        keys = self._placed(f"k{suffix}", k, how)
        first = keys[..., : self.case.headdim_of_v]
        values = first if self.case.values_in_keys else self._placed(f"v{suffix}", v, how)
        return {f"k{suffix}": keys, f"v{suffix}": values}

    def _placed(self, name: str, values: Tensor, how: Memory) -> Tensor:
        view, self.buffers[name] = place(values, how)
        return view

    def _kept(self, name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is not None:
            self.buffers[name] = tensor
        return tensor


class _WithoutValues(_Builder):
    """The same tensors by shape and dtype, with whatever their memory holds."""

    def _normal(self, magnitude: float, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device="cpu")

    def _filled(self, cache: Cache, spans: Iterable[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor | None]:
        return self._keys(*cache.shape), self._values(*cache.shape), cache.index

    def _stored(self, suffix: str, dtype: torch.dtype | None, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        caches = self._keys_and_values(suffix, k, v, self.case.memory_k)
        if dtype is None:
            return caches
        scales = {name: torch.empty(k.shape[:-1], dtype=torch.float32, device="cpu") for name in ("k_scale", "v_scale")}
        return scales | {name: torch.empty(cache.shape, dtype=dtype, device="cpu") for name, cache in caches.items()}

    def _placed(self, name: str, values: Tensor, how: Memory) -> Tensor:
        return values


def _hidden(bias: Bias, values: Tensor, generator: torch.Generator) -> Tensor:
    """True where the bias hides a key."""
    hidden = torch.zeros_like(values, dtype=torch.bool)
    if bias.hides == "entries":
        hidden = torch.rand(values.shape, generator=generator, dtype=torch.float32, device="cpu") < 0.3
    elif bias.hides == "rows":
        hidden[..., ::3, :] = True
    elif bias.hides == "columns":
        hidden[..., 1::4] = True
    return hidden


def _true(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool, device="cpu")


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64, device="cpu").cumsum(0).to(torch.int32)


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")
