"""Block masks: patterns that are known in advance, patterns chosen from queries and keys, and what a mask keeps.

A block mask is bool (batch_size or 1, nheads or 1, rows, columns), True where a block of the score matrix is kept:

    rows = seqlen_q / block_m, columns = seqlen_k / block_n, both rounded up

`fast_attn_func` takes it as `block_mask`, with the same `block_size`. Blocks are counted from query 0 and key 0, so the
last row and the last column may be narrower. The diagonal is aligned to the bottom right, as that of causal masks: key
i + seqlen_k - seqlen_q is on the diagonal of query i.

A mask keeps whole blocks. Give `causal=True` or `window_size` to the call as well, to hide keys within kept blocks, or
make a mask of single pairs by `from_pairs`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattention.attention.mask_tiles import PairMask, tiles_of
from fastattention.attention.problem import BLOCK_STEP
from fastattention.attention.validation.block_masks import DEFAULT_BLOCK_SIZE, BlockSize, read_block_size
from fastattention.attention.validation.common import check_options, read_options
from fastattention.engine.checks import (
    check_like_q,
    check_rank,
    read_flag,
    read_int,
    spec_of,
)
from fastattention.errors import ArgumentError

__all__ = ["PairMask", "density", "from_pairs", "recall", "streaming", "strided", "top_p_blocks"]

PerHead = int | Sequence[int] | Tensor

# Scores that `recall` holds at a time: 32 MiB in float32, and a few temporaries of that size.
_CHUNK_ELEMENTS = 2**23
# A number of tokens that reaches every key, with which int64 arithmetic does not overflow.
_EVERY_KEY = 2**62


def streaming(
    nheads: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    sink_tokens: PerHead,
    local_tokens: PerHead,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    device: torch.device | str | None = None,
) -> Tensor:
    """The first keys and the last ones before each query: attention sinks and a local window.

    From StreamingLLM (arXiv 2309.17453); with different numbers for each head, the A-shape heads of MInference (arXiv
    2407.02490). With seqlen_q=3, seqlen_k=8, sink_tokens=2, local_tokens=3 these pairs are wanted:

        1 1 0 1 1 1 0 0
        1 1 0 0 1 1 1 0
        1 1 0 0 0 1 1 1

    - `sink_tokens`: each query wants that many keys from key 0 on, as far as a causal mask shows them.
    - `local_tokens`: each query wants that many keys, the last of them on its diagonal.
    - Both are at least 0, and one number for all heads or nheads numbers. A tensor on a GPU is copied to the CPU.
    - `block_size`: (block_m, block_n), or one number for both; multiples of 64. Default 128.
    - `device`: device of the mask. None is torch's default device.

    Returns bool (1, nheads, rows, columns): blocks with a pair that is wanted. Raises ArgumentError for other numbers.
    """
    nheads = _at_least("nheads", nheads, 1)
    blocks = _Blocks.of(seqlen_q, seqlen_k, block_size, device)
    sinks = _per_head("sink_tokens", sink_tokens, nheads, device)
    window = _per_head("local_tokens", local_tokens, nheads, device)
    return (blocks.local(window) | (blocks.causal() & (blocks.first_key < sinks)))[None]


def strided(
    nheads: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    stride: int,
    local_tokens: PerHead,
    offset: PerHead = 0,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    device: torch.device | str | None = None,
) -> Tensor:
    """A local window, and every stride-th column of blocks up to the diagonal.

    After Sparse Transformers (arXiv 1904.10509): there one head keeps near keys and another one every stride-th key.
    Here each head keeps both, in blocks. Columns are the same for all queries, as in the fixed pattern of that paper.

    - `stride`: stride in blocks of keys, at least 1.
    - `local_tokens`: each query wants that many keys, the last of them on its diagonal.
    - `offset`: the first column that is kept, from 0 to stride - 1. Heads with different offsets divide the columns
      among them.
    - `local_tokens` and `offset` are one number for all heads or nheads numbers.
    - `block_size`, `device`: as in `streaming`.

    Returns bool (1, nheads, rows, columns). Blocks beyond the diagonal are dropped. Raises ArgumentError for other
    numbers.
    """
    nheads, stride = _at_least("nheads", nheads, 1), _at_least("stride", stride, 1)
    blocks = _Blocks.of(seqlen_q, seqlen_k, block_size, device)
    window = _per_head("local_tokens", local_tokens, nheads, device)
    offsets = _per_head("offset", offset, nheads, device, most=stride - 1)
    columns = torch.arange(len(blocks.first_key), device=device)
    return (blocks.local(window) | (blocks.causal() & ((columns - offsets) % stride == 0)))[None]


def top_p_blocks(
    q: Tensor,
    k: Tensor,
    p: float,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
) -> Tensor:
    """For each block of queries the fewest blocks of keys whose estimated share of the softmax reaches p.

    A block of queries or keys stands for the mean of its tokens. The softmax over the scores of these means estimates
    what share of the attention each block of keys has: the scores of SpargeAttention (arXiv 2502.18137), without its
    test of how alike the tokens of a block are. Blocks are taken from the largest share on until their sum reaches p.
    FlexPrefill (arXiv 2502.20766) and XAttention (arXiv 2503.16428) choose by such a sum as well.

    The first block of keys and the blocks on the diagonal are always kept, whatever their shares.

    - `q`: (batch_size, seqlen_q, nheads, headdim), floating point; `k`: (batch_size, seqlen_k, nheads_k, headdim), of
        its dtype and device. nheads_k divides nheads.
    - `p`: above 0, at most 1. With 1, every block that has a share is kept.
    - `causal`: blocks in which a causal mask hides every pair have no share and are dropped.
    - `softmax_scale`: None means headdim ** -0.5.
    - `block_size`: as in `streaming`.

    Returns bool (batch_size, nheads, rows, columns). It computes in float32, and no gradient flows through it. Where
    the shares of a block of queries are NaN, every block is kept. Raises ArgumentError for tensors that do not fit and
    for any other p.
    """
    scale, causal = _check_scores(q, k, softmax_scale, causal)
    _check_share(p)
    block_m, block_n = read_block_size(block_size)
    blocks = _Blocks.of(q.shape[1], k.shape[1], (block_m, block_n), q.device)
    visible = blocks.visible(causal)
    if p == 1:  # the sum of all shares may be rounded to less
        return visible.expand(q.shape[0], q.shape[2], -1, -1).contiguous()
    scores = _scores(_means(q.detach(), block_m), _means(k.detach(), block_n), scale)
    shares = scores.masked_fill_(~visible, -math.inf).softmax(dim=-1)
    shares, order = shares.sort(dim=-1, descending=True, stable=True)
    before = shares.cumsum(dim=-1).roll(1, dims=-1)  # sum of all larger shares
    before[..., :1] = 0.0
    kept = torch.zeros_like(shares, dtype=torch.bool).scatter_(-1, order, ~(before >= p))  # NaN keeps
    return (kept | blocks.local(1) | (blocks.first_key == 0)) & visible


def from_pairs(pairs: Tensor, *, block_size: BlockSize = DEFAULT_BLOCK_SIZE) -> PairMask:
    """Any mask, for `block_mask` of dense calls: kernels skip hidden blocks, and read bits where a tile is mixed.

    - `pairs`: bool (batch_size or 1, nheads or 1, seqlen_q, seqlen_k), True where a query sees a key, on the device of
        the call. Documents, prefixes and padding are such masks.
    - `block_size`: as in `streaming`.

    One mask serves all layers. It takes 512 bytes for each 64 x 64 pairs that are neither all visible nor all hidden.
    Making it reads `pairs` once and takes about 10 bytes a pair of scratch memory; on a GPU it synchronizes. Raises
    ArgumentError for another dtype or number of axes.
    """
    given = spec_of("pairs", pairs)
    check_rank("pairs", given, "batch_size or 1, nheads or 1, seqlen_q, seqlen_k")
    if given.dtype is not torch.bool:
        raise ArgumentError(f"pairs must be bool, True where a query sees a key, got {given.dtype}")
    block_m, block_n = read_block_size(block_size)
    shown, index, bits = tiles_of(pairs)
    rows, columns = block_m // BLOCK_STEP, block_n // BLOCK_STEP
    shown = F.pad(shown, (0, -shown.shape[3] % columns, 0, -shown.shape[2] % rows))
    size = shown.shape[2] // rows, rows, shown.shape[3] // columns, columns
    kept = shown.view(*shown.shape[:2], *size).any(dim=5).any(dim=3)
    return PairMask(kept, index, bits, (block_m, block_n), (pairs.shape[2], pairs.shape[3]))


def recall(
    q: Tensor,
    k: Tensor,
    block_mask: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
) -> Tensor:
    """The share of the softmax that is in kept blocks: 1 where the mask hides nothing that counts.

    - `q`, `k`, `causal`, `softmax_scale`: as in `top_p_blocks`
    - `block_mask`: bool (batch_size or 1, nheads or 1, rows, columns), on the device of q; `block_size`: that of its
        blocks

    Returns float32 (batch_size, nheads): the mean over the queries that see a key, 1 if none does. It computes all
    scores in float32, as many rows at a time as fit 32 MiB, at least one. No gradient flows through it. Raises
    ArgumentError for tensors that do not fit.
    """
    scale, causal = _check_scores(q, k, softmax_scale, causal)
    block_m, block_n = read_block_size(block_size)
    (batch_size, seqlen_q, nheads, _), seqlen_k = q.shape, k.shape[1]
    blocks = _Blocks.of(seqlen_q, seqlen_k, (block_m, block_n), q.device)
    _check_mask(block_mask, blocks, (batch_size, nheads))
    if block_mask.device != q.device:
        raise ArgumentError(
            f"block_mask is on {block_mask.device} and q on {q.device}; they must be on the same device"
        )
    keys, keys_as_float = torch.arange(seqlen_k, device=q.device), k.detach().float()
    first = max(seqlen_q - seqlen_k, 0) if causal or seqlen_k == 0 else 0  # the first query that sees a key
    step = max(_CHUNK_ELEMENTS // max(batch_size * nheads * seqlen_k, 1), 1)
    total = torch.zeros(batch_size, nheads, dtype=torch.float32, device=q.device)
    for begin in range(first, seqlen_q, step):
        rows = torch.arange(begin, min(begin + step, seqlen_q), device=q.device)
        scores = _scores(q.detach()[:, begin : begin + step].float(), keys_as_float, scale)
        if causal:
            scores.masked_fill_(keys > rows[:, None] + seqlen_k - seqlen_q, -math.inf)
        kept = block_mask[:, :, rows // block_m][..., keys // block_n]
        total += (scores.softmax(dim=-1) * kept).sum(dim=(-2, -1))
    return total / (seqlen_q - first) if first < seqlen_q else total + 1.0


def density(
    block_mask: Tensor,
    *,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool = False,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
) -> float:
    """The share of blocks that a mask keeps, among those that need work without it.

    - `block_mask`: bool (any, any, rows, columns) of a call with seqlen_q queries and seqlen_k keys; `block_size`: that
        of its blocks
    - `causal`: blocks in which a causal mask hides every pair do not count, kept or not.

    Returns a number from 0 to 1, over all sequences and heads of the mask; 1 where no block needs work. Raises
    ArgumentError for a mask that does not fit.
    """
    blocks = _Blocks.of(seqlen_q, seqlen_k, block_size, block_mask.device if isinstance(block_mask, Tensor) else None)
    _check_mask(block_mask, blocks, None)
    visible = blocks.visible(read_flag("causal", causal))
    needed = int(visible.sum()) * block_mask.shape[0] * block_mask.shape[1]
    return int((block_mask & visible).sum()) / needed if needed else 1.0


class _Blocks(NamedTuple):
    """The positions of the blocks of a score matrix."""

    first_diagonal: Tensor  # (rows, 1): key on the diagonal of the block's first query; may lie outside the keys
    last_diagonal: Tensor  # (rows, 1)
    first_key: Tensor  # (columns,)
    last_key: Tensor  # (columns,)

    @classmethod
    def of(cls, seqlen_q: int, seqlen_k: int, block_size: BlockSize, device: torch.device | str | None) -> _Blocks:
        """The blocks of a score matrix. Raises ArgumentError for impossible lengths or sizes."""
        seqlen_q, seqlen_k = _at_least("seqlen_q", seqlen_q, 0), _at_least("seqlen_k", seqlen_k, 0)
        block_m, block_n = read_block_size(block_size)
        first_diagonal = torch.arange(0, seqlen_q, block_m, device=device)[:, None] + seqlen_k - seqlen_q
        first_key = torch.arange(0, seqlen_k, block_n, device=device)
        # The last row and column count as whole blocks. The diagonal ends in their corner, so no comparison changes.
        return cls(first_diagonal, first_diagonal + block_m - 1, first_key, first_key + block_n - 1)

    def causal(self) -> Tensor:
        """Bool (rows, columns): blocks with a pair on or before the diagonal."""
        return self.first_key <= self.last_diagonal

    def visible(self, causal: bool) -> Tensor:
        """Bool (rows, columns): blocks with a pair that is visible under a causal mask, or without a mask."""
        return self.causal() if causal else torch.ones_like(self.causal())

    def local(self, tokens: Tensor | int) -> Tensor:
        """Bool (..., rows, columns): blocks with one of the last `tokens` keys up to a query's diagonal."""
        wanted = torch.as_tensor(tokens, device=self.first_key.device, dtype=torch.int64)
        return self.causal() & (self.last_key > self.first_diagonal - wanted) & (wanted > 0)


