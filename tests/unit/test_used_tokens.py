"""seqused_q and seqused_k of varlen calls: what they compute beside the float64 reference, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastattention import explain, fast_attn_varlen_func, fast_attn_varlen_kvpacked_func
from fastattention.attention.problem import AttentionOutput
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import Options, prepare_dense
from unit.refusals import Refusal, assert_refused, refusals, refused
from unit.samples import int32

TOKENS_Q, TOKENS_K = (7, 40, 0, 3, 66, 17), (9, 33, 5, 0, 130, 64)
USED_Q, USED_K = (5, 40, 0, 2, 0, 17), (9, 20, 3, 0, 77, 0)
NHEADS, NHEADS_K, HEADDIM, HEADDIM_V = 4, 2, 16, 24
BACKENDS = ("cpu", "sdpa")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return int32(0, *lengths).cumsum(0, dtype=torch.int32)


def poisoned(tensor: Tensor, tokens: tuple[int, ...], used: tuple[int, ...]) -> Tensor:
    """`tensor`, NaN in the unused tokens of each sequence."""
    for rows, count in zip(tensor.split(tokens), used, strict=True):
        rows[count:] = torch.nan
    return tensor


def arguments(used_q: tuple[int, ...] | None, used_k: tuple[int, ...] | None) -> dict[str, Any]:
    """A call with NaN in all unused tokens."""
    q = poisoned(draw(sum(TOKENS_Q), NHEADS, HEADDIM), TOKENS_Q, used_q or TOKENS_Q)
    k, v = (
        poisoned(draw(sum(TOKENS_K), NHEADS_K, size, seed=size), TOKENS_K, used_k or TOKENS_K)
        for size in (HEADDIM, HEADDIM_V)
    )
    return {
        "q": q, "k": k, "v": v, "cu_seqlens_q": offsets(TOKENS_Q), "cu_seqlens_k": offsets(TOKENS_K),
        "max_seqlen_q": max(TOKENS_Q), "max_seqlen_k": max(TOKENS_K),
        "seqused_q": None if used_q is None else int32(*used_q),
        "seqused_k": None if used_k is None else int32(*used_k),
    }  # fmt: skip


def in_pages(call: dict[str, Any], page_block_size: int) -> dict[str, Any]:
    """The same call with keys and values in pages. No cu_seqlens_k says how long sequences are."""
    width = -(-max(TOKENS_K) // page_block_size)
    table = torch.randperm(len(TOKENS_K) * width, generator=torch.Generator().manual_seed(0)).view(len(TOKENS_K), width)
    pages = {}
    for name in ("k", "v"):
        memory = torch.full((table.numel() * page_block_size, *call[name].shape[1:]), torch.nan)
        for rows, row in zip(call[name].split(TOKENS_K), table, strict=True):
            places = (row[:, None] * page_block_size + torch.arange(page_block_size)).flatten()
            memory[places[: len(rows)]] = rows
        pages[name] = memory.unflatten(0, (-1, page_block_size))
    lengths = {name: tensor for name, tensor in call.items() if name != "cu_seqlens_k"}
    return lengths | pages | {"block_table": table.int()}


def reference(call: dict[str, Any], options: Options, **scores: Any) -> AttentionOutput:
    """out and lse in float64, one sequence after another, from used tokens alone."""
    used_q, used_k = (
        tokens if call[name] is None else call[name].tolist()
        for name, tokens in (("seqused_q", TOKENS_Q), ("seqused_k", TOKENS_K))
    )
    outs, lses = [], []
    rows = zip(*(call[name].split(tokens) for name, tokens in (("q", TOKENS_Q), ("k", TOKENS_K), ("v", TOKENS_K))),
               strict=True)  # fmt: skip
    for index, (q, k, v) in enumerate(rows):
        one = (q[None, : used_q[index]], k[None, : used_k[index]], v[None, : used_k[index]])
        if "attn_bias" in scores:
            first = sum(TOKENS_Q[:index])
            own = scores | {"attn_bias": call["attn_bias"][:, first : first + used_q[index], : used_k[index]]}
        else:
            own = {name: tensor[index : index + 1] for name, tensor in scores.items()}
        found = reference_attention(*prepare_dense(*one, options, **own))
        assert found.lse is not None
        out, lse = q.new_zeros(len(q), NHEADS, HEADDIM_V, dtype=torch.float64), torch.full((NHEADS, len(q)), -torch.inf)
        out[: used_q[index]], lse[:, : used_q[index]] = found.out[0], found.lse[0].float()
        outs.append(out)
        lses.append(lse)
    return AttentionOutput(torch.cat(outs), torch.cat(lses, 1))


def assert_is(found: tuple[Tensor, Tensor], wanted: AttentionOutput) -> None:
    torch.testing.assert_close(found[0].double(), wanted.out, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(found[1], wanted.lse, atol=3e-6, rtol=1e-5)


USED = [(USED_Q, None), (None, USED_K), (USED_Q, USED_K)]
IDS = ["queries", "keys", "both"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("used_q", "used_k"), USED, ids=IDS)
def test_unused_tokens_do_not_count(
    used_q: tuple[int, ...] | None, used_k: tuple[int, ...] | None, backend: str
) -> None:
    call = arguments(used_q, used_k)
    found = fast_attn_varlen_func(**call, window_size=(30, 2), return_lse=True, backend=backend)
    assert_is(found, reference(call, Options(window_left=30, window_right=2)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_block_size", [1, 7, 64])
@pytest.mark.parametrize("used_q", [None, USED_Q], ids=["all queries", "used queries"])
def test_used_keys_are_the_lengths_of_pages(used_q: tuple[int, ...] | None, page_block_size: int, backend: str) -> None:
    call = arguments(used_q, USED_K)
    found = fast_attn_varlen_func(**in_pages(call, page_block_size), causal=True, return_lse=True, backend=backend)
    assert_is(found, reference(call, Options(causal=True)))


@pytest.mark.parametrize("score", ["alibi_slopes", "attn_bias", "block_mask"])
def test_scores_belong_to_the_given_sequences(score: str) -> None:
    call = arguments(USED_Q, USED_K)
    given = {
        "alibi_slopes": draw(len(TOKENS_Q), NHEADS),
        "attn_bias": draw(NHEADS, sum(TOKENS_Q), max(TOKENS_K)),
        "block_mask": draw(len(TOKENS_Q), NHEADS, 2, 3) > 0,
    }[score]
    options = Options(causal=True)
    if score == "block_mask":
        found = fast_attn_varlen_func(**call, causal=True, block_mask=given, block_size=64, return_lse=True)
        wanted = [_with_blocks(call, options, given)]
    else:
        found = fast_attn_varlen_func(**call, causal=True, **{score: given}, return_lse=True)  # type: ignore[arg-type]
        wanted = [reference(call | {score: given}, options, **{score: given})]
    assert_is(found, wanted[0])


def _with_blocks(call: dict[str, Any], options: Options, mask: Tensor) -> AttentionOutput:
    """`reference` with a block mask, as a bias of -inf."""
    bias = torch.zeros(NHEADS, sum(TOKENS_Q), max(TOKENS_K))
    for rows, kept, tokens in zip(bias.split(TOKENS_Q, 1), mask, TOKENS_Q, strict=True):
        by_token = kept.repeat_interleave(64, 1)[:, :tokens].repeat_interleave(64, 2)[..., : max(TOKENS_K)]
        rows.masked_fill_(~by_token, -torch.inf)
    return reference(call | {"attn_bias": bias}, options, attn_bias=bias)


def test_unused_queries_have_the_lse_of_their_sinks() -> None:
    sinks = draw(NHEADS)
    _, lse = fast_attn_varlen_func(**arguments(USED_Q, USED_K), sinks=sinks, return_lse=True)
    unused = torch.cat([torch.arange(n) >= used for n, used in zip(TOKENS_Q, USED_Q, strict=True)])
    torch.testing.assert_close(lse[:, unused], sinks[:, None].expand(-1, int(unused.sum())))


@pytest.mark.parametrize("backend", BACKENDS)
def test_unused_tokens_have_gradient_zero(backend: str) -> None:
    call = arguments(USED_Q, USED_K)
    tensors = [call[name].requires_grad_() for name in ("q", "k", "v")]
    weights = draw(sum(TOKENS_Q), NHEADS, HEADDIM_V)
    found = torch.autograd.grad((fast_attn_varlen_func(**call, causal=True, backend=backend) * weights).sum(), tensors)
    wanted = torch.autograd.grad((reference(call, Options(causal=True)).out * weights).sum(), tensors)
    for name, one, other in zip("qkv", found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_dropped_weights_are_those_of_the_given_sequences() -> None:
    call = arguments(USED_Q, USED_K)
    out, _, weights = fast_attn_varlen_func(**call, dropout_p=0.5, return_attn_probs=True, backend="sdpa")
    assert weights is not None
    assert weights.shape == (len(TOKENS_Q), NHEADS, max(TOKENS_Q), max(TOKENS_K))
    kept = weights[1, :, : USED_Q[1], : USED_K[1]].clamp(min=0.0) * 2.0
    values = call["v"].split(TOKENS_K)[1][: USED_K[1]].transpose(0, 1).repeat_interleave(NHEADS // NHEADS_K, 0)
    second = out.split(TOKENS_Q)[1][: USED_Q[1]].transpose(0, 1)
    torch.testing.assert_close(second, kept @ values, atol=1e-5, rtol=1e-5)


def test_packed_forms_take_used_tokens() -> None:
    call = arguments(USED_Q, USED_K) | {"v": draw(sum(TOKENS_K), NHEADS_K, HEADDIM)}
    names = ("q", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    packed = {name: call[name] for name in names}
    out = fast_attn_varlen_kvpacked_func(kv=torch.stack((call["k"], call["v"]), 1), **packed)
    assert torch.equal(out, fast_attn_varlen_func(**call))


def test_used_tokens_under_torch_compile() -> None:
    call = arguments(USED_Q, USED_K)
    compiled = torch.compile(fast_attn_varlen_func, backend="eager", fullgraph=True)
    assert torch.equal(compiled(**call, causal=True), fast_attn_varlen_func(**call, causal=True))


def test_explain_takes_used_tokens() -> None:
    assert explain(**arguments(USED_Q, USED_K), function=fast_attn_varlen_func, backend="cpu").backend == "cpu"


def small() -> dict[str, Any]:
    """A call that is accepted: sequences of 2 and 3 queries and of 4 and 3 keys."""
    tensors = {"q": torch.zeros(5, 4, 16), "k": torch.zeros(7, 2, 16), "v": torch.zeros(7, 2, 24)}
    used = {"seqused_q": int32(2, 1), "seqused_k": int32(0, 3)}
    return tensors | {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k": int32(0, 4, 7)} | used


@refusals(
    refused("seqused_q must be int32", "int64", seqused_q=int32(2, 1).long()),
    refused("seqused_k must be (batch_size) = (2)", "(3,)", seqused_k=int32(0, 3, 1)),
    refused("seqused_k must be a torch.Tensor", "list", seqused_k=[0, 3]),
    refused("seqused_q is on meta", "same device", seqused_q=int32(2, 1).to("meta")),
    refused("seqused_q[1]=4 must be 0 to 3", seqused_q=int32(2, 4)),
    refused("seqused_k[0]=-1 must be 0 to 4", seqused_k=int32(-1, 3)),
    refused("cu_seqlens_k must be a torch.Tensor", "NoneType", cu_seqlens_k=None),
    refused("cu_seqlens_k must start at 0", "got 1", cu_seqlens_k=int32(1, 4, 7)),
    refused("cu_seqlens_q must end at", "tokens, 5", "got 4", cu_seqlens_q=int32(0, 2, 4)),
    refused("k must be (total_k, nheads_k, headdim)", "(1, 7, 2, 16)", k=torch.zeros(1, 7, 2, 16)),
)
def test_wrong_used_tokens_are_refused(refusal: Refusal) -> None:
    assert fast_attn_varlen_func(**small()).shape == (5, 4, 24)
    assert_refused(lambda: fast_attn_varlen_func(**small() | refusal.changes), refusal)


@refusals(
    refused("seqused_k[1]=5 must be 0 to 4", seqused_k=int32(0, 5)),
    refused("block_table names page 9 for sequence 1", block_table=int32([0, 1], [9, 2])),
    refused("cu_seqlens_k must be a torch.Tensor", "NoneType", seqused_k=None),
    refused("cu_seqlens_k must be (batch_size + 1) = (3)", "(2,)", cu_seqlens_k=int32(0, 7)),
    refused("k must be (num_blocks, page_block_size, nheads_k, headdim)", "(7, 2, 16)", k=torch.zeros(7, 2, 16)),
)
def test_wrong_used_tokens_in_pages_are_refused(refusal: Refusal) -> None:
    pages = {"k": torch.zeros(4, 2, 2, 16), "v": torch.zeros(4, 2, 2, 24), "block_table": int32([0, 1], [3, 2])}
    changes = pages | {"cu_seqlens_k": None} | refusal.changes
    assert_refused(lambda: fast_attn_varlen_func(**small() | changes), refusal)
