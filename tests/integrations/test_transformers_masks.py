"""Masks without a matrix agree with Transformers' own matrix."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils

from fastattention import ArgumentError, UnsupportedError
from fastattention.integrations.transformers import fast_attention_mask
from fastattention.integrations.transformers.masks import (
    CachedMask,
    DenseMask,
    Scores,
    SequenceMask,
    VarlenMask,
    attend_dense,
    combine,
)
from fastattention.integrations.transformers.patterns import Pattern, recognize

CAUSAL = masking_utils.causal_mask_function
BIDIRECTIONAL = masking_utils.bidirectional_mask_function
sliding = masking_utils.sliding_window_causal_mask_function
sliding_bidirectional = masking_utils.sliding_window_bidirectional_mask_function

SCORES = Scores(softmax_scale=None, softcap=0.0, sinks=None, dropout_p=0.0)


class Request(NamedTuple):
    """The arguments that Transformers gives to a mask function."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int
    mask_function: Callable[..., Any]
    attention_mask: Tensor | None

    def make(self, **kwargs: Any) -> SequenceMask | Tensor:
        return fast_attention_mask(**{**self._asdict(), "allow_is_bidirectional_skip": True, **kwargs})

    def matrix(self) -> Tensor:
        """bool (batch_size, 1, q_length, kv_length), True is seen: by Transformers."""
        mask = masking_utils.sdpa_mask(**self._asdict(), allow_is_causal_skip=False)
        assert mask is not None
        return mask


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Prefill, chunks and decoding; caches that grow, are static or slide; padding anywhere."""
    batch_size, q_length, q_offset = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(0, 8))
    window = draw(st.integers(1, 10))
    functions = (CAUSAL, BIDIRECTIONAL, sliding(window), sliding_bidirectional(window))
    mask_function = draw(st.sampled_from(functions))
    kv_offset = draw(st.integers(0, q_offset))
    num_keys = q_offset + q_length - kv_offset
    kv_length = num_keys + draw(st.sampled_from((0, 0, 1, 5)))
    padding = draw(st.sampled_from(("none", "left", "right", "anywhere")))
    if padding == "none":
        return Request(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, None)
    # A mask may end early, as that of a prompt that is kept while decoding.
    length = q_offset + q_length - draw(st.sampled_from((0, 0, 0, 1, q_length, q_length + 2)))
    tokens = torch.ones(batch_size, max(length, 1), dtype=torch.bool)
    for row in tokens:
        count = draw(st.integers(0, len(row)))
        where = {"left": slice(0, count), "right": slice(len(row) - count, len(row))}.get(padding)
        row[where if where is not None else draw(st.lists(st.integers(0, len(row) - 1), max_size=4))] = False
    return Request(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, tokens)


def _tensors(request: Request, requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (request.q_length, request.kv_length, request.kv_length)
    heads = (4, 2, 2)
    q, k, v = (
        torch.randn(request.batch_size, heads_, length, 8, generator=generator).requires_grad_(requires_grad)
        for heads_, length in zip(heads, lengths, strict=True)
    )
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _real_queries(request: Request) -> Tensor:
    """bool (batch_size, q_length), False where the query is padding. Queries past the end of the mask are real."""
    real = torch.ones(request.batch_size, request.q_offset + request.q_length, dtype=torch.bool)
    if request.attention_mask is not None:
        length = min(request.attention_mask.shape[1], real.shape[1])
        real[:, :length] = request.attention_mask[:, :length]
    return real[:, request.q_offset :]


LEFT = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]], dtype=torch.bool)
RIGHT = LEFT.flip(1)
HOLES = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 1]], dtype=torch.bool)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(requests(), st.booleans(), st.booleans())
@example(Request(2, 1, 9, 5, 0, CAUSAL, HOLES), True, True)
@example(Request(2, 1, 9, 5, 0, CAUSAL, LEFT), True, True)
@example(Request(2, 1, 9, 5, 0, CAUSAL, None), True, True)
def test_attention_under_a_mask_is_that_under_its_matrix(request: Request, grad: bool, counts: bool) -> None:
    """counts: whether the offset is a tensor, by which a static cache counts its tokens."""
    matrix = request.matrix()
    with torch.set_grad_enabled(grad):
        offset = torch.tensor(request.q_offset) if counts else request.q_offset
        mask = request.make(q_offset=offset)
        q, k, v = _tensors(request, requires_grad=grad)
        expected = attend_dense(q, k, v, combine(matrix, None, q.dtype), SCORES)
        if isinstance(mask, Tensor):
            assert torch.equal(mask, matrix)
            return
        assert torch.equal(mask.as_tensor(), matrix)
        out = mask.attend(q, k, v, None, SCORES)
        if grad:
            out.sum().backward()  # whatever was chosen, it has a backward
    real = _real_queries(request)
    torch.testing.assert_close(out[real], expected[real], atol=2e-6, rtol=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(requests())
def test_a_bias_is_added_under_every_mask(request: Request) -> None:
    mask = request.make()
    if isinstance(mask, Tensor):
        return
    q, k, v = _tensors(request)
    shape = (1, 4, request.q_length, request.kv_length)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = attend_dense(q, k, v, combine(request.matrix(), bias, q.dtype), SCORES)
    real = _real_queries(request)
    torch.testing.assert_close(mask.attend(q, k, v, bias, SCORES)[real], expected[real], atol=2e-6, rtol=1e-5)


CHEAPEST = {
    "prefill": (Request(2, 6, 6, 0, 0, CAUSAL, None), DenseMask),
    "prefill, no padding in the mask": (Request(2, 6, 6, 0, 0, CAUSAL, torch.ones_like(LEFT)), DenseMask),
    "prefill, window": (Request(2, 6, 6, 0, 0, sliding(3), None), DenseMask),
    "prefill, static cache": (Request(2, 6, 9, 0, 0, CAUSAL, None), DenseMask),
    "prefill, left": (Request(2, 6, 6, 0, 0, CAUSAL, LEFT), VarlenMask),
    "prefill, right, window": (Request(2, 6, 6, 0, 0, sliding(3), RIGHT), VarlenMask),
    "decode": (Request(2, 1, 6, 5, 0, CAUSAL, None), DenseMask),
    "decode, sliding cache": (Request(2, 1, 3, 5, 3, sliding(3), LEFT), DenseMask),
    "decode, static cache": (Request(2, 1, 9, 5, 0, CAUSAL, None), CachedMask),
    "decode, left": (Request(2, 1, 6, 5, 0, CAUSAL, LEFT), CachedMask),
    "decode, left, window, static cache": (Request(2, 1, 9, 5, 0, sliding(3), LEFT), CachedMask),
    "chunk, left": (Request(2, 3, 6, 3, 0, CAUSAL, LEFT), CachedMask),
    "decode after right padding": (Request(2, 1, 6, 5, 0, CAUSAL, HOLES), VarlenMask),
    "decode after right padding, window": (Request(2, 1, 6, 5, 0, sliding(5), HOLES), Tensor),
    "encoder": (Request(2, 6, 6, 0, 0, BIDIRECTIONAL, None), DenseMask),
    "encoder, right": (Request(2, 6, 6, 0, 0, BIDIRECTIONAL, RIGHT), VarlenMask),
    "encoder, right, window": (Request(2, 6, 6, 0, 0, sliding_bidirectional(2), RIGHT), VarlenMask),
    "some queries, right, window to both sides": (Request(2, 3, 6, 3, 0, sliding_bidirectional(2), RIGHT), Tensor),
    "cross-attention of a token": (Request(2, 1, 6, 0, 0, BIDIRECTIONAL, RIGHT), CachedMask),
    "decode, the prompt's mask": (Request(2, 1, 8, 7, 0, CAUSAL, LEFT), CachedMask),
    "chunk, the prompt's mask": (Request(2, 2, 8, 6, 0, CAUSAL, HOLES), VarlenMask),
    "chunk across the end of the mask": (Request(2, 3, 8, 5, 0, CAUSAL, LEFT), Tensor),
    "decode, the prompt's mask, window": (Request(2, 1, 8, 7, 0, sliding(5), LEFT), Tensor),
}


@pytest.mark.parametrize(("request_", "kind"), CHEAPEST.values(), ids=CHEAPEST)
def test_the_cheapest_mask_is_chosen(request_: Request, kind: type) -> None:
    with torch.no_grad():
        assert type(request_.make()) is kind


@pytest.mark.parametrize("function", [CAUSAL, BIDIRECTIONAL, sliding(4)], ids=["causal", "full", "window"])
@pytest.mark.parametrize("used", [torch.ones(6, dtype=torch.bool), LEFT[1], RIGHT[1]], ids=["all", "left", "right"])
def test_one_row_of_padding_is_that_of_every_sequence(used: Tensor, function: Callable[..., Any]) -> None:
    one, each = (Request(3, 6, 6, 0, 0, function, used.expand(rows, -1)) for rows in (1, 3))
    q, k, v = _tensors(each)
    outs = []
    for request in (one, each):
        mask = request.make()
        assert isinstance(mask, SequenceMask)
        assert torch.equal(mask.as_tensor(), each.matrix())
        outs.append(mask.attend(q, k, v, None, SCORES))
    assert torch.equal(*outs)


@pytest.mark.parametrize("shape", [(6,), (2, 6), (0, 6), (3, 6, 6)], ids=str)
def test_a_padding_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ArgumentError, match=rf"batch_size=3, or have four dimensions, got shape {re.escape(str(shape))}"
    ):
        Request(3, 6, 6, 0, 0, CAUSAL, torch.ones(shape, dtype=torch.bool)).make()


def test_a_window_as_wide_as_the_keys_is_dropped() -> None:
    mask = Request(2, 1, 6, 5, 0, sliding(6), None).make()
    assert isinstance(mask, DenseMask)
    assert mask.window == (-1, 0)


def test_lengths_of_a_static_cache_are_read_before_it_counts_on() -> None:
    """The offset is the cache's own counter, which every layer's update moves."""
    counter = torch.tensor(5)
    with torch.no_grad():
        mask = fast_attention_mask(2, 1, 9, counter, 0, CAUSAL, LEFT)
        before = Request(2, 1, 9, 5, 0, CAUSAL, LEFT).matrix()
        counter.add_(1)
    assert isinstance(mask, CachedMask)
    assert mask.cache_seqlens.tolist() == [6, 6]
    assert torch.equal(mask.as_tensor(), before)


def test_a_model_that_computes_with_its_mask_gets_a_matrix() -> None:
    request = Request(2, 6, 6, 0, 0, CAUSAL, LEFT)
    forced = request.make(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    assert isinstance(forced, Tensor)
    assert torch.equal(forced, request.matrix())


def packed(
    base: Callable[..., Any], positions: Tensor, sequence_ids: Tensor
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The parts of a mask of several sequences in a row, each under `base`."""
    return (
        masking_utils.packed_sequence_mask_function(sequence_ids),
        masking_utils.remap_positions_for_packed_sequence(base, positions),
    )


