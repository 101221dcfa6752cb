"""Block masks: every pattern against its definition, pair by pair."""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from tiers import sampled
from torch import Tensor

from fastattention import sparse
from unit.refusals import Refusal, assert_refused, refusals, refused

LENGTHS = st.integers(1, 500)
BLOCK_SIZES = st.sampled_from([(64, 64), (64, 128), (128, 64), (192, 128)])
# Blocks are small compared with most of these lengths, and some are not multiples of a block.
SHAPES = [(300, 300), (129, 400), (400, 129), (1, 257), (64, 128), (70, 1)]
IDS = [f"{seqlen_q}x{seqlen_k}" for seqlen_q, seqlen_k in SHAPES]


def diagonal_distance(seqlen_q: int, seqlen_k: int) -> Tensor:
    """(seqlen_q, seqlen_k): how far each key is beyond the diagonal of each query."""
    return torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)


def blocks_with_a_pair(pairs: Tensor, block_size: tuple[int, int]) -> Tensor:
    """Bool (..., rows, columns): blocks with a pair of bool (..., seqlen_q, seqlen_k)."""
    block_m, block_n = block_size
    padded = F.pad(pairs, (0, -pairs.shape[-1] % block_n, 0, -pairs.shape[-2] % block_m))
    return padded.unflatten(-1, (-1, block_n)).unflatten(-3, (-1, block_m)).any(-1).any(-2)


def as_pairs(block_mask: Tensor, seqlen_q: int, seqlen_k: int, block_size: tuple[int, int]) -> Tensor:
    """Bool (..., seqlen_q, seqlen_k): the pairs in kept blocks."""
    rows, columns = torch.arange(seqlen_q) // block_size[0], torch.arange(seqlen_k) // block_size[1]
    return block_mask[..., rows, :][..., columns]


def tensors(seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """q and k with scores that differ from block to block: 2 sequences, 4 heads on 2."""
    return 3 * torch.randn(2, seqlen_q, 4, 16), 3 * torch.randn(2, seqlen_k, 2, 16)


@given(
    LENGTHS, LENGTHS, BLOCK_SIZES, st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=3)
)
@example(128, 129, (64, 64), [(0, 1)])  # a block with a pair only in its corner
def test_streaming_keeps_blocks_with_a_wanted_pair_and_no_others(
    seqlen_q: int, seqlen_k: int, block_size: tuple[int, int], heads: list[tuple[int, int]]
) -> None:
    sink_tokens, local_tokens = zip(*heads, strict=True)
    kept = sparse.streaming(
        len(heads), seqlen_q, seqlen_k, sink_tokens=sink_tokens, local_tokens=local_tokens, block_size=block_size
    )
    beyond, keys = diagonal_distance(seqlen_q, seqlen_k), torch.arange(seqlen_k)
    wanted = [(beyond <= 0) & ((keys < sinks) | (beyond > -local)) for sinks, local in heads]
    assert torch.equal(kept, blocks_with_a_pair(torch.stack(wanted), block_size)[None])


@pytest.mark.parametrize("many", [10**6, 2**63 - 1, 2**80], ids=["million", "int64", "huge"])
def test_more_tokens_than_there_are_mean_all_of_them(many: int) -> None:
    causal = blocks_with_a_pair(diagonal_distance(300, 500) <= 0, (128, 128))[None, None]
    assert torch.equal(sparse.streaming(1, 300, 500, sink_tokens=0, local_tokens=many), causal)
    assert torch.equal(sparse.streaming(1, 300, 500, sink_tokens=many, local_tokens=0), causal)


def test_one_number_is_that_of_every_head() -> None:
    expected = sparse.streaming(2, 300, 500, sink_tokens=[5, 5], local_tokens=[70, 70])
    assert torch.equal(sparse.streaming(2, 300, 500, sink_tokens=5, local_tokens=torch.tensor(70)), expected)
    assert torch.equal(sparse.streaming(2, 300, 500, sink_tokens=torch.tensor([5, 5]), local_tokens=70), expected)


