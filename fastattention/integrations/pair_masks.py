"""Masks that models give as bool tensors, read as masks of single pairs, whose hidden blocks kernels skip.

Such a tensor serves all layers of a forward pass: text with images, or documents that padding masks cannot express. The
second call that gets it reads it. The first does not: a model may make another mask for each of its layers, and
reading one can take as long as attending under it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fastattention.attention.problem import BLOCK_STEP
from fastattention.engine.eager import runs_eagerly
from fastattention.gpu_runtime.module import is_capturing
from fastattention.sparse import PairMask, from_pairs

# Devices whose kernels skip hidden blocks, and the dtypes that these take.
_SKIPPING = {"cpu": (torch.float32, torch.float16, torch.bfloat16), "cuda": (torch.float16, torch.bfloat16)}


class _Seen(NamedTuple):
    version: int  # of the tensor: it may be written to
    pairs: PairMask | None  # None: one call has had it


_SEEN: MutableMapping[Tensor, _Seen] = WeakIdKeyDictionary()


def pair_mask_of(mask: Tensor, q: Tensor, k: Tensor) -> PairMask | None:
    """The mask of single pairs that a tensor is; None where it is none, or where it is not worth it.

    mask: broadcasts to (batch_size, nheads, seqlen_q, seqlen_k); q: (batch_size, seqlen_q, nheads, headdim), k likewise
    """
    if mask.dtype is not torch.bool or not 2 <= mask.dim() <= 4:
        return None
    pairs = mask[(None,) * (4 - mask.dim())]
    sizes = (q.shape[1], k.shape[1])
    fits = pairs.shape[0] in (1, q.shape[0]) and pairs.shape[1] in (1, q.shape[2]) and tuple(pairs.shape[2:]) == sizes
    if not fits or min(sizes) < BLOCK_STEP:
        return None
    if q.dtype not in _SKIPPING.get(mask.device.type, ()) or not runs_eagerly(mask, q, k):
        return None
    if mask.is_cuda and is_capturing():  # reading a mask waits for the GPU
        return None
    if mask.is_inference():  # nothing tells whether it has been written to
        return None
    seen = _SEEN.get(mask)
    if seen is None or seen.version != mask._version:
        _SEEN[mask] = _Seen(mask._version, None)
        return None
    if seen.pairs is None:
        seen = _SEEN[mask] = _Seen(mask._version, from_pairs(pairs))
    return seen.pairs
