"""The sdpa backend: both of its paths, with chunks of any size, against the reference."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from conformance.rows_behind import check_rows_behind
from tiers import sampled
from torch import Tensor

from fastattention import fast_attn_func, fast_attn_varlen_func
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.problem import AttentionOutput, Inputs, Problem
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import KvCacheArguments, Options, prepare_dense, prepare_kvcache, prepare_varlen
from fastattention.backends.sdpa import backend as sdpa_backend
from fastattention.backends.sdpa import fused, gpu_kernels, masks, parts
from unit.samples import int32


def qkv(seqlen_q: int = 37, seqlen_k: int = 53) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, seqlen_q, 4, 16), torch.randn(2, seqlen_k, 2, 16), torch.randn(2, seqlen_k, 2, 16)


def serve(problem: Problem, inputs: Inputs) -> AttentionOutput:
    return ATTENTION_BACKENDS.get("sdpa").forward(problem, inputs)


def assert_matches_reference(problem: Problem, inputs: Inputs) -> None:
    result = serve(problem, inputs)
    expected = reference_attention(problem, inputs)
    torch.testing.assert_close(result.out, expected.out.to(problem.dtype))
    if problem.return_lse:
        torch.testing.assert_close(result.lse, expected.lse.float())


@pytest.mark.parametrize("sink", [-200.0, 200.0])
@pytest.mark.parametrize("causal", [False, True])
def test_a_sink_far_from_all_scores_does_not_overflow(sink: float, causal: bool) -> None:
    options = Options(causal=causal, return_lse=True)
    assert_matches_reference(*prepare_dense(*qkv(53, 37), options, sinks=torch.tensor([sink, 0.0, -sink, sink])))


def cut_into_chunks(monkeypatch: pytest.MonkeyPatch, elements: int = 1) -> None:
    """By default as finely as work can be cut: one row."""
    for module in (masks, sdpa_backend):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", elements)


OPTIONS = {
    "full": Options(),
    "causal": Options(causal=True),
    "window": Options(window_left=4, window_right=2),
    "left": Options(window_left=4),
    "right": Options(window_right=2),
    "softcap": Options(softcap=2.0),
    "causal_lse": Options(causal=True, return_lse=True),
    "negative_scale": Options(softmax_scale=-0.3, causal=True),
    "no_scale": Options(softmax_scale=0.0, causal=True),
}
WITH_OPTIONS = pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))


@sampled
@WITH_OPTIONS
@pytest.mark.parametrize("lengths", [(37, 53), (53, 37), (37, 37), (1, 53), (37, 1), (37, 0)], ids=str)
@pytest.mark.parametrize("extra", ["plain", "bias", "alibi", "sinks"])
def test_any_cut_of_the_work_gives_the_reference(
    options: Options, lengths: tuple[int, int], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {
        "plain": {},
        "bias": {"attn_bias": torch.randn(4, *lengths).masked_fill(torch.rand(4, *lengths) < 0.3, -torch.inf)},
        "alibi": {"alibi_slopes": torch.rand(2, 4)},
        "sinks": {"sinks": torch.randn(4)},
    }[extra]
    problem, inputs = prepare_dense(*qkv(*lengths), options, **tensors)
    assert_matches_reference(problem, inputs)
    monkeypatch.setattr(masks, "BAND_ROWS", 5)
    assert_matches_reference(problem, inputs)
    cut_into_chunks(monkeypatch)
    assert_matches_reference(problem, inputs)


@pytest.mark.parametrize("seqlens", [(37, 53), (37, 37)], ids=str)
def test_old_torch_without_enable_gqa_gives_the_same(seqlens: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "HAS_ENABLE_GQA", False)
    assert_matches_reference(*prepare_dense(*qkv(*seqlens), Options(causal=True)))


EXPRESSIBLE: dict[str, tuple[Options, dict[str, Tensor]]] = {
    "plain": (Options(), {}),
    "alibi": (Options(causal=True, window_left=3), {"alibi_slopes": torch.ones(4)}),
    "bias": (Options(), {"attn_bias": torch.ones(53)}),
}
OURS: dict[str, tuple[Options, dict[str, Tensor]]] = {
    "softcap": (Options(softcap=1.0), {}),
    "lse": (Options(return_lse=True), {}),
    "dropout": (Options(dropout_p=0.5), {"dropout_seed": torch.tensor(1)}),
    "sinks": (Options(), {"sinks": torch.ones(4)}),
    "negative_scale": (Options(softmax_scale=-1.0), {}),
}


@pytest.mark.parametrize("name", EXPRESSIBLE | OURS)
def test_torch_is_asked_exactly_when_it_can_express_the_call(name: str) -> None:
    options, tensors = (EXPRESSIBLE | OURS)[name]
    with mock.patch.object(fused, "torch_attention", side_effect=fused.torch_attention) as torch_attention:
        serve(*prepare_dense(*qkv(), options, **tensors))
    assert torch_attention.called == (name in EXPRESSIBLE)


def test_hidden_keys_are_not_read() -> None:
    """Whole chunks of hidden keys are skipped, so their values, NaN included, are never multiplied."""
    q, k, v = qkv(40, 100)
    for x in (k, v):
        x[:, :50] = torch.nan
    problem, inputs = prepare_dense(q, k, v, Options(window_left=9, window_right=0))
    assert serve(problem, inputs).out.isfinite().all()


@pytest.mark.parametrize("options", [Options(), Options(return_lse=True)], ids=["fused", "math"])
@pytest.mark.parametrize("hidden", ["causal", "bias"])
def test_rows_without_keys_have_zero_output_and_zero_gradients(hidden: str, options: Options) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(7, 3))
    bias = torch.zeros(7, 3)
    if hidden == "bias":
        bias[:4] = -torch.inf
    else:
        options = options._replace(causal=True)
    problem, inputs = prepare_dense(q, k, v, options, attn_bias=bias.requires_grad_())
    out, lse, _ = serve(problem, inputs)
    assert not out[:, :4].any()
    assert out[:, 4:].all()
    loss = out.sum() + (0.0 if lse is None else lse[lse.isfinite()].sum())
    gradients = torch.autograd.grad(loss, (q, k, v, bias))
    for gradient in gradients:
        assert gradient.isfinite().all()
    assert not gradients[0][:, :4].any()
    assert gradients[0][:, 4:].any()
    if lse is not None:
        assert lse[:, :, :4].isneginf().all()
        assert lse[:, :, 4:].isfinite().all()


@pytest.mark.parametrize("added", [False, True], ids=["bool", "float"])
def test_torch_is_never_handed_a_row_without_keys(added: bool) -> None:
    """Some of its kernels and versions give NaN for one. The row sees all keys instead, and its result is dropped."""
    visible = torch.tensor([[False, False], [True, False], [True, True]])
    mask = masks.Mask(visible, torch.zeros(1, 1, 3, 2) if added else None)
    attn_mask, dead = fused._attn_mask(mask, torch.float32)
    assert dead.flatten().tolist() == [True, False, False]
    seen = attn_mask == 0.0 if added else attn_mask
    assert seen[0, 0].tolist() == [[True, True], [True, False], [True, True]]


@pytest.mark.parametrize(
    "options", [Options(causal=True), Options(window_left=2, return_lse=True)], ids=["fused", "math"]
)
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_each_sequence_reads_its_own_part_of_a_cache(paged: bool, options: Options) -> None:
    """Rows or pages are out of order, with padding on the left and different lengths; all other memory is NaN."""
    shape = (7, 4) if paged else (4, 12)
    caches = [torch.full((*shape, 2, 16), torch.nan) for _ in range(2)]
    lengths, leftpads = [5, 11, 0], [2, 5, 0]
    table, rows = int32([6, 0, 3], [1, 5, 2], [4, 4, 4]), int32(3, 0, 2)
    for index, (length, leftpad) in enumerate(zip(lengths, leftpads, strict=True)):
        for position in range(leftpad, length):
            where = (table[index, position // 4], position % 4) if paged else (rows[index], position)
            for cache in caches:
                cache[where] = torch.randn(2, 16)
    arguments = KvCacheArguments(
        torch.randn(3, 2, 4, 16), *caches, cache_seqlens=int32(*lengths), cache_leftpad=int32(*leftpads),
        cache_batch_idx=None if paged else rows, block_table=table if paged else None,
        attn_bias=torch.randn(3, 1, 2, 12), alibi_slopes=torch.rand(3, 4),
    )  # fmt: skip
    assert_matches_reference(*prepare_kvcache(arguments, options))


@pytest.mark.parametrize(
    ("tokens_q", "tokens_k", "offsets"),
    [((0, 5), (0, 3), ()), ((0,), (0,), (int32(0), int32(0)))],
    ids=["dense", "varlen"],
)
def test_a_batch_of_nothing_has_a_gradient_of_nothing(
    tokens_q: tuple[int, ...], tokens_k: tuple[int, ...], offsets: tuple[Tensor, ...]
) -> None:
    q = torch.zeros(*tokens_q, 4, 16, requires_grad=True)
    function = fast_attn_varlen_func if offsets else fast_attn_func
    out = function(q, torch.zeros(*tokens_k, 2, 16), torch.zeros(*tokens_k, 2, 24), *offsets)
    assert out.shape == (*tokens_q, 4, 24)
    out.sum().backward()
    assert q.grad.shape == q.shape


def test_memory_does_not_grow_with_the_score_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut to one row a chunk, no tensor that the mask or the scores need has more than one row."""
    cut_into_chunks(monkeypatch)
    rows = []
    chunk_mask = masks.chunk_mask

    def watched(problem: Problem, part: Any, chunk: masks.Chunk) -> masks.Mask:
        mask = chunk_mask(problem, part, chunk)
        rows.append(max(x.shape[-2] for x in mask if x is not None))
        return mask

    monkeypatch.setattr("fastattention.backends.sdpa.math.chunk_mask", watched)
    monkeypatch.setattr(fused, "chunk_mask", watched)
    for options in (Options(causal=True), Options(causal=True, return_lse=True)):
        serve(*prepare_dense(*qkv(7, 11), options, alibi_slopes=torch.rand(4)))
    assert rows == [1] * (2 * 2 * 7)  # two calls of two sequences of 7 rows