@given(
    LENGTHS,
    LENGTHS,
    BLOCK_SIZES,
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 4)), min_size=1, max_size=3),
)
def test_strided_keeps_the_window_and_columns_up_to_the_diagonal(
    seqlen_q: int, seqlen_k: int, block_size: tuple[int, int], stride: int, heads: list[tuple[int, int]]
) -> None:
    heads = [(local, offset % stride) for local, offset in heads]
    kept = sparse.strided(
        len(heads), seqlen_q, seqlen_k, stride=stride, local_tokens=[local for local, _ in heads],
        offset=[offset for _, offset in heads], block_size=block_size,
    )  # fmt: skip
    beyond, column = diagonal_distance(seqlen_q, seqlen_k), torch.arange(seqlen_k) // block_size[1]
    wanted = [(beyond <= 0) & ((beyond > -local) | (column % stride == offset)) for local, offset in heads]
    assert torch.equal(kept, blocks_with_a_pair(torch.stack(wanted), block_size)[None])


@pytest.mark.parametrize(
    ("make", "options"),
    [(sparse.streaming, {"sink_tokens": [1, 2]}), (sparse.strided, {"stride": 2, "offset": [0, 1]})],
    ids=["streaming", "strided"],
)
def test_patterns_are_made_where_they_are_asked_for(make: Any, options: dict[str, Any]) -> None:
    assert make(2, 100, 100, local_tokens=3, **options, device="meta").device.type == "meta"
    made = make(2, 100, 100, local_tokens=3, **options)
    assert (made.device.type, made.dtype) == ("cpu", torch.bool)


