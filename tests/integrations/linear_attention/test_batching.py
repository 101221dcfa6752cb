"""Continuous batching of Transformers has no place for states: models with linear layers are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tiers import slow
from transformers import ContinuousBatchingConfig, GenerationConfig

from fastattention import UnsupportedError
from fastattention.integrations.transformers import batching

from .models import NAMES, model_with


@pytest.fixture
def model(name: str) -> Any:
    found = model_with(name)
    found.set_attn_implementation("fast_attention")
    return found


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    batching.enable()
    yield
    batching.disable()


def refused(model: Any) -> Any:
    """Expects an error that names the type of a model and of its layers."""
    kind = next(kind for kind in model.config.layer_types if kind != "full_attention")
    return pytest.raises(UnsupportedError, match=f"model_type='{model.config.model_type}' has layers of type {kind}")


@pytest.mark.parametrize("name", NAMES)
def test_generate_batch_is_refused_by_the_name_of_the_type(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=3, eos_token_id=-1)
    with refused(model):
        model.generate_batch([[3, 4, 5]], config, ContinuousBatchingConfig(num_blocks=8))
    assert model.config._attn_implementation == "fast_attention"  # so that it generates as before


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("bamba", marks=slow)])
def test_a_manager_is_refused_where_sdpa_is_switched_too(model: Any) -> None:
    model.set_attn_implementation("sdpa")
    batching.enable(switch=True)
    with refused(model):
        model.init_continuous_batching(GenerationConfig(eos_token_id=-1))
    assert model.config._attn_implementation == "sdpa"