def dropped(seed: int, dropout_p: float = 0.3, return_lse: bool = True, needs_grad: bool = False) -> AttentionOutput:
    torch.manual_seed(0)
    q, k, v = (x.requires_grad_(needs_grad) for x in qkv())
    options = Options(causal=True, dropout_p=dropout_p, return_lse=return_lse, return_mask=return_lse)
    return serve(*prepare_dense(q, k, v, options, dropout_seed=torch.tensor(seed)))


def test_dropout_repeats_with_its_seed_and_changes_with_it() -> None:
    first = dropped(seed=1)
    assert first.dropout_mask is not None
    assert torch.equal(first.out, dropped(seed=1).out)
    assert not torch.equal(first.out, dropped(seed=2).out)


def test_dropout_is_the_same_with_and_without_gradients_and_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_into_chunks(monkeypatch, 9 * 4 * 53)  # of nine rows
    first = dropped(seed=1)
    assert torch.equal(first.out, dropped(seed=1, needs_grad=True).out.detach())
    assert torch.equal(first.out, dropped(seed=1, return_lse=False).out)


def test_dropout_drops_its_share_and_says_which() -> None:
    result = dropped(seed=5)
    mask = result.dropout_mask
    assert mask.shape == (2, 4, 37, 53)
    weights = reference_weights()
    torch.testing.assert_close(mask.abs(), weights)
    share = (mask < 0).sum() / (weights > 0).sum()
    assert abs(float(share) - 0.3) < 0.02  # more than 5 standard deviations for 11,000 weights