def _at_least(name: str, value: object, least: int, most: int | None = None) -> int:
    allowed = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    number = read_int(name, value, allowed)
    if number < least or (most is not None and number > most):
        raise ArgumentError(f"{name}={number} must be {allowed}")
    return number


def _per_head(
    name: str, value: PerHead, nheads: int, device: torch.device | str | None, most: int | None = None
) -> Tensor:
    """int64 (nheads, 1, 1) of one number for all heads, or of one for each."""
    given = value.tolist() if isinstance(value, Tensor) else value
    listed = list(given) if isinstance(given, Sequence) else [given] * nheads
    if len(listed) != nheads:
        raise ArgumentError(f"{name} has {len(listed)} numbers; give one for all heads, or one for each of {nheads}")
    checked = [min(_at_least(name, number, 0, most), _EVERY_KEY) for number in listed]
    return torch.tensor(checked, dtype=torch.int64, device=device)[:, None, None]


def _check_share(p: object) -> None:
    if not (isinstance(p, numbers.Real) and 0.0 < float(p) <= 1.0):
        raise ArgumentError(f"p={p!r} must be a number above 0 and at most 1")


def _check_scores(q: Tensor, k: Tensor, softmax_scale: float | None, causal: bool) -> tuple[float, bool]:
    """Checks q and k. Returns softmax_scale and causal, read."""
    given_q, given_k = spec_of("q", q), spec_of("k", k)
    check_rank("q", given_q, "batch_size, seqlen_q, nheads, headdim")
    check_rank("k", given_k, "batch_size, seqlen_k, nheads_k, headdim")
    if not q.dtype.is_floating_point:
        raise ArgumentError(f"q must be floating point, got {q.dtype}")
    check_like_q("k", given_k, given_q)
    (batch_size, _, nheads, headdim), (batch_size_k, _, nheads_k, headdim_k) = q.shape, k.shape
    for name, of_q, of_k in (("batch_size", batch_size, batch_size_k), ("headdim", headdim, headdim_k)):
        if of_q != of_k:
            raise ArgumentError(f"k has {name} {of_k} and q has {of_q}; they must be the same")
    if headdim < 1:
        raise ArgumentError(f"headdim={headdim} of q must be at least 1")
    if nheads_k < 1 or nheads < 1 or nheads % nheads_k:
        raise ArgumentError(f"nheads={nheads} of q must be a positive multiple of nheads_k={nheads_k} of k")
    options = read_options(softmax_scale, causal, (-1, -1), softcap=0.0)
    return check_options(options, headdim, q.shape[1], k.shape[1]).softmax_scale, options.causal


