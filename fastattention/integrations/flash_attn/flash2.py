"""Names of flash-attn 2.8: its functions, which are fastattention's, and those of flash_attn.bert_padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattention.attention import interface
from fastattention.errors import ArgumentError

VERSION = "2.8.3"  # the flash-attn whose functions these are; importers compare it with what they need

INTERFACE = {
    "flash_attn_func": interface.fast_attn_func,
    "flash_attn_qkvpacked_func": interface.fast_attn_qkvpacked_func,
    "flash_attn_kvpacked_func": interface.fast_attn_kvpacked_func,
    "flash_attn_varlen_func": interface.fast_attn_varlen_func,
    "flash_attn_varlen_qkvpacked_func": interface.fast_attn_varlen_qkvpacked_func,
    "flash_attn_varlen_kvpacked_func": interface.fast_attn_varlen_kvpacked_func,
    "flash_attn_with_kvcache": interface.fast_attn_with_kvcache,
}


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices`, int64 (n,), of input (rows, ...): (n, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with values (n, ...) in rows `indices`, int64 (n,)."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens of a padded batch.

    - `hidden_states`: (batch_size, seqlen, ...)
    - `attention_mask`: bool or int (batch_size, seqlen), 1 is a token and 0 is padding
    - `unused_mask`: same shape, 1 is a token that is kept though it is not used; None is none

    Returns the kept tokens (total, ...), their indices into the flattened batch, int64 (total,), cu_seqlens, int32
    (batch_size + 1,), the longest sequence, and the number of used tokens a sequence, int32 (batch_size,).
    """
    if attention_mask.shape != hidden_states.shape[:2]:
        raise ArgumentError(
            f"attention_mask must be (batch_size, seqlen) = {tuple(hidden_states.shape[:2])}, "
            f"got shape {tuple(attention_mask.shape)}"
        )
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    seqlens = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(seqlens.max()) if len(seqlens) else 0
    unpadded = index_first_axis(hidden_states.flatten(0, 1), indices)
    return unpadded, indices, cu_seqlens, longest, attention_mask.sum(dim=-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of unpad_input: (batch, seqlen, ...) with hidden_states (total, ...) at `indices` and 0 elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).reshape(batch, seqlen, *hidden_states.shape[1:])
