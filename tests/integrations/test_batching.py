"""Continuous batching with fast_attention: the tokens of eager attention, for any mix of requests in the cache."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiers import deep, sampled, slow
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching import continuous_api, initialization
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from fastattention import UnsupportedError, fast_attn_varlen_func, fast_attn_with_kvcache
from fastattention.integrations.transformers import batching, page_allocators
from integrations.models import DECODERS, VOCABULARY, pair

NEW_TOKENS = 12
OPTIONS: dict[str, Any] = {"page_size": 16, "max_batch_tokens": 512}
Prompts = list[list[int]]


def requests(count: int, longest: int = 600) -> Prompts:
    """Prompts of 5 to `longest` tokens, three of which begin with the same half."""
    generator = torch.Generator().manual_seed(3)

    def draw(length: int) -> list[int]:
        tokens: list[int] = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        return tokens

    prompts = [draw(int(length)) for length in torch.randint(5, longest, (count,), generator=generator)]
    shared = draw(longest // 2)
    prompts[1], prompts[2], prompts[count // 2] = [*shared, 7], [*shared, 9], [*shared, 10, 11]
    return prompts


def third_of(prompts: Prompts, page_size: int) -> int:
    """Blocks that hold a third of the prompts."""
    return sum(map(len, prompts)) // page_size // 3


def eager_tokens(model: Any, prompts: Prompts) -> Prompts:
    """The tokens with which `generate` continues each prompt by itself."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    return [model.generate(torch.tensor([one]), **options)[0, len(one) :].tolist() for one in prompts]


@functools.cache
def eager_tokens_of(name: str, count: int) -> tuple[Prompts, Prompts]:
    """Prompts, and their continuations by eager attention, cached for many tests."""
    prompts = requests(count)
    return prompts, eager_tokens(pair(name).eager, prompts)


def batched(model: Any, prompts: Prompts, return_logprobs: bool = False, **options: Any) -> list[Any]:
    """The outputs of `generate_batch` for each prompt; asserts that none failed."""
    options = {**OPTIONS, **options}
    options.setdefault("num_blocks", third_of(prompts, options["page_size"]))
    several = options.pop("num_return_sequences", 1)  # of the likeliest token only, as in greedy decoding
    sampling = {"do_sample": True, "top_k": 1, "num_return_sequences": several} if several > 1 else {"do_sample": False}
    found = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0, **sampling),
        continuous_batching_config=ContinuousBatchingConfig(return_logprobs=return_logprobs, **options),
    )
    assert [one.error for one in found.values()] == [None] * len(found)
    return list(found.values())