def estimated_shares(q: Tensor, k: Tensor, causal: bool, block_size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(shares, visible, always kept) in float64, from the definition: one mean after the other."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    q_means = torch.stack([part.double().mean(1) for part in q.split(block_size[0], dim=1)], dim=2)
    k_means = torch.stack([part.double().mean(1) for part in k.split(block_size[1], dim=1)], dim=2)
    scores = q_means @ k_means.transpose(-2, -1) * q.shape[-1] ** -0.5
    beyond = diagonal_distance(q.shape[1], k.shape[1])
    visible = blocks_with_a_pair(beyond <= 0 if causal else torch.ones_like(beyond, dtype=torch.bool), block_size)
    always = blocks_with_a_pair((beyond == 0) | (torch.arange(k.shape[1]) == 0), block_size) & visible
    return scores.masked_fill(~visible, -math.inf).softmax(-1), visible, always


@sampled
@pytest.mark.parametrize("block_size", [(64, 64), (64, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SHAPES, ids=IDS)
def test_top_p_keeps_the_fewest_blocks_whose_shares_reach_p(
    seqlen_q: int, seqlen_k: int, causal: bool, block_size: tuple[int, int]
) -> None:
    q, k = tensors(seqlen_q, seqlen_k)
    q[:, ::64] *= 40  # so that the means of blocks differ
    k[:, ::64] *= 40
    shares, visible, always = estimated_shares(q, k, causal, block_size)
    for p in (0.05, 0.5, 0.9, 0.999):
        kept = sparse.top_p_blocks(q, k, p, causal=causal, block_size=block_size)
        for index in itertools.product(*map(range, shares.shape[:3])):
            expected = always[index[2]].clone()
            reached = 0.0
            for column in shares[index].argsort(descending=True).tolist():
                if not visible[index[2], column] or reached >= p:
                    break
                expected[column] = True
                reached += shares[index][column].item()
            assert torch.equal(kept[index], expected), (p, index)


def test_top_p_tells_blocks_apart() -> None:
    """If nothing were dropped, a mask that keeps everything would pass the test above."""
    q, k = torch.zeros(1, 512, 4, 16), torch.zeros(1, 512, 2, 16)
    q[:, 320:384, 3, 0] = 10
    k[:, 128:192, 1, 0] = 10
    kept = sparse.top_p_blocks(q, k, 0.9, block_size=64)
    assert kept[0, 3, 5].nonzero().flatten().tolist() == [0, 2, 5]
    assert kept[0, :3, 5].sum(-1).tolist() == [8, 8, 8]


def test_top_p_of_equal_shares_takes_the_earliest() -> None:
    q, k = torch.zeros(1, 64, 1, 8), torch.zeros(1, 512, 1, 8)
    for p, columns in ((0.5, [0, 1, 2, 3, 7]), (0.51, [0, 1, 2, 3, 4, 7])):
        kept = sparse.top_p_blocks(q, k, p, block_size=64)
        assert kept[0, 0, 0].nonzero().flatten().tolist() == columns


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_top_p_of_one_keeps_every_block(causal: bool) -> None:
    q, k = tensors(500, 700)
    q[:, ::64] *= 1000  # so that most shares are rounded to 0
    _, visible, _ = estimated_shares(q, k, causal, (64, 64))
    assert torch.equal(sparse.top_p_blocks(q, k, 1, causal=causal, block_size=64), visible.expand(2, 4, -1, -1))


def test_top_p_keeps_no_block_of_queries_that_see_no_key() -> None:
    q, k = tensors(500, 100)
    for p in (0.5, 1.0):
        kept = sparse.top_p_blocks(q, k, p, causal=True, block_size=128)
        assert kept[:, :, 3:].all()
        assert not kept[:, :, :3].any()


@pytest.mark.parametrize("what", ["nan", "inf"])
def test_top_p_keeps_all_blocks_where_a_share_is_nan(what: str) -> None:
    q, k = tensors(200, 300)
    q[0, 70, 1] = float(what)
    kept = sparse.top_p_blocks(q, k, 0.1, block_size=64)
    assert kept[0, 1, 1].all()
    assert not kept[0, 0, 1].all()
    assert not kept[0, 1, 2].all()


def test_top_p_scales_scores() -> None:
    q, k = tensors(300, 300)
    expected = sparse.top_p_blocks(q * 6, k, 0.7, block_size=64)
    assert torch.equal(sparse.top_p_blocks(q, k, 0.7, softmax_scale=1.5, block_size=64), expected)
    assert not torch.equal(sparse.top_p_blocks(q, k, 0.7, block_size=64), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_estimates_and_recall_compute_in_float32(dtype: torch.dtype) -> None:
    q, k = (x.to(dtype) for x in tensors(300, 400))
    expected = sparse.top_p_blocks(q.float(), k.float(), 0.6, block_size=64)
    share = sparse.recall(q.float(), k.float(), expected, block_size=64)
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            assert torch.equal(sparse.top_p_blocks(q, k, 0.6, block_size=64), expected)
            assert torch.equal(sparse.recall(q, k, expected, block_size=64), share)


def test_neither_strides_nor_gradients_matter() -> None:
    q, k = (x.requires_grad_() for x in tensors(300, 400))
    strided_q, strided_k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    kept = sparse.top_p_blocks(q, k, 0.6, block_size=64)
    assert torch.equal(sparse.top_p_blocks(strided_q, strided_k, 0.6, block_size=64), kept)
    share = sparse.recall(strided_q, strided_k, kept, block_size=64)
    torch.testing.assert_close(share, sparse.recall(q, k, kept, block_size=64))
    assert not share.requires_grad


def exact_recall(q: Tensor, k: Tensor, pairs: Tensor, causal: bool) -> Tensor:
    """(batch_size, nheads), in float64, from the whole score matrix."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(diagonal_distance(q.shape[1], k.shape[1]) > 0, -math.inf)
    sees = (scores > -math.inf).any(-1)
    shares = scores.masked_fill(~sees[..., None], 0.0).softmax(-1).mul(pairs).sum(-1)
    return (shares * sees).sum(-1) / sees.sum(-1)


@pytest.mark.parametrize("sizes", [(2, 4), (1, 4), (2, 1), (1, 1)], ids=["2x4", "1x4", "2x1", "1x1"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SHAPES, ids=IDS)
def test_recall_is_the_share_of_the_softmax_in_kept_blocks(
    seqlen_q: int, seqlen_k: int, causal: bool, sizes: tuple[int, int]
) -> None:
    q, k = tensors(seqlen_q, seqlen_k)
    block_mask = torch.rand(*sizes, -(-seqlen_q // 64), -(-seqlen_k // 128)) < 0.5
    expected = exact_recall(q, k, as_pairs(block_mask, seqlen_q, seqlen_k, (64, 128)), causal)
    share = sparse.recall(q, k, block_mask, causal=causal, block_size=(64, 128))
    assert share.dtype is torch.float32
    torch.testing.assert_close(share.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2000], ids=["row", "rows"])
def test_recall_of_chunks_of_rows_is_that_of_all(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = tensors(100, 70)
    block_mask = torch.tensor([[True, False], [False, True]]).expand(1, 1, 2, 2)
    expected = sparse.recall(q, k, block_mask, causal=True, block_size=64)
    monkeypatch.setattr(sparse, "_CHUNK_ELEMENTS", chunk)
    torch.testing.assert_close(sparse.recall(q, k, block_mask, causal=True, block_size=64), expected)


def test_recall_of_top_p_reaches_p_where_means_say_all() -> None:
    """Tokens of a block are equal, so estimated shares are exact up to the number of tokens in a block."""
    q, k = (x.repeat_interleave(64, dim=1) for x in tensors(5, 7))
    for p in (0.3, 0.8, 0.99):
        kept = sparse.top_p_blocks(q, k, p, block_size=64)
        assert sparse.recall(q, k, kept, block_size=64).min() >= p - 1e-5


def test_without_keys_nothing_is_kept_and_nothing_is_lost() -> None:
    q, k = tensors(100, 0)
    kept = sparse.top_p_blocks(q, k, 0.5)
    assert kept.shape == (2, 4, 1, 0)
    assert sparse.streaming(3, 100, 0, sink_tokens=1, local_tokens=1).shape == (1, 3, 1, 0)
    assert sparse.strided(3, 0, 100, stride=1, local_tokens=1).shape == (1, 3, 0, 1)
    for causal in (False, True):
        assert (sparse.recall(q, k, kept, causal=causal) == 1.0).all()
        assert sparse.density(kept, seqlen_q=100, seqlen_k=0, causal=causal) == 1.0
    assert sparse.top_p_blocks(*tensors(0, 100), 0.5).shape == (2, 4, 0, 1)
    assert (sparse.recall(*tensors(0, 100), torch.ones(1, 1, 0, 1, dtype=torch.bool)) == 1.0).all()


@given(LENGTHS, LENGTHS, BLOCK_SIZES, st.booleans(), st.integers(0, 2**16))
@example(128, 129, (64, 64), True, 0)  # a block with a pair only in its corner
def test_density_counts_blocks_that_the_causal_mask_leaves(
    seqlen_q: int, seqlen_k: int, block_size: tuple[int, int], causal: bool, seed: int
) -> None:
    beyond = diagonal_distance(seqlen_q, seqlen_k)
    visible = blocks_with_a_pair(beyond <= 0 if causal else torch.ones_like(beyond, dtype=torch.bool), block_size)
    block_mask = torch.rand(2, 3, *visible.shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    found = sparse.density(block_mask, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, block_size=block_size)
    expected = (block_mask & visible).sum().item() / (6 * visible.sum().item())
    assert found == pytest.approx(expected)


PATTERN = {"nheads": 2, "seqlen_q": 100, "seqlen_k": 200, "local_tokens": 3}
BAD_PATTERNS = (
    refused("nheads=0", "at least 1", nheads=0),
    refused("nheads must be", "at least 1", "2.0", nheads=2.0),
    refused("seqlen_q=-1", "at least 0", seqlen_q=-1),
    refused("seqlen_k=-1", "at least 0", seqlen_k=-1),
    refused("local_tokens=-1", "at least 0", local_tokens=[3, -1]),
    refused("local_tokens has 3 numbers", "each of 2", local_tokens=[3, 3, 3]),
    refused("local_tokens must be an integer", "0.5", local_tokens=0.5),
    refused("local_tokens must be an integer", "[1, 1]", local_tokens=torch.ones(2, 2).long()),
    refused("block_size", "(64, 100)", "multiples of 64", block_size=(64, 100)),
    refused("block_size", "multiples of 64", block_size=0),
)


@refusals(
    *BAD_PATTERNS,
    refused("sink_tokens=-1", "at least 0", sink_tokens=-1),
    refused("sink_tokens has 3 numbers", "each of 2", sink_tokens=torch.ones(3).long()),
    refused("sink_tokens must be an integer", "None", sink_tokens=None),
)
def test_wrong_streaming_is_refused(refusal: Refusal) -> None:
    assert_refused(lambda: sparse.streaming(**(PATTERN | {"sink_tokens": 1} | refusal.changes)), refusal)


@refusals(
    *BAD_PATTERNS,
    refused("stride=0", "at least 1", stride=0),
    refused("offset=4", "from 0 to 3", offset=4),
    refused("offset=-1", "from 0 to 3", offset=[0, -1]),
    refused("offset has 1 numbers", "each of 2", offset=[0]),
)
def test_wrong_strides_are_refused(refusal: Refusal) -> None:
    assert_refused(lambda: sparse.strided(**(PATTERN | {"stride": 4} | refusal.changes)), refusal)


Q, K = torch.zeros(2, 100, 4, 8), torch.zeros(2, 200, 2, 8)
MASK = torch.ones(2, 4, 1, 2, dtype=torch.bool)
BAD_SCORES = (
    refused("q must be a torch.Tensor", "NoneType", q=None),
    refused("q must be (batch_size, seqlen_q, nheads, headdim)", "(100, 4, 8)", q=Q[0]),
    refused("k must be (batch_size, seqlen_k, nheads_k, headdim)", "(200, 2, 8)", k=K[0]),
    refused("q must be floating point", "int64", q=Q.long(), k=K.long()),
    refused("k has dtype torch.float16", "torch.float32", k=K.half()),
    refused("k is on meta", "cpu", k=K.to("meta")),
    refused("k has batch_size 1", "q has 2", k=K[:1]),
    refused("k has headdim 4", "q has 8", k=K[..., :4]),
    refused("headdim=0", "at least 1", q=Q[..., :0], k=K[..., :0]),
    refused("nheads=3", "nheads_k=2", q=Q[:, :, :3]),
    refused("nheads=4", "nheads_k=0", k=K[:, :, :0]),
    refused("softmax_scale=nan", "finite", softmax_scale=math.nan),
    refused("softmax_scale must be a number", "'1'", softmax_scale="1"),
    refused("causal must be True or False", "2", causal=2),
    refused("block_size", "(32, 64)", "multiples of 64", block_size=(32, 64)),
)


@refusals(
    *BAD_SCORES,
    refused("p=0", "above 0 and at most 1", p=0),
    refused("p=1.01", "above 0 and at most 1", p=1.01),
    refused("p=nan", "above 0 and at most 1", p=math.nan),
    refused("p='0.5'", "above 0 and at most 1", p="0.5"),
)
def test_wrong_estimates_are_refused(refusal: Refusal) -> None:
    assert_refused(lambda: sparse.top_p_blocks(**({"q": Q, "k": K, "p": 0.5} | refusal.changes)), refusal)


BAD_MASKS = (
    refused("block_mask must be a torch.Tensor", "NoneType", block_mask=None),
    refused("block_mask must be bool", "int32", block_mask=MASK.int()),
    refused("block_mask must be", "1, 2)", "(4, 1, 2)", block_mask=MASK[0]),
    refused("block_mask must be", "1, 2)", "(2, 4, 2, 2)", block_mask=MASK.expand(-1, -1, 2, -1)),
    refused("block_mask must be", "1, 2)", "(2, 4, 1, 1)", block_mask=MASK[..., :1]),
    refused("block_mask must be", "2, 4)", "(2, 4, 1, 2)", block_size=64),
)


@refusals(
    *BAD_SCORES,
    *BAD_MASKS,
    refused("block_mask must be", "(2 or 1, 4 or 1, 1, 2)", "(4, 4, 1, 2)", block_mask=MASK.repeat(2, 1, 1, 1)),
    refused("block_mask must be", "(2 or 1, 4 or 1, 1, 2)", "(2, 2, 1, 2)", block_mask=MASK[:, :2]),
    refused("block_mask is on meta", "cpu", block_mask=MASK.to("meta")),
)
def test_wrong_recalls_are_refused(refusal: Refusal) -> None:
    assert_refused(lambda: sparse.recall(**({"q": Q, "k": K, "block_mask": MASK} | refusal.changes)), refusal)


@refusals(
    *BAD_MASKS,
    refused("seqlen_q=-5", "at least 0", seqlen_q=-5),
    refused("causal must be True or False", "'no'", causal="no"),
    refused("block_size", "65", "multiples of 64", block_size=65),
)
def test_wrong_densities_are_refused(refusal: Refusal) -> None:
    arguments = {"block_mask": MASK, "seqlen_q": 100, "seqlen_k": 200} | refusal.changes
    assert_refused(lambda: sparse.density(**arguments), refusal)