def test_patterns_of_transformers_are_recognized() -> None:
    ids = torch.tensor([[0, 0, 1]])
    assert recognize(CAUSAL) == Pattern(True, (-1, 0))
    assert recognize(BIDIRECTIONAL) == Pattern(False, (-1, -1))
    assert recognize(sliding(4)) == Pattern(True, (3, 0))
    assert recognize(sliding_bidirectional(4)) == Pattern(False, (4, 4))
    parts = packed(sliding(4), torch.tensor([[0, 1, 0]]), ids)
    for order in (parts, reversed(parts)):  # Transformers 5.24 reversed it
        assert recognize(masking_utils.and_masks(*order)) == Pattern(True, (3, 0), ids)


UNKNOWN = {
    "chunked": masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
    "union": masking_utils.or_masks(CAUSAL, BIDIRECTIONAL),
    "user's": lambda batch, head, q, k: k <= q,
    "user's, within": masking_utils.and_masks(CAUSAL, lambda batch, head, q, k: k % 2 == 0),
    "window of no base": masking_utils.and_masks(sliding(4), sliding(3)),
    "three": masking_utils.and_masks(CAUSAL, CAUSAL, CAUSAL),
    "packed, user's": masking_utils.and_masks(
        *packed(lambda batch, head, q, k: k <= q, torch.zeros(1, 3), torch.zeros(1, 3))
    ),
}