def batched_tokens(model: Any, prompts: Prompts, **options: Any) -> Prompts:
    """The tokens of `batched`."""
    return [one.generated_tokens for one in batched(model, prompts, **options)]


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    batching.enable()
    yield
    batching.disable()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts of calls that appended and attended, read pages, or saw only new tokens."""
    count = {"append": 0, "pages": 0, "new tokens": 0}

    def counted_kvcache(*args: Any, **kwargs: Any) -> Any:
        count["append"] += 1
        return fast_attn_with_kvcache(*args, **kwargs)

    def counted_varlen(*args: Any, **kwargs: Any) -> Any:
        count["new tokens" if kwargs["block_table"] is None else "pages"] += 1
        return fast_attn_varlen_func(*args, **kwargs)

    monkeypatch.setattr(batching, "fast_attn_with_kvcache", counted_kvcache)
    monkeypatch.setattr(batching, "fast_attn_varlen_func", counted_varlen)
    return count


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """A list of the results of a method from now on, one entry a call."""
    results: list[Any] = []
    method = getattr(owner, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        results.append(method(*args, **kwargs))
        return results[-1]

    monkeypatch.setattr(owner, name, recorded)
    return results


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=slow) for name in DECODERS if name != "llama")])
def test_tokens_are_those_of_eager_attention(name: str, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    gathers = counted(monkeypatch, FullAttentionCacheAllocator, "update")
    prompts, expected = eager_tokens_of(name, 12)
    assert batched_tokens(pair(name).fast, prompts) == expected
    assert min(calls.values()) > 0
    assert not gathers


@slow
@sampled
@pytest.mark.parametrize(
    "options",
    [{"page_size": 4, "max_batch_tokens": 64}, {"page_size": 7, "num_blocks": 300}, {"page_size": 256, "num_blocks": 6},
     {"num_blocks": 50, "max_batch_tokens": 100}, {"max_blocks_per_request": 0}, {"max_blocks_per_request": 9},
     {"scheduler_type": "prefill_first"}, {"allow_block_sharing": False}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=deep) for name in ("gemma2", "mistral"))])
def test_however_the_cache_is_cut(name: str, options: dict[str, Any]) -> None:
    prompts, expected = eager_tokens_of(name, 12)
    assert batched_tokens(pair(name).fast, prompts, **options) == expected


def test_prefixes_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    hits = counted(monkeypatch, paged_cache.PagedAttentionCache, "search_prefix_match")
    prompts, expected = eager_tokens_of("llama", 12)
    assert batched_tokens(pair("llama").fast, prompts) == expected
    assert max(hits) >= 288


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=slow)])
def test_a_full_cache_resets_requests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resets = counted(monkeypatch, OffloadingManager, "offload_requests")
    prompts = requests(20, longest=100)
    found = batched_tokens(pair(name).fast, prompts, num_blocks=16, page_size=8, max_batch_tokens=64)
    assert found == eager_tokens(pair(name).eager, prompts)
    assert any(resets)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=deep) for name in ("gemma2", "gpt_oss"))])
def test_nobody_reads_what_was_not_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create = paged_cache.PagedAttentionCache.__init__

    def poisoned(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        self.cache_tensor.fill_(0xFF)  # NaN

    monkeypatch.setattr(paged_cache.PagedAttentionCache, "__init__", poisoned)
    prompts, expected = eager_tokens_of(name, 12)
    assert batched_tokens(pair(name).fast, prompts) == expected


@slow
@pytest.mark.parametrize("name", [pytest.param("llama", marks=slow), "gemma2"])
def test_several_continuations_of_a_prompt(name: str) -> None:
    prompts = requests(9, longest=100)
    expected = [tokens for tokens in eager_tokens(pair(name).eager, prompts) for _ in range(3)]
    assert batched_tokens(pair(name).fast, prompts, num_return_sequences=3, page_size=8) == expected


@slow
@sampled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=deep) for name in ("gemma2", "gpt_oss"))])
def test_half_types_are_as_near_to_float32_as_eager_attention(name: str, dtype: torch.dtype) -> None:
    eager, fast = (copy.deepcopy(model).to(dtype) for model in pair(name))
    prompts = requests(24, longest=200)
    ours, theirs = distances(eager, pair(name).eager, prompts, batched(fast, prompts, return_logprobs=True))
    assert ours <= 1.25 * theirs


def distances(eager: Any, exact: Any, prompts: Prompts, found: list[Any]) -> tuple[float, float]:
    """Root mean square errors of log probabilities, relative to `exact`: those of `found` and of `eager`."""
    ours, theirs = [], []
    for prompt, one in zip(prompts, found, strict=True):
        right = _logprobs(exact, prompt, one.generated_tokens)
        ours.append(torch.tensor(one.logprobs) - right)
        theirs.append(_logprobs(eager, prompt, one.generated_tokens) - right)
    assert torch.cat(ours).numel() == len(prompts) * NEW_TOKENS
    return tuple(float(torch.cat(whose).square().mean().sqrt()) for whose in (ours, theirs))  # type: ignore[return-value]


@torch.no_grad()
def _logprobs(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """The log probability of each token after those before it, float32 (tokens,) in host memory."""
    logits = model(torch.tensor([prompt + tokens], device=model.device)).logits[0, len(prompt) - 1 : -1].float()
    found: Tensor = logits.log_softmax(-1).cpu().gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    return found


def _by_hand(model: Any, act: Callable[[Any], None]) -> None:
    """Calls `act` with a started manager of the model."""
    manager = model.init_continuous_batching(
        GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0),  # type: ignore[no-untyped-call]
        ContinuousBatchingConfig(num_blocks=64, **OPTIONS),
    )
    manager.start()
    try:
        act(manager)
    finally:
        manager.stop(block=True)


def test_a_manager_serves_requests_as_they_come_and_forgets_cancelled_ones() -> None:
    eager, fast = pair("llama")
    prompts = requests(6, longest=100)

    def act(manager: Any) -> None:
        cancelled = manager.add_request(prompts[0], max_new_tokens=10_000)
        for prompt, expected in zip(prompts, eager_tokens(eager, prompts), strict=True):
            request = manager.add_request(prompt)
            assert manager.get_result(request, timeout=60).generated_tokens == expected
        manager.cancel_request(cancelled)
        request = manager.add_request(prompts[3])
        assert manager.get_result(request, timeout=60).generated_tokens == eager_tokens(eager, prompts)[3]
        assert not manager.batch_processor.scheduler.active_requests
        assert fast.config._attn_implementation == batching.BATCHED_NAME

    _by_hand(fast, act)
    assert fast.config._attn_implementation == "fast_attention"


def test_a_paused_manager_leaves_the_model_to_other_calls() -> None:
    """Padding on the left needs the mask that batching does not use."""
    eager, fast = pair("gemma2")
    prompts = torch.tensor(requests(3, longest=20)[0])[None].expand(2, -1)
    mask = torch.ones_like(prompts)
    mask[1, :3] = 0

    def act(manager: Any) -> None:
        with manager.pause():
            found, expected = (
                model.generate(prompts, attention_mask=mask, max_new_tokens=5) for model in (fast, eager)
            )
        assert torch.equal(found, expected)

    _by_hand(fast, act)


@slow
def test_other_implementations_are_batched_as_before() -> None:
    prompts = requests(10, longest=100)
    model = copy.deepcopy(pair("mistral").eager)
    expected = eager_tokens(model, prompts)
    assert batched_tokens(model, prompts) == expected
    model.set_attn_implementation("sdpa")
    assert batched_tokens(model, prompts) == expected


@slow
@pytest.mark.parametrize("auto_switch_to_flash", [True, False])
def test_other_implementations_are_switched_if_asked_for(auto_switch_to_flash: bool, calls: dict[str, int]) -> None:
    batching.enable(switch=True)
    prompts = requests(10, longest=100)
    model = copy.deepcopy(pair("llama").eager)
    model.set_attn_implementation("sdpa")
    found = batched_tokens(model, prompts, auto_switch_to_flash=auto_switch_to_flash)
    assert found == eager_tokens(pair("llama").eager, prompts)
    assert any(calls.values()) == auto_switch_to_flash
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("ignored", "named"),
    [
        ({"stop_strings": ["x"]}, r"stop_strings=\['x'\]"),
        ({"num_beams": 2}, "num_beams=2"),
        ({"min_new_tokens": 2}, "min_new_tokens=2"),
        ({"repetition_penalty": 1.5}, "RepetitionPenaltyLogitsProcessor"),
    ],
)
@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")  # by Transformers
def test_settings_that_batching_ignores_are_refused(ignored: dict[str, Any], named: str) -> None:
    config = GenerationConfig(max_new_tokens=3, eos_token_id=1, **ignored)
    with pytest.raises(UnsupportedError, match=named):
        pair("llama").fast.init_continuous_batching(config)
    copy.deepcopy(pair("llama").eager).init_continuous_batching(config)  # as before


def test_latent_attention_is_refused() -> None:
    model = copy.deepcopy(pair("llama").fast)
    model.config.kv_lora_rank = 16
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM has latent attention \(kv_lora_rank=16\)"):
        model.init_continuous_batching(GenerationConfig(eos_token_id=-1))


def test_models_with_states_are_refused() -> None:
    """Such as RWKV, whose configuration names no types of layers."""
    model = copy.deepcopy(pair("llama").fast)
    model._is_stateful = True
    with pytest.raises(UnsupportedError, match="model_type='llama' has layers of type recurrent"):
        model.init_continuous_batching(GenerationConfig(eos_token_id=-1))


def test_disable_puts_everything_back() -> None:
    def state() -> list[Any]:
        return [
            continuous_api.ContinuousBatchingManager.__init__,
            continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn,
            initialization.ensure_decode_fast_path_is_available,
            paged_cache.PagedAttentionCache.update,
            *paged_cache.ATTN_TYPE_TO_ALLOCATOR.values(),
        ]

    batching.disable()
    before = state()
    batching.enable()
    batching.enable(switch=True)
    assert all(new is not old for new, old in zip(state(), before, strict=True))
    batching.disable()
    batching.disable()
    assert state() == before
    with pytest.raises(ValueError, match="fast_attention is not supported for continuous batching"):
        pair("llama").fast.init_continuous_batching(GenerationConfig(eos_token_id=-1))


class _Pool:
    """A pool of pages 1, 2, 3, ..."""

    def __init__(self) -> None:
        self.free = list(range(1, 100))

    def free_blocks(self, index: int, blocks: list[int]) -> None:
        self.free = blocks + self.free

    def get_free_blocks(self, index: int, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken


@pytest.fixture
def sliding() -> page_allocators.SlidingPages:
    """Pages of 4 tokens of one layer with a window of 6."""
    allocator = page_allocators.SlidingPages(
        index=0, config=pair("mistral").fast.config, num_key_value_heads=2, cache_dtype=torch.float32, page_size=4,
        layer_indices=[0], allow_block_sharing=True,
    )  # fmt: skip
    allocator.pool = _Pool()
    return allocator


def test_a_window_holds_few_pages(sliding: page_allocators.SlidingPages) -> None:
    for past in range(50):
        assert sliding.needs_new_blocks("a", past, 1) in (0, 1)
        sliding.allocate_cache_to_request("a", past, 1)
        assert len(sliding.block_table["a"]) <= 3
        first = max(0, past - 6) // 4
        assert len(sliding.get_read_indices("a", past, 1)) == past // 4 - first + 1
        assert sliding.get_seqlen_k(past, 1) == past + 1 - 4 * first
        page, place = divmod(past, 4)
        assert sliding.get_write_indices("a", past, 1) == [4 * sliding.block_table["a"][page - first] * 2 + place]
    sliding.free_blocks("a")
    assert sorted(sliding.pool.free) == list(range(1, 100))
    assert not sliding._begins


def test_pages_come_back_from_host_memory_where_they_were(sliding: page_allocators.SlidingPages) -> None:
    sliding.allocate_cache_to_request("a", 0, 21)
    sliding.allocate_cache_to_request("a", 21, 1)  # from page 3 on
    held = len(sliding.block_table["a"])
    sliding.free_blocks("a", no_cache=True)
    sliding.free_blocks("a")  # by the scheduler
    assert sliding.needs_new_blocks("a", 30, 1) == 5
    sliding.allocate_cache_to_request("a", 30, 1)  # pages 3 to 7; the first are filled from host memory
    assert held <= len(sliding.block_table["a"]) == 5
    assert len(sliding.get_read_indices("a", 30, 1)) == 2  # pages 6 and 7
    sliding.free_blocks("a")
    sliding.allocate_cache_to_request("a", 0, 3)  # another request of that name
    assert len(sliding.block_table["a"]) == 1
