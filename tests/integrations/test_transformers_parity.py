"""Models with fast_attention compute what they compute with eager attention."""

from __future__ import annotations

import copy

import pytest
import torch
from tiers import sampled

from integrations.models import (
    DECODERS,
    ENCODERS,
    assert_as_exact,
    assert_same,
    assert_varied,
    greedy,
    padding_mask,
    pair,
    prompts,
    random_masks,
    stepwise,
)


@sampled
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad"])
@pytest.mark.parametrize("cache", ["no cache", "dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_those_of_eager(name: str, side: str, cache: str, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        (eager, real), (fast, _) = (stepwise(model, side, cache) for model in pair(name))
    assert_same(fast, eager, real)


@sampled
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_generation_is_that_of_eager(name: str, side: str, cache: str | None) -> None:
    eager, fast = (greedy(model, prompts(), padding_mask(side), 12, cache) for model in pair(name))
    assert_varied(eager)
    assert fast == eager


def test_generation_of_a_padded_prompt_is_that_of_the_prompt_alone() -> None:
    fast, ids, mask = pair("gemma2").fast, prompts(), padding_mask("left")
    for row, text in enumerate(greedy(fast, ids, mask)):
        prompt = ids[row : row + 1, mask[row].bool()]
        assert text[11:] == greedy(fast, prompt, torch.ones_like(prompt))[0][prompt.shape[1] :]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "grad"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_logits_are_those_of_eager(name: str, side: str, grad: bool) -> None:
    ids, mask = prompts(), padding_mask(side)
    with torch.set_grad_enabled(grad):
        eager, fast = (model(ids, attention_mask=mask).logits for model in pair(name))
    assert_same(fast, eager, mask)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "right"])
def test_encoder_decoder_with_position_bias_is_that_of_eager(side: str, cache: str | None) -> None:
    ids, mask = prompts(), padding_mask(side)
    with torch.no_grad():
        eager, fast = (model(ids, attention_mask=mask, decoder_input_ids=ids[:, :5]).logits for model in pair("t5"))
    assert_same(fast, eager, tolerance=2e-5)  # T5 does not scale its scores
    texts, found = (greedy(model, ids, mask, cache=cache) for model in pair("t5"))
    assert found == texts


@sampled
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, "modernbert"])
def test_gradients_are_those_of_eager(name: str, side: str) -> None:
    ids, mask = prompts(), padding_mask(side)
    # A token's label is read at the token before it, so the first after padding on the left has none either.
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0), value=1)
    labels = ids.masked_fill((mask == 0) | (before == 0), -100)
    models = tuple(copy.deepcopy(model) for model in pair(name))
    for model in models:
        model(ids, attention_mask=mask, labels=labels).loss.backward()
    eager, fast = (dict(model.named_parameters()) for model in models)
    with_grad = [key for key, weight in eager.items() if weight.grad is not None]
    assert any("sinks" in key for key in with_grad) == (name == "gpt_oss")
    for key in with_grad:
        assert_same(fast[key].grad.view(1, 1, -1), eager[key].grad.view(1, 1, -1), tolerance=2e-4)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert"])
def test_a_mask_of_four_dimensions_is_obeyed(name: str, kind: str) -> None:
    seen, added = random_masks()
    if kind == "float":
        seen = added = added + torch.randn(seen.shape, generator=torch.Generator().manual_seed(2)) * seen
    with torch.no_grad():
        eager = pair(name).eager(prompts(), attention_mask=added).logits
        fast = pair(name).fast(prompts(), attention_mask=seen).logits
    assert_same(fast, eager)


# GPT-OSS does not hand its position ids on when it asks Transformers for masks: eager mixes its sequences, too.
@pytest.mark.parametrize("name", [name for name in DECODERS if name != "gpt_oss"])
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    ids = prompts(2, 12)
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]])
    eager, fast = (model(ids, position_ids=position_ids, use_cache=False).logits for model in pair(name))
    assert_same(fast, eager)
    alone = pair(name).fast(ids[:1, 8:11], use_cache=False).logits
    assert_same(fast[:1, 8:11], alone)


@pytest.mark.parametrize("restarted", [False, True], ids=["positions run on", "positions start again"])
@pytest.mark.parametrize("name", DECODERS)
def test_sequences_packed_by_the_caller_do_not_see_each_other(name: str, restarted: bool) -> None:
    """The arguments cu_seq_lens_q and others are those that DataCollatorWithFlattening makes."""
    ids, offsets = prompts(1, 19), torch.tensor([0, 8, 18, 19], dtype=torch.int32)
    packing = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 10, "max_length_k": 10}
    position_ids = torch.cat([torch.arange(8), torch.arange(10), torch.arange(1)])[None] if restarted else None
    fast = pair(name).fast
    packed = fast(ids, position_ids=position_ids, use_cache=False, **packing).logits
    for begin, end in ((0, 8), (8, 18), (18, 19)):
        alone = pair(name).eager(ids[:, begin:end], use_cache=False).logits
        assert_same(packed[:, begin:end], alone, tolerance=2e-5)  # rotary angles differ, by the same for all tokens


@pytest.mark.parametrize("name", DECODERS)
def test_bfloat16_is_as_exact_as_eager(name: str) -> None:
    ids, mask = prompts(), padding_mask("left")
    with torch.no_grad():
        exact = pair(name).eager(ids, attention_mask=mask).logits
        eager, fast = (copy.deepcopy(model).bfloat16()(ids, attention_mask=mask).logits for model in pair(name))
    assert_as_exact(fast, eager, exact, mask)


def test_autocast_runs_in_its_dtype() -> None:
    ids, mask = prompts(), padding_mask("left")
    with torch.no_grad():
        exact = pair("llama").eager(ids, attention_mask=mask).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            eager, fast = (model(ids, attention_mask=mask).logits for model in pair("llama"))
    assert fast.dtype is eager.dtype
    assert_as_exact(fast, eager, exact, mask)