def reference_weights() -> Tensor:
    """Softmax weights of `dropped` before dropout: (batch_size, nheads, seqlen_q, seqlen_k)."""
    torch.manual_seed(0)
    problem, inputs = prepare_dense(*qkv(), Options(causal=True, dropout_p=0.3))
    kept = torch.ones(2, 4, 37, 53, dtype=torch.bool)
    mask = reference_attention(problem, inputs, dropout_keep=kept).dropout_mask
    return mask


def test_the_mask_is_the_one_that_was_applied() -> None:
    result = dropped(seed=7)
    torch.manual_seed(0)
    problem, inputs = prepare_dense(*qkv(), Options(causal=True, dropout_p=0.3))
    expected = reference_attention(problem, inputs, dropout_keep=result.dropout_mask > 0)
    torch.testing.assert_close(result.out, expected.out.float())


def test_varlen_dropout_mask_is_padded_with_zeros() -> None:
    q, k, v = torch.randn(5, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    options, seed = Options(dropout_p=0.5, return_lse=True, return_mask=True), torch.tensor(3)
    call = prepare_varlen(q, k, v, int32(0, 1, 5), int32(0, 7, 9), None, None, options, dropout_seed=seed)
    mask = serve(*call).dropout_mask
    assert mask.shape == (2, 4, 4, 7)
    assert mask[0, :, :1].all()
    assert not mask[0, :, 1:].any()
    assert mask[1, :, :, :2].all()
    assert not mask[1, :, :, 2:].any()


def test_memory_that_gpu_kernels_fault_on_is_copied() -> None:
    wide = torch.randn(2, 3, 4, 24)
    for fitting in (wide, wide[..., :16], wide[:, 1:, ::2, 8:], wide.transpose(1, 2)):
        assert parts.aligned(fitting) is fitting
    for misplaced in (wide[..., 1:9], wide.flatten()[1:-23].view(1, 2, 12, 23)[..., :8], wide.transpose(2, 3)):
        copy = parts.aligned(misplaced)
        assert copy.is_contiguous()
        assert copy.data_ptr() != misplaced.data_ptr()
        assert torch.equal(copy, misplaced)


def test_describe_names_torch_and_its_kernels() -> None:
    description = ATTENTION_BACKENDS.get("sdpa").describe()
    assert str(torch.__version__) in description
    assert "flash" in description
    assert "\n" not in description


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("what", ["address", "strides"])
def test_all_tensors_are_asked_for_their_alignment(which: int, what: str) -> None:
    """`attend_whole` checks all at once, because torch's GPU kernels fault on an unaligned tensor."""
    tensors = [torch.zeros(2, 3, 4, 8) for _ in range(3)]
    assert parts.are_aligned(*tensors)
    room = torch.zeros(2, 3, 4, 12)
    tensors[which] = room[..., 1:9] if what == "address" else torch.zeros(2, 3, 4, 9)[..., :8]
    assert tensors[which].data_ptr() % 16 == (4 if what == "address" else 0)
    assert not parts.are_aligned(*tensors)


@pytest.mark.parametrize("longest", [1, 40])
def test_rows_behind_the_last_sequence_see_no_keys(longest: int) -> None:
    check_rows_behind(ATTENTION_BACKENDS.get("sdpa"), torch.float32, longest)
