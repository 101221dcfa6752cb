"""The public functions: flash-attn 2.8's names, argument order and semantics, for any device a backend serves.

All of them compute

    out = softmax(softcap(q @ k^T * softmax_scale) + alibi + attn_bias, masked) @ v

in one pass, without storing the seqlen_q x seqlen_k matrix. Where torch has no kernel for a call, the `sdpa` backend
computes it in chunks of rows. With gradients it computes each chunk once more. A backward of ours, as the cpu and
cuda backends have, keeps q, k, v, out and lse.

q, k and v are float16, bfloat16 or float32, all of one dtype and on one device (caches may be quantized, see
`fast_attn_with_kvcache`). headdim is 1 to 576, headdim_v 1 to 512, and they may differ; nheads_k divides nheads. Any
strides are served in place; a strided last axis is copied first.

Shared arguments, in flash-attn's order:

- `softmax_scale`: factor on q @ k^T. Default headdim ** -0.5.
- `causal`: True hides the keys after each query. The mask is aligned to the bottom right, as drawn below.
- `window_size`: (left, right), both inclusive, -1 unlimited. Query i sees the keys from i + seqlen_k - seqlen_q - left
    to i + seqlen_k - seqlen_q + right. A tensor of two integers is read. `causal` sets right to 0.
- `softcap`: scores become softcap * tanh(score / softcap) before bias and mask; 0 turns it off.
- `alibi_slopes`: float (nheads,) or (batch_size, nheads); adds -slope * |i + seqlen_k - seqlen_q - j| to the scores.
- `dropout_p`: probability with which a softmax weight is dropped, rounded to a multiple of 2^-16; others are divided by
    1 - dropout_p. A seed is drawn from torch's generator, so torch.manual_seed repeats it; for a seed all backends drop
    the same weights. Use 0.0 in inference.
- `deterministic`: asks for gradients with the same bits in every run. By default, kernels of GPUs may add gradients of
    q in any order, which is faster and takes 4 bytes an element of q. Everything else always has the same bits.
- `return_attn_probs`: also returns lse and the dropout mask: (out, lse, S_dmask). S_dmask is None without dropout.
    Otherwise it holds the softmax weights, negative where dropped: (batch_size, nheads, seqlen_q, seqlen_k) in the
    dtype of q. For varlen calls the lengths are the longest ones, and 0 fills the rest.

Shared arguments beyond flash-attn's, keyword-only:

- `attn_bias`: added to the scores after softcap; float32 or the dtype of q; -inf masks a key out. Broadcasts to
    (batch_size, nheads, seqlen_q, seqlen_k), for varlen calls to (nheads, total_q, max_seqlen_k).
- `sinks`: float (nheads,), one logit a head that takes part in the softmax without a value. lse includes it, so a row
    without keys has lse = sink.
- `block_mask`: bool (batch_size or 1, nheads or 1, seqlen_q / block_m, seqlen_k / block_n), rounded up: True where a
    block of scores is kept. Exact: scores outside kept blocks are hidden, and kernels skip them. It joins the other
    masks. Blocks are counted from query 0 and key 0; of varlen calls each sequence has its own, and the last two sizes
    are those of the longest. A row whose blocks are all hidden gives out 0 and lse -inf. A dense call also takes a mask
    of single pairs (`sparse.from_pairs`), and a `BlockMask` of torch.nn.attention.flex_attention.
    `fastattention.sparse` makes masks. Caches take none.
- `block_size`: (block_m, block_n) in tokens, or one number for both; multiples of 64. Default 128.
- `qk_dtype`: "int8" multiplies queries and keys as 8-bit integers: approximate, and faster for long prompts. Few
    queries are slower, since all keys become int8 first (docs/benchmarks/int8-products.md has times). No other argument
    trades exactness, and this is never chosen for you. Keys lose their mean over a sequence's tokens, which no softmax
    sees. Then each query, and each 64 keys of a head, are rounded to multiples of their largest element / 127. Values
    and weights stay as they are. On CPUs with VNNI or AMX, and GPUs from Turing on; without gradients.
    docs/internals/numerics.md has the errors.
- `attention_chunk`: as in Llama 4. Positions are divided into chunks of that many, and a
    query sees only keys of its own chunk, within the other masks. Query i is at position i + seqlen_k - seqlen_q, and
    key j at j; queries before position 0 see no keys. 0 turns it off. Exact: the chunks become sequences of their own,
    so other keys are not read. With block_table, pages nest in chunks or have tokens that follow one another in memory.
    Not with attn_bias, block_mask, or the dropout mask of return_attn_probs.
- `return_lse`: also returns lse, float32 (batch_size, nheads, seqlen_q), for varlen calls (nheads, total_q): the
    natural logarithm of the softmax's denominator, which `merge_attn_states` needs.
- `backend`: "auto", or the name of the only backend to use (`fastattention info` lists them).

With `causal`, query i sees key j if and only if j <= i + seqlen_k - seqlen_q. A row without keys gives out 0 and lse
-inf:

    seqlen_q=2, seqlen_k=4:      seqlen_q=4, seqlen_k=2:
        1 1 1 0                      0 0
        1 1 1 1                      0 0
                                     1 0
                                     1 1

All functions work under torch.compile, where a call becomes one operator. Only the dropout mask of return_attn_probs
is not available there. docs/guides/pytorch.md lists other tracers, transforms and kinds of tensors.

They raise `ArgumentError` (a ValueError) for a wrong argument, and `UnsupportedError` (a NotImplementedError) with
every backend's reason when none can serve the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastattention.attention.function import attention_function
from fastattention.attention.mask_tiles import PairMask
from fastattention.attention.operators import ATTENTION, ATTENTION_KVCACHE
from fastattention.attention.problem import AttentionOutput, Inputs
from fastattention.attention.ragged_cache import Appending, read_ragged_cache
from fastattention.attention.rows import as_rows
from fastattention.attention.sequence_parts import Longest, sequence_parts
from fastattention.attention.validation import KvCacheArguments
from fastattention.attention.validation.block_masks import BlockSize, BlockTensors, read_block_mask
from fastattention.attention.validation.common import read_options
from fastattention.attention.validation.prefill import check_dense_shapes
from fastattention.engine.checks import read_flag, read_int, require_tensor, require_tensors
from fastattention.engine.explain import Explanation
from fastattention.engine.kinds import check_readable
from fastattention.engine.operator import request_of
from fastattention.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:  # its import takes seconds
    from torch.nn.attention.flex_attention import BlockMask

WindowSize = Sequence[int] | Tensor


@attention_function
def fast_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attention_chunk: int = 0,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    block_mask: Tensor | PairMask | BlockMask | None = None,
    block_size: BlockSize = None,
    qk_dtype: str | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Exact attention: softmax(q @ k^T * softmax_scale) @ v.

    - `q`: (batch_size, seqlen_q, nheads, headdim)
    - `k`: (batch_size, seqlen_k, nheads_k, headdim)
    - `v`: (batch_size, seqlen_k, nheads_k, headdim_v)

    - `causal`: hides later keys; aligned to the bottom right, so the last query sees every key.
    - `window_size`: (left, right), inclusive: how many keys before and after its own position a query sees. -1 is no
        limit.
    - `softcap`: scores become softcap * tanh(score / softcap); 0 turns it off.

    The other arguments, the mask and the errors are those that all functions share (the docstring of this module).

    Returns out (batch_size, seqlen_q, nheads, headdim_v); with return_lse (out, lse); with return_attn_probs
    (out, lse, S_dmask).
    """
    if attention_chunk:
        check_dense_shapes(Inputs(q, k, v))
        rows_q, rows_k, rows_v = (as_rows(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        *request, returned = fast_attn_varlen_func.request(
            rows_q.rows, rows_k.rows, rows_v.rows, rows_q.cu_seqlens, rows_k.cu_seqlens, rows_q.longest, rows_k.longest,
            dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
            attention_chunk=attention_chunk, attn_bias=attn_bias, sinks=sinks, block_mask=block_mask,
            block_size=block_size, qk_dtype=qk_dtype, return_lse=return_lse, backend=backend,
        )  # fmt: skip
        return *request, lambda output: rows_q.back(returned(output))
    with_lse = return_lse or return_attn_probs
    options = read_options(
        softmax_scale, causal, window_size, softcap, dropout_p, deterministic, with_lse, return_attn_probs, qk_dtype
    )
    blocks = BlockTensors()
    if block_mask is not None or block_size is not None:
        blocks, options = read_block_mask(block_mask, block_size, q, k, options)
    seed = _dropout_seed(q) if options.dropout_p else None
    given = Inputs(q, k, v, None, None, None, alibi_slopes, attn_bias, sinks, seed, *blocks)
    results = _out_lse_and_mask if return_attn_probs else _out_and_lse if return_lse else _out_alone
    return ATTENTION, given, options, backend, results


@attention_function
def fast_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **keyword_only: Any,
) -> Any:
    """`fast_attn_func` with q, k and v in one tensor. Views, no copies.

    - `qkv`: (batch_size, seqlen, 3, nheads, headdim)
    - `keyword_only`: the keyword-only arguments of `fast_attn_func`

    Returns what `fast_attn_func` returns.
    """
    q, k, v = _unstack("qkv", qkv, 3, 5)
    return fast_attn_func.request(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        **keyword_only,
    )  # fmt: skip


@attention_function
def fast_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **keyword_only: Any,
) -> Any:
    """`fast_attn_func` with keys and values in one tensor. Views, no copies.

    - `q`: (batch_size, seqlen_q, nheads, headdim)
    - `kv`: (batch_size, seqlen_k, 2, nheads_k, headdim)
    - `keyword_only`: the keyword-only arguments of `fast_attn_func`

    Returns what `fast_attn_func` returns.
    """
    k, v = _unstack("kv", kv, 2, 5)
    return fast_attn_func.request(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        **keyword_only,
    )  # fmt: skip


