"""Models that cache latents: absorbed queries beside eager attention, and when keys and values are expanded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache

from fastattention.integrations.transformers import latents
from fastattention.integrations.transformers.latents import Latents
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT

from .models import LATENT, assert_same, assert_varied, greedy, padding_mask, pair, prompts, stepwise

models = pytest.mark.parametrize("name", LATENT)


class Choices(list[tuple[int, bool]]):
    """For each layer that ran: how many queries it had, and whether keys and values were expanded."""


@pytest.fixture
def choices() -> Iterator[Choices]:
    """What layers choose during a test."""
    found, choose = Choices(), Latents.is_expanded_for

    def chosen(self: Latents, query: Tensor, topk: int | None) -> bool:
        expanded = choose(self, query, topk)
        found.append((query.shape[2], expanded))
        return expanded

    with mock.patch.object(Latents, "is_expanded_for", chosen):
        yield found


@models
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_prompts_chunks_and_tokens_are_those_of_eager_attention(
    name: str, side: str, cache: str, choices: Choices
) -> None:
    with torch.no_grad():
        (eager, real), (fast, _) = (stepwise(model, side, cache) for model in pair(name))
    assert_same(fast, eager, real)
    if cache == "dynamic":
        assert set(choices) == {(11, True), (3, False), (1, False)}


@models
def test_greedy_tokens_are_those_of_eager_attention(name: str) -> None:
    texts = [greedy(model, prompts(), padding_mask("left")) for model in pair(name)]
    assert texts[0] == texts[1]
    assert_varied(texts[0])


@models
def test_gradients_are_those_of_eager_attention(name: str, choices: Choices) -> None:
    found = []
    for model in pair(name):
        ids = prompts()
        loss = model(ids, labels=ids).loss
        found.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    assert all(expanded for _, expanded in choices)
    for eager, fast in zip(*found, strict=True):
        if eager is not None:
            torch.testing.assert_close(fast, eager, atol=1e-5 * float(eager.abs().max() + 1e-3), rtol=1e-4)


@pytest.mark.parametrize("name", ["deepseek_v3"])
def test_a_step_compiles_without_a_break(name: str) -> None:
    fast = pair(name).fast
    ids, cache = prompts(), StaticCache(config=fast.config, max_cache_len=16)
    expected = fast(ids).logits
    step: Any = torch.compile(fast, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        fast(ids[:, :10], **{CACHE_ARGUMENT: cache})
        assert_same(step(ids[:, 10:], **{CACHE_ARGUMENT: cache}).logits, expected[:, 10:])


class Layer(nn.Module):
    """A layer of DeepSeek V3's size."""

    qk_nope_head_dim, v_head_dim = 128, 128

    def __init__(self, nheads: int, rank: int) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(rank, nheads * 256, bias=False, device="meta")


def latents_of(seqlen_k: int, nheads: int = 128, rank: int = 512, rope: int = 64) -> Latents:
    kv, rotated = (torch.empty(1, 1, seqlen_k, size, device="meta") for size in (rank, rope))
    return Latents(Layer(nheads, rank), kv, rotated, lambda: (kv, rotated))


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "topk", "expanded"),
    [
        (4096, 4096, None, True),  # a prompt
        (1, 4096, None, False),
        (100, 4096, None, False),
        (300, 4096, None, True),  # a chunk: 171 queries cost as much either way
        (1, 1, None, True),
        (4096, 4096, 2048, True),  # few keys are not selected
        (65536, 65536, 2048, False),
        (300, 65536, 2048, False),
    ],
)
def test_what_takes_fewer_operations_is_chosen(seqlen_q: int, seqlen_k: int, topk: int | None, expanded: bool) -> None:
    query = torch.empty(1, 128, seqlen_q, 192, device="meta")
    with torch.no_grad():
        assert latents_of(seqlen_k).is_expanded_for(query, topk) is expanded


class Adapted(nn.Linear):
    """As an adapter or a quantized layer, whose weight is not all there is."""


@contextmanager
def adapted(projection: nn.Linear) -> Iterator[None]:
    projection.__class__ = Adapted
    try:
        yield
    finally:
        projection.__class__ = nn.Linear


@contextmanager
def hooked(projection: nn.Linear) -> Iterator[None]:
    with projection.register_forward_pre_hook(lambda *_: None):
        yield


@pytest.mark.parametrize("changed", [adapted, hooked])
def test_keys_of_all_heads_are_expanded_where_the_projection_is_no_plain_matrix(
    changed: Callable[[Any], AbstractContextManager[None]], choices: Choices
) -> None:
    fast = pair("deepseek_v3").fast
    with torch.no_grad(), ExitStack() as stack:
        expected, _ = stepwise(fast, "none", "dynamic")
        before = len(choices)
        for layer in fast.model.layers:
            stack.enter_context(changed(layer.self_attn.kv_b_proj))
        found, _ = stepwise(fast, "none", "dynamic")
    assert len(choices) == before
    assert_same(found, expected)


def test_a_module_is_wrapped_once() -> None:
    fast = pair("deepseek_v3").fast
    stepwise(fast, "none", "dynamic")
    of_class = type(fast.model.layers[0].self_attn)
    wrapped = of_class.expand_kv
    wrap: Any = latents.serve_latents
    wrap.__wrapped__(type(fast.config))
    assert of_class.expand_kv is wrapped
