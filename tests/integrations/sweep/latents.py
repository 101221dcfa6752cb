"""What our attention function did with latents of a model, and whether our indexers selected its keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from fastattention.integrations.transformers import attention, indexers
from fastattention.integrations.transformers.latents import Latents

# What is recorded, and the function that does it.
WAYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "expanded": (Latents, ("is_expanded_for",)),
    "absorbed": (Latents, ("absorbed",)),
    "selected keys": (attention, ("attend_to_selected", "attend_to_gathered", "attend_to_blocks")),
    "masked keys": (attention, ("with_selected",)),
    "indexer": (indexers, ("fast_indexer_func",)),
}


@contextmanager
def recorded_ways() -> Iterator[set[str]]:
    """Records the keys of WAYS that a model comes by."""
    found: set[str] = set()

    def recording(way: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if way != "expanded" or result:
                found.add(way)
            return result

        return call

    with ExitStack() as patches:
        for way, (owner, names) in WAYS.items():
            for name in names:
                patches.enter_context(patch.object(owner, name, recording(way, getattr(owner, name))))
        yield found
