"""Whole models: logits, tokens and gradients are those of torch's operations."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiers import slow
from torch import Tensor
from transformers import DynamicCache

from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from integrations.models import assert_same, greedy, padding_mask, prompts

from .calls import Calls, by_torch
from .models import LENGTH, NAMES, NUM_LINEAR, model_of, model_with


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_torch(name: str, side: str, calls: Calls) -> None:
    model, ids, mask = model_of(name), prompts(length=LENGTH), padding_mask(side, length=LENGTH)

    @torch.no_grad()
    def logits() -> Tensor:
        return model(ids, attention_mask=mask).logits

    ours = logits()
    assert calls.counts == (NUM_LINEAR, 0)
    assert_same(ours, by_torch(logits), mask, 1e-4)
    assert calls.counts == (NUM_LINEAR, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_parts_and_decoding_are_those_of_torch(name: str, calls: Calls) -> None:
    model, ids = model_of(name), prompts(length=LENGTH)

    @torch.no_grad()
    def logits() -> Tensor:
        cache = DynamicCache(config=model.config)
        parts = ids.split([70, 3, 1, 1], dim=1)
        return torch.cat([model(part, **{CACHE_ARGUMENT: cache}).logits for part in parts], dim=1)

    ours = logits()
    assert calls.counts == (2 * NUM_LINEAR, 2 * NUM_LINEAR)
    assert_same(ours, by_torch(logits), tolerance=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_torch(name: str, calls: Calls) -> None:
    given = model_of(name), prompts(length=20), padding_mask("left", length=20), 20
    ours = greedy(*given)
    assert calls.counts == (NUM_LINEAR, 19 * NUM_LINEAR)
    assert ours == by_torch(lambda: greedy(*given))


@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_has_the_loss_and_gradients_of_torch(name: str, calls: Calls) -> None:
    model, ids = model_of(name), prompts(length=LENGTH)

    def step() -> tuple[Tensor, tuple[Tensor, ...]]:
        loss = model(ids, labels=ids, use_cache=False).loss
        return loss, torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)

    loss, grads = step()
    assert calls.counts == (NUM_LINEAR, 0)
    loss_of_torch, grads_of_torch = by_torch(step)
    torch.testing.assert_close(loss, loss_of_torch, rtol=1e-5, atol=1e-5)
    largest = max(grad.abs().max() for grad in grads_of_torch).item()
    for one, other in zip(grads, grads_of_torch, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5 * largest)


@pytest.mark.parametrize(
    "name", ["qwen3_5", "olmo_hybrid", "bamba"]
)  # experts of Qwen3-Next are chosen: errors may leap
def test_bfloat16_is_as_near_to_float32_as_torch(name: str) -> None:
    rounded = copy.deepcopy(model_of(name)).to(torch.bfloat16)
    exact = copy.deepcopy(rounded).float()
    ids = prompts(length=LENGTH)
    with torch.no_grad():
        wanted = by_torch(lambda: exact(ids).logits)
        ours, others = rounded(ids).logits, by_torch(lambda: rounded(ids).logits)
    errors = [(logits.float() - wanted).square().mean().sqrt().item() for logits in (ours, others)]
    assert errors[0] <= 1.25 * errors[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_keeps_concatenated_sequences_apart(name: str, calls: Calls, warned: Mock) -> None:
    model = model_with(name)
    model.set_attn_implementation("fast_attention")
    ids = prompts(batch_size=1, length=LENGTH)
    offsets = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
    lengths = {f"cu_seq_lens_{each}": offsets for each in "qk"} | {f"max_length_{each}": LENGTH - 5 for each in "qk"}
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
    layers = model.base_model  # Mamba2ForCausalLM gives them no offsets
    with torch.no_grad():
        together = layers(ids, position_ids=positions, use_cache=False, **lengths).last_hidden_state
        assert calls.counts == (NUM_LINEAR, 0)
        apart = [layers(part, use_cache=False).last_hidden_state for part in ids.split([5, LENGTH - 5], dim=1)]
    assert_same(together, torch.cat(apart, dim=1), tolerance=1e-4)
    assert not warned.called


@slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_model_calls_our_operator() -> None:
    model, ids = model_of("qwen3_5"), prompts(length=12)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        ours = compiled(ids, use_cache=False).logits
    assert graphs[0].count("fastattention.linear_attention") == NUM_LINEAR
    assert_same(ours, by_torch(lambda: model(ids, use_cache=False).logits.detach()), tolerance=1e-4)