@pytest.mark.parametrize("function", UNKNOWN.values(), ids=UNKNOWN)
def test_any_other_pattern_stays_a_matrix(function: Callable[..., Any]) -> None:
    assert recognize(function) is None
    request = Request(1, 3, 3, 0, 0, function, None)
    mask = request.make()
    assert isinstance(mask, Tensor)
    assert torch.equal(mask, request.matrix())


def test_a_mask_is_for_one_shape() -> None:
    request = Request(2, 6, 6, 0, 0, CAUSAL, LEFT)
    mask = request.make()
    assert isinstance(mask, SequenceMask)
    q, k, v = _tensors(request)
    with pytest.raises(ArgumentError, match=r"\(2, 1, 6, 6\), got \(2, 1, 6, 5\)"):
        mask.attend(q, k[:, :5], v[:, :5], None, SCORES)
    with pytest.raises(ArgumentError, match=r"\(2, 1, 6, 6\), got \(1, 1, 6, 6\)"):
        mask.attend(q[:1], k[:1], v[:1], None, SCORES)


def test_a_mask_moves_with_its_layer() -> None:
    request = Request(2, 6, 6, 0, 0, CAUSAL, LEFT)
    mask = request.make()
    assert isinstance(mask, VarlenMask)
    moved = mask.to("meta", non_blocking=True)
    assert moved.cu_seqlens_q.device.type == moved.as_tensor().device.type == "meta"
    assert moved.tokens_q is not None
    assert {indices.device.type for indices in moved.tokens_q} == {"meta"}
    q, k, v = _tensors(request)
    assert torch.equal(mask.to("cpu").attend(q, k, v, None, SCORES), mask.attend(q, k, v, None, SCORES))


