"""Attention of a layer to the keys that its indexer selects: single ones, or blocks of them."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.attention.interface import fast_attn_with_kvcache
from fastattention.attention.selected import fast_attn_selected_func
from fastattention.engine.checks import needs_grad
from fastattention.errors import UnsupportedError
from fastattention.integrations.transformers.latents import Latents
from fastattention.integrations.transformers.masks import (
    CachedMask,
    DenseMask,
    Scores,
    SequenceMask,
    VarlenMask,
    attend_dense,
    combine,
    matrix_of,
)
from fastattention.integrations.transformers.stored import StoredTokens


def check_selected(
    mask: SequenceMask | Tensor | None, indices: Tensor, query: Tensor, key: Tensor | StoredTokens | Latents
) -> None:
    """Raises UnsupportedError for indices that do not fit, or may be those of hidden keys."""
    shape = (query.shape[0], query.shape[2])
    # Indices that were selected under a matrix may be those of keys that it hides.
    is_unknown = isinstance(key, StoredTokens) or (isinstance(key, Latents) and key.are_stored)
    if mask is None or (is_unknown and isinstance(mask, Tensor)) or tuple(indices.shape[:-1]) != shape:
        raise UnsupportedError(
            f"indices of shape {tuple(indices.shape)}, by which a model selects keys, need an attention_mask, which is "
            f"no matrix with a FastAttentionCache, and shape {shape} followed by the number of keys; load the model "
            "with attn_implementation='eager', or use a DynamicCache"
        )


def check_sequences(mask: SequenceMask | Tensor | None) -> None:
    """Raises UnsupportedError for selected keys with lengths of sequences, and a mask that does not know these."""
    if mask is None or isinstance(mask, DenseMask):
        raise UnsupportedError(
            "cu_seq_lens_q and cu_seq_lens_k are not served with keys that a model selects; give position_ids, which "
            "start again at 0 in each sequence"
        )


def with_selected(mask: SequenceMask | Tensor, indices: Tensor, seqlen_k: int) -> Tensor:
    """The mask with all keys hidden that were not selected, as models with an indexer make it for eager attention."""
    mask = mask if isinstance(mask, Tensor) else mask.as_tensor()
    seen = matrix_of(indices, seqlen_k)
    return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def attend_to_selected(
    query: Tensor, key: Tensor, value: Tensor, mask: SequenceMask | Tensor, indices: Tensor, scaling: float | None,
    softcap: float | None, sinks: Tensor | None, dropout: float,
) -> Tensor:  # fmt: skip
    """Attention to the selected keys alone, but for those that the mask hides.

    With a matrix as their mask indexers fill up with such keys; with a SequenceMask they select none.
    """
    if dropout:
        raise UnsupportedError("dropout is not served with indices; load the model with attn_implementation='eager'")
    if isinstance(mask, Tensor):
        hides = ~mask if mask.dtype is torch.bool else mask < 0.5 * torch.finfo(mask.dtype).min
        hides = hides.expand(query.shape[0], 1, query.shape[2], key.shape[2])[:, 0]
        indices = torch.where(hides.gather(-1, indices.clamp(min=0).long()), -1, indices)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return fast_attn_selected_func(q, k, v, indices, scaling, softcap=softcap or 0.0, sinks=sinks)


def selects_few(latents: Latents, mask: SequenceMask | Tensor | None, indices: Tensor) -> bool:
    """Whether gathering the selected latents copies less than joining the two parts of all of them.

    Indices that were selected under a matrix may have -1, or keys that it hides, anywhere.
    """
    batch_size, _, seqlen_k, _ = latents.shape
    return isinstance(mask, SequenceMask) and not latents.are_stored and indices.numel() <= batch_size * seqlen_k


def attend_to_gathered(
    latents: Latents, query: Tensor, indices: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """`attend_to_selected` for a few absorbed queries whose indices come before any -1: no other latents are read."""
    keys = latents.gathered(indices).flatten(0, 1).unsqueeze(2)
    q = query.transpose(1, 2)
    out = fast_attn_with_kvcache(
        q.flatten(0, 1)[:, None], keys, keys[..., : latents.rank], softmax_scale=scaling, softcap=softcap or 0.0,
        cache_seqlens=(indices >= 0).sum(-1, dtype=torch.int32).flatten(), sinks=sinks,
    )  # fmt: skip
    return out.view(*q.shape[:-1], -1)


def attend_to_blocks(
    query: Tensor, key: object, value: object, mask: SequenceMask | Tensor | None, blocks: Tensor, size: int | None,
    scaling: float | None, softcap: float | None, sinks: Tensor | None, dropout: float,
) -> Tensor:  # fmt: skip
    """Attention of each key head to the blocks of keys that it has selected, so far as the mask shows them.

    - `blocks`: integers (batch_size, nheads_k, seqlen_q, topk); -1 is none
    - `size`: keys of a block

    Reads the selected blocks alone where the mask is causal without padding. Otherwise, and where a gradient is wanted,
    all keys are read, with a matrix of those that are seen. Raises UnsupportedError for several sequences in a row.
    """
    if isinstance(mask, VarlenMask) and mask.cu_seqlens_q.shape[0] - 1 > query.shape[0]:
        raise UnsupportedError(
            "several sequences in a row are not served with block_indices: MiniMax-M3 numbers blocks from the start of "
            "the row, so later sequences select blocks of the first; give each sequence a row of its own"
        )
    if size is None:
        raise UnsupportedError(
            "this model gives its attention function block_indices, and no module.indexer.block_size tells the size of "
            "a block; load it with attn_implementation='eager'"
        )
    if not (isinstance(key, Tensor) and isinstance(value, Tensor)):
        raise UnsupportedError(
            "blocks of keys are selected of the keys in a cache of Transformers alone; use a DynamicCache"
        )
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    in_place = isinstance(mask, CachedMask) and mask.cache_leftpad is None and mask.order is None
    is_plain = not dropout and sinks is None and not needs_grad(query, key, value)
    if is_plain and (mask is None or isinstance(mask, DenseMask) or in_place):
        assert not isinstance(mask, Tensor)
        if isinstance(mask, DenseMask):
            k, v = k[:, : mask.num_keys], v[:, : mask.num_keys]
        return fast_attn_selected_func(
            q, k, v, blocks.transpose(1, 2), scaling, mask is None or mask.causal, softcap or 0.0, key_block=size,
            seqused_k=mask.cache_seqlens if isinstance(mask, CachedMask) else None,
        )  # fmt: skip
    bias = combine(_seen_of_blocks(mask, blocks, size, k.shape[1], q.shape[2]), None, q.dtype)
    return attend_dense(q, k, v, bias, Scores(scaling, softcap or 0.0, sinks, dropout))


def _seen_of_blocks(
    mask: SequenceMask | Tensor | None, blocks: Tensor, size: int, seqlen_k: int, nheads: int
) -> Tensor:
    """Which keys each query of each head sees: bool (batch_size, nheads, seqlen_q, seqlen_k)."""
    count = -(-seqlen_k // size)
    columns = torch.where(blocks < 0, count, blocks).long()
    kept = blocks.new_zeros((*blocks.shape[:3], count + 1), dtype=torch.bool).scatter(-1, columns, True)[..., :-1]
    seen = kept.repeat_interleave(size, dim=-1)[..., :seqlen_k].repeat_interleave(nheads // blocks.shape[1], dim=1)
    if mask is None:
        seqlen_q = blocks.shape[2]
        return seen & torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=seen.device).tril(seqlen_k - seqlen_q)
    matrix = mask if isinstance(mask, Tensor) else mask.as_tensor()
    return seen & (matrix if matrix.dtype is torch.bool else matrix > 0.5 * torch.finfo(matrix.dtype).min)
