"""Computes the chunks of a part one after another, which bounds memory, also for gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Given = TypeVar("Given")
Result = TypeVar("Result")


def compute_chunked(compute: Callable[[Given], Result], chunks: Sequence[Given], with_gradients: bool) -> list[Result]:
    """What `compute` makes of every chunk, in their order.

    The last is computed first: under a causal mask it has the most keys, and what it frees has room for all others.
    Smaller ones first would each take new memory from an allocator that keeps what is freed.
    with_gradients: where there are several, each is computed again when its gradients are, and its scores are not kept.
    Transforms of torch.func cannot do that: within them scores are kept.
    """
    again = with_gradients and len(chunks) > 1 and torch._C._functorch.maybe_current_level() is None
    results = []
    for chunk in reversed(chunks):
        if again:
            results.append(checkpoint(compute, chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            results.append(compute(chunk))
    return results[::-1]
