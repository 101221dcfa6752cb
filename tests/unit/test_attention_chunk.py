"""attention_chunk: what it computes beside its definition in float64, and what it does not go with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastattention import ArgumentError, UnsupportedError, explain, fast_attn_func, fast_attn_varlen_func
from unit.samples import int32, visible

NHEADS, NHEADS_K, HEADDIM, HEADDIM_V = 4, 2, 16, 24
# Queries and keys of each sequence: fewer queries than keys, more, as many, none of either.
SEQLENS_Q, SEQLENS_K = (5, 40, 0, 33, 17, 1), (9, 33, 7, 33, 0, 70)
MASKS = {"all": {}, "causal": {"causal": True}, "window": {"window_size": (11, 2)}}
BACKENDS = ("cpu", "sdpa")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return int32(0, *lengths).cumsum(0, dtype=torch.int32)


def tokens(lengths_q: tuple[int, ...], lengths_k: tuple[int, ...]) -> list[Tensor]:
    """q, k and v of a varlen call."""
    return [
        draw(sum(lengths_q), NHEADS, HEADDIM),
        draw(sum(lengths_k), NHEADS_K, HEADDIM),
        draw(sum(lengths_k), NHEADS_K, HEADDIM_V, seed=1),
    ]


def shown(
    seqlen_q: int, seqlen_k: int, chunk: int, causal: bool = False, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    """Bool (seqlen_q, seqlen_k): which keys a query sees, from the definition of a chunk."""
    left, right = window_size
    positions = torch.arange(seqlen_q) + seqlen_k - seqlen_q
    same = torch.div(positions, chunk, rounding_mode="floor")[:, None] == torch.arange(seqlen_k) // chunk
    return same & visible(seqlen_q, seqlen_k, left, 0 if causal else right)


def reference(q: Tensor, k: Tensor, v: Tensor, shows: Tensor, slopes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse of one sequence in float64; rows without keys give 0 and -inf."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(NHEADS // NHEADS_K, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * HEADDIM**-0.5
    if slopes is not None:
        seqlen_q, seqlen_k = shows.shape
        distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
        scores = scores - slopes[:, None, None] * distance.abs()
    weights = scores.masked_fill(~shows, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / total.clamp(min=1e-300) @ v).transpose(0, 1), total[..., 0].log()


def varlen_reference(
    tensors: list[Tensor], lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], chunk: int, **mask: Any
) -> tuple[Tensor, Tensor]:
    """`reference` of each sequence. mask: arguments of `shown`, and slopes (batch_size, nheads)."""
    slopes = mask.pop("slopes", [None] * len(lengths_q))
    q, k, v = tensors
    results = [
        reference(*sequence, shown(len(sequence[0]), len(sequence[1]), chunk, **mask), own)
        for *sequence, own in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), slopes, strict=True)
    ]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(lses, 1)


def assert_same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=3e-6, rtol=1e-5)


def in_pages(call: dict[str, Any], page_block_size: int) -> dict[str, Any]:
    """The same call with keys and values in pages, NaN where no token is."""
    width = -(-max(SEQLENS_K) // page_block_size)
    table = torch.randperm(len(SEQLENS_K) * width, generator=torch.Generator().manual_seed(0)).view(-1, width)
    pages = {}
    for name in ("k", "v"):
        memory = torch.full((table.numel() * page_block_size, *call[name].shape[1:]), torch.nan)
        for rows, row in zip(call[name].split(SEQLENS_K), table, strict=True):
            places = (row[:, None] * page_block_size + torch.arange(page_block_size)).flatten()
            memory[places[: len(rows)]] = rows
        pages[name] = memory.unflatten(0, (-1, page_block_size))
    return call | pages | {"block_table": table.int()}


def varlen_call(**tensors: Tensor) -> dict[str, Any]:
    given = dict(zip("qkv", tokens(SEQLENS_Q, SEQLENS_K), strict=True)) | tensors
    return given | {"cu_seqlens_q": offsets(SEQLENS_Q), "cu_seqlens_k": offsets(SEQLENS_K)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("chunk", [1, 3, 8, 64, 2**31 - 1])
def test_queries_see_their_own_chunk(chunk: int, mask: str, backend: str) -> None:
    call, options = varlen_call(), MASKS[mask]
    found = fast_attn_varlen_func(
        **call, max_seqlen_q=40, max_seqlen_k=70, attention_chunk=chunk, return_lse=True, backend=backend, **options
    )
    tensors = [call[name] for name in "qkv"]
    assert_same(found, varlen_reference(tensors, SEQLENS_Q, SEQLENS_K, chunk, **options))


@pytest.mark.parametrize("chunk", [5, 16, 24, 100])
@pytest.mark.parametrize("page_block_size", [1, 10, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_begin_anywhere_in_pages(page_block_size: int, chunk: int, backend: str) -> None:
    call = varlen_call()
    found = fast_attn_varlen_func(
        **in_pages(call, page_block_size), attention_chunk=chunk, causal=True, return_lse=True, backend=backend
    )
    tensors = [call[name] for name in "qkv"]
    assert_same(found, varlen_reference(tensors, SEQLENS_Q, SEQLENS_K, chunk, causal=True))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(7, 20), (20, 7), (1, 18)], ids=["7x20", "20x7", "1x18"])
def test_dense_calls_have_chunks(seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = (x.unflatten(0, (2, -1)) for x in tokens((2 * seqlen_q,), (2 * seqlen_k,)))
    out, lse = fast_attn_func(q, k, v, causal=True, attention_chunk=6, return_lse=True)
    assert lse.shape == (2, NHEADS, seqlen_q)
    for index in range(2):
        wanted = reference(q[index], k[index], v[index], shown(seqlen_q, seqlen_k, 6, causal=True))
        assert_same((out[index], lse[index]), wanted)
    assert torch.equal(fast_attn_func(q, k, v, causal=True, attention_chunk=6), out)
    probs = fast_attn_func(q, k, v, causal=True, attention_chunk=6, return_attn_probs=True)
    assert torch.equal(probs[1], lse)
    assert probs[2] is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_before_the_first_chunk_are_not_read(backend: str) -> None:
    q, k, v = (x[None] for x in tokens((2,), (20,)))
    wanted = fast_attn_func(q, k[:, 18:], v[:, 18:], causal=True, return_lse=True, backend=backend)
    k[:, :18] = v[:, :18] = torch.nan
    assert_same(fast_attn_func(q, k, v, causal=True, attention_chunk=6, return_lse=True, backend=backend), wanted)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_chunks_of_used_tokens(paged: bool) -> None:
    """Positions count used keys. Unused tokens are NaN."""
    used_q, used_k = (4, 40, 0, 10, 3, 1), (9, 12, 7, 33, 0, 50)
    call = varlen_call()
    rows = [(call["q"], SEQLENS_Q, used_q), (call["k"], SEQLENS_K, used_k), (call["v"], SEQLENS_K, used_k)]
    tensors = [
        torch.cat([x[:n] for x, n in zip(tensor.split(lengths), used, strict=True)]) for tensor, lengths, used in rows
    ]
    for tensor, lengths, used in rows:
        for sequence, count in zip(tensor.split(lengths), used, strict=True):
            sequence[count:] = torch.nan
    given = in_pages(call, 4) if paged else call
    out, lse = fast_attn_varlen_func(
        **given, max_seqlen_q=40, max_seqlen_k=max(SEQLENS_K), seqused_q=int32(*used_q), seqused_k=int32(*used_k),
        causal=True, attention_chunk=6, return_lse=True,
    )  # fmt: skip
    kept = torch.cat([torch.arange(n) < used for n, used in zip(SEQLENS_Q, used_q, strict=True)])
    assert_same((out[kept], lse[:, kept]), varlen_reference(tensors, used_q, used_k, 6, causal=True))
    assert (out[~kept] == 0.0).all()
    assert lse[:, ~kept].isneginf().all()


def test_slopes_belong_to_the_given_sequences() -> None:
    call, slopes = varlen_call(), draw(len(SEQLENS_Q), NHEADS).abs()
    found = fast_attn_varlen_func(**call, alibi_slopes=slopes, attention_chunk=9, return_lse=True)
    tensors = [call[name] for name in "qkv"]
    assert_same(found, varlen_reference(tensors, SEQLENS_Q, SEQLENS_K, 9, slopes=slopes))


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_have_gradients(backend: str) -> None:
    call = varlen_call()
    tensors = [call[name].requires_grad_() for name in "qkv"]
    out = fast_attn_varlen_func(**call, causal=True, attention_chunk=7, backend=backend)
    wanted, _ = varlen_reference(tensors, SEQLENS_Q, SEQLENS_K, 7, causal=True)
    weights = draw(*out.shape)
    assert_close = zip(*(torch.autograd.grad((x * weights).sum(), tensors) for x in (out, wanted)), strict=True)
    for one, other in assert_close:
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_chunks_under_torch_compile() -> None:
    call = varlen_call() | {"max_seqlen_q": 40, "max_seqlen_k": 70, "attention_chunk": 8, "causal": True}
    compiled = torch.compile(fast_attn_varlen_func, backend="eager", fullgraph=True)
    assert torch.equal(compiled(**call), fast_attn_varlen_func(**call))


def test_explain_takes_chunks() -> None:
    q, k, v = (x[None] for x in tokens((7,), (20,)))
    assert explain(q, k, v, attention_chunk=6, backend="cpu").backend == "cpu"


def test_pages_that_cannot_be_divided_are_refused() -> None:
    pages = torch.zeros(4, 2, 16, 8).transpose(1, 2)  # heads first: 16 tokens a page
    arguments: dict[str, Any] = {"block_table": int32([0, 1], [3, 2]), "seqused_k": int32(20, 32), "causal": True}
    q = torch.zeros(2, 2, 8)
    with pytest.raises(UnsupportedError, match="k has pages of 16 tokens, which attention_chunk is no multiple of"):
        fast_attn_varlen_func(q, pages, pages, int32(0, 1, 2), None, 1, attention_chunk=24, **arguments)
    assert (
        fast_attn_varlen_func(q, pages, pages, int32(0, 1, 2), None, 1, attention_chunk=32, **arguments).shape
        == q.shape
    )


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("attn_bias", {"attn_bias": torch.zeros(7, 20)}),
        ("block_mask", {"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}),
        ("return_attn_probs with dropout", {"dropout_p": 0.5, "return_attn_probs": True}),
    ],
)
def test_what_counts_keys_of_a_sequence_is_refused(name: str, given: dict[str, Any]) -> None:
    q, k, v = (x[None] for x in tokens((7,), (20,)))
    with pytest.raises(UnsupportedError, match=f"^{name} is not served with attention_chunk=6"):
        fast_attn_func(q, k, v, attention_chunk=6, **given)


@pytest.mark.parametrize(
    ("chunk", "says"), [(-1, "attention_chunk=-1 must be at least 0"), (2.5, "must be an integer")]
)
def test_wrong_chunks_are_refused(chunk: Any, says: str) -> None:
    q, k, v = (x[None] for x in tokens((7,), (20,)))
    with pytest.raises(ArgumentError, match=says):
        fast_attn_func(q, k, v, attention_chunk=chunk)
