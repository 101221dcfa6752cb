"""sparse_prefill: prompts have the results of eager attention to the tokens that the pattern keeps."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tiers import sampled, slow
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, StaticCache

from fastattention import ArgumentError, UnsupportedError, fast_attn_func, sparse
from fastattention.integrations.transformers import (
    FastAttentionCache,
    PrefillLayer,
    batching,
    block_sparse,
    fast_attention_forward,
    fast_attention_mask,
    sparse_prefill,
)
from fastattention.integrations.transformers.tensor_parallel import tiled_attention_forward
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from integrations.budgets import LARGE, cache_arguments
from integrations.models import WINDOW, assert_same, make_cache, pair, prompts

BLOCK = 64
LENGTH = 200  # three blocks, and a narrower one
LAYERS, HEADS, KEY_HEADS = 2, 4, 2
MODELS = ("llama", "mistral", "gemma2", "gpt_oss", "qwen3")
Sizes = Callable[[int, int, int], Tensor]  # layer_idx, seqlen_q, seqlen_k -> block mask


def everything(layer_idx: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    return torch.ones(1, 1, -(-seqlen_q // BLOCK), -(-seqlen_k // BLOCK), dtype=torch.bool)


def streaming(layer_idx: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Other blocks for each head, and for each layer."""
    sinks, window = [1, 0, 1, 0], [1, 65, 1, 1]
    return sparse.streaming(
        HEADS, seqlen_q, seqlen_k, sink_tokens=sinks[::-1] if layer_idx else sinks, local_tokens=window,
        block_size=BLOCK,
    )  # fmt: skip


class Pattern:
    """A pattern that depends only on sizes, and records its layers."""

    def __init__(self, blocks: Sizes = streaming) -> None:
        self.blocks = blocks
        self.asked: list[PrefillLayer] = []

    def __call__(self, layer: PrefillLayer) -> Tensor:
        self.asked.append(layer)
        assert layer.layer_idx is not None
        return self.blocks(layer.layer_idx, layer.q.shape[1], layer.k.shape[1])

    def seqlens(self) -> list[tuple[int, int]]:
        """Queries and keys of each call."""
        return [(layer.q.shape[1], layer.k.shape[1]) for layer in self.asked]


