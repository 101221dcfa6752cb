"""Every model type of Transformers gives the results of eager attention, or refuses; the sweep detects both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from tiers import deep, slow
from transformers import AttentionInterface

from fastattention.integrations.transformers import linear_layers

from . import results
from .__main__ import sweep
from .tiny import model_types

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers warns of its own models


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@deep
@pytest.mark.parametrize("model_type", model_types())
def test_a_type_is_served_or_refused(model_type: str) -> None:
    """The list includes new types of Transformers automatically."""
    result = sweep(model_type)
    assert not results.is_failure(result), result


def test_a_model_that_works_passes_every_check() -> None:
    result = sweep("llama")
    assert result["class"] == "LlamaForCausalLM"
    assert result["checks"].pop("asks") == "yes"
    assert {"padding left", "static cache", "beams", "chunks", "packing", "gradients"} < result["checks"].keys()
    assert set(result["checks"].values()) == {"same"}


def test_a_model_that_is_refused_is_told_from_one_that_fails() -> None:
    result = sweep("falcon")
    assert result["checks"]["loading"].startswith("refused: UnsupportedError: FalconModel")
    assert not results.is_failure(result)


def test_a_model_that_never_asks_is_known() -> None:
    assert sweep("openai-gpt")["checks"]["asks"] == "no"


@pytest.mark.parametrize(
    ("model_type", "ours"),
    [
        ("qwen3_next", ["chunk_gated_delta_rule", "recurrent_gated_delta_rule"]),
        pytest.param("kimi_linear", ["chunk_kda", "recurrent_kda"], marks=slow),
        pytest.param("mamba2", ["chunk_ssd", "recurrent_ssd"], marks=slow),
        pytest.param("mamba", [], marks=slow),  # its state space is Transformers' own
    ],
)
def test_linear_layers_are_compared_with_those_of_transformers(model_type: str, ours: list[str]) -> None:
    result = sweep(model_type)
    assert not results.is_failure(result)
    assert result["linear"] == {"ours": ["causal_conv1d", "causal_conv1d_update", *ours], "left": []}


def test_linear_layers_that_are_left_to_the_model_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layers, "MAX_HEADDIM", 8)
    linear = sweep("qwen3_next")["linear"]
    assert linear["ours"] == ["causal_conv1d", "causal_conv1d_update"]
    assert "a head dimension is 16" in linear["left"][0]


def test_linear_layers_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = linear_layers.chunk_gated_delta_rule

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out, state = compute(*args, **kwargs)
        return _slightly_off(out), state

    monkeypatch.setattr(linear_layers, "chunk_gated_delta_rule", wrong)
    result = sweep("qwen3_next")
    assert {name for name, said in result["checks"].items() if said.startswith("differs by")} > {"gradients", "greedy"}


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("deepseek_v3", []),
        ("deepseek_v32", ["selected keys", "masked keys", "indexer"]),
        ("glm5_next", ["selected keys", "masked keys"]),  # its indexer pools keys
    ],
)
def test_what_becomes_of_latents_is_recorded(model_type: str, more: list[str]) -> None:
    result = sweep(model_type)
    assert not results.is_failure(result)
    assert result["latents"] == ["expanded", "absorbed", *more]


def test_a_type_that_needs_other_inputs_is_not_tried() -> None:
    assert "its main input is input_features" in sweep("parakeet_ctc")["cannot"]


def _slightly_off(out: torch.Tensor) -> torch.Tensor:
    return out * (1 + 1e-3)


def _of_another_library(out: torch.Tensor) -> torch.Tensor:
    raise KeyError("key")


@pytest.mark.parametrize(
    ("change", "said"),
    [(_slightly_off, "differs by"), (_of_another_library, "error: KeyError")],
    ids=["numbers", "error"],
)
def test_what_is_wrong_is_found(change: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = AttentionInterface._global_mapping["fast_attention"]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return change(attend(*args, **kwargs)[0]), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "fast_attention", wrong)
    result = sweep("llama")
    assert results.is_failure(result)
    checks = {name: value for name, value in result["checks"].items() if name != "asks"}
    assert all(value.startswith(said) for value in checks.values()), checks


def test_recorded_results_have_no_failure() -> None:
    failed = {name: result for name, result in results.read().items() if results.is_failure(result)}
    assert not failed