def _check_mask(block_mask: Tensor, blocks: _Blocks, leading: tuple[int, int] | None) -> None:
    """Raises unless the mask is bool and fits. leading: (batch_size, nheads), for each of which the mask may have 1."""
    given = spec_of("block_mask", block_mask)
    if given.dtype is not torch.bool:
        raise ArgumentError(f"block_mask must be bool, True where a block is kept, got {given.dtype}")
    trailing = (len(blocks.first_diagonal), len(blocks.first_key))
    fits = len(given.shape) == 4 and tuple(given.shape[2:]) == trailing
    if leading is not None:
        fits = fits and all(size in (1, wanted) for size, wanted in zip(given.shape, leading, strict=False))
    if not fits:
        first = "any, any" if leading is None else f"{leading[0]} or 1, {leading[1]} or 1"
        raise ArgumentError(
            f"block_mask must be (batch_size or 1, nheads or 1, seqlen_q / block_m, seqlen_k / block_n), rounded up, = "
            f"({first}, {trailing[0]}, {trailing[1]}), got shape {tuple(given.shape)}"
        )


def _means(x: Tensor, block: int) -> Tensor:
    """float32 (batch_size, blocks, heads, headdim): means of the tokens in each block of x, fewer in the last."""
    whole = x.shape[1] // block
    means = x[:, : whole * block].view(x.shape[0], whole, block, *x.shape[2:]).mean(dim=2, dtype=torch.float32)
    if x.shape[1] == whole * block:
        return means
    return torch.cat((means, x[:, whole * block :].mean(dim=1, keepdim=True, dtype=torch.float32)), dim=1)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scores (batch_size, nheads, rows, columns) of float32 q (batch_size, rows, nheads, headdim) and such k."""
    (batch_size, rows, nheads, headdim), nheads_k = q.shape, k.shape[2]
    grouped = q.view(batch_size, rows, nheads_k, nheads // nheads_k, headdim)
    with torch.autocast(q.device.type, enabled=False):
        return torch.einsum("bmhgd,bnhd->bhgmn", grouped, k).flatten(1, 2) * scale