@attention_function
def fast_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    attention_chunk: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    block_mask: Tensor | None = None,
    block_size: BlockSize = None,
    qk_dtype: str | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Exact attention over a varlen batch: sequences of any lengths, concatenated without padding.

    - `q`: (total_q, nheads, headdim)
    - `k`: (total_k, nheads_k, headdim), or pages (num_blocks, page_block_size, nheads_k, headdim) with block_table
    - `v`: as k, with headdim_v
    - `cu_seqlens_q`, `cu_seqlens_k`: int32 (batch_size + 1,), offsets from 0: sequence b is tokens cu_seqlens[b] to
        cu_seqlens[b + 1] - 1. Sequences may be empty.
    - `max_seqlen_q`, `max_seqlen_k`: lengths of the longest sequences. None derives them, which synchronizes on a GPU.
    - `block_table`: int32 (batch_size, max_blocks_per_seq), pages of each sequence; entries past its length are not
        read.
    - `seqused_q`, `seqused_k`: int32 (batch_size,), how many tokens of each sequence are used, from its first on; None
        is all. The mask is aligned to the used ones. Unused queries are rows without keys. Unused keys and values are
        not read. All of them have gradient 0. max_seqlen_q and max_seqlen_k count unused tokens too. cu_seqlens_k
        may be left out with block_table and seqused_k, as vLLM does.
    - `k_scale`, `v_scale`: of quantized pages, as in `fast_attn_with_kvcache`. `cpu`, `cuda` and `sdpa` serve
        them.
    - `causal`, `window_size`, `softcap`: as in `fast_attn_func`, aligned to the bottom right of each sequence.

    The other arguments, the mask (aligned per sequence) and the errors are those that all functions share
    (`fastattention.attention.interface`).

    Returns out (total_q, nheads, headdim_v); lse is (nheads, total_q).
    """
    results = _out_lse_and_mask if return_attn_probs else _out_and_lse if return_lse else _out_alone
    sequences = Inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, k_scale=k_scale, v_scale=v_scale)
    if attention_chunk:
        if k_scale is not None or v_scale is not None:
            raise UnsupportedError("k_scale and v_scale are not served with attention_chunk; dequantize the pages")
        attention_chunk = _read_chunk(attention_chunk, attn_bias, block_mask, return_attn_probs and bool(dropout_p))
    if seqused_q is not None or seqused_k is not None or attention_chunk:
        parts = sequence_parts(sequences, Longest(max_seqlen_q, max_seqlen_k), seqused_q, seqused_k, attention_chunk)
        sequences, (max_seqlen_q, max_seqlen_k), per_sequence = parts
        alibi_slopes, block_mask = parts.of_each(alibi_slopes, 2), parts.of_each(block_mask, 4)
        results = functools.partial(_of_first_parts, per_sequence, results)
    require_tensors(cu_seqlens_q=sequences.cu_seqlens_q, cu_seqlens_k=sequences.cu_seqlens_k)
    with_lse = return_lse or return_attn_probs
    options = read_options(
        softmax_scale, causal, window_size, softcap, dropout_p, deterministic, with_lse, return_attn_probs, qk_dtype
    )
    options = options._replace(
        max_seqlen_q=_read_longest("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=_read_longest("max_seqlen_k", max_seqlen_k),
    )
    if block_mask is not None or block_size is not None:
        (block_mask, *_), options = read_block_mask(block_mask, block_size, q, k, options, varlen=True)
    seed = _dropout_seed(q) if options.dropout_p else None
    given = sequences._replace(
        alibi_slopes=alibi_slopes, attn_bias=attn_bias, sinks=sinks, dropout_seed=seed, block_mask=block_mask
    )
    return ATTENTION, given, options, backend, results


@attention_function
def fast_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **keyword_only: Any,
) -> Any:
    """`fast_attn_varlen_func` with q, k and v in one tensor. Views, no copies.

    - `qkv`: (total, 3, nheads, headdim)
    - `cu_seqlens`, `max_seqlen`: as cu_seqlens_q and max_seqlen_q of `fast_attn_varlen_func`
    - `keyword_only`: the keyword-only arguments of `fast_attn_varlen_func`

    Returns what `fast_attn_varlen_func` returns.
    """
    q, k, v = _unstack("qkv", qkv, 3, 4)
    return fast_attn_varlen_func.request(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs, **keyword_only,
    )  # fmt: skip


@attention_function
def fast_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **keyword_only: Any,
) -> Any:
    """`fast_attn_varlen_func` with keys and values in one tensor. Views, no copies.

    - `q`: (total_q, nheads, headdim)
    - `kv`: (total_k, 2, nheads_k, headdim)
    - `cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q`, `max_seqlen_k`: as in `fast_attn_varlen_func`
    - `keyword_only`: the keyword-only arguments of `fast_attn_varlen_func`

    Returns what `fast_attn_varlen_func` returns.
    """
    k, v = _unstack("kv", kv, 2, 4)
    return fast_attn_varlen_func.request(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs, **keyword_only,
    )  # fmt: skip


@attention_function
def fast_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    attention_chunk: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Appends k and v to the caches in place, rotates q and k, and attends to what the caches then hold.

    - `q`: (batch_size, seqlen_q, nheads, headdim)
    - `k_cache`: (batch_size_cache, seqlen_cache, nheads_k, headdim), or with block_table pages
        (num_blocks, page_block_size, nheads_k, headdim); written in place when k is given
    - `v_cache`: as k_cache, with headdim_v; or `k_cache[..., :headdim_v]`, as in latent attention, and then `v` must be
        `k[..., :headdim_v]`, and no rotary tables are allowed
    - `k`, `v`: (batch_size, seqlen_new, nheads_k, headdim or headdim_v), tokens to append at cache_seqlens[b], or None
    - `rotary_cos`, `rotary_sin`: (seqlen_rotary, rotary_dim / 2), dtype of q; needs k. k[:, i] is rotated by position
        cache_seqlens[b] + i, and so is q[:, i] when causal or windowed; otherwise all of q by cache_seqlens[b].
    - `rotary_interleaved`: True pairs elements 0 and 1, 2 and 3 (GPT-J); False pairs 0 and rotary_dim / 2 (GPT-NeoX,
        Llama).
    - `cache_seqlens`: int32 (batch_size,) or one int: tokens in the cache before this call; None means the cache is
        full.
    - `cache_batch_idx`: int32 (batch_size,), the row of the cache of each sequence; must not repeat when appending.
    - `cache_leftpad`: int32 (batch_size,), first token of each sequence within its cache row, counted in cache_seqlens.
    - `block_table`: int32 (batch_size, max_blocks_per_seq), pages of each sequence; entries past its length are not
        read.
    - `causal`, `window_size`, `softcap`: as in `fast_attn_func`; the last query is the last token of the cache.
    - `num_splits`: parts the keys are split into in decoding (split-KV); 0 chooses.
    - `cu_seqlens_q`: int32 (batch_size + 1,), offsets of a varlen batch of queries. Then q is (total_q, nheads,
        headdim), and results are those of `fast_attn_varlen_func`. `max_seqlen_q` is the longest
        sequence, or a bound; None takes total_q.
    - `cu_seqlens_k_new`: int32 (batch_size + 1,), offsets of a varlen batch of new tokens, up to the rows of k. Then
        k and v are (total_new, nheads_k, headdim or headdim_v).
    - `k_scale`, `v_scale`: float32, shaped as the caches without their last axis, any strides: the scales of quantized
        caches, which hold int8 or float8_e4m3fn, both the same. A key is k_cache * k_scale.

    The other arguments and the errors are those that all functions share (the docstring of this module). There is no
    backward.

    Returns out (batch_size, seqlen_q, nheads, headdim_v), with return_softmax_lse or return_lse (out, lse).

    **Masks.** Query i of seqlen_q is token cache_seqlens[b] + seqlen_new - seqlen_q + i: causal and window_size are
    aligned to the bottom right of the cache as it is after the append. attn_bias broadcasts to (batch_size, nheads,
    seqlen_q, capacity); alibi_slopes and attn_bias count keys from cache_leftpad.

    **Quantized caches.** Appended tokens are quantized after rotary embedding, and their scales are written in place:
    amax / 127 (int8) or amax / 448 (float8), where amax is the largest |element| of the token in that head. A token
    with an element that is not finite gets scale NaN.

    **Ragged calls.** With cu_seqlens_q, cu_seqlens_k_new or attention_chunk, one call appends, and then a call of
    `fast_attn_varlen_func` over the pages attends, by `backend`. A cache of rows is read as one page a row. Such calls
    take no rotary tables, cache_leftpad or attn_bias. On a GPU, a sequence without room appends what fits, and
    its results are undefined.

    **Errors.** When an error is raised, the caches are as they were. A sequence whose cache has no room for the append
    is an error on the CPU. On a GPU only the device knows the lengths: the cache is left as it was, and out and lse of
    that sequence are NaN. The same holds for invalid values in cache_seqlens or cache_leftpad, and for rotary tables
    that are too short. A later call with a cache, once the GPU has got there, raises and names the sequence. With
    FASTATTENTION_CHECK_NUMBERS=1 the call itself raises, and every call waits for the GPU. So does every call that the
    `sdpa` backend serves: it reads the lengths, and CUDA graphs cannot capture it.
    """
    with_lse = return_softmax_lse or return_lse
    options = read_options(softmax_scale, causal, window_size, softcap, return_lse=with_lse)
    if not (rotary_interleaved is True and type(num_splits) is int and num_splits == 0):
        options = options._replace(
            rotary_interleaved=read_flag("rotary_interleaved", rotary_interleaved),
            num_splits=num_splits if type(num_splits) is int else read_int("num_splits", num_splits),
        )
    arguments = KvCacheArguments(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        alibi_slopes, attn_bias, sinks, k_scale, v_scale,
    )  # fmt: skip
    if cu_seqlens_q is not None or cu_seqlens_k_new is not None or attention_chunk:
        cache = read_ragged_cache(arguments, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q)
        operator, *request, returned = fast_attn_varlen_func.request(
            cache.queries.rows, k_cache, v_cache, cache.queries.cu_seqlens, None, cache.queries.longest, cache.capacity,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes, block_table=cache.pages, seqused_k=cache.used, attention_chunk=attention_chunk,
            k_scale=k_scale, v_scale=v_scale, sinks=sinks, return_lse=with_lse, backend=backend,
        )  # fmt: skip
        served = operator if k is None else Appending(operator, cache)
        return served, *request, lambda output: cache.queries.back(returned(output))
    return ATTENTION_KVCACHE, arguments, options, backend, _out_and_lse if with_lse else _out_alone


