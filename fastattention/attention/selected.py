"""fast_attn_selected_func: attention to the keys that each query selects, as indexers of sparse attention choose them.

A selected key is a page of one token, and a query a sequence of its own whose block table are its indices. So such a
call is one with a cache of pages (fast_attn_with_kvcache). Every backend that reads pages serves it, and its cost is
proportional to the number of selected keys. No tensor has a row of all keys for each query.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattention.attention.function import attention_function
from fastattention.attention.key_tokens import KeyTokens
from fastattention.attention.operators import ATTENTION_KVCACHE
from fastattention.attention.problem import AttentionOutput
from fastattention.attention.rows import Rows, as_rows
from fastattention.attention.selection.operators import SELECTION, SelectionOptions
from fastattention.attention.selection.problem import SelectionInputs, SelectionOutput
from fastattention.attention.validation import KvCacheArguments
from fastattention.attention.validation.common import read_options
from fastattention.engine.checks import check_device, read_flag, read_int, spec_of
from fastattention.engine.eager import runs_eagerly
from fastattention.engine.kinds import check_readable
from fastattention.errors import ArgumentError


@attention_function
def fast_attn_selected_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    key_block: int = 1,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Exact attention of each query to the keys that its indices name, for all heads or for each key head.

    - `q`: (batch_size, seqlen_q, nheads, headdim); with cu_seqlens_q (total_q, nheads, headdim)
    - `k`: (batch_size, seqlen_k, nheads_k, headdim); with cu_seqlens_k (total_k, nheads_k, headdim); with block_table
        pages (num_blocks, page_block_size, nheads_k, headdim)
    - `v`: as k, with headdim_v; or `k[..., :headdim_v]`, as in latent attention
    - `indices`: int32 or int64 (batch_size, seqlen_q, topk), with cu_seqlens_q (total_q, topk): positions of keys
        within the sequence of the query, in any order. -1 is no key. A key that is named twice counts twice. With an
        axis of key heads, (batch_size, seqlen_q, nheads_k, topk) or (total_q, nheads_k, topk), each has its own keys.
    - `key_block`: indices name blocks of so many neighbouring keys, of which the last may have fewer
    - `causal`: drops keys behind the query; aligned to the bottom right, so the last query may see every key.
    - `seqused_k`: int32 (batch_size,), how many tokens of each sequence there are; None means all. Needed with
        block_table, whose rows may hold more.

    Queries and keys of one call may be varlen or not, independently. The other arguments are those of all functions.
    Keys at or after the end of their sequence are errors on the CPU. On a GPU they are dropped, as -1 is. There is no
    backward. A query without keys gives out 0 and lse -inf.

    Returns out (batch_size, seqlen_q, nheads, headdim_v), for varlen queries (total_q, nheads, headdim_v); with
    return_lse (out, lse), lse as of the other functions. Raises as they do.
    """
    try:
        queries = as_rows("q", q, cu_seqlens_q)
        tokens = KeyTokens.of({"k": k, "v": v}, "nheads_k, headdim", cu_seqlens_k, block_table, seqused_k)
        keys = _KeySlots.of(tokens, k=k, v=v, k_scale=k_scale, v_scale=v_scale)
        of_heads = _of_heads(queries, indices, keys.k.shape[2], sinks)
        keys = keys.of_each_head() if of_heads else keys
        selected = _select(queries, keys, indices, read_flag("causal", causal), _read_block(key_block))
    except (RuntimeError, TypeError):
        check_readable({"q": q, "k": k, "v": v, "indices": indices})
        raise
    rows = queries.rows.view(selected.counts.shape[0], -1, q.shape[-1]) if of_heads else queries.rows
    given = KvCacheArguments(
        rows[:, None], keys.k, keys.v, cache_seqlens=selected.counts, block_table=selected.slots, sinks=sinks,
        k_scale=keys.k_scale, v_scale=keys.v_scale,
    )  # fmt: skip
    options = read_options(softmax_scale, False, (-1, -1), softcap, return_lse=return_lse)

    def returned(result: AttentionOutput) -> Any:
        out = result.out.view(*queries.rows.shape[:2], -1)
        if not return_lse:
            return queries.back(out)
        assert result.lse is not None
        return queries.back((out, result.lse.view(queries.rows.shape[:2]).T.contiguous()))

    return ATTENTION_KVCACHE, given, options, backend, returned


