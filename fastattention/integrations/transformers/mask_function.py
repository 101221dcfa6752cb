"""The mask function: makes one mask per forward pass, from offsets, cache sizes and padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import causal_mask_function, eager_mask, prepare_padding_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from fastattention.errors import ArgumentError
from fastattention.host_numbers import constant
from fastattention.integrations.transformers.indexers import serve_indexers
from fastattention.integrations.transformers.latents import serve_latents
from fastattention.integrations.transformers.masks import (
    CachedMask,
    DenseMask,
    SequenceMask,
    Tokens,
    VarlenMask,
    Window,
)
from fastattention.integrations.transformers.model_source import matrix_needed, require_dispatch
from fastattention.integrations.transformers.patterns import BIDIRECTIONAL, CAUSAL, Pattern, recognize


def fast_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | SequenceMask | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: object | None = None,
    packs: bool = True,
    **_: Any,
) -> SequenceMask | Tensor:
    """The mask of one kind of layer, as Transformers' AttentionMaskInterface asks for it.

    Queries are tokens q_offset to q_offset + q_length - 1, keys are tokens kv_offset to kv_offset + kv_length - 1. A
    query sees a key when mask_function says so and attention_mask, bool (batch_size or 1, tokens), does not call the
    key padding (False). Keys past the end of attention_mask are padding, as in Transformers; queries there are real.
    packs=False keeps prompts with padding on the left in place, if a mask can express that.
    Returns a tensor, bool (batch_size, 1, q_length, kv_length), in three cases: patterns that no SequenceMask can
    express, models that compute with their mask, and padding under torch.compile, which must not be read. Models
    without SDPA that compute with their mask get that of eager attention, in `dtype`. Raises UnsupportedError when the
    model would not hand the mask to the attention function, ArgumentError for an attention_mask of another shape.
    """
    if isinstance(attention_mask, SequenceMask):
        return attention_mask  # `generate` made it for the forward pass that now asks for it
    require_dispatch(config)
    serve_latents(config)
    static = isinstance(q_offset, Tensor)
    if isinstance(q_offset, Tensor) and not is_tracing(q_offset):
        q_offset = int(q_offset)  # a static cache counts on the device, and later changes this tensor
    if attention_mask is not None:
        attention_mask = _fitting(attention_mask, batch_size)
    pattern = recognize(mask_function)
    indexed = serve_indexers(config) and pattern == CAUSAL
    needed = None if indexed else matrix_needed(config)
    if needed == "float":
        return eager_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,  # type: ignore[arg-type]
            dtype=dtype, use_vmap=use_vmap, device=device,
        )  # fmt: skip

    def as_tensor() -> Tensor:
        mask = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,  # type: ignore[arg-type]
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        assert mask is not None
        return mask

    decodes = q_length == 1 and not torch.is_grad_enabled()  # a CachedMask has no gradients
    counts_all = pattern == CAUSAL and kv_offset == 0 and attention_mask is None
    if isinstance(q_offset, Tensor) and decodes and counts_all and not needed:
        # The fill of a static cache must not be read while a CUDA graph is captured, or torch.compile traces.
        lengths = (q_offset + 1).to(torch.int32).expand(batch_size).contiguous()
        shape = (batch_size, 1, q_length, kv_length)
        return CachedMask(shape, True, CAUSAL.window, as_tensor, lengths, None, False)
    unreadable = isinstance(q_offset, Tensor) or (attention_mask is not None and is_tracing(attention_mask))
    if needed or pattern is None or unreadable:
        return as_tensor()
    shape = (batch_size, 1, q_length, kv_length)
    call = _Call(shape, int(q_offset), kv_offset, pattern, device, packs, static and decodes, as_tensor)
    if pattern.sequence_ids is not None:
        return call.sequences(pattern.sequence_ids)
    # Models that compute with their mask do not allow skipping it. Nor does `generate`, when it decodes into a static
    # cache. Indexers that have been changed do.
    if q_length > 1 and not (allow_is_causal_skip or allow_is_bidirectional_skip or indexed):
        return as_tensor()
    return call.mask(attention_mask)


def _fitting(attention_mask: Tensor, batch_size: int) -> Tensor:
    """A padding mask with a row for every sequence. Further rows are ignored, as in Transformers."""
    rows = attention_mask.shape[0] if attention_mask.dim() == 2 else 0
    if rows != 1 and rows < batch_size:
        raise ArgumentError(
            f"attention_mask must be (batch_size, tokens) or (1, tokens) with batch_size={batch_size}, or have four "
            f"dimensions, got shape {tuple(attention_mask.shape)}"
        )
    return attention_mask.expand(batch_size, -1) if rows == 1 else attention_mask[:batch_size]


class _Call(NamedTuple):
    """A recognized pattern, and where its queries and keys are."""

    shape: tuple[int, int, int, int]  # (batch_size, 1, q_length, kv_length)
    q_offset: int
    kv_offset: int
    pattern: Pattern
    device: torch.device | str
    packs: bool
    is_static_step: bool  # of decoding into a static cache: all such steps get a CachedMask, for torch.compile
    as_tensor: Callable[[], Tensor]

    def mask(self, attention_mask: Tensor | None) -> SequenceMask | Tensor:
        """attention_mask: bool (batch_size, tokens), False is padding; None is no padding."""
        q_length, kv_length = self.shape[2:]
        num_keys = kv_length
        if self.pattern.is_positional:
            num_keys = self.q_offset + q_length - self.kv_offset
            # Causal queries do not see the free places of a static cache after them. Other queries would.
            if not q_length <= num_keys <= kv_length or (num_keys < kv_length and not self.pattern.causal):
                return self.as_tensor()
        if attention_mask is None:
            return self._without_padding(num_keys)
        tokens = prepare_padding_mask(attention_mask, kv_length, self.kv_offset)
        assert tokens is not None
        used = tokens[:, self.kv_offset : self.kv_offset + num_keys]
        if bool(used.all()):
            return self._without_padding(num_keys)
        behind = self.q_offset + q_length - attention_mask.shape[1]  # queries past the end of the mask
        if not self.pattern.is_positional or behind <= 0:
            return self._with_padding(used)
        if behind < q_length or self.pattern.window[0] >= 0:
            return self.as_tensor()
        # All queries come after all keys in use: a causal mask hides none of them.
        return self._replace(pattern=BIDIRECTIONAL)._with_padding(used)

    def sequences(self, sequence_ids: Tensor) -> SequenceMask | Tensor:
        """sequence_ids: int (batch_size, tokens); sequences lie one after another, none goes on in the next row."""
        batch_size, _, q_length, kv_length = self.shape
        if tuple(sequence_ids.shape) != (batch_size, q_length) or q_length != kv_length:
            return self.as_tensor()
        begins = torch.ones_like(sequence_ids, dtype=torch.bool)
        begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
        offsets = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=begins.numel()).to(torch.int32)
        numbers: list[int] = offsets.tolist()
        cu_seqlens = constant(offsets, numbers)
        longest = max(end - begin for begin, end in itertools.pairwise(numbers))
        return VarlenMask(*self._common(longest), None, None, cu_seqlens, cu_seqlens, longest, longest)

    def _without_padding(self, num_keys: int) -> SequenceMask:
        batch_size, _, q_length, kv_length = self.shape
        if self.is_static_step or (num_keys < kv_length and q_length == 1 and not torch.is_grad_enabled()):
            # Lengths in a tensor, so that one compiled decoding step serves them all.
            lengths = torch.full((batch_size,), num_keys, dtype=torch.int32, device=self.device)
            return CachedMask(*self._common(num_keys), constant(lengths, [num_keys] * batch_size), None, False)
        return DenseMask(*self._common(num_keys), num_keys)

    def _with_padding(self, used: Tensor) -> SequenceMask | Tensor:
        """used: bool (batch_size, num_keys), with at least one False."""
        q_length, num_keys = self.shape[2], used.shape[1]
        common, positional = self._common(num_keys), self.pattern.is_positional
        windowed = -1 not in common[2]
        first, end, contiguous = _runs(used)
        # Gathering tokens keeps their order, but not distances across padding between them.
        if windowed and not contiguous:
            return self.as_tensor()
        if self.is_static_step and not contiguous:
            free = F.pad(used, (0, self.shape[3] - num_keys))
            return CachedMask(*common, constant(used.sum(dim=1, dtype=torch.int32)), None, False, _used_first(free))
        reaches_end = bool((end == num_keys).all())
        in_place = q_length < num_keys or not self.packs
        if contiguous and (reaches_end or not positional) and in_place and not torch.is_grad_enabled():
            return CachedMask(*common, constant(end), constant(first), reaches_end)
        if windowed and not self.pattern.causal and q_length != num_keys:
            return self.as_tensor()
        tokens_k, cu_seqlens_k, max_seqlen_k = _packing(used)
        if positional:
            tokens_q, cu_seqlens_q, max_seqlen_q = _packing(used[:, num_keys - q_length :])
            return VarlenMask(*common, tokens_q, tokens_k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        # The queries may belong to another sequence (cross-attention), whose padding is not known.
        offsets = torch.arange(len(used) + 1, dtype=torch.int32, device=used.device) * q_length
        cu_seqlens_q = constant(offsets, [row * q_length for row in range(len(used) + 1)])
        return VarlenMask(*common, None, tokens_k, cu_seqlens_q, cu_seqlens_k, q_length, max_seqlen_k)

    def _common(self, num_keys: int) -> tuple[tuple[int, int, int, int], bool, Window, Callable[[], Tensor]]:
        """The fields of every SequenceMask. The window is -1 on sides where it reaches past all num_keys keys."""
        left, right = (-1 if side >= num_keys - 1 else side for side in self.pattern.window)
        return self.shape, self.pattern.causal, (left, right), self.as_tensor


def _used_first(used: Tensor) -> Tensor:
    """Indices of the tokens of each sequence, int64 (batch_size, tokens): those in use in order, then the others."""
    return used.logical_not().to(torch.uint8).argsort(dim=1, stable=True)


def _runs(used: Tensor) -> tuple[Tensor, Tensor, bool]:
    """First and last + 1 token in use, int32 (batch_size,), and whether all tokens between them are in use."""
    count = used.sum(dim=1)
    first = used.int().argmax(dim=1)
    positions = torch.arange(used.shape[1], dtype=torch.int64, device=used.device)
    run = (positions >= first[:, None]) & (positions < (first + count)[:, None])
    return first.to(torch.int32), (first + count).to(torch.int32), bool((run == used).all())


def _packing(used: Tensor) -> tuple[Tokens, Tensor, int]:
    """The tokens in use, the offsets of their sequences, int32 (batch_size + 1,), and the longest length."""
    lengths = used.sum(dim=1)
    numbers: list[int] = lengths.tolist()
    rows, tokens = used.nonzero(as_tuple=True)
    offsets = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return (rows, tokens), constant(offsets, [0, *itertools.accumulate(numbers)]), max(numbers)
