"""Models whose indexers select keys or blocks of keys: which are changed, and what they select under each mask."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.masking_utils import causal_mask_function

from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.integrations.transformers import attention, indexers, selected
from fastattention.integrations.transformers.indexers import select_keys, serve_indexers
from fastattention.integrations.transformers.mask_function import fast_attention_mask
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT

from .models import assert_same, padding_mask, pair, prompts, random_masks, stepwise
from .sweep.tiny import build

BLOCKS = "minimax_m3_vl_text"


@pytest.fixture
def selections() -> Iterator[list[str]]:
    """The kinds of masks under which keys are selected during a test."""
    found: list[str] = []

    of_packed, index = indexers._select_of_packed, indexers.fast_indexer_func

    def packed(*arguments: Any) -> Tensor:
        found.append("packed")
        return of_packed(*arguments)

    def indexed(*arguments: Any, **named: Any) -> Tensor:
        found.append("cached" if "seqused_k" in named else "packed" if "cu_seqlens_k" in named else "dense")
        return index(*arguments, **named)

    with mock.patch.multiple(indexers, _select_of_packed=packed, fast_indexer_func=indexed):
        yield found


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_indexers_select_without_a_matrix(name: str, selections: list[str]) -> None:
    fast = pair(name).fast
    with torch.no_grad():
        for side, cache in (("none", "dynamic"), ("left", "dynamic"), ("right", "dynamic"), ("none", "static")):
            stepwise(fast, side, cache)
    assert set(selections) == {"dense", "cached", "packed"}


@pytest.mark.parametrize(
    ("module", "indexer", "is_changed"),
    [
        ("deepseek_v32", "DeepseekV32Indexer", True),
        ("glm_moe_dsa", "GlmMoeDsaIndexer", True),
        ("hy_v4_vl", "HYV4VLIndexer", True),
        ("dots3_note", "Dots3NoteTextIndexer", True),
        ("glm5_next", "Glm5NextTextIndexer", False),  # pools its keys
        ("minimax_m3_vl", "MiniMaxM3VLIndexer", False),  # selects blocks
    ],
)
def test_indexers_with_the_known_end_are_changed(module: str, indexer: str, is_changed: bool) -> None:
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    changed = indexers._changed(vars(modeling)[indexer].forward, modeling)
    assert (changed is not None) == is_changed


class Other:
    """An indexer that ends otherwise: its scores are not cut at zero."""

    def forward(self, q: Any, k: Any, weights: Any, attention_mask: Any) -> Any:
        scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
        scores = scores.abs()
        weights = weights.float()
        index_scores = torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)
        if attention_mask.dtype == torch.bool:
            index_scores = index_scores.masked_fill(~attention_mask, float("-inf"))
        else:
            index_scores = index_scores + attention_mask
        topk = min(self.index_topk, index_scores.shape[-1])  # type: ignore[attr-defined]
        return index_scores.topk(topk, dim=-1).indices.to(torch.int32)


def test_an_indexer_that_ends_otherwise_is_left_alone() -> None:
    module = types.ModuleType("other")
    assert indexers._changed(Other.forward, module) is None


def mask_of(seqlen_q: int, seqlen_k: int, padding: Tensor | None) -> Any:
    config = pair("deepseek_v32").fast.config
    assert serve_indexers(config)
    return fast_attention_mask(
        3, seqlen_q, seqlen_k, seqlen_k - seqlen_q, 0, causal_mask_function, padding, allow_is_causal_skip=False,
        config=config,
    )  # fmt: skip


@pytest.mark.parametrize("side", ["none", "left", "right", "gaps"])
@pytest.mark.parametrize("seqlen_q", [1, 4, 20])
def test_keys_are_selected_of_those_that_the_mask_shows(seqlen_q: int, side: str) -> None:
    padding = None if side == "none" else padding_mask("left" if side == "gaps" else side, length=20).bool()
    if side == "gaps":
        assert padding is not None
        padding[1, 9] = False
    with torch.no_grad():
        mask = mask_of(seqlen_q, 20, padding)
    if isinstance(mask, Tensor):
        pytest.skip("the mask function gives a matrix")
    generator = torch.Generator().manual_seed(seqlen_q)
    q, k, weights = (
        torch.randn(shape, generator=generator) for shape in ((3, seqlen_q, 24, 8), (3, 20, 8), (3, seqlen_q, 24))
    )
    found = select_keys(q, k, weights, mask, 6)
    scores = torch.einsum("bsht,bsh->bst", torch.einsum("bshd,btd->bsht", q, k).clamp(min=0.0), weights)
    scores = scores.masked_fill(~mask.as_tensor()[:, 0], -torch.inf)
    best = scores.topk(6)
    wanted = torch.where(best.values.isneginf(), 99, best.indices).sort(dim=-1).values
    real = torch.ones(3, 20, dtype=torch.bool) if padding is None else padding
    assert found.dtype is torch.int32
    assert torch.equal(torch.where(found < 0, 99, found)[real[:, -seqlen_q:]], wanted[real[:, -seqlen_q:]].int())


def test_a_token_reads_the_keys_of_few_pools_and_of_the_last_ones() -> None:
    """After padding GLM-5 Next has -1 for pools that are missing, before the keys that are in no pool yet."""
    tiny = build("glm5_next")
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    found = []
    with (
        torch.no_grad(),
        mock.patch.object(attention, "attend_to_gathered", wraps=selected.attend_to_gathered) as calls,
    ):
        for model in (tiny.eager, tiny.fast()):
            cache = DynamicCache(config=model.config.get_text_config())
            model(ids[:, :8], attention_mask=mask[:, :8], **{CACHE_ARGUMENT: cache})
            found.append(model(ids[:, 8:], attention_mask=mask, **{CACHE_ARGUMENT: cache}).logits)
    assert calls.call_count == 1
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def test_a_mask_of_other_lengths_is_refused() -> None:
    mask = mask_of(4, 20, None)
    q, k, weights = torch.randn(3, 5, 2, 8), torch.randn(3, 20, 8), torch.randn(3, 5, 2)
    with pytest.raises(ArgumentError, match="the mask is for"):
        select_keys(q, k, weights, mask, 6)
    with pytest.raises(UnsupportedError, match="cannot be indexed"):
        mask[:, 0, :2]


@pytest.mark.parametrize("cache", ["no cache", "dynamic", "static"])
def test_blocks_that_key_heads_select_are_read_alone(cache: str) -> None:
    """Without padding, whose keys take part in the selection and differ between implementations."""
    select = selected.fast_attn_selected_func
    with torch.no_grad(), mock.patch.object(selected, "fast_attn_selected_func", side_effect=select) as calls:
        (eager, real), (fast, _) = (stepwise(model, "none", cache) for model in pair(BLOCKS))
    assert_same(fast, eager, real)
    assert calls.call_count == 2 * (1 if cache == "no cache" else 4)


def test_blocks_under_a_matrix_are_those_of_eager_attention() -> None:
    seen, added = random_masks()
    eager, fast = pair(BLOCKS)
    with torch.no_grad():
        expected = eager(prompts(), attention_mask=added).logits
        assert_same(fast(prompts(), attention_mask=seen).logits, expected)


def test_blocks_of_several_sequences_in_a_row_are_refused() -> None:
    """Eager attention gives their later queries, which select none of their own keys, a mean of all values."""
    _, fast = pair(BLOCKS)
    ids = prompts()[:, :8]
    with pytest.raises(UnsupportedError, match="several sequences in a row are not served with block_indices"):
        fast(ids, position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]).expand(len(ids), -1), use_cache=False)


def test_gradients_of_selected_blocks_are_those_of_eager_attention() -> None:
    found = []
    for model in pair(BLOCKS):
        ids = prompts()
        loss = model(ids, labels=ids).loss
        found.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    for eager, fast in zip(*found, strict=True):
        if eager is not None:
            torch.testing.assert_close(fast, eager, atol=1e-5 * float(eager.abs().max() + 1e-3), rtol=1e-3)
