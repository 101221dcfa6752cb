"""Attention to selected keys and to latents, beside float64 attention with a dense mask of the same keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattention import (
    ArgumentError,
    UnsupportedError,
    explain,
    fast_attn_func,
    fast_attn_latent_func,
    fast_attn_selected_func,
)
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import Options, prepare_dense
from fastattention.testing.oracle import LSE_FLOOR, OUT_FLOOR
from unit.samples import int32, quantized_selection

BACKENDS = ["cpu", "sdpa", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALE = 0.11
# Queries and keys of each sequence.
LENGTHS = {"prompts": [(7, 40), (5, 9), (1, 1), (4, 4)], "steps": [(1, 50), (1, 3), (1, 17)]}
HEADS = {
    "grouped": (4, 2, 32, 24),
    "latents": (6, 1, 80, 64),
    "latents-576": (17, 1, 576, 512),
}  # nheads, nheads_k, headdim, headdim_v
Sequences = list[tuple[Tensor, Tensor, Tensor, Tensor]]  # q, k, v, indices of each


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def draw(lengths: str, heads: str, dtype: torch.dtype, topk: int = 11) -> Sequences:
    """Keys in any order, a few missing; the first query of each sequence has none."""
    nheads, nheads_k, headdim, headdim_v = HEADS[heads]
    drawn = []
    for number, (seqlen_q, seqlen_k) in enumerate(LENGTHS[lengths]):
        q = normal(seqlen_q, nheads, headdim, seed=number).to(dtype)
        k = normal(seqlen_k, nheads_k, headdim, seed=number + 10).to(dtype)
        v = k[..., :headdim_v] if nheads_k == 1 else normal(seqlen_k, nheads_k, headdim_v, seed=number).to(dtype)
        order = normal(seqlen_q, max(seqlen_k, topk), seed=number + 20).argsort(dim=1)[:, :topk].int()
        order[(order >= seqlen_k) | (normal(seqlen_q, topk, seed=number + 30) > 1.0)] = -1
        if number == 0:
            order[0] = -1
        drawn.append((q, k, v, order))
    return drawn


def wanted(
    sequence: tuple[Tensor, Tensor, Tensor, Tensor], causal: bool, sinks: Tensor | None, compute: Any
) -> tuple[Tensor, Tensor]:
    q, k, v, indices = (x[None] for x in sequence)
    hidden = torch.full((*indices.shape[:2], k.shape[1] + 1), -math.inf)
    hidden.scatter_(2, torch.where(indices < 0, k.shape[1], indices).long(), 0.0)
    options = Options(SCALE, causal, return_lse=True)
    problem, inputs = prepare_dense(q, k, v, options, attn_bias=hidden[:, None, :, :-1].contiguous(), sinks=sinks)
    out, lse, _ = reference_attention(problem, inputs, compute)
    assert lse is not None
    return out[0], lse[0]


def check(sequences: Sequences, found: list[tuple[Tensor, Tensor]], causal: bool, sinks: Tensor | None) -> None:
    """Errors are at most twice those of torch with the dense mask, beside a rounding of results and one of scores."""
    dtype, headdim = sequences[0][0].dtype, sequences[0][0].shape[-1]
    of_scores = SCALE * (headdim + 4 * headdim**0.5) * torch.finfo(torch.float32).eps
    for sequence, results in zip(sequences, found, strict=True):
        exact, usual = (wanted(sequence, causal, sinks, compute) for compute in (torch.float64, None))
        for result, right, other, floor in zip(results, exact, usual, (OUT_FLOOR, LSE_FLOOR), strict=True):
            assert result.shape == right.shape
            finite = right.isfinite()
            assert torch.equal(result[~finite].double(), right[~finite].double())
            errors = [torch.where(finite, x.double() - right, 0.0).abs().max() for x in (result, other)]
            scale = max(1.0, float(right.masked_fill(~finite, 0.0).abs().max()))
            assert errors[0] <= 2 * errors[1] + scale * (floor[dtype] + of_scores)


def offsets(lengths: list[int]) -> Tensor:
    return int32(0, *lengths).cumsum(0, dtype=torch.int32)


def varlen(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat(tensors), offsets([len(x) for x in tensors])


def in_rows(tensors: list[Tensor], width: int, heads_first: bool = False) -> Tensor:
    """Rows of a cache with NaN behind each sequence, and beyond `width`."""
    _, heads, size = tensors[0].shape
    memory = torch.full((len(tensors), width + 3, heads, size), torch.nan, dtype=tensors[0].dtype)
    if heads_first:
        memory = memory.transpose(1, 2).contiguous().transpose(1, 2)
    for row, x in zip(memory, tensors, strict=True):
        row[: len(x)] = x
    return memory[:, :width]


def in_pages(tensors: list[Tensor], size: int) -> tuple[Tensor, Tensor]:
    """Pages in a random order, with NaN in unused tokens, and the block table."""
    counts = [-(-len(x) // size) for x in tensors]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(0))
    pages = torch.full((len(order), size, *tensors[0].shape[1:]), torch.nan, dtype=tensors[0].dtype)
    table = torch.full((len(tensors), max(counts)), -5, dtype=torch.int32)
    for number, x in enumerate(tensors):
        mine = order[sum(counts[:number]) :][: counts[number]]
        table[number, : len(mine)] = mine
        for page, part in zip(mine, torch.split(x, size), strict=True):
            pages[page, : len(part)] = part
    return pages, table


def keys_in(layout: str, sequences: Sequences) -> dict[str, Any]:
    """Arguments for the keys and values."""
    _, ks, vs, _ = (list(x) for x in zip(*sequences, strict=True))
    used = int32(*(len(k) for k in ks))
    shares_memory = vs[0].shape[1] == 1
    size_v = vs[0].shape[2]
    if layout == "varlen":
        k, cu_seqlens_k = varlen(ks)
        return {"k": k, "v": k[..., :size_v] if shares_memory else torch.cat(vs), "cu_seqlens_k": cu_seqlens_k}
    if layout == "pages":
        (k, table), (v, _) = in_pages(ks, 4), in_pages(vs, 4)
        return {"k": k, "v": k[..., :size_v] if shares_memory else v, "block_table": table, "seqused_k": used}
    width, heads_first = int(used.max()), layout == "heads first"
    k, v = (in_rows(x, width, heads_first) for x in (ks, vs))
    return {"k": k, "v": k[..., :size_v] if shares_memory else v, "seqused_k": used}


def run(sequences: Sequences, layout: str, **others: Any) -> list[tuple[Tensor, Tensor]]:
    """Queries are varlen, or a batch if they have one length."""
    qs, _, _, chosen = (list(x) for x in zip(*sequences, strict=True))
    arguments = keys_in(layout, sequences) | others
    is_batch = len({len(q) for q in qs}) == 1
    if is_batch:
        arguments |= {"q": torch.stack(qs), "indices": torch.stack(chosen)}
    else:
        q, cu_seqlens_q = varlen(qs)
        arguments |= {"q": q, "indices": torch.cat(chosen), "cu_seqlens_q": cu_seqlens_q}
    if others.get("backend") == "cuda":
        arguments = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    out, lse = fast_attn_selected_func(**arguments, softmax_scale=SCALE, return_lse=True)
    assert lse.is_contiguous()
    out, lse = out.cpu(), lse.cpu()
    if is_batch:
        return list(zip(out, lse, strict=True))
    counts = [len(x) for x in qs]
    return list(zip(out.split(counts), lse.split(counts, dim=1), strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("layout", ["rows", "heads first", "varlen", "pages"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_results_are_those_of_a_dense_mask(
    lengths: str, heads: str, layout: str, causal: bool, dtype: torch.dtype, backend: str
) -> None:
    if backend == "cuda" and dtype is torch.float32:
        pytest.skip("cuda serves 16 bits")
    sequences = draw(lengths, heads, dtype)
    check(sequences, run(sequences, layout, causal=causal, backend=backend), causal, None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key_block", [1, 3])
@pytest.mark.parametrize("layout", ["rows", "heads first", "varlen", "pages"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_each_key_head_may_select_keys_or_blocks_of_its_own(
    lengths: str, layout: str, key_block: int, backend: str
) -> None:
    sequences, (nheads, nheads_k, *_) = draw(lengths, "grouped", torch.float16), HEADS["grouped"]
    group = nheads // nheads_k
    of_heads: list[Sequences] = []  # with all keys of the blocks, as calls of one key head
    chosen = []
    for number, (_, k, _, indices) in enumerate(sequences):
        blocks = torch.stack([indices, indices.roll(1, dims=0)], dim=1)  # (seqlen_q, nheads_k, topk)
        if key_block > 1:
            count = -(-len(k) // key_block)
            order = normal(*blocks.shape[:2], count, seed=number + 40).argsort(dim=2).int()
            blocks = torch.where(order % 3 > 0, order, -1)[..., : max(count // 2, 1)]
            blocks = torch.nn.functional.pad(blocks, (0, 20 - blocks.shape[2]), value=-1)
        chosen.append(blocks)
    for head in range(nheads_k):
        keys = []
        for x, (_, k, *_) in zip(chosen, sequences, strict=True):
            expanded = (x[:, head, :, None] * key_block + torch.arange(key_block)).int()
            is_key = (x[:, head, :, None] >= 0) & (expanded < len(k))
            keys.append(torch.where(is_key, expanded, -1).flatten(1))
        heads = slice(head * group, (head + 1) * group)
        of_heads.append(
            [
                (q[:, heads], k[:, head : head + 1], v[:, head : head + 1], x)
                for (q, k, v, _), x in zip(sequences, keys, strict=True)
            ]
        )
    mine = [(q, k, v, x) for (q, k, v, _), x in zip(sequences, chosen, strict=True)]
    found = run(mine, layout, causal=True, backend=backend, key_block=key_block)
    for head, alone in enumerate(of_heads):
        heads = slice(head * group, (head + 1) * group)
        check(alone, [(out[:, heads], lse[heads]) for out, lse in found], True, None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_take_part(backend: str) -> None:
    sequences, sinks = draw("prompts", "grouped", torch.float16), normal(4)
    check(sequences, run(sequences, "rows", sinks=sinks, backend=backend), False, sinks)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_keys_are_selected_too(cache_dtype: torch.dtype, backend: str) -> None:
    call, exact = quantized_selection(cache_dtype)
    if backend == "cuda":
        call = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in call.items()}
    found = fast_attn_selected_func(**call, backend=backend)
    for result, right in zip(found, fast_attn_selected_func(**exact, backend="sdpa"), strict=True):
        torch.testing.assert_close(result.cpu().float(), right, atol=2e-3, rtol=1e-3)


def test_a_topk_above_the_number_of_keys() -> None:
    sequences = draw("steps", "latents", torch.float32, topk=70)
    check(sequences, run(sequences, "rows"), False, None)


# Queries, keys, topk, and the share of indices that is no key.
LATENT_SHAPES = [(1, 592, 128, 0.1), (62, 128, 256, 0.0), (13, 128, 256, 0.7), (5, 300, 64, 1.0)]


@pytest.mark.parametrize("backend", sorted({*BACKENDS} - {"sdpa"}))
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "topk", "missing"), LATENT_SHAPES)
def test_results_are_within_the_limits_of_flashmla(
    seqlen_q: int, seqlen_k: int, topk: int, missing: float, has_sinks: bool, backend: str
) -> None:
    """The limits, kinds of cases and size of numbers of its own tests of sparse attention, in bfloat16."""
    q, k = (normal(n, heads, 576, seed=n).div(10).bfloat16() for n, heads in ((seqlen_q, 16), (seqlen_k, 1)))
    indices = torch.stack([normal(max(topk, seqlen_k), seed=row).argsort()[:topk] for row in range(seqlen_q)]).int()
    hidden = torch.rand(seqlen_q, topk, generator=torch.Generator().manual_seed(topk)) < missing
    sequence = (q, k, k[..., :512], torch.where(hidden | (indices >= seqlen_k), -1, indices))
    sinks = normal(16, seed=3) if has_sinks else None
    ((out, lse),) = run([sequence], "rows", sinks=sinks, backend=backend)
    right, right_lse = wanted(sequence, False, sinks, torch.float64)
    assert (lse == -math.inf).equal(right_lse == -math.inf)
    errors, sizes = (out.double() - right).abs(), right.abs()
    assert ((errors < 8e-4) | (errors < 3.01 / 128 * sizes)).all()
    same = 2 * (out.double() * right).sum() / (out.double().square() + right.square()).sum().clamp_min(1e-30)
    assert missing == 1.0 or 1 - same < 7e-6
    is_key = right_lse.isfinite()
    of_lse = (lse - right_lse).abs()[is_key]
    assert ((of_lse < 1e-6) | (of_lse < 2.01 / 65536 * right_lse.abs()[is_key])).all()
    again = run([sequence], "rows", sinks=sinks, backend=backend)[0]
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)


def test_int64_indices_and_no_indices_at_all() -> None:
    q, k = normal(2, 3, 4, 16), normal(2, 9, 1, 16)
    chosen = torch.arange(9).expand(2, 3, 9)
    torch.testing.assert_close(fast_attn_selected_func(q, k, k, chosen), fast_attn_func(q, k, k))
    out, lse = fast_attn_selected_func(q, k, k, chosen[..., :0].int(), return_lse=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert lse.isneginf().all()


def test_results_repeat_and_compile() -> None:
    q, k = normal(2, 3, 4, 64), normal(2, 30, 1, 64)
    chosen = torch.randint(-1, 30, (2, 3, 8), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    out = fast_attn_selected_func(q, k, k, chosen, causal=True)
    assert torch.equal(out, fast_attn_selected_func(q, k, k, chosen, causal=True))
    compiled: Any = torch.compile(fast_attn_selected_func, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, k, chosen, causal=True), out)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "a key behind the sequence": (
        lambda a: {"indices": a["indices"].clone().fill_(9)},
        "indices name key 9 for query 0",
    ),
    "a negative key": (lambda a: {"indices": a["indices"].clone().fill_(-2)}, "indices name key -2"),
    "a block behind the sequence": (
        lambda a: {"indices": a["indices"].clone().fill_(3), "key_block": 3},
        "indices name block of 3 keys 3 for query 0",
    ),
    "a block without keys": (lambda a: {"key_block": 0}, "key_block=0 must be at least 1"),
    "heads that there are not": (
        lambda a: {"indices": torch.zeros(2, 3, 2, 5, dtype=torch.int32)},
        "with an axis of nheads_k=1 before the last",
    ),
    "sinks of key heads": (
        lambda a: {"indices": torch.zeros(2, 3, 1, 5, dtype=torch.int32), "sinks": torch.zeros(4)},
        "sinks cannot be given",
    ),
    "floats": (lambda a: {"indices": a["indices"].float()}, "indices must be int32 or int64"),
    "too few queries": (lambda a: {"indices": a["indices"][:, :1]}, "indices must be"),
    "no lengths of pages": (lambda a: {"block_table": int32(0).view(1, 1).expand(2, 1)}, "seqused_k must be given"),
    "values of other tokens": (lambda a: {"v": a["v"][:, :5]}, "k and v must hold the same tokens"),
    "lengths of another batch": (lambda a: {"seqused_k": int32(3)}, "seqused_k must be"),
    "keys of another batch": (
        lambda a: {"k": a["k"][:1], "v": a["v"][:1]},
        "keys are those of 1 sequences, and queries of 2",
    ),
    "more tokens than there are": (lambda a: {"seqused_k": int32(3, 10)}, r"seqused_k\[1\]=10 must be 0 to 9"),
    "a negative length": (lambda a: {"seqused_k": int32(-1, 3)}, r"seqused_k\[0\]=-1 must be 0 to 9"),
    "more tokens than pages": (
        lambda a: {"block_table": int32(0, 1).view(2, 1), "seqused_k": int32(9, 10)},
        r"seqused_k\[1\]=10 must be 0 to 9",
    ),
    "pages that are missing": (
        lambda a: {"block_table": int32(0, 2).view(2, 1), "seqused_k": int32(9, 9)},
        "block_table names page 2 for sequence 1",
    ),
    "queries that no sequence has": (
        lambda a: {
            "q": a["q"].flatten(0, 1),
            "indices": a["indices"].flatten(0, 1),
            "cu_seqlens_q": int32(0, 3, 5),
        },
        "cu_seqlens_q must end at the number of tokens, 6",
    ),
    "offsets without elements": (
        lambda a: {"q": a["q"].flatten(0, 1), "indices": a["indices"].flatten(0, 1), "cu_seqlens_q": int32()},
        "cu_seqlens_q must be .*, got no elements",
    ),
    "pages without tokens": (
        lambda a: {
            "k": a["k"][:, :0],
            "v": a["v"][:, :0],
            "block_table": int32(0, 1).view(2, 1),
            "seqused_k": int32(0, 0),
        },
        "with at least one token a page",
    ),
    "offsets of keys that decrease": (
        lambda a: {"k": a["k"].flatten(0, 1), "v": a["v"].flatten(0, 1), "cu_seqlens_k": int32(0, 19, 18)},
        "cu_seqlens_k must not decrease",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(change: Callable[[dict[str, Any]], dict[str, Any]], message: str) -> None:
    arguments = {"q": normal(2, 3, 4, 16), "k": normal(2, 9, 1, 16), "v": normal(2, 9, 1, 16)}
    arguments["indices"] = torch.zeros(2, 3, 5, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=message):
        fast_attn_selected_func(**arguments | change(arguments))


def test_gradients_are_refused_with_a_reason() -> None:
    q, k = normal(1, 3, 4, 16).requires_grad_(), normal(1, 9, 1, 16)
    with pytest.raises(UnsupportedError, match="no backward"):
        fast_attn_selected_func(q, k, k, torch.zeros(1, 3, 2, dtype=torch.int32))


def test_a_call_is_explained() -> None:
    q, k = normal(1, 3, 4, 16), normal(1, 9, 1, 16)
    explanation = explain(q, k, k, torch.zeros(1, 3, 2, dtype=torch.int32), function=fast_attn_selected_func)
    assert explanation.backend == "cpu"


# ---- latents


@pytest.mark.parametrize("chosen", [False, True], ids=["all", "selected"])
@pytest.mark.parametrize("layout", ["rows", "used rows", "varlen", "pages"])
def test_latents_are_one_key_head_whose_values_come_first(layout: str, chosen: bool) -> None:
    nheads, _, headdim, headdim_v = HEADS["latents"]
    lengths = [(3, 12), (3, 12)] if layout in ("rows", "used rows") else [(3, 12), (2, 7)]
    sequences = []
    for number, (seqlen_q, seqlen_k) in enumerate(lengths):
        k = normal(seqlen_k, 1, headdim, seed=number)
        kept = torch.arange(seqlen_k, dtype=torch.int32).expand(seqlen_q, -1)
        kept = torch.where(kept % 3 == 0, kept, -1) if chosen else kept
        sequences.append((normal(seqlen_q, nheads, headdim, seed=number), k, k[..., :headdim_v], kept))
    qs, ks, _, kept_keys = (list(x) for x in zip(*sequences, strict=True))
    arguments: dict[str, Any] = {}
    if layout in ("rows", "used rows"):
        q, latents = torch.stack(qs), in_rows(ks, 12 if layout == "rows" else 15)
        indices = torch.stack(kept_keys)
        if layout == "used rows":
            arguments["seqused_k"] = int32(12, 12)
    else:
        q, arguments["cu_seqlens_q"] = varlen(qs)
        width = max(x.shape[1] for x in kept_keys)
        padding = [torch.nn.functional.pad(x, (0, width - x.shape[1]), value=-1) for x in kept_keys]
        indices = torch.cat(padding)
        if layout == "varlen":
            latents, arguments["cu_seqlens_k"] = varlen(ks)
        else:
            latents, arguments["block_table"] = in_pages(ks, 4)
            arguments["block_table"].clamp_(min=0)
            arguments["seqused_k"] = int32(*(len(k) for k in ks))
    if chosen:
        arguments["indices"] = indices
    out, lse = fast_attn_latent_func(
        q, latents.squeeze(-2), headdim_v, SCALE, causal=True, return_lse=True, **arguments
    )
    if q.dim() == 4:
        found = list(zip(out, lse, strict=True))
    else:
        counts = [len(x) for x in qs]
        found = list(zip(out.split(counts), lse.split(counts, dim=1), strict=True))
    check(sequences, found, True, None)


def test_wrong_arguments_of_latents_are_named() -> None:
    q, latents = normal(1, 3, 4, 16), normal(1, 9, 16)
    for others, message in (
        ((17, SCALE), "headdim_v=17 must be 1 to 16"),
        ((0, SCALE), "headdim_v=0 must be 1 to 16"),
        ((8, None), "softmax_scale must be a number"),
    ):
        with pytest.raises(ArgumentError, match=message):
            fast_attn_latent_func(q, latents, *others)
    with pytest.raises(ArgumentError, match="latents must be"):
        fast_attn_latent_func(q, latents[0], 8, SCALE)
    with pytest.raises(ArgumentError, match="seqused_k must be given with block_table"):
        fast_attn_latent_func(q, latents, 8, SCALE, block_table=int32(0).view(1, 1))