def tokens(blocks: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Bool (.., .., seqlen_q, seqlen_k): which pairs are in kept blocks."""
    return blocks.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[:, :, :seqlen_q, :seqlen_k]


@contextlib.contextmanager
def hidden(model: Any, blocks: Sizes) -> Iterator[None]:
    """Within it layers of an eager model see only tokens in kept blocks, when they have more than one query."""

    def hide(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = kwargs["attention_mask"]
        seqlens = mask.shape[2:]
        if seqlens[0] > 1:
            kept = tokens(blocks(module.layer_idx, *seqlens), *seqlens)
            mask = mask.masked_fill(~kept, torch.finfo(mask.dtype).min)
        return args, kwargs | {"attention_mask": mask}

    with hooked([layer.self_attn for layer in model.model.layers], hide):
        yield


@contextlib.contextmanager
def hooked(modules: Sequence[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    """Within it `hook` changes what modules are called with."""
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def generated(model: Any, cache: Any = None, **given: Any) -> Tensor:
    """Logits of four new tokens after two prompts: (batch_size, 4, vocabulary)."""
    given = {CACHE_ARGUMENT: cache, **given} if cache is not None else given
    out = model.generate(
        prompts(2, LENGTH), max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True, **given
    )
    return torch.stack(out.logits, dim=1)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def sparse_blocks(pattern: Any, **given: Any) -> contextlib.AbstractContextManager[None]:
    return sparse_prefill(pattern, block_size=BLOCK, **given)


@pytest.mark.parametrize("name", MODELS)
def test_a_full_mask_generates_the_tokens_of_dense(name: str) -> None:
    fast, pattern = pair(name).fast, Pattern(everything)
    dense = generated(fast)
    with sparse_blocks(pattern):
        found = generated(fast)
    assert len(pattern.asked) == LAYERS
    assert_same(found, dense)
    assert torch.equal(found.argmax(-1), dense.argmax(-1))


@pytest.mark.parametrize("name", MODELS)
def test_prompts_are_those_of_eager_under_the_tokens_kept(name: str) -> None:
    eager, fast = pair(name)
    dense = eager(prompts(2, LENGTH)).logits
    with hidden(eager, streaming):
        expected = eager(prompts(2, LENGTH), output_hidden_states=True)
    with sparse_blocks(Pattern()):
        found = fast(prompts(2, LENGTH), output_hidden_states=True)
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert_same(ours, theirs)
    assert_same(found.logits, expected.logits)
    assert (dense - expected.logits).abs().max() > 0.05 * dense.abs().max(), "the pattern hides nothing that counts"


@sampled
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_decode_steps_are_dense_and_ask_no_pattern(name: str, kind: str) -> None:
    eager, fast = pair(name)
    with hidden(eager, streaming):
        expected = generated(eager)
    pattern, cache = Pattern(), DynamicCache(config=fast.config)
    if kind == "static":
        cache = StaticCache(config=fast.config, max_cache_len=LENGTH + 8)
    with sparse_blocks(pattern):
        found = generated(fast, cache)
    assert pattern.seqlens() == [(LENGTH, LENGTH)] * LAYERS  # without free places of a static cache
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_chunks_of_a_prompt_are_prompts(name: str) -> None:
    eager, fast = pair(name)
    pattern, results = Pattern(), []
    for model, context in ((eager, hidden(eager, streaming)), (fast, sparse_blocks(pattern))):
        with context:
            results.append(generated(model, DynamicCache(config=model.config), prefill_chunk_size=80))
    assert pattern.seqlens() == [(80, 80)] * LAYERS + [(80, 160)] * LAYERS + [(40, 200)] * LAYERS
    assert_same(results[1], results[0])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_a_prompt_after_cached_tokens_asks_for_its_own_queries(name: str, kind: str) -> None:
    """A layer with a window holds only its last tokens: their first one is key 0."""
    eager, fast = pair(name)
    pattern, results = Pattern(), []
    first, second = prompts(2, LENGTH).split([70, LENGTH - 70], dim=1)
    for model, context in ((eager, hidden(eager, streaming)), (fast, sparse_blocks(pattern))):
        cache = make_cache("dynamic", model)
        if kind == "static" and model is fast:
            cache = StaticCache(config=model.config, max_cache_len=LENGTH + 8)
        model(first, **{CACHE_ARGUMENT: cache})
        with context:
            results.append(model(second, **{CACHE_ARGUMENT: cache}).logits)
    assert_same(results[1], results[0])
    windows = {"llama": (False, False), "gemma2": (True, False), "mistral": (True, True)}[name]
    assert pattern.seqlens() == [(130, 130 + WINDOW - 1 if window else 200) for window in windows]


def test_a_pattern_is_told_the_layer() -> None:
    fast, pattern = pair("gemma2").fast, Pattern()
    with sparse_blocks(pattern):
        fast(prompts(2, LENGTH))
    for index, (layer, module) in enumerate(zip(pattern.asked, fast.model.layers, strict=True)):
        assert layer.layer_idx == index
        assert layer.module is module.self_attn
        assert layer.q.shape == (2, LENGTH, HEADS, 16)
        assert layer.k.shape == (2, LENGTH, KEY_HEADS, 16)
        assert layer.causal
        assert layer.window_size == ((-1, 0) if index else (WINDOW - 1, 0))
        assert layer.softmax_scale == 16**-0.5


def test_a_pattern_may_leave_layers_dense() -> None:
    eager, fast = pair("llama")
    with hidden(eager, lambda index, *seqlens: (streaming if index else everything)(index, *seqlens)):
        expected = eager(prompts(2, LENGTH)).logits
    with sparse_blocks(lambda layer: Pattern()(layer) if layer.layer_idx else None):
        assert_same(fast(prompts(2, LENGTH)).logits, expected)


def test_a_pattern_may_read_queries_and_keys() -> None:
    """Each sequence has its own blocks."""
    eager, fast = pair("llama")
    made = []

    def top_p(layer: PrefillLayer) -> Tensor:
        made.append(
            sparse.top_p_blocks(
                layer.q, layer.k, 0.3, causal=layer.causal, softmax_scale=layer.softmax_scale, block_size=BLOCK
            )
        )
        return made[-1]

    with sparse_blocks(top_p):
        found = fast(prompts(2, LENGTH)).logits
    assert [tuple(mask.shape) for mask in made] == [(2, HEADS, 4, 4)] * LAYERS
    assert not torch.equal(made[1][0], made[1][1])
    with hidden(eager, lambda index, *_: made[index]):
        assert_same(found, eager(prompts(2, LENGTH)).logits)


def test_blocks_need_not_be_square() -> None:
    q, k, v = (torch.randn(1, heads, LENGTH, 16) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    kept = torch.eye(2, dtype=torch.bool).repeat_interleave(2, 1)[None, None]
    with sparse_prefill(lambda layer: kept, block_size=(128, 64)):
        out, _ = fast_attention_forward(Layer().eval(), q, k, v, None, is_causal=False)
    seen = kept.repeat_interleave(128, 2).repeat_interleave(64, 3)[:, :, :LENGTH, :LENGTH]
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_a_block_mask_joins_relative_positions() -> None:
    """T5 gives its layers a position_bias; its encoder sees both sides, and its cross-attention other lengths."""
    eager, fast = pair("t5")
    given = {"input_ids": prompts(2, LENGTH), "decoder_input_ids": prompts(2, 130, seed=1)}
    pattern = Pattern(lambda *sizes: everything(*sizes).tril())
    dense = eager(**given).logits

    def hide(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        keys = kwargs.get("key_value_states", args[0])
        seqlens = args[0].shape[1], keys.shape[1]
        mask = torch.zeros(1, 1, *seqlens) if kwargs["mask"] is None else kwargs["mask"]
        kept = tokens(pattern.blocks(0, *seqlens), *seqlens)
        return args, kwargs | {"mask": mask.masked_fill(~kept, torch.finfo(mask.dtype).min)}

    attentions = [module for module in eager.modules() if type(module).__name__ == "T5Attention"]
    with hooked(attentions, hide):
        expected = eager(**given).logits
    with sparse_blocks(pattern):
        assert_same(fast(**given).logits, expected, tolerance=2e-5)  # T5 does not scale its scores
    assert pattern.seqlens() == [(LENGTH, LENGTH)] * LAYERS + [(130, 130), (130, LENGTH)] * LAYERS
    assert (dense - expected).abs().max() > 0.05 * dense.abs().max()


def test_autocast_and_softcap_and_dtype_reach_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append((args, kwargs))
        return fast_attn_func(*args, **kwargs)

    monkeypatch.setattr(block_sparse, "fast_attn_func", noted)
    pattern = Pattern()
    with sparse_blocks(pattern), torch.autocast("cpu", dtype=torch.bfloat16):
        pair("gemma2").fast(prompts(2, LENGTH))
    for (args, kwargs), layer in zip(made, pattern.asked, strict=True):
        assert {tensor.dtype for tensor in args[:3]} == {layer.q.dtype} == {torch.bfloat16}
        assert args[7] == 5.0
        assert kwargs["block_size"] == (BLOCK, BLOCK)


def test_few_queries_stay_dense() -> None:
    fast, pattern = pair("llama").fast, Pattern()
    dense = fast(prompts(2, LENGTH)).logits
    with sparse_blocks(pattern, least_queries=LENGTH + 1):
        assert torch.equal(fast(prompts(2, LENGTH)).logits, dense)
    assert not pattern.asked
    with sparse_blocks(pattern, least_queries=LENGTH):
        fast(prompts(2, LENGTH))
    assert len(pattern.asked) == LAYERS


def test_a_batch_without_padding_in_its_mask_is_served() -> None:
    fast, pattern = pair("llama").fast, Pattern()
    with sparse_blocks(pattern):
        expected = fast(prompts(2, LENGTH)).logits
        found = fast(prompts(2, LENGTH), attention_mask=torch.ones(2, LENGTH, dtype=torch.int64)).logits
    assert torch.equal(found, expected)


def test_gradients_flow_through_kept_blocks() -> None:
    q, k, v = (torch.randn(1, heads, LENGTH, 16) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    k.requires_grad_()
    kept = torch.tensor([True, False, False, False]).expand(1, 1, 4, 4)
    with torch.enable_grad(), sparse_blocks(lambda layer: kept):
        fast_attention_forward(Layer().eval(), q, k, v, None, is_causal=False)[0].square().sum().backward()
    assert k.grad is not None
    assert k.grad[:, :, :BLOCK].abs().min() > 0
    assert not k.grad[:, :, BLOCK:].any()


def test_the_innermost_context_rules() -> None:
    fast, outer, inner = pair("llama").fast, Pattern(), Pattern(everything)
    dense = fast(prompts(2, LENGTH)).logits
    with sparse_blocks(outer):
        with sparse_blocks(inner):
            assert_same(fast(prompts(2, LENGTH)).logits, dense)
        assert len(inner.asked) == LAYERS
        assert not outer.asked
        found = fast(prompts(2, LENGTH)).logits
        assert len(outer.asked) == LAYERS
    assert (found - dense).abs().max() > 1e-2
    assert torch.equal(fast(prompts(2, LENGTH)).logits, dense)
    assert len(outer.asked) == LAYERS


def test_an_outer_context_whose_layers_an_inner_one_served_is_not_warned_of() -> None:
    with sparse_blocks(Pattern()), sparse_blocks(Pattern()):
        pair("llama").fast(prompts(2, LENGTH))


def test_an_exception_ends_the_context() -> None:
    fast, pattern = pair("llama").fast, Pattern()

    def fail(layer: PrefillLayer) -> Tensor:
        raise KeyError("mine")

    with sparse_blocks(pattern):
        with pytest.raises(KeyError, match="mine"), sparse_blocks(fail):
            fast(prompts(2, LENGTH))
        with pytest.raises(KeyError, match="mine"), sparse_blocks(Pattern()):  # and no warning that it was not called
            raise KeyError("mine")
        fast(prompts(2, LENGTH))
    assert len(pattern.asked) == LAYERS
    assert block_sparse._active.get() is None
    assert block_sparse._num_open == 0


def test_a_context_is_of_its_thread() -> None:
    fast, pattern, results = pair("llama").fast, Pattern(), []
    dense = fast(prompts(2, LENGTH)).logits

    def run() -> None:
        with torch.no_grad():
            results.append(fast(prompts(2, LENGTH)).logits)

    with sparse_blocks(pattern):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert not pattern.asked
        fast(prompts(2, LENGTH))
    assert torch.equal(results[0], dense)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_that_never_calls_us_is_warned_of(implementation: str) -> None:
    model = copy.deepcopy(pair("llama").eager)
    model.set_attn_implementation(implementation)
    with pytest.warns(UserWarning, match="attn_implementation='fast_attention'") as caught, sparse_blocks(Pattern()):
        model(prompts(2, LENGTH))
    assert [one.filename for one in caught] == [__file__]


# Refusals


class Layer(nn.Module):
    """A layer of a model that makes no masks."""

    is_causal = True
    layer_idx = 5


def _layer(seqlen_q: int = 6, seqlen_k: int = 6, **given: Any) -> dict[str, Any]:
    q = torch.randn(2, HEADS, seqlen_q, 16)
    k, v = (torch.randn(2, KEY_HEADS, seqlen_k, 16) for _ in range(2))
    return {"module": Layer().eval(), "query": q, "key": k, "value": v, "attention_mask": None, **given}


def _padded(side: str, seqlen_q: int = 6) -> Any:
    used = torch.ones(2, 6, dtype=torch.bool)
    used[1, slice(0, 2) if side == "left" else slice(4, 6)] = False
    return fast_attention_mask(2, seqlen_q, 6, 6 - seqlen_q, attention_mask=used)


_OFFSETS = {"cu_seq_lens_q": torch.tensor([0, 4, 12]), "cu_seq_lens_k": torch.tensor([0, 4, 12])}
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "padding left": (lambda: _layer(attention_mask=_padded("left")), r"padding or variable lengths \(VarlenMask\)"),
    "padding right": (lambda: _layer(attention_mask=_padded("right")), r"padding or variable lengths \(VarlenMask\)"),
    "chunk after padding": (
        lambda: _layer(3, attention_mask=_padded("left", 3)),
        r"padding or variable lengths \(CachedMask\)",
    ),
    "padding and a bias": (
        lambda: _layer(attention_mask=_padded("left"), position_bias=torch.zeros(1, HEADS, 6, 6)),
        "VarlenMask",
    ),
    "mask tensor": (lambda: _layer(attention_mask=torch.zeros(2, 1, 6, 6)), r"tensor of shape \(2, 1, 6, 6\)"),
    "selected keys": (
        lambda: _layer(
            attention_mask=torch.ones(2, 1, 6, 6, dtype=torch.bool), indices=torch.zeros(2, 6, 3, dtype=torch.int64)
        ),
        r"tensor of shape \(2, 1, 6, 6\)",
    ),
    "mask that broadcasts": (
        lambda: _layer(attention_mask=fast_attention_mask(1, 6, 6)),
        r"for \(1, 1, 6, 6\) and broadcasts to \(2, 1, 6, 6\)",
    ),
    "varlen": (lambda: _layer(**_OFFSETS), "cu_seq_lens_q"),
    "varlen under a mask": (lambda: _layer(attention_mask=fast_attention_mask(2, 6, 6), **_OFFSETS), "cu_seq_lens_q"),
    "training": (lambda: _layer(module=Layer().train()), r"training mode.*model\.eval\(\)"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_takes_no_block_mask_is_refused(arguments: Callable[[], dict[str, Any]], message: str) -> None:
    given, pattern = arguments(), Pattern(everything)
    fast_attention_forward(**given)
    with sparse_blocks(pattern), pytest.raises(UnsupportedError, match=f"sparse_prefill cannot serve .*{message}"):
        fast_attention_forward(**given)
    assert not pattern.asked


def test_a_padded_batch_of_a_model_is_refused() -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :5] = 0
    with sparse_blocks(Pattern()), pytest.raises(UnsupportedError, match="LlamaAttention: the batch has padding"):
        pair("llama").fast.generate(prompts(2, LENGTH), attention_mask=mask, max_new_tokens=2)


def test_tiled_attention_is_refused() -> None:
    with sparse_blocks(Pattern()), pytest.raises(UnsupportedError, match="tile_allreduce"):
        tiled_attention_forward(**_layer())


def test_tokens_in_a_fast_attention_cache_are_refused() -> None:
    """Its first prompt is served: the layer gets tensors."""
    fast, pattern = pair("llama").fast, Pattern()
    cache = FastAttentionCache(fast.config, **cache_arguments(LARGE, None, {}))
    first, second = prompts(2, LENGTH).split([150, 50], dim=1)
    with sparse_blocks(pattern):
        found = fast(first, **{CACHE_ARGUMENT: cache}).logits
        assert torch.equal(found, fast(first).logits)
        with pytest.raises(UnsupportedError, match=r"FastAttentionCache.*DynamicCache"):
            fast(second, **{CACHE_ARGUMENT: cache})
        fast(second[:, :1], **{CACHE_ARGUMENT: cache})  # a decode step


@pytest.fixture
def _batching() -> Iterator[None]:
    batching.enable()
    yield
    batching.disable()


@pytest.mark.usefixtures("_batching")
@pytest.mark.filterwarnings("ignore:nothing called fast_attention")
def test_continuous_batching_is_refused() -> None:
    model = copy.deepcopy(pair("llama").fast)
    for name in ("fast_attention", batching.BATCHED_NAME):
        model.config._attn_implementation = name
        with sparse_blocks(Pattern()), pytest.raises(UnsupportedError, match="continuous batching"):
            model.init_continuous_batching()


@pytest.mark.usefixtures("_batching")
def test_a_batch_of_prompts_is_refused_and_a_batched_decode_step_is_not() -> None:
    forward = AttentionInterface._global_mapping[batching.BATCHED_NAME]
    q, k, v = (torch.randn(1, heads, 2, 16) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    pages = {f"{name}_cache": torch.randn(4, 16, KEY_HEADS, 16) for name in "kv"}
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 1, "max_length_k": 1}
    given = {**pages, "block_table": table, "in_host_memory": False, **lengths}
    decode = {**given, "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32)}
    with sparse_blocks(Pattern()):
        forward(Layer().eval(), q, k, v, None, **decode)
        with pytest.raises(UnsupportedError, match="continuous batching"):
            forward(Layer().eval(), q, k, v, None, **given, cache_seqlens=None)
        fast_attention_forward(**_layer(1))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("fullgraph", [False, True], ids=["parts", "fullgraph"])
@pytest.mark.parametrize("before", [False, True], ids=["new", "compiled before"])
def test_a_compiled_prompt_is_refused(before: bool, fullgraph: bool) -> None:
    """It is refused even where a graph was made without a pattern."""
    given, pattern = _layer(LENGTH, LENGTH), Pattern()
    compiled = torch.compile(lambda: fast_attention_forward(**given)[0], backend="eager", fullgraph=fullgraph)
    dense = fast_attention_forward(**given)[0]
    if before:
        assert torch.equal(compiled(), dense)
    error = torch._dynamo.exc.Unsupported if fullgraph else UnsupportedError
    with sparse_blocks(pattern):
        with pytest.raises(error, match="_refuse_to_be_traced" if fullgraph else "a prompt that is traced"):
            compiled()
        assert not pattern.asked
        assert not torch.equal(fast_attention_forward(**given)[0], dense)
    assert torch.equal(compiled(), dense)


@slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_decode_step_is_served() -> None:
    """`generate` compiles it so for static caches."""
    eager, fast = pair("llama")
    step = torch.compile(fast, backend="eager", fullgraph=True)
    with hidden(eager, streaming):
        expected = generated(eager)
    cache, ids = StaticCache(config=fast.config, max_cache_len=LENGTH + 8), prompts(2, LENGTH)
    with sparse_blocks(Pattern()):
        logits = [fast(ids, **{CACHE_ARGUMENT: cache}).logits[:, -1]]
        for _ in range(3):
            ids = logits[-1].argmax(-1, keepdim=True)
            logits.append(step(ids, **{CACHE_ARGUMENT: cache}).logits[:, -1])
    assert_same(torch.stack(logits, dim=1), expected)


WRONG: dict[str, tuple[Any, str]] = {
    "list": ([[True]], "must be a torch.Tensor"),
    "dtype": (torch.ones(1, 1, 4, 4), "must be bool"),
    "rank": (torch.ones(4, 4, dtype=torch.bool), r"got shape \(4, 4\)"),
    "rows": (torch.ones(1, 1, 3, 4, dtype=torch.bool), r"\(2 or 1, 4 or 1, 4, 4\).*got shape \(1, 1, 3, 4\)"),
    "key heads": (torch.ones(1, KEY_HEADS, 4, 4, dtype=torch.bool), r"got shape \(1, 2, 4, 4\)"),
    "device": (torch.ones(1, 1, 4, 4, dtype=torch.bool, device="meta"), "is on meta and q on cpu"),
}


@pytest.mark.parametrize(("returned", "message"), WRONG.values(), ids=WRONG)
def test_a_pattern_that_returns_something_else_is_named(returned: Any, message: str) -> None:
    with (
        sparse_blocks(lambda layer: returned),
        pytest.raises(ArgumentError, match=rf"pattern returned .* for Layer with layer_idx=5: .*{message}"),
    ):
        fast_attention_forward(**_layer(LENGTH, LENGTH))


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "pattern": ({"pattern": torch.ones(1)}, "pattern=tensor.* must be a function"),
    "block_size": ({"block_size": 100}, "block_size=100 must be"),
    "least_queries": ({"least_queries": 1}, "least_queries=1 must be an integer of at least 2"),
    "least_queries of another type": ({"least_queries": 2.5}, "least_queries must be an integer of at least 2"),
}


@pytest.mark.parametrize(("changed", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_wrong_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message), sparse_prefill(**{"pattern": Pattern(), **changed}):
        pass
    assert block_sparse._num_open == 0