class _KeySlots(NamedTuple):
    """Keys and values as pages of one token: slots. The slots of a sequence, or of a given page, follow one another."""

    tokens: KeyTokens
    step: int  # slots from a row of the batch, or a page, to the next
    k: Tensor  # (num_slots, 1, nheads_k, headdim)
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    head_steps: tuple[int, int, int] | None = None  # nheads_k, and slots from a token and from a head to the next

    @classmethod
    def of(cls, tokens: KeyTokens, **tensors: Tensor | None) -> _KeySlots:
        """The slots of keys and values, without copying them where tokens of all sequences have slots of one size."""
        given = {name: x for name, x in tensors.items() if x is not None}
        k, v = given["k"], given["v"]
        if k.shape[:-2] != v.shape[:-2]:
            raise ArgumentError(f"k and v must hold the same tokens, got shapes {tuple(k.shape)} and {tuple(v.shape)}")
        if tokens.cu_seqlens is not None:
            slots, step = [x[:, None] for x in given.values()], 0
        else:
            in_keys = runs_eagerly(k, v) and _is_part(v, k)
            slots, step = _as_slots([x for name, x in given.items() if not (in_keys and name == "v")])
            if in_keys:  # with the strides of k, also on axes of size 1: kernels then read shared memory once
                slots.insert(1, slots[0][..., : v.shape[-1]])
        found = dict(zip(given, slots, strict=True))
        return cls(tokens, step, found["k"], found["v"], found.get("k_scale"), found.get("v_scale"))

    def of_each_head(self) -> _KeySlots:
        """The same with slots of one head: slot s of head h becomes s * head_steps[1] + h * head_steps[2]."""
        given = {name: x for name in ("k", "v", "k_scale", "v_scale") if (x := getattr(self, name)) is not None}
        heads = self.k.shape[2]
        steps = {_head_steps(x) for x in given.values()}
        if len(steps) > 1 or not runs_eagerly(*given.values()):  # slots of all must be the same
            apart = {name: x.reshape(-1, 1, 1, *x.shape[3:]) for name, x in given.items()}
            return self._replace(**apart)._replace(head_steps=(heads, heads, 1))
        ((of_token, of_head),) = steps
        count = max((self.k.shape[0] - 1) * of_token + (heads - 1) * of_head + 1, 0) if self.k.numel() else 0
        apart = {name: _with_slots(x, count, x.stride(0) // of_token) for name, x in given.items()}
        return self._replace(**apart)._replace(head_steps=(heads, of_token, of_head))


def _head_steps(x: Tensor) -> tuple[int, int]:
    """How many slots of one head (num_slots, 1, nheads_k, ...) has from a token, and from a head, to the next."""
    unit = math.gcd(x.stride(0), x.stride(2))
    return x.stride(0) // max(unit, 1) or 1, x.stride(2) // max(unit, 1)


def _with_slots(x: Tensor, count: int, stride: int) -> Tensor:
    return x.as_strided((count, 1, 1, *x.shape[3:]), (stride, stride, stride, *x.stride()[3:]))


def _is_part(v: Tensor, k: Tensor) -> bool:
    """Whether v is the first columns of k."""
    axes = [axis for axis, size in enumerate(k.shape) if size != 1]
    strides = [(k.stride(axis), v.stride(axis)) for axis in axes]
    return v.data_ptr() == k.data_ptr() and v.shape[-1] <= k.shape[-1] and all(a == b for a, b in strides)


def _as_slots(tensors: list[Tensor]) -> tuple[list[Tensor], int]:
    """Tensors (batch_size, seqlen, ...) as (num_slots, 1, ...), and the slots from a sequence to the next."""
    batch_size, seqlen = tensors[0].shape[:2]
    steps = {divmod(x.stride(0), x.stride(1) or 1) for x in tensors}
    (step, rest), *others = steps
    if others or rest or step == seqlen or batch_size < 2 or not runs_eagerly(*tensors):
        return [x.flatten(0, 1)[:, None] for x in tensors], seqlen
    # Rows of a cache with room for more tokens: all of its slots are one tensor.
    num_slots = (batch_size - 1) * step + seqlen
    return [
        x.as_strided((num_slots, 1, *x.shape[2:]), (x.stride(1), x.stride(1), *x.stride()[2:])) for x in tensors
    ], step


def _read_block(value: object) -> int:
    key_block = read_int("key_block", value)
    if key_block < 1:
        raise ArgumentError(f"key_block={key_block} must be at least 1")
    return key_block


def _of_heads(queries: Rows, indices: Tensor, nheads_k: int, sinks: Tensor | None) -> bool:
    """Checks indices. Whether each key head has its own."""
    q, found = spec_of("q", queries.rows), spec_of("indices", indices)
    if found.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"indices must be int32 or int64, got {found.dtype}")
    check_device("indices", found, q)
    batch = queries.batch or q.shape[:1]
    rest = found.shape[len(batch) :]
    if found.shape[: len(batch)] != batch or len(rest) not in (1, 2) or (len(rest) == 2 and rest[0] != nheads_k):
        raise ArgumentError(
            "indices must be (batch_size, seqlen_q, topk), or (total_q, topk) with cu_seqlens_q, with an axis of "
            f"nheads_k={nheads_k} before the last or without, got {tuple(found.shape)}"
        )
    if len(rest) == 2 and q.shape[1] % max(nheads_k, 1):
        raise ArgumentError(f"nheads_k={nheads_k} must divide nheads={q.shape[1]}")
    if len(rest) == 2 and sinks is not None:
        raise ArgumentError("sinks cannot be given with indices of each key head; give indices of all heads")
    return len(rest) == 2


def _select(queries: Rows, keys: _KeySlots, indices: Tensor, causal: bool, key_block: int) -> SelectionOutput:
    """The slots of the keys of each query, or of each key head of a query."""
    heads, token_step, head_step = keys.head_steps or (1, 1, 0)
    tokens = keys.tokens
    given = SelectionInputs(
        indices.reshape(queries.rows.shape[0], heads, indices.shape[-1]),
        queries.offsets, tokens.cu_seqlens, tokens.used, tokens.block_table,
    )  # fmt: skip
    batch_size = 0 if queries.batch is None else queries.batch[0]
    options = SelectionOptions(
        batch_size, tokens.rows, tokens.seqlen, key_block, causal, keys.step, token_step, head_step
    )
    return SELECTION(given, options, "auto")
