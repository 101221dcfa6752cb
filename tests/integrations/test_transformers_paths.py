"""The functions that fast_attention calls, operations that it avoids, and its refusals."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import sampled, slow
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    StaticCache,
)

from fastattention import ArgumentError, UnsupportedError
from fastattention.integrations import transformers as integration
from fastattention.integrations.transformers import attention, mask_function, masks
from fastattention.integrations.transformers.masks import CachedMask
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from integrations.models import DECODERS, VOCABULARY, assert_same, greedy, make_cache, padding_mask, pair, prompts


class Calls:
    """Records what the masks call: (name of the function, its arguments by position, and by name)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        functions = masks.Functions(*map(self._recorded, masks.AT_ONCE))
        forward = functools.partial(integration.fast_attention_forward, functions=functions)
        monkeypatch.setitem(AttentionInterface._global_mapping, "fast_attention", forward)

    def _recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__

        def call(*args: Any, **kwargs: Any) -> Any:
            self.made.append((name, args, kwargs))
            return function(*args, **kwargs)

        return call

    def take(self) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        made, self.made = self.made, []
        return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_importing_registers_and_registering_again_changes_nothing() -> None:
    for _ in range(2):
        assert AttentionInterface._global_mapping["fast_attention"] is integration.fast_attention_forward
        assert AttentionMaskInterface._global_mapping["fast_attention"] is integration.fast_attention_mask
        integration.register()


@sampled
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoding_copies_no_cache(name: str, kind: str, side: str, calls: Calls) -> None:
    """A step reads keys and values in the cache's memory, unless the cache itself makes new tensors."""
    fast = pair(name).fast
    past, mask = make_cache(kind, fast), padding_mask(side)
    assert isinstance(past, DynamicCache | StaticCache)
    with torch.inference_mode():
        fast(prompts(), attention_mask=mask, **{CACHE_ARGUMENT: past})
        calls.take()
        fast(prompts()[:, :1], attention_mask=nn.functional.pad(mask, (0, 1), value=1), **{CACHE_ARGUMENT: past})
    made = calls.take()
    assert len(made) == len(past.layers)
    for (function, args, kwargs), layer in zip(made, past.layers, strict=True):
        # A cache that slides makes new keys and values, without free places: it is full after the prompt.
        slid = layer.is_sliding
        with_lengths = side == "left" or (kind == "static" and not slid)
        assert function == ("fast_attn_with_kvcache" if with_lengths else "fast_attn_func")
        assert kwargs.get("attn_bias") is None
        if not slid:
            assert _same_memory(args[1], layer.keys)
            assert _same_memory(args[2], layer.values)
        assert args[1].shape[2] == 2, "key/value heads must not be repeated"


def test_prefill_without_padding_copies_nothing(calls: Calls) -> None:
    fast, past = pair("llama").fast, DynamicCache()
    with torch.inference_mode():
        fast(prompts(), attention_mask=padding_mask("none"), **{CACHE_ARGUMENT: past})
    for (function, args, _), layer in zip(calls.take(), past.layers, strict=True):
        assert function == "fast_attn_func"
        assert _same_memory(args[1], layer.keys)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_computed(side: str, calls: Calls) -> None:
    mask = padding_mask(side)
    pair("gpt_oss").fast(prompts(), attention_mask=mask)
    made = calls.take()
    assert [function for function, _, _ in made] == ["fast_attn_varlen_func"] * 2
    for _, args, kwargs in made:
        assert {tensor.shape[0] for tensor in args[:3]} == {int(mask.sum())}
        assert kwargs["sinks"] is not None


@sampled
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", [*DECODERS, "t5"])
def test_generation_makes_no_matrix(name: str, cache: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded prompt with windows would make one if patterns of Transformers were no longer recognized."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a matrix is made")

    if name != "t5":  # its bias is a matrix anyway
        monkeypatch.setattr(mask_function, "sdpa_mask", refuse)
    assert len(greedy(pair(name).fast, prompts(), padding_mask("left"), cache=cache)) == 3


