"""The reference against torch's own attention, against loops over single elements, and against its own definition."""

from __future__ import annotations

import math

import pytest
import torch
from tiers import sampled
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from conformance.cases import CASES
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import KvCacheArguments, Options, prepare_dense, prepare_kvcache, prepare_varlen
from fastattention.errors import ArgumentError
from fastattention.testing.calls import build_call
from fastattention.testing.case import Case
from fastattention.testing.oracle import kept_weights


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(seqlen_q: int = 7, seqlen_k: int = 11, nheads: int = 4, nheads_k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return (
        randn(2, seqlen_q, nheads, 16, seed=1),
        randn(2, seqlen_k, nheads_k, 16, seed=2),
        randn(2, seqlen_k, nheads_k, 12, seed=3),
    )


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """torch's attention on our layout, in float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


@pytest.mark.parametrize("scale", [None, 0.3], ids=["default-scale", "scale-0.3"])
def test_plain_attention_is_that_of_torch(scale: float | None) -> None:
    q, k, v = qkv()
    out, _, _ = reference_attention(*prepare_dense(q, k, v, Options(softmax_scale=scale)))
    torch.testing.assert_close(out, torch_attention(q, k, v, scale=scale))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 8), (1, 6)], ids=["5x5", "3x8", "1x6"])
def test_causal_is_aligned_to_the_bottom_right(seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = qkv(seqlen_q, seqlen_k)
    mask = torch.ones(seqlen_q, seqlen_k).tril(seqlen_k - seqlen_q).bool()
    out, _, _ = reference_attention(*prepare_dense(q, k, v, Options(causal=True)))
    torch.testing.assert_close(out, torch_attention(q, k, v, mask))


def test_the_drawn_mask_with_more_queries_than_keys() -> None:
    q, k, v = qkv(4, 2)
    out, lse, _ = reference_attention(*prepare_dense(q, k, v, Options(causal=True)))
    assert lse is not None
    assert lse[:, :, :2].isneginf().all()
    assert not out[:, :2].any()
    # Query 2 sees only key 0, so it returns its value.
    torch.testing.assert_close(out[:, 2], v[:, 0].double().repeat_interleave(2, dim=1))
    mask = torch.ones(2, 2).tril().bool()
    torch.testing.assert_close(out[:, 2:], torch_attention(q[:, 2:], k, v, mask))


def test_a_bias_is_added_and_minus_infinity_hides() -> None:
    q, k, v = qkv()
    bias = randn(2, 4, 7, 11, seed=5)
    bias[0, :, :, 3] = -torch.inf
    out, _, _ = reference_attention(*prepare_dense(q, k, v, Options(), attn_bias=bias))
    torch.testing.assert_close(out, torch_attention(q, k, v, bias.double()))


@pytest.mark.parametrize("window", [(2, 1), (0, 0), (-1, 1), (2, -1)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(3, 5), (5, 3), (4, 4)], ids=["3x5", "5x3", "4x4"])
def test_single_numbers_follow_the_formula(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> None:
    """softcap, ALiBi, bias, window and sinks together, one query, head and key at a time in plain Python."""
    q, k, v = qkv(seqlen_q, seqlen_k)
    slopes, sinks, bias = randn(2, 4, seed=6).abs(), randn(4, seed=7), randn(2, 1, seqlen_q, seqlen_k, seed=8)
    options = Options(softcap=1.5, window_left=window[0], window_right=window[1])
    problem, inputs = prepare_dense(q, k, v, options, alibi_slopes=slopes, attn_bias=bias, sinks=sinks)
    out, lse, _ = reference_attention(problem, inputs)
    assert lse is not None
    left, right = (math.inf if side == -1 else side for side in window)
    for b in range(2):
        for h in range(4):
            for i in range(seqlen_q):
                total, weighted = math.exp(float(sinks[h])), torch.zeros(12, dtype=torch.float64)
                for j in range(seqlen_k):
                    diagonal = i + seqlen_k - seqlen_q
                    if not diagonal - left <= j <= diagonal + right:
                        continue
                    score = float(q[b, i, h].double() @ k[b, j, h // 2].double()) * 16**-0.5
                    score = (
                        1.5 * math.tanh(score / 1.5) - float(slopes[b, h]) * abs(diagonal - j) + float(bias[b, 0, i, j])
                    )
                    total += math.exp(score)
                    weighted += math.exp(score) * v[b, j, h // 2].double()
                torch.testing.assert_close(out[b, i, h], weighted / total)
                assert float(lse[b, h, i]) == pytest.approx(math.log(total))


def test_varlen_sequences_are_dense_calls_by_themselves() -> None:
    lengths_q, lengths_k = (3, 0, 5), (4, 2, 3)
    q, k, v = randn(8, 4, 16, seed=1), randn(9, 2, 16, seed=2), randn(9, 2, 16, seed=3)
    bias = randn(4, 8, 4, seed=4)
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    problem, inputs = prepare_varlen(q, k, v, cu_q, cu_k, None, None, Options(causal=True), attn_bias=bias)
    out, lse, _ = reference_attention(problem, inputs)
    assert lse is not None
    for b, (length_q, length_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone = reference_attention(
            *prepare_dense(
                q[None, rows], k[None, keys], v[None, keys], Options(causal=True), attn_bias=bias[:, rows, :length_k]
            )
        )
        assert length_q == alone.out.shape[1]
        assert alone.lse is not None
        torch.testing.assert_close(out[rows], alone.out[0])
        torch.testing.assert_close(lse[:, rows], alone.lse[0])


def kvcache_arguments() -> KvCacheArguments:
    """Two sequences of 5 and 9 tokens, of which 2 and 0 are padding, in a cache of 14; 3 tokens are appended."""
    cache = torch.full((2, 14, 2, 16), torch.nan)
    cache[0, 2:5], cache[1, :9] = randn(3, 2, 16, seed=1), randn(9, 2, 16, seed=2)
    return KvCacheArguments(
        q=randn(2, 3, 4, 16, seed=3),
        k_cache=cache.clone(),
        v_cache=cache.clone(),
        k=randn(2, 3, 2, 16, seed=4),
        v=randn(2, 3, 2, 16, seed=5),
        cache_seqlens=torch.tensor([5, 9], dtype=torch.int32),
        cache_leftpad=torch.tensor([2, 0], dtype=torch.int32),
    )


def test_a_cache_is_its_tokens_and_the_new_ones_without_padding() -> None:
    a = kvcache_arguments()
    assert a.k is not None
    assert a.v is not None
    old_k, old_v = a.k_cache.clone(), a.v_cache.clone()
    out, _, _ = reference_attention(*prepare_kvcache(a, Options(causal=True)))
    for b, (start, end) in enumerate([(2, 5), (0, 9)]):
        k, v = torch.cat((old_k[b, start:end], a.k[b])), torch.cat((old_v[b, start:end], a.v[b]))
        alone = reference_attention(*prepare_dense(a.q[b : b + 1], k[None], v[None], Options(causal=True)))
        torch.testing.assert_close(out[b], alone.out[0])
        assert torch.equal(a.k_cache[b, end : end + 3], a.k[b])
        assert torch.equal(a.v_cache[b, end : end + 3], a.v[b])
        assert a.k_cache[b, end + 3 :].isnan().all()


@pytest.mark.parametrize("page_block_size", [1, 2, 7])
def test_pages_hold_what_a_dense_cache_holds(page_block_size: int) -> None:
    a = kvcache_arguments()
    wanted = reference_attention(*prepare_kvcache(kvcache_arguments(), Options(causal=True)))
    blocks = 14 // page_block_size
    table = torch.arange(2 * blocks).flip(0).reshape(2, blocks).int()
    pages = torch.empty(2 * blocks, page_block_size, 2, 16)
    for b in range(2):
        pages[table[b].long()] = a.k_cache[b].reshape(blocks, page_block_size, 2, 16)
    paged = a._replace(k_cache=pages, v_cache=pages.clone(), block_table=table)
    actual = reference_attention(*prepare_kvcache(paged, Options(causal=True)))
    torch.testing.assert_close(actual.out, wanted.out)
    torch.testing.assert_close(pages[table[1].long()].flatten(0, 1)[:12], torch.cat((a.k_cache[1, :9], a.k[1])))  # type: ignore[index]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
def test_rotary_turns_pairs_as_complex_numbers(interleaved: bool, causal: bool) -> None:
    """Scores under rotary embedding are those of keys and queries turned by complex multiplication."""
    a = kvcache_arguments()._replace(cache_leftpad=None)
    a.k_cache[0, :2], a.v_cache[0, :2] = 0.5, -0.5
    assert a.k is not None
    assert isinstance(a.cache_seqlens, Tensor)
    angles = 6.0 * torch.rand(12, 4, generator=torch.Generator().manual_seed(9))
    rotary = a._replace(rotary_cos=angles.cos(), rotary_sin=angles.sin())

    def turn(x: Tensor, positions: Tensor) -> Tensor:  # x (tokens, heads, 16), of which 8 turn
        pairs = x[..., :8].reshape(*x.shape[:2], *((4, 2) if interleaved else (2, 4)))
        pairs = pairs if interleaved else pairs.transpose(-1, -2)
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()), angles[positions])[:, None]
        pairs = torch.view_as_real(turned)
        return torch.cat(((pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2), x[..., 8:]), dim=-1)

    turned_k = torch.stack([turn(a.k[b], a.cache_seqlens[b] + torch.arange(3)) for b in range(2)])
    steps = torch.arange(3) if causal else torch.zeros(3, dtype=torch.long)
    turned_q = torch.stack([turn(a.q[b], a.cache_seqlens[b] + steps) for b in range(2)])
    by_hand = a._replace(k=turned_k, q=turned_q, k_cache=a.k_cache.clone(), v_cache=a.v_cache.clone())
    actual = reference_attention(*prepare_kvcache(rotary, Options(causal=causal, rotary_interleaved=interleaved)))
    wanted = reference_attention(*prepare_kvcache(by_hand, Options(causal=causal)))
    torch.testing.assert_close(actual.out, wanted.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rotary.k_cache, by_hand.k_cache, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_dropout_drops_what_the_mask_says_and_scales_the_rest() -> None:
    q, k, v = qkv()
    keep = torch.rand(2, 4, 7, 11, generator=torch.Generator().manual_seed(3)) < 0.7
    plain, inputs = prepare_dense(q, k, v, Options())
    with_dropout, _ = prepare_dense(q, k, v, Options(dropout_p=0.25))
    out, lse, mask = reference_attention(with_dropout, inputs, dropout_keep=keep)
    wanted = reference_attention(plain, inputs)
    assert torch.equal(lse, wanted.lse)  # type: ignore[arg-type]
    assert mask is not None
    assert torch.equal(mask.signbit(), ~keep)
    weights = mask.double().clamp(min=0.0) / 0.75
    torch.testing.assert_close(
        out, torch.einsum("bhqk,bkhd->bqhd", weights, v.double().repeat_interleave(2, 2)), rtol=1e-5, atol=1e-6
    )


def test_dropout_without_a_mask_is_refused() -> None:
    problem, inputs = prepare_dense(*qkv(), Options(dropout_p=0.25))
    with pytest.raises(ArgumentError, match="dropout_keep"):
        reference_attention(problem, inputs)


def test_gradients_stay_finite_in_rows_without_keys() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv(5, 2))
    out, _, _ = reference_attention(*prepare_dense(q, k, v, Options(causal=True)))
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][:, :3].any()


def test_compute_dtype_is_that_of_the_results() -> None:
    q, k, v = (tensor.to(torch.bfloat16) for tensor in qkv())
    problem, inputs = prepare_dense(q, k, v, Options())
    assert reference_attention(problem, inputs).out.dtype is torch.float64
    assert reference_attention(problem, inputs, torch.float32).out.dtype is torch.float32
    usual = reference_attention(problem, inputs, None)
    assert usual.out.dtype is torch.bfloat16
    assert usual.lse is not None
    assert usual.lse.dtype is torch.float32


@sampled
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_unused_memory_is_never_read(case: Case) -> None:
    """The cases fill it with NaN."""
    problem, inputs = build_call(case, torch.float32).prepare()
    keep = kept_weights(problem) if case.dropout_p else None
    out, lse, _ = reference_attention(problem, inputs, dropout_keep=keep)
    assert out.isfinite().all()
    assert lse is not None
    assert not lse.isnan().any()
    assert out.shape == problem.out_shape
    assert lse.shape == problem.lse_shape