def explain(*args: Any, function: Callable[..., Any] = fast_attn_func, **kwargs: Any) -> Explanation[Any]:
    """Every backend's verdict on the call `function(*args, **kwargs)`, which is validated but not computed.

    - `function`: any attention function of the package. Its caches are not written.

    `print` shows the sizes of the axes as the call was read, then a line for each backend, with "->" before the one
    that serves the call.

    Its `traffic` counts bytes of main memory: `tiled` of our CUDA kernels, `lower_bound` of any algorithm, `standard`
    of attention that keeps scores in memory. Lengths are read from their device.

    Raises ArgumentError as the call would, and under torch.compile, where a call cannot be explained.
    """
    operator, given, scalars, chosen, _ = request_of(function, *args, **kwargs)
    return operator.explain(given, scalars, chosen)


def _dropout_seed(q: Tensor) -> Tensor:
    """A seed from torch's generator. It is a tensor, so that a traced call draws a new one each time it runs."""
    require_tensor("q", q)
    return torch.randint(2**62, (), dtype=torch.int64, device=q.device)


def _read_longest(name: str, value: object) -> int | None:
    """A maximum of varlen lengths; a tensor is read, and other values are checked with the lengths."""
    return read_int(name, value) if isinstance(value, Tensor) else value  # type: ignore[return-value]


