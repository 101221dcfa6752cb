"""Masks of unusual lengths and shapes, and models that do unusual things with attention."""

from __future__ import annotations

import ast
import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiers import deep as in_deep_tier
from tiers import sampled
from torch import Tensor
from transformers import CONFIG_MAPPING, MambaConfig, PreTrainedModel, ViTConfig

from fastattention import ArgumentError, FastAttentionError, UnsupportedError
from fastattention.integrations.transformers import FastAttentionCache, MicroBatchedCache, overlapped
from fastattention.integrations.transformers.attention import UNKNOWN_ARGUMENTS
from fastattention.integrations.transformers.model_source import matrix_needed
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from integrations.budgets import LARGE, NUM_LAYERS, cache_arguments
from integrations.models import (
    DECODERS,
    ENCODERS,
    VOCABULARY,
    assert_same,
    deep,
    greedy,
    make_cache,
    padding_mask,
    pair,
    prompts,
    sharpen,
)

WINDOWED = ("gemma2", "gpt_oss", "mistral")


@sampled
@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 1)], ids=["tokens", "a chunk"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_prompts_mask_may_be_kept_while_decoding(name: str, side: str, cache: str, counts: tuple[int, ...]) -> None:
    """Keys past its end are unseen, and queries there are real, as in eager.

    The window of a short sequence with padding on the right may hold no key: then rows are 0, and arbitrary in eager.
    """
    ids, mask = prompts(), padding_mask(side)
    results = []
    for model in pair(name):
        given = {CACHE_ARGUMENT: make_cache(cache, model)}
        with torch.no_grad():
            model(ids, attention_mask=mask, **given)
            results.append(torch.cat([model(ids[:, :n], attention_mask=mask, **given).logits for n in counts], dim=1))
    compared = torch.ones(results[0].shape[:2])
    if side == "right" and name in WINDOWED:
        compared[1:] = 0
    assert_same(results[1], results[0], compared)


def test_a_cache_within_a_budget_refuses_a_mask_without_the_new_tokens() -> None:
    """New tokens would be unseen. Stored tokens stay."""
    fast, ids = pair("llama").fast, prompts()
    cache = FastAttentionCache(fast.config, **cache_arguments(LARGE, None, {}))
    with torch.no_grad():
        fast(ids, attention_mask=padding_mask("left"), **{CACHE_ARGUMENT: cache})
        for mask in (padding_mask("left"), padding_mask("none")):
            with pytest.raises(UnsupportedError, match="give an attention_mask that has the new tokens"):
                fast(ids[:, :1], attention_mask=mask, **{CACHE_ARGUMENT: cache})
    assert cache.length == ids.shape[1]


def test_halves_of_a_batch_take_masks_as_the_whole_does() -> None:
    model, ids, row = deep("llama", NUM_LAYERS), prompts(), padding_mask("left")[1:2]
    longer, given = torch.nn.functional.pad(row, (0, 1), value=1), cache_arguments(LARGE, None, {})
    cache = MicroBatchedCache(model.config, **given)
    with torch.no_grad():
        plain = {CACHE_ARGUMENT: make_cache("dynamic", model)}
        expected = [model(ids, attention_mask=row, **plain).logits]
        expected.append(model(ids[:, :1], attention_mask=longer, **plain).logits)
        with overlapped(model, cache):
            logits = [model(ids, attention_mask=row, **{CACHE_ARGUMENT: cache}).logits]
            with pytest.raises(UnsupportedError, match="give an attention_mask that has the new tokens"):
                model(ids[:, :1], attention_mask=row, **{CACHE_ARGUMENT: cache})
            assert cache.length == ids.shape[1]
            logits.append(model(ids[:, :1], attention_mask=longer, **{CACHE_ARGUMENT: cache}).logits)
    assert_same(torch.cat(logits, dim=1), torch.cat(expected, dim=1), longer.expand(3, -1))


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["llama", "gemma2", *ENCODERS])
def test_one_row_of_padding_serves_the_whole_batch(name: str, side: str) -> None:
    row = padding_mask(side)[1:2]
    with torch.no_grad():
        eager = pair(name).eager(prompts(), attention_mask=row.repeat(3, 1)).logits
        fast = pair(name).fast(prompts(), attention_mask=row).logits
    assert_same(fast, eager, row.expand(3, -1))


