"""MicroBatchedCache: the tokens of plain generation, by two halves of the batch that run at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from offload.fake_device import FakeDevice
from tiers import sampled
from torch import Tensor
from transformers import DynamicCache

from fastattention.errors import ArgumentError, CacheFullError, UnsupportedError
from fastattention.integrations.transformers import FastAttentionCache, MicroBatchedCache, overlapped
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT

from .budgets import LARGE, LENGTH, NUM_LAYERS, POLICIES, assert_goes_on, cache_arguments, call, generate, logits
from .models import VOCABULARY, deep, prompts

SMALL = 140_000  # bytes: few layers of three sequences stay on the device
MODELS = ("llama", "qwen3", "gemma2")


def make_cache(name: str, device: FakeDevice | None = None, **changed: Any) -> MicroBatchedCache:
    return MicroBatchedCache(deep(name, NUM_LAYERS).config, **cache_arguments(SMALL, device, changed))


def assert_close(given: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


@sampled
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_plain_generation(name: str, policy: str) -> None:
    device = FakeDevice()
    cache = make_cache(name, device, policy=policy)
    assert torch.equal(generate(name, cache), generate(name, None))
    assert sorted(device.branches) == [0] * 11 + [1] * 11
    first, second = (half.usage for half in cache.halves)
    assert min(first.num_layers_cpu, second.num_layers_cpu) > 0
    assert first.gpu_bytes <= SMALL * 2 // 3
    assert second.gpu_bytes <= SMALL // 3
    (chosen,) = {half.policy.value for half in cache.halves}
    assert (device.uploaded_bytes > 0) == (chosen in ("classical", "hybrid"))
    assert (device.cpu_bytes > 0) == (chosen != "classical")


@sampled
@pytest.mark.parametrize(
    "how",
    [
        {"prefill_chunk_size": 7},
        {"do_sample": True, "num_return_sequences": 2},
        {"inputs": prompts(4, LENGTH), "attention_mask": None},
        {"inputs": prompts(2, 40), "attention_mask": None},
        {"inputs": prompts(1, LENGTH), "attention_mask": None, "prompt_lookup_num_tokens": 3},
        {"inputs": prompts(3, 1), "attention_mask": None},
    ],
    ids=["chunks", "samples", "even batch", "two sequences", "lookup", "one token"],
)
@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_generate(name: str, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    expected = generate(name, None, **how)
    torch.manual_seed(0)
    assert torch.equal(generate(name, make_cache(name, kv_budget=2 * SMALL), **how), expected)


def test_embeddings_and_positions_are_divided_too() -> None:
    tokens, more = prompts(length=LENGTH), prompts(length=2, seed=1)
    cache, expected = make_cache("llama"), logits("llama", None, torch.cat([tokens, more], 1))[:, -2:]
    logits("llama", cache, tokens)
    model = deep("llama", NUM_LAYERS)
    embeddings = model.get_input_embeddings()(more).detach()
    positions = torch.arange(LENGTH, LENGTH + 2)
    with torch.no_grad(), overlapped(model, cache):
        given = {"inputs_embeds": embeddings, CACHE_ARGUMENT: cache}
        assert_close(model(**given, position_ids=positions.expand(3, 2)).logits, expected)
        cache.crop(-2)
        assert_close(model(**given, position_ids=positions[None]).logits, expected)


def test_a_single_sequence_has_all_of_the_budget_and_no_threads() -> None:
    device = FakeDevice()
    cache = make_cache("llama", device)
    alone = FastAttentionCache(deep("llama", NUM_LAYERS).config, **cache_arguments(SMALL, None, {}))
    one = {"inputs": prompts(1, LENGTH), "attention_mask": None, "max_new_tokens": 60}
    assert torch.equal(generate("llama", cache, **one), generate("llama", alone, **one))
    assert cache.halves[0].usage == alone.usage
    assert alone.usage.num_layers_cpu > 0
    assert device.branches == []


def test_prompts_pass_one_half_after_the_other() -> None:
    device = FakeDevice()
    cache = make_cache("llama", device, kv_budget=LARGE)
    for length in (LENGTH, 33):
        logits("llama", cache, prompts(length=length))
    assert device.branches == []
    logits("llama", cache, prompts(length=32))
    assert sorted(device.branches) == [0, 1]


def test_a_step_runs_both_halves_at_once() -> None:
    cache, tokens = make_cache("llama"), prompts(length=LENGTH)
    logits("llama", cache, tokens)
    both = threading.Barrier(2)

    def meet(*_: object) -> None:
        both.wait(30.0)  # passes only when both halves are there

    handles = [layer.register_forward_hook(meet) for layer in deep("llama", NUM_LAYERS).model.layers]
    try:
        found = logits("llama", cache, tokens[:, :1])
    finally:
        for handle in handles:
            handle.remove()
    assert_close(found, logits("llama", None, torch.cat([tokens, tokens[:, :1]], 1))[:, -1:])


def test_hidden_states_and_tuples_are_joined() -> None:
    tokens, more = prompts(length=LENGTH), prompts(length=1, seed=1)
    cache, plain = make_cache("llama"), DynamicCache(config=deep("llama", NUM_LAYERS).config)
    for given in (tokens, more):
        result = call("llama", cache, given, output_hidden_states=True)
        expected = call("llama", plain, given, output_hidden_states=True)
        assert len(result.hidden_states) == NUM_LAYERS + 1
        for state, wanted in zip(result.hidden_states, expected.hidden_states, strict=True):
            assert_close(state, wanted)
        assert result[CACHE_ARGUMENT] is cache
    first, second = call("llama", cache, more, return_dict=False)
    assert first.shape == (3, 1, VOCABULARY)
    assert second is cache


class Failing:
    """Fails the forward pass of halves with a given number of sequences, in a layer that has its new tokens."""

    def __init__(self, name: str, layer: int, *sequences: int) -> None:
        self._module, self._sequences = deep(name, NUM_LAYERS).model.layers[layer].mlp, sequences

    def __call__(self, module: object, inputs: tuple[Tensor], output: Tensor) -> None:
        if inputs[0].shape[0] in self._sequences:
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._handle = self._module.register_forward_hook(self)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


@sampled
@pytest.mark.parametrize("sequences", [[2], [1], [2, 1]], ids=["first half", "second half", "both"])
@pytest.mark.parametrize("layer", [0, 3, 5])
@pytest.mark.parametrize("name", MODELS)
def test_a_pass_that_fails_leaves_no_trace_in_both_halves(name: str, layer: int, sequences: list[int]) -> None:
    cache, tokens = make_cache(name), prompts(length=LENGTH)
    logits(name, cache, tokens)
    for position in range(3):
        with Failing(name, layer, *sequences), pytest.raises(KeyboardInterrupt):
            logits(name, cache, prompts(length=1 + position, seed=99))
        assert cache.get_seq_length() == LENGTH + position
        before = torch.cat([tokens, tokens[:, :position]], dim=1)
        assert_goes_on(name, cache, before, tokens[:, position : position + 1])


@pytest.mark.parametrize("name", MODELS)
def test_after_a_failed_prompt_another_batch_may_follow(name: str) -> None:
    cache = make_cache(name)
    with Failing(name, 3, 1), pytest.raises(KeyboardInterrupt):
        logits(name, cache, prompts(length=LENGTH))
    assert cache.get_seq_length() == 0
    tokens = prompts(2, LENGTH, seed=1)
    assert_goes_on(name, cache, tokens[:, :0], tokens)
    assert_goes_on(name, cache, tokens, tokens[:, :1])


@pytest.mark.parametrize("name", MODELS)
def test_a_failed_pass_may_be_followed_by_cropping(name: str) -> None:
    cache, tokens = make_cache(name), prompts(length=4)  # shorter than windows, which may be cropped only then
    logits(name, cache, tokens)
    with Failing(name, 2, 1), pytest.raises(KeyboardInterrupt):
        logits(name, cache, tokens[:, :1])
    cache.crop(-2)
    assert cache.get_seq_length() == 2
    assert_goes_on(name, cache, tokens[:, :2], tokens[:, 2:])


def test_a_full_half_is_told_and_leaves_both_usable() -> None:
    cache, tokens = make_cache("llama", cpu_memory=0), prompts(length=LENGTH)
    logits("llama", cache, tokens[:, :8])
    with pytest.raises(CacheFullError, match="raise cpu_memory"):
        logits("llama", cache, prompts(length=60))
    assert cache.get_seq_length() == 8
    assert_goes_on("llama", cache, tokens[:, :8], tokens[:, 8:9])


def test_cropping_and_reset_are_of_both_halves() -> None:
    cache, tokens = make_cache("llama"), prompts(length=LENGTH)
    logits("llama", cache, tokens)
    cache.crop(-4)
    assert cache.get_seq_length() == LENGTH - 4
    assert cache.get_mask_sizes(2, 0) == (LENGTH - 2, 0)
    assert_goes_on("llama", cache, tokens[:, :-4], tokens[:, -4:])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate("llama", cache), generate("llama", None))


def test_a_model_is_as_it_was_afterwards_and_serves_other_caches_meanwhile() -> None:
    model, cache, tokens = deep("llama", NUM_LAYERS), make_cache("llama"), prompts(length=LENGTH)
    expected = logits("llama", None, tokens)
    with torch.no_grad(), overlapped(model, cache), overlapped(model, make_cache("llama")):
        assert_close(model(tokens, **{CACHE_ARGUMENT: DynamicCache(config=model.config)}).logits, expected)
        assert_close(model(tokens, None, None, cache).logits, expected)
    assert "forward" not in vars(model)
    assert cache.get_seq_length() == LENGTH


def test_beam_search_is_refused() -> None:
    cache = make_cache("llama", kv_budget=LARGE)
    with pytest.raises(UnsupportedError, match="beam search needs; use a FastAttentionCache"):
        generate("llama", cache, num_beams=2)
    for change in (cache.batch_repeat_interleave, cache.batch_select_indices):
        with pytest.raises(UnsupportedError, match="change places"):
            change(2)


def test_a_cache_that_is_used_as_it_is_says_what_it_needs() -> None:
    with pytest.raises(UnsupportedError, match="with overlapped"):
        deep("llama", NUM_LAYERS)(prompts(), **{CACHE_ARGUMENT: make_cache("llama")})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"labels": prompts(length=LENGTH)}, UnsupportedError, "labels"),
        ({"output_attentions": True}, UnsupportedError, "output_attentions"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, UnsupportedError, "cu_seq_lens_q"),
        ({"attention_mask": {"full_attention": None}}, UnsupportedError, "attention_mask of type dict"),
        ({"position_ids": torch.zeros(3, 3, LENGTH)}, UnsupportedError, "position_ids"),
        ({"attention_mask": torch.ones(2, LENGTH)}, ArgumentError, "batch_size=3"),
        ({"inputs_embeds": torch.zeros(3, LENGTH, 64)}, ArgumentError, "one of input_ids and inputs_embeds"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_be_divided_is_named(given: dict[str, Any], error: type[Exception], message: str) -> None:
    cache = make_cache("llama")
    with pytest.raises(error, match=message):
        call("llama", cache, prompts(length=LENGTH), **given)
    assert cache.get_seq_length() == 0


def test_another_batch_size_is_refused_until_reset() -> None:
    cache = make_cache("llama")
    logits("llama", cache, prompts(3, LENGTH))
    with pytest.raises(ArgumentError, match="4 sequences and the cache 3; reset it"):
        logits("llama", cache, prompts(4, 1))
    cache.reset()
    logits("llama", cache, prompts(4, LENGTH))
    assert cache.get_seq_length() == LENGTH


@pytest.mark.parametrize("kind", ["dynamic", "longrope", {"full_attention": "dynamic"}], ids=str)
def test_models_that_change_while_they_compute_are_refused(kind: object, monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep("llama", NUM_LAYERS)
    monkeypatch.setattr(model.model.rotary_emb, "rope_type", kind)
    with pytest.raises(UnsupportedError, match="rope_type"), overlapped(model, make_cache("llama")):
        pass


def test_all_of_the_gpu_memory_is_divided_too() -> None:
    budgets = [{"gpu_memory": 2**20 + SMALL, "workspace": "1MiB", "kv_budget": None}, {"kv_budget": SMALL}]
    caches = [make_cache("llama", **budget) for budget in budgets]
    for cache in caches:
        generate("llama", cache)
    first, second = ([half.usage for half in cache.halves] for cache in caches)
    assert first == second
    with pytest.raises(CacheFullError, match="raise gpu_memory"):
        generate("llama", make_cache("llama", gpu_memory="2MiB", kv_budget=None, workspace="2MiB"))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ArgumentError, match="gpu_memory"):
        make_cache("llama", gpu_memory="16GiB")