def _out_alone(result: AttentionOutput) -> Tensor:
    return result.out


def _out_and_lse(result: AttentionOutput) -> tuple[Tensor, Tensor | None]:
    return result.out, result.lse


def _out_lse_and_mask(result: AttentionOutput) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return result.out, result.lse, result.dropout_mask


def _read_chunk(attention_chunk: object, attn_bias: object, block_mask: object, returns_mask: bool) -> int:
    """attention_chunk as an int. Raises UnsupportedError for what counts keys from the start of a sequence."""
    chunk = read_int("attention_chunk", attention_chunk)
    if chunk < 0:
        raise ArgumentError(f"attention_chunk={chunk} must be at least 0 (0 turns it off)")
    others = {
        "attn_bias": attn_bias is not None,
        "block_mask": block_mask is not None,
        "return_attn_probs with dropout": returns_mask,
    }
    for name, is_given in others.items():
        if is_given:
            raise UnsupportedError(f"{name} is not served with attention_chunk={chunk}: each chunk has keys of its own")
    return chunk


def _of_first_parts(per_sequence: int, results: Callable[[AttentionOutput], Any], result: AttentionOutput) -> Any:
    """`results` of a call whose sequences are `per_sequence` parts of each given one, used tokens first."""
    mask = result.dropout_mask
    return results(result if mask is None else result._replace(dropout_mask=mask[::per_sequence]))


def _unstack(name: str, packed: Tensor, count: int, rank: int) -> tuple[Tensor, ...]:
    """Views of the `count` tensors stacked on the third axis from the end."""
    require_tensor(name, packed)
    try:
        if packed.dim() != rank or packed.shape[-3] != count:
            axes = f"{'batch_size, seqlen, ' if rank == 5 else 'total, '}{count}, nheads, headdim"
            raise ArgumentError(f"{name} must be ({axes}), got shape {tuple(packed.shape)}")
        return packed.unbind(-3)
    except RuntimeError:
        check_readable({name: packed})
        raise
