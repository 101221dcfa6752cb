"""Which linear layers of a model are computed by our functions, and why others are not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from transformers import PretrainedConfig

from fastattention.integrations.transformers import linear_attention, linear_layers

# Ours, by the names under which the integration calls them.
FUNCTIONS = tuple(name for name in vars(linear_layers) if name.startswith(("chunk_", "recurrent_", "causal_conv1d")))


@dataclass
class Linear:
    """What the linear layers of a model called."""

    ours: set[str] = field(default_factory=set)  # names of our functions
    left: set[str] = field(default_factory=set)  # warnings: what is left to the model, and why

    def is_there(self, config: PretrainedConfig) -> bool:
        """Whether a model has linear layers."""
        kinds = getattr(config.get_text_config(), "layer_types", None) or ()
        return bool(self.ours or self.left) or "linear_attention" in kinds

    def result(self) -> dict[str, list[str]]:
        """For results.json."""
        return {"ours": [name for name in FUNCTIONS if name in self.ours], "left": sorted(self.left)}


@contextmanager
def recorded() -> Iterator[Linear]:
    """Records calls of our functions by linear layers of models."""
    linear = Linear()

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            linear.ours.add(name)
            return function(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for name in FUNCTIONS:
            patches.enter_context(patch.object(linear_layers, name, recording(name, getattr(linear_layers, name))))
        patches.enter_context(patch.object(linear_attention, "warn_once", linear.left.add))
        yield linear