def test_autocast_decides_the_dtype(calls: Calls) -> None:
    """Under autocast layers give queries in float32, the dtype after rotary embedding."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        pair("llama").fast(prompts())
    assert [{tensor.dtype for tensor in args[:3]} for _, args, _ in calls.take()] == [{torch.bfloat16}] * 2


def _with_dropout() -> Any:
    model = copy.deepcopy(pair("llama").fast)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.25
    return model


def test_dropout_is_handed_on_in_training_only(calls: Calls) -> None:
    fast = _with_dropout()
    fast(prompts())
    fast.train()
    fast(prompts())
    fast(prompts(), attention_mask=padding_mask("left"))
    dropouts = [args[3] if function == "fast_attn_func" else args[7] for function, args, _ in calls.take()]
    assert dropouts == [0.0] * 2 + [0.25] * 4


def test_dropout_is_not_lost_while_decoding(calls: Calls) -> None:
    """fast_attn_with_kvcache has none, so a padded step in training mode must not go there."""
    fast, past, mask = _with_dropout(), DynamicCache(), padding_mask("left")
    with torch.no_grad():
        fast(prompts(), attention_mask=mask, **{CACHE_ARGUMENT: past})
        calls.take()
        longer = nn.functional.pad(mask, (0, 1), value=1)
        fast.train()(prompts()[:, :1], attention_mask=longer, **{CACHE_ARGUMENT: past})
    assert [(function, args[3]) for function, args, _ in calls.take()] == [("fast_attn_func", 0.25)] * 2


def test_the_public_way_to_load_a_model() -> None:
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(pair("llama").eager.config), attn_implementation="fast_attention"
    )
    assert model.config._attn_implementation == "fast_attention"
    model.set_attn_implementation("eager")
    model.set_attn_implementation("fast_attention")
    assert model(prompts()).logits.shape == (3, 11, VOCABULARY)


def test_weights_are_none_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(attention._log, "warning_once", said.append)
    output = pair("llama").fast(prompts(), output_attentions=True)
    assert all(weights is None for weights in output.attentions)
    assert all("attn_implementation='eager'" in text for text in said)
    assert said
    config = copy.deepcopy(pair("llama").fast.config)
    with pytest.raises(ValueError, match="output_attentions"):  # by Transformers
        config.output_attentions = True


def test_a_model_that_computes_its_own_attention_is_refused() -> None:
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=1, n_head=4)
    model = BloomForCausalLM._from_config(config, attn_implementation="fast_attention")
    with pytest.raises(UnsupportedError, match="BloomAttention computes attention by itself"):
        model(prompts())


def _heads(length: int, nheads: int = 4) -> Tensor:
    return torch.randn(2, nheads, length, 16, generator=torch.Generator().manual_seed(length))


class Layer(nn.Module):
    """A layer of a model that makes no masks."""

    is_causal = True


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "indices without a mask": ({"indices": torch.zeros(2, 6, 3)}, UnsupportedError, r"indices of shape \(2, 6, 3\)"),
    "indices of other queries": (
        {"indices": torch.zeros(2, 5, 3), "attention_mask": torch.zeros(2, 1, 6, 6)},
        UnsupportedError,
        r"shape \(2, 6\) followed by",
    ),
    "blocks of any size": ({"block_indices": torch.zeros(1)}, UnsupportedError, "block_indices"),
    "selected keys of sequences in a row": (
        {"block_indices": torch.zeros(1), "cu_seq_lens_q": torch.arange(3), "cu_seq_lens_k": torch.arange(3)},
        UnsupportedError,
        "cu_seq_lens_q and cu_seq_lens_k are not served with keys that a model selects",
    ),
    "sinks of each token": ({"sinks": torch.zeros(1)}, UnsupportedError, "'sinks'"),
    "padding mask": ({"attention_mask": torch.ones(2, 6)}, ArgumentError, r"got shape \(2, 6\)"),
    "integer mask": ({"attention_mask": torch.ones(2, 1, 6, 6, dtype=torch.int64)}, ArgumentError, "int64"),
    "mask of another length": ({"attention_mask": torch.zeros(2, 1, 6, 5)}, ArgumentError, r"\(2, 1, 6, 5\)"),
    "queries nobody placed": ({"key": _heads(9, 2), "value": _heads(9, 2)}, UnsupportedError, "6 queries to 9 keys"),
    "bias of variable-length sequences": (
        {"position_bias": torch.zeros(1, 4, 6, 6), "cu_seq_lens_q": torch.arange(3), "cu_seq_lens_k": torch.arange(3)},
        UnsupportedError,
        "position_bias",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_exact_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"query": _heads(6), "key": _heads(6, 2), "value": _heads(6, 2), "attention_mask": None, **changes}
    with pytest.raises(error, match=message):
        integration.fast_attention_forward(Layer(), **arguments)


def _assert_attends(out: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> None:
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("sliding_window", [None, 3], ids=["no window", "window"])
def test_a_layer_without_a_mask_follows_its_flags(is_causal: bool, sliding_window: int | None) -> None:
    q, k, v = _heads(6), _heads(6, 2), _heads(6, 2)
    out, weights = integration.fast_attention_forward(
        Layer(), q, k, v, None, is_causal=is_causal, sliding_window=sliding_window
    )
    distance = torch.arange(6)[:, None] - torch.arange(6)  # from a query to a key before it
    seen = (distance >= 0) if is_causal else torch.ones(6, 6, dtype=torch.bool)
    if sliding_window is not None:
        seen = seen & (distance.abs() < sliding_window)
    _assert_attends(out, q, k, v, seen)
    assert weights is None


@pytest.mark.parametrize("varlen", [False, True], ids=["one sequence", "varlen"])
def test_a_mask_overrules_the_flags_of_a_layer(varlen: bool) -> None:
    """OLMoE hands on a window that its mask does not have."""
    q, k, v = _heads(6), _heads(6, 2), _heads(6, 2)
    offsets = torch.tensor([0, 2, 6, 12]) if varlen else None
    mask = integration.fast_attention_mask(2, 6, 6)
    out, _ = integration.fast_attention_forward(
        Layer(), q, k, v, mask, is_causal=False, sliding_window=2, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets
    )
    seen = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    if varlen:
        seen[0, :, 2:, :2] = False
    _assert_attends(out, q, k, v, seen)


def test_one_query_without_a_mask_sees_every_key() -> None:
    q, k, v = _heads(1), _heads(9, 2), _heads(9, 2)
    out, _ = integration.fast_attention_forward(Layer(), q, k, v, None)
    _assert_attends(out, q, k, v)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_one_compiled_step_decodes_a_static_cache(side: str) -> None:
    """Runs as in `generate`: the mask is made outside, and the last step fills the cache.

    No step after the first is compiled again.
    """
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    results = []
    for model, run in ((pair("llama").eager, None), (pair("llama").fast, count)):
        past, ids, mask = StaticCache(config=model.config, max_cache_len=15), prompts(), padding_mask(side)
        step = model if run is None else torch.compile(model, backend=run, fullgraph=True, dynamic=False)
        with torch.no_grad():
            model(ids, attention_mask=mask, **{CACHE_ARGUMENT: past})
            logits = []
            for token in range(4):
                mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
                ids = torch.cat([ids, ids[:, token : token + 1]], dim=1)
                inputs = model.prepare_inputs_for_generation(
                    ids, next_sequence_length=1, **{CACHE_ARGUMENT: past}, attention_mask=mask, use_cache=True
                )
                logits.append(step(**inputs).logits[:, -1])
        results.append(torch.stack(logits, dim=1))
    assert_same(results[1], results[0])
    assert len(graphs) == 1
    called = {str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"}
    assert any("attention_kvcache" in target for target in called)


def test_a_step_that_may_not_read_lengths_decodes_a_static_cache_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths must not be read while a CUDA graph is captured."""
    made = []

    def noted(*arguments: Any) -> CachedMask:
        made.append(CachedMask(*arguments))
        return made[-1]

    results = []
    for model in (pair("llama").eager, pair("llama").fast):
        past = StaticCache(config=model.config, max_cache_len=24)
        with torch.no_grad():
            logits = [model(prompts(), **{CACHE_ARGUMENT: past}).logits[:, -1]]
            with monkeypatch.context() as capturing:
                capturing.setattr(mask_function, "is_tracing", lambda tensor=None: True)
                capturing.setattr(mask_function, "CachedMask", noted)
                for token in range(3):
                    step = prompts()[:, token : token + 1]
                    logits.append(model(step, **{CACHE_ARGUMENT: past}).logits[:, -1])
        results.append(torch.stack(logits, dim=1))
    assert_same(results[1], results[0])
    assert [mask.cache_seqlens.tolist() for mask in made] == [[12] * 3, [13] * 3, [14] * 3]


@slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_model_is_that_of_eager() -> None:
    """The mask is made while it is traced, where padding cannot be read."""
    compiled = torch.compile(pair("gemma2").fast, backend="eager", fullgraph=True)
    for mask in (None, padding_mask("left")):
        with torch.no_grad():
            eager = pair("gemma2").eager(prompts(), attention_mask=mask, use_cache=False).logits
            fast = compiled(prompts(), attention_mask=mask, use_cache=False).logits
        assert_same(fast, eager, mask)