@pytest.mark.parametrize("shape", [(1, 1, 11, 11), (3, 1, 1, 11), (1, 1, 1, 11), (1, 4, 11, 11)], ids=str)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_mask_of_four_dimensions_broadcasts(name: str, shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        eager, fast = (model(prompts(), attention_mask=bias).logits for model in pair(name))
    assert_same(fast, eager)


def _models(model_type: str, **sizes: Any) -> tuple[Any, Any]:
    """A causal model with eager attention, and the same with fast_attention."""
    config = CONFIG_MAPPING[model_type](vocab_size=VOCABULARY, pad_token_id=0, **sizes)
    models = []
    for implementation in ("eager", "fast_attention"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=implementation)
        sharpen(model)
        models.append(model.eval())
    return models[0], models[1]


def _assert_same_models(eager: Any, fast: Any, mask: Tensor) -> Tensor:
    """In logits, which are returned, and in greedy texts."""
    with torch.no_grad():
        expected, logits = (model(prompts(), attention_mask=mask).logits for model in (eager, fast))
    assert_same(logits, expected, mask)
    assert greedy(fast, prompts()[:1], count=6) == greedy(eager, prompts()[:1], count=6)
    return expected  # type: ignore[no-any-return]


DEEPSEEK_V4: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 2, "sliding_window": 6, "max_position_embeddings": 64,
    "layer_types": ["compressed_sparse_attention", "sliding_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
}  # fmt: skip


@pytest.mark.parametrize("where", ["none", "left", "right", "hole"])
def test_a_model_that_extends_its_mask_gets_that_of_eager(where: str) -> None:
    """DeepSeek-V4 appends a bias in the dtype of the mask: with a bool mask, seen and unseen would be exchanged."""
    eager, fast = _models("deepseek_v4", **DEEPSEEK_V4)
    mask = padding_mask("none" if where == "hole" else where)
    if where == "hole":
        mask[1, 4:6] = 0
    _assert_same_models(eager, fast, mask)


DEEPSEEK_V32: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "index_n_heads": 24, "index_head_dim": 16, "index_topk": 4,
}  # fmt: skip


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_keys_that_an_indexer_selects_are_the_only_ones_seen(side: str) -> None:
    eager, fast = _models("deepseek_v32", **DEEPSEEK_V32)
    mask = padding_mask(side)
    expected = _assert_same_models(eager, fast, mask)
    eager.config.index_topk = 11  # what the test would show if the selection were lost
    for layer in eager.model.layers:
        layer.self_attn.indexer.index_topk = 11
    with torch.no_grad():
        assert (eager(prompts(), attention_mask=mask).logits - expected).abs().max() > 0.1


TABLES = {
    "falcon": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4},
    "gpt_neo": {"hidden_size": 64, "num_layers": 1, "num_heads": 4, "attention_types": [[["global"], 1]]},
}


@pytest.mark.parametrize("model_type", TABLES)
def test_a_model_with_a_table_of_its_own_is_refused_by_name(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type](vocab_size=VOCABULARY, **TABLES[model_type])
    for make in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        with pytest.raises(UnsupportedError, match=r"Model chooses its attention from a table of its own.*'eager'"):
            make.from_config(config, attn_implementation="fast_attention")
        assert make.from_config(config, attn_implementation="eager").config._attn_implementation == "eager"


def _tables_of_transformers() -> Iterator[tuple[str, str]]:
    """(module, name of a table) for every dict of a modeling module that lists an implementation "eager"."""
    folder = Path(transformers.__file__).parent / "models"
    for path in sorted(folder.glob("*/modeling_*.py")):
        if '"eager":' not in (source := path.read_text(encoding="utf-8")):
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
                if "eager" in keys:
                    assert isinstance(node.targets[0], ast.Name)
                    yield f"transformers.models.{path.parent.name}.{path.stem}", node.targets[0].id


