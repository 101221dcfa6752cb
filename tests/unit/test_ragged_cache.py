"""Calls with a cache that have cu_seqlens_q, cu_seqlens_k_new or attention_chunk, beside calls of one sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fastattention import ArgumentError, UnsupportedError, explain, fast_attn_func, fast_attn_with_kvcache
from fastattention.quantized import quantize
from unit.samples import int32

TABLE = int32([4, 1, 3], [0, 5, 2])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def offsets(*lengths: int) -> Tensor:
    return int32(0, *lengths).cumsum(0, dtype=torch.int32)


def assert_same(given: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


class Ragged(NamedTuple):
    """Two sequences of 7 and 0 cached tokens, to which 2 and 4 are appended, with 1 and 3 queries."""

    q: Tensor  # (4, 4, 16)
    k: Tensor  # (6, 2, 16)
    v: Tensor
    caches: list[Tensor]  # pages, or rows of 12 tokens

    def reference(self, slopes: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        """out, lse and the caches after a causal call, from calls of one sequence each."""
        after = [cache.clone() for cache in self.caches]
        results = []
        for index, (queries, new, held) in enumerate(((slice(0, 1), slice(0, 2), 7), (slice(1, 4), slice(2, 6), 0))):
            pages = {"block_table": TABLE[index : index + 1]} if self.is_paged else {"cache_batch_idx": int32(index)}
            results.append(fast_attn_with_kvcache(
                self.q[None, queries], *after, self.k[None, new], self.v[None, new], cache_seqlens=held, causal=True,
                alibi_slopes=None if slopes is None else slopes[index], return_lse=True, **pages, **options,
            ))  # fmt: skip
        outs, lses = zip(*results, strict=True)
        return torch.cat(outs, 1)[0], torch.cat(lses, 2)[0], after

    @property
    def is_paged(self) -> bool:
        return self.caches[0].shape[1] == 4


@pytest.fixture(params=["rows", "pages"])
def ragged(request: pytest.FixtureRequest) -> Ragged:
    shape = (6, 4, 2, 16) if request.param == "pages" else (2, 12, 2, 16)
    caches = [torch.full(shape, torch.nan) for _ in range(2)]
    for seed, cache in enumerate(caches):
        for page, tokens in ((4, slice(0, 4)), (1, slice(4, 7))) if request.param == "pages" else ((0, slice(0, 7)),):
            cache[page, : tokens.stop - tokens.start] = draw(7, 2, 16, seed=seed)[tokens]
    return Ragged(draw(4, 4, 16), draw(6, 2, 16), draw(6, 2, 16, seed=1), caches)


def test_a_call_with_ragged_queries_and_keys(ragged: Ragged) -> None:
    slopes, options = draw(2, 4).abs(), {"sinks": draw(4), "softcap": 3.0}
    out, lse, after = ragged.reference(slopes, **options)
    given = fast_attn_with_kvcache(
        ragged.q, *ragged.caches, ragged.k, ragged.v, cache_seqlens=int32(7, 0), cu_seqlens_q=offsets(1, 3),
        cu_seqlens_k_new=offsets(2, 4), max_seqlen_q=3, causal=True, return_lse=True, alibi_slopes=slopes,
        block_table=TABLE if ragged.is_paged else None, **options,
    )  # fmt: skip
    assert_same(given, (out, lse))
    for written, wanted in zip(ragged.caches, after, strict=True):
        assert torch.equal(written.nan_to_num(7.0), wanted.nan_to_num(7.0))
    # The same cache without an append, in another order of its rows.
    q, rows = ragged.q[[1, 2, 3, 0]], int32(1, 0)
    where = {"block_table": TABLE[rows.long()]} if ragged.is_paged else {"cache_batch_idx": rows}
    again = fast_attn_with_kvcache(
        q, *ragged.caches, cache_seqlens=int32(4, 9), cu_seqlens_q=offsets(3, 1), causal=True, return_lse=True,
        alibi_slopes=slopes[[1, 0]], **where, **options,
    )  # fmt: skip
    assert_same(again, (out[[1, 2, 3, 0]], lse[:, [1, 2, 3, 0]]))


@pytest.mark.parametrize("ragged", ["pages"], indirect=True)
def test_a_ragged_call_reads_no_lengths(ragged: Ragged) -> None:
    """It is one graph for torch.compile, which nothing that waits for values could be."""
    copies = [cache.clone() for cache in ragged.caches]
    arguments: dict[str, Any] = {
        "cache_seqlens": int32(7, 0), "cu_seqlens_q": offsets(1, 3), "cu_seqlens_k_new": offsets(2, 4),
        "max_seqlen_q": 3, "causal": True, "block_table": TABLE, "attention_chunk": 5,
    }  # fmt: skip
    compiled = torch.compile(fast_attn_with_kvcache, backend="eager", fullgraph=True)
    out = compiled(ragged.q, *copies, ragged.k, ragged.v, **arguments)
    assert torch.equal(out, fast_attn_with_kvcache(ragged.q, *ragged.caches, ragged.k, ragged.v, **arguments))
    assert all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(ragged.caches, copies, strict=True))


def test_a_call_with_ragged_keys_alone(ragged: Ragged) -> None:
    """Queries in a batch of one length come back in it."""
    arguments: dict[str, Any] = {
        "cache_seqlens": int32(7, 0), "cu_seqlens_k_new": offsets(2, 4), "causal": True,
        "block_table": TABLE if ragged.is_paged else None,
    }  # fmt: skip
    q = draw(2, 2, 4, 16)
    after = ragged.reference()[2]
    where = {"block_table": TABLE} if ragged.is_paged else {}
    wanted = fast_attn_with_kvcache(q, *after, cache_seqlens=int32(9, 4), causal=True, return_lse=True, **where)
    given = fast_attn_with_kvcache(q, *ragged.caches, ragged.k, ragged.v, return_lse=True, **arguments)
    assert_same(given, wanted)


def test_a_call_with_ragged_queries_and_even_keys(ragged: Ragged) -> None:
    """The second sequence has keys but no query."""
    out, _, _ = ragged.reference()
    k, v = (torch.stack((x[:2], x[2:4])) for x in (ragged.k, ragged.v))
    where = {"block_table": TABLE} if ragged.is_paged else {}
    given = fast_attn_with_kvcache(
        ragged.q[:1], *ragged.caches, k, v, cache_seqlens=int32(7, 0), cu_seqlens_q=offsets(1, 0), max_seqlen_q=1,
        causal=True, **where,
    )  # fmt: skip
    assert_same((given,), (out[:1],))


def test_a_call_with_chunks(ragged: Ragged) -> None:
    """After the append sequences have 9 and 2 tokens. Their last ones see the tokens from 5 and from 0 on."""
    q = draw(2, 1, 4, 16)
    new = [torch.stack((x[:2], x[2:4])) for x in (ragged.k, ragged.v)]
    given = fast_attn_with_kvcache(
        q, *ragged.caches, *new, cache_seqlens=int32(7, 0), causal=True, attention_chunk=5, return_lse=True,
        block_table=TABLE if ragged.is_paged else None,
    )  # fmt: skip
    cached = [draw(7, 2, 16, seed=seed)[5:] for seed in range(2)]
    first = fast_attn_func(
        q[:1], *(torch.cat((old, x[0]))[None] for old, x in zip(cached, new, strict=True)), return_lse=True
    )
    second = fast_attn_func(q[1:], *(x[1:] for x in new), return_lse=True)
    assert_same(given, tuple(torch.cat(both) for both in zip(first, second, strict=True)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cache_seqlens": int32(11, 0)}, r"cache_seqlens\[0\]=11 must be 0 to 10"),
        ({"cache_seqlens": int32(7)}, "cache_seqlens must be"),
        ({"cache_seqlens": None}, "k, v and cache_seqlens must be given together"),
        ({"v": None}, "k, v and cache_seqlens must be given together"),
        ({"cu_seqlens_k_new": offsets(2, 3)}, "cu_seqlens_k_new must end at the number of tokens, 6"),
        ({"cu_seqlens_k_new": offsets(6)}, "cu_seqlens_k_new must be"),
        ({"cu_seqlens_q": offsets(1, 2)}, "cu_seqlens_q must end at the number of tokens, 4"),
        ({"k": draw(6, 2, 16).half()}, "k has dtype"),
        ({"v": draw(5, 2, 16)}, "v must be"),
        ({"window_size": (-2, 0)}, "window_size"),
        ({"block_table": int32([4, 6, 3], [0, 5, 2])}, "names page 6 for sequence 0"),
        ({"block_table": int32([4, 1, 0], [0, 5, 2])}, "two appended tokens into slot 0 of page 0"),
        ({"block_table": None}, "k_cache holds 6 sequences and q 2"),
        ({"cache_batch_idx": int32(0, 1)}, "cannot be combined with block_table"),
    ],
)
@pytest.mark.parametrize("ragged", ["pages"], indirect=True)
def test_wrong_ragged_calls_leave_caches_alone(ragged: Ragged, changes: dict[str, Any], says: str) -> None:
    before = [cache.clone() for cache in ragged.caches]
    good = {
        "k": ragged.k, "v": ragged.v, "block_table": TABLE, "cache_seqlens": int32(7, 0), "cu_seqlens_q": offsets(1, 3),
        "cu_seqlens_k_new": offsets(2, 4), "max_seqlen_q": 3,
    }  # fmt: skip
    with pytest.raises(ArgumentError, match=says):
        fast_attn_with_kvcache(ragged.q, *ragged.caches, **good | changes)
    assert all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(ragged.caches, before, strict=True))


def test_a_ragged_call_appends_to_quantized_caches(ragged: Ragged) -> None:
    stored = [quantize(cache.nan_to_num(0.0), torch.int8) for cache in ragged.caches]
    caches, scales = ([pair[at] for pair in stored] for at in (0, 1))
    names = ("k_scale", "v_scale")
    wanted_scales = [scale.clone() for scale in scales]
    out, lse, after = ragged._replace(caches=caches).reference(**dict(zip(names, wanted_scales, strict=True)))
    given = fast_attn_with_kvcache(
        ragged.q, *caches, ragged.k, ragged.v, cache_seqlens=int32(7, 0), cu_seqlens_q=offsets(1, 3),
        cu_seqlens_k_new=offsets(2, 4), max_seqlen_q=3, causal=True, return_lse=True,
        block_table=TABLE if ragged.is_paged else None, **dict(zip(names, scales, strict=True)),
    )  # fmt: skip
    assert_same(given, (out, lse))
    assert all(map(torch.equal, [*caches, *scales], [*after, *wanted_scales]))


@pytest.mark.parametrize("ragged", ["pages"], indirect=True)
def test_explain_leaves_ragged_caches_alone(ragged: Ragged) -> None:
    before = [cache.clone() for cache in ragged.caches]
    explanation = explain(
        ragged.q, *ragged.caches, ragged.k, ragged.v, cache_seqlens=int32(7, 0), cu_seqlens_q=offsets(1, 3),
        cu_seqlens_k_new=offsets(2, 4), block_table=TABLE, function=fast_attn_with_kvcache, backend="cpu",
    )  # fmt: skip
    assert explanation.backend == "cpu"
    assert all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(ragged.caches, before, strict=True))


@pytest.mark.parametrize("name", ["rotary_cos", "cache_leftpad", "attn_bias"])
@pytest.mark.parametrize("ragged", ["rows"], indirect=True)
def test_what_ragged_calls_do_not_take_is_refused(ragged: Ragged, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name} is not served with cu_seqlens_q, cu_seqlens_k_new or"):
        fast_attn_with_kvcache(ragged.q, *ragged.caches, cu_seqlens_q=offsets(1, 3), **{name: torch.zeros(2)})
