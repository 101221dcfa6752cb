"""Computes the chunks of a part one after another, which bounds memory, also for gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Given = TypeVar("Given")
Result = TypeVar("Result")


def compute_chunked(compute: Callable[[Given], Result], chunks: Sequence[Given], with_gradients: bool) -> list[Result]:
    """The results of `compute` for all chunks, in their order.

    The last chunk is computed first. Under a causal mask it has the most keys, so the memory that it frees has room for
    all others. In the other order each chunk would take new memory, because the allocator keeps what is freed.
    with_gradients: with several chunks, the backward computes each again, so that scores are not kept. Transforms of
        torch.func cannot do that, so within them scores are kept.
    """
    again = with_gradients and len(chunks) > 1 and torch._C._functorch.maybe_current_level() is None
    results = []
    for chunk in reversed(chunks):
        if again:
            results.append(checkpoint(compute, chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            results.append(compute(chunk))
    return results[::-1]