@pytest.mark.parametrize(
    "request_", [Request(1, 6, 6, 0, 0, CAUSAL, LEFT[1:]), Request(2, 1, 1, 0, 0, CAUSAL, None)], ids=["batch", "keys"]
)
def test_a_mask_of_ones_among_its_lengths_broadcasts(request_: Request) -> None:
    """EncoderDecoderModel decodes under a mask for one key: eager attention lets the query see all keys."""
    mask = request_.make()
    assert isinstance(mask, SequenceMask)
    q, k, v = _tensors(Request(2, request_.q_length, 6, 0, 0, CAUSAL, None))
    expected = attend_dense(q, k, v, combine(request_.matrix(), None, q.dtype), SCORES)
    torch.testing.assert_close(mask.attend(q, k, v, None, SCORES), expected, atol=2e-6, rtol=1e-5)


MISUSES: dict[str, Callable[[Any], object]] = {
    "index": lambda mask: mask[:, :, :, :3],
    "operator": lambda mask: torch.zeros(2, 1, 6, 6) + mask,
    "function": lambda mask: torch.where(mask, 0.0, 1.0),
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_a_model_that_computes_with_a_mask_is_told(misuse: Callable[[Any], object]) -> None:
    with pytest.raises(UnsupportedError, match="computes with its attention mask"):
        misuse(Request(2, 6, 6, 0, 0, CAUSAL, LEFT).make())


def test_a_model_that_asks_a_mask_for_its_dtype_is_told() -> None:
    mask = Request(2, 6, 6, 0, 0, CAUSAL, LEFT).make()
    assert not hasattr(mask, "dtype")
    with pytest.raises(UnsupportedError, match="'dtype': this model computes with its attention mask"):
        _ = mask.dtype
