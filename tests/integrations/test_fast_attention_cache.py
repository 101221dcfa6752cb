"""FastAttentionCache in Transformers models: the tokens of plain generation, for any policy and budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offload.fake_device import FakeDevice
from tiers import sampled, slow
from transformers import CONFIG_MAPPING, DynamicCache

from fastattention.errors import ArgumentError, CacheFullError, UnsupportedError
from fastattention.integrations.transformers import FastAttentionCache
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT

from .budgets import (
    LARGE,
    LENGTH,
    NUM_LAYERS,
    POLICIES,
    assert_goes_on,
    cache_arguments,
    call,
    generate,
    logits,
)
from .models import deep, padding_mask, prompts

SMALL = 90_000  # bytes: few layers of three sequences stay on the device
MODELS = ("llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3", "deepseek_v32")


def make_cache(name: str, device: FakeDevice | None = None, **changed: Any) -> FastAttentionCache:
    return FastAttentionCache(deep(name, NUM_LAYERS).config, **cache_arguments(SMALL, device, changed))


@sampled
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_plain_generation(name: str, policy: str) -> None:
    device = FakeDevice()
    cache = make_cache(name, device, policy=policy)
    assert torch.equal(generate(name, cache, max_new_tokens=20), generate(name, None, max_new_tokens=20))
    assert cache.usage.num_layers_cpu > 0
    assert cache.usage.gpu_bytes <= SMALL
    assert (device.uploaded_bytes > 0) == (cache.policy.value in ("classical", "hybrid"))
    assert (device.cpu_bytes > 0) == (cache.policy.value not in ("classical", "gathered"))


@pytest.mark.parametrize("name", MODELS)
def test_nothing_leaves_the_device_while_the_budget_suffices(name: str) -> None:
    device = FakeDevice()
    cache = make_cache(name, device, kv_budget=LARGE)
    assert torch.equal(generate(name, cache), generate(name, None))
    assert (cache.usage.num_layers_cpu, cache.policy.value) == (0, "resident")
    assert device.downloaded_bytes == 0


@sampled
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"prefill_chunk_size": 7},
        {"prompt_lookup_num_tokens": 3, "inputs": prompts(1, LENGTH), "attention_mask": None},
        {"do_sample": True, "num_return_sequences": 2},
    ],
    ids=["beams", "chunks", "lookup", "samples"],
)
def test_every_way_to_generate(name: str, policy: str, how: dict[str, Any]) -> None:
    # There are enough pages of 1 KiB for the prompts, but not for all layers at the end.
    num_sequences = (1 if "inputs" in how else 3) * max(how.get("num_beams", 1), how.get("num_return_sequences", 1))
    budget = num_sequences * 1024 * (NUM_LAYERS + 22)
    torch.manual_seed(0)
    expected = generate(name, None, **how)
    torch.manual_seed(0)
    cache = make_cache(name, policy=policy, kv_budget=budget)
    assert torch.equal(generate(name, cache, **how), expected)
    assert cache.usage.num_layers_cpu > 0


def test_an_assistant_model_may_have_its_tokens_taken_back() -> None:
    how = {"inputs": prompts(1, LENGTH), "attention_mask": None, "max_new_tokens": 40}
    expected = generate("llama", None, **how)
    cache = make_cache("llama", kv_budget=SMALL // 3)
    assert torch.equal(generate("llama", cache, assistant_model=deep("llama", 2), **how), expected)
    assert cache.usage.num_layers_cpu > 0


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_goes_on_with_the_same_cache(name: str) -> None:
    cache, plain = make_cache(name), DynamicCache(config=deep(name, NUM_LAYERS).config)
    inputs = prompts(length=LENGTH)
    for turn in range(3):
        mask = torch.ones_like(inputs)
        expected = generate(name, plain, inputs=inputs, attention_mask=mask)
        assert torch.equal(generate(name, cache, inputs=inputs, attention_mask=mask), expected)
        inputs = torch.cat([expected, prompts(length=9, seed=turn)], dim=1)
    assert cache.get_seq_length() == plain.get_seq_length()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_cache_that_is_reset_serves_prompts_with_other_padding(name: str) -> None:
    cache, mask = make_cache(name), padding_mask("left", length=LENGTH)
    for one in (mask, mask.flip(0)):
        assert torch.equal(generate(name, cache, attention_mask=one), generate(name, None, attention_mask=one))
        cache.reset()
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("kept", [0, 1, 8, 11, 12, 23])
def test_cropping_forgets_the_last_tokens(kept: int) -> None:
    cache, tokens = make_cache("llama"), prompts(length=LENGTH)
    logits("llama", cache, tokens)
    logits("llama", cache, tokens[:, :1])
    cache.crop(kept - LENGTH - 1)
    assert cache.get_seq_length() == kept
    assert_goes_on("llama", cache, tokens[:, :kept], tokens[:, kept:])


def test_sequences_are_repeated_and_selected() -> None:
    cache, tokens, more = make_cache("llama", kv_budget=2 * SMALL), prompts(length=LENGTH), prompts(length=5, seed=1)
    logits("llama", cache, tokens)
    cache.batch_repeat_interleave(2)
    rows = torch.tensor([5, 0, 2])
    cache.batch_select_indices(rows)
    assert_goes_on("llama", cache, tokens.repeat_interleave(2, 0)[rows], more)


@sampled
@pytest.mark.parametrize("failing", range(NUM_LAYERS - 1))
@pytest.mark.parametrize("name", MODELS)
def test_an_interrupted_forward_pass_leaves_no_trace(name: str, failing: int) -> None:
    cache, tokens = make_cache(name), prompts(length=LENGTH)
    logits(name, cache, tokens)
    layer = deep(name, NUM_LAYERS).model.layers[failing].mlp

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    for position in range(3):
        handle = layer.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            logits(name, cache, prompts(length=1, seed=99))
        handle.remove()
        assert cache.get_seq_length() == LENGTH + position
        before = torch.cat([tokens, tokens[:, :position]], dim=1)
        assert_goes_on(name, cache, before, tokens[:, position : position + 1])


def test_a_full_cache_says_what_to_change_and_stays_usable() -> None:
    cache, tokens = make_cache("llama", cpu_memory=130_000), prompts(length=LENGTH)
    all_tokens = tokens
    logits("llama", cache, all_tokens)

    def fill() -> None:
        nonlocal all_tokens
        for position in range(1000):
            chunk = tokens[:, position % LENGTH][:, None]
            logits("llama", cache, chunk)
            all_tokens = torch.cat([all_tokens, chunk], dim=1)

    with pytest.raises(CacheFullError, match="raise cpu_memory"):
        fill()
    assert cache.get_seq_length() == all_tokens.shape[1] > LENGTH
    cache.crop(-10)
    assert_goes_on("llama", cache, all_tokens[:, :-10], all_tokens[:, -10:-7])


def test_a_chunk_too_long_for_the_device_is_told_so() -> None:
    cache, tokens = make_cache("llama"), prompts(length=LENGTH)
    logits("llama", cache, tokens)
    with pytest.raises(CacheFullError, match="raise kv_budget, or give the prompt in smaller chunks"):
        logits("llama", cache, prompts(length=80))
    assert_goes_on("llama", cache, tokens, prompts(length=4, seed=1))


def test_a_quantized_cache_is_close() -> None:
    tokens, more = prompts(length=LENGTH), prompts(length=1, seed=1)
    cache = make_cache("llama", cpu_cache_dtype=torch.int8)
    logits("llama", cache, tokens)
    result, expected = logits("llama", cache, more), logits("llama", None, torch.cat([tokens, more], 1))[:, -1:]
    assert 0 < (result - expected).abs().max() < 0.1 * expected.abs().max()
    assert cache.usage.num_layers_cpu > 0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"kv_budget": None}, "gpu_memory"),
        ({"gpu_memory": "16GiB"}, "gpu_memory"),
        ({"kv_budget": "many"}, "kv_budget"),
        ({"cpu_memory": -1}, "cpu_memory"),
        ({"policy": "fast"}, "policy"),
        ({"cpu_cache_dtype": torch.int4}, "cpu_cache_dtype"),
        ({"policy": "resident"}, "policy='resident' is not known; choose from auto, classical, cooperative, hybrid"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 1.5}, "page_size=1.5 must be an integer"),
        ({"page_size": "4"}, "page_size='4' must be an integer"),
        ({"hardware": "h200"}, "hardware must be a Hardware"),
        ({"device": "cuda"}, "device='cuda' must be a Device"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        make_cache("llama", **changed)


def test_a_model_in_the_place_of_its_config_is_refused() -> None:
    with pytest.raises(ArgumentError, match="config must be that of a model of Transformers, got LlamaForCausalLM"):
        FastAttentionCache(deep("llama", NUM_LAYERS), kv_budget=SMALL)  # type: ignore[arg-type]


def test_an_indexer_that_reads_the_cache_is_refused() -> None:
    with pytest.raises(ArgumentError, match="indexer of a Glm5NextTextConfig reads the keys of its cache itself"):
        FastAttentionCache(CONFIG_MAPPING["glm5_next_text"](), kv_budget=SMALL)


@slow
def test_torch_compile_is_refused() -> None:
    model, cache, ids = deep("llama", NUM_LAYERS), make_cache("llama"), prompts(4)
    logits("llama", cache, ids)
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"torch\.compile cannot trace a FastAttentionCache"):
        torch.compile(model, backend="eager")(ids[:, :1], **{CACHE_ARGUMENT: cache})


def test_too_small_a_budget_is_told_before_any_token_is_kept() -> None:
    cache = make_cache("llama", kv_budget=1000)
    with pytest.raises(CacheFullError, match=r"at least .* raise kv_budget"):
        generate("llama", cache)
    assert cache.get_seq_length() == 0


def test_a_model_on_the_cpu_needs_no_such_cache() -> None:
    cache = FastAttentionCache(deep("llama", NUM_LAYERS).config, "16GiB")
    with pytest.raises(ArgumentError, match="CUDA"):
        generate("llama", cache)


def test_models_whose_layers_all_have_windows_are_refused() -> None:
    with pytest.raises(ArgumentError, match="DynamicCache"):
        make_cache("mistral")


def test_other_implementations_of_attention_are_told_off() -> None:
    model = deep("llama", 3)
    model.set_attn_implementation("sdpa")
    cache = FastAttentionCache(model.config, **cache_arguments(SMALL, None, {}))
    given = {"attention_mask": torch.ones_like(prompts()), CACHE_ARGUMENT: cache, "max_new_tokens": 3}
    with pytest.raises(UnsupportedError, match="attn_implementation='fast_attention'"):
        model.generate(prompts(), **given)


def test_padding_on_the_right_is_refused() -> None:
    cache, tokens = make_cache("llama"), prompts(length=LENGTH)
    logits("llama", cache, tokens)
    mask = torch.cat([padding_mask("right", length=LENGTH), torch.ones(3, 4)], dim=1)
    with pytest.raises(UnsupportedError, match="pad on the left"):
        call("llama", cache, tokens[:, :4], attention_mask=mask)
