"""Functions of modelling modules: where they are, arguments as models give them, and counts of calls of ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import torch
import transformers

from integrations.models import own_linear_layers

RULES = ("gated_delta_rule", "kda", "ssd")


class Calls(NamedTuple):
    """Mocks that count calls of our functions of every rule, and compute."""

    chunk: list[Mock]
    recurrent: list[Mock]

    @property
    def counts(self) -> tuple[int, int]:
        return sum(mock.call_count for mock in self.chunk), sum(mock.call_count for mock in self.recurrent)


def by_torch(compute: Callable[[], Any]) -> Any:
    """The result of `compute` with torch's functions."""
    with own_linear_layers():
        return compute()


def names_of_models(function: str) -> list[str]:
    """Names of models whose code has a function."""
    folder = Path(transformers.__file__).parent / "models"
    return sorted(path.parent.name for path in folder.glob("*/modeling_*.py") if f"def {function}(" in path.read_text())


def modeling_of(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def arguments(seqlen: int = 9, headdim: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    """Arguments of a gated delta rule, as models give them: 2 heads for queries and keys, 4 for values."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, seqlen, 2, headdim, generator=generator, dtype=dtype) for _ in range(2))
    value = torch.randn(1, seqlen, 4, headdim, generator=generator, dtype=dtype)
    g, beta = (torch.rand(1, seqlen, 4, generator=generator) for _ in range(2))
    last = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "cu_seqlens": None, "max_length_q": 3}
    return {"query": query, "key": key, "value": value, "g": -g, "beta": beta, **last}