@pytest.mark.parametrize(("module", "table"), list(_tables_of_transformers()))
def test_every_table_of_transformers_is_given_a_refusal(module: str, table: str) -> None:
    modeling = importlib.import_module(module)
    one = next(
        each
        for each in vars(modeling).values()
        if isinstance(each, type) and issubclass(each, PreTrainedModel) and each.__module__ == module
    )
    one.get_correct_attn_implementation(one.__new__(one), "fast_attention")
    with pytest.raises(UnsupportedError, match=f"{one.__name__} chooses its attention from a table"):
        getattr(modeling, table)["fast_attention"](None)


def test_an_unknown_implementation_is_told_our_name() -> None:
    model = pair("llama")[0]
    with pytest.raises(ValueError, match=r'fastattention is `attn_implementation="fast_attention"`'):
        model.get_correct_attn_implementation("fastattention")


def test_the_part_of_a_model_that_has_the_table_is_named() -> None:
    """Not the last part that was made before: GIT makes its vision model first."""
    with pytest.raises(UnsupportedError, match=r"^GitModel chooses"):
        transformers.AutoModel.from_config(transformers.GitConfig(), attn_implementation="fast_attention")


def test_a_users_entry_of_a_table_is_left_alone() -> None:
    module = importlib.import_module("transformers.models.falcon.modeling_falcon")
    table, mine = module.FALCON_ATTENTION_CLASSES, object()
    before = table.get("fast_attention")
    table["fast_attention"] = mine
    try:
        module.FalconModel.get_correct_attn_implementation(
            module.FalconModel.__new__(module.FalconModel), "fast_attention"
        )
        assert table["fast_attention"] is mine
    finally:
        table["fast_attention"] = before
        if before is None:
            del table["fast_attention"]


# Arguments by name that attention modules of Transformers give, and that fast_attention serves or may ignore.
KNOWN_ARGUMENTS = {
    "attention_mask", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "dropout", "indices", "is_causal", "key",
    "max_length_k", "max_length_q", "output_attentions", "position_bias", "position_ids", "query", "s_aux", "scaling",
    "sliding_window", "softcap", "value",
}  # fmt: skip


@in_deep_tier
def test_every_argument_that_a_model_gives_is_known() -> None:
    """An unknown argument could change results. Before adding it here, check what eager attention does with it."""
    unknown: dict[str, set[str]] = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "attention_interface":
                for name in {given.arg for given in node.keywords if given.arg}:
                    if name not in {*KNOWN_ARGUMENTS, *UNKNOWN_ARGUMENTS}:
                        unknown.setdefault(name, set()).add(path.stem)
    assert not unknown


@pytest.mark.parametrize("config_class", [MambaConfig, ViTConfig])
def test_a_cache_of_a_model_without_attention_to_tokens_is_refused(config_class: type) -> None:
    with pytest.raises(ArgumentError, match=rf"config must be .* this {config_class.__name__} has none"):
        FastAttentionCache(config_class(), kv_budget=LARGE)


@in_deep_tier
def test_a_cache_is_made_or_refused_for_every_configuration_there_is() -> None:
    made = 0
    for model_type in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # some cannot be made without arguments
            continue
        try:
            FastAttentionCache(config, kv_budget=LARGE, cpu_memory=LARGE)
            made += 1
        except FastAttentionError:
            pass
    assert made > 100


NEEDED = {
    "llama": None,
    "gpt2": None,
    "bert": None,
    "gpt_oss": None,
    "doge": "bool",
    "deepseek_v32": "bool",
    "deepseek_v4": "float",
}


@pytest.mark.parametrize("model_type", NEEDED)
def test_a_matrix_is_made_for_models_that_compute_with_it_alone(model_type: str) -> None:
    """GPT-2 computes with its mask in a function that never hands it on. T5Gemma 2 says that it needs a matrix."""
    config = CONFIG_MAPPING[model_type]()
    importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    assert matrix_needed(config) == NEEDED[model_type]
