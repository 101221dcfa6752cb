"""Checks the arguments of the indexer: to an IndexerProblem and its inputs, or an ArgumentError."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastattention.attention.key_tokens import KeyTokens
from fastattention.attention.validation.lengths import are_checked, check_cu_seqlens
from fastattention.engine.checks import (
    DTYPES,
    check_device,
    check_dtype,
    check_index,
    check_like_q,
    check_rank,
    check_shape,
    differentiation,
    last_axis_contiguous,
    read_flag,
    read_int,
    spec_of,
)
from fastattention.errors import ArgumentError
from fastattention.indexer.problem import IndexerInputs, IndexerProblem


class IndexerOptions(NamedTuple):
    """The scalar arguments of a call, of the right types."""

    topk: int
    causal: bool
    batch_size: int = 1  # of queries of one length; not used with cu_seqlens_q


def read_options(topk: object, causal: object, batch_size: int = 1) -> IndexerOptions:
    """IndexerOptions from arguments as given; raises ArgumentError for anything else."""
    count = read_int("topk", topk)
    if count < 1:
        raise ArgumentError(f"topk={count} must be at least 1")
    return IndexerOptions(count, read_flag("causal", causal), batch_size)


def key_tokens(given: IndexerInputs) -> KeyTokens:
    """Where the keys of a call lie."""
    rows, seqlen, _ = given.k.shape
    return KeyTokens(rows, seqlen, given.cu_seqlens_k, given.block_table, given.seqused_k)


def prepare(given: IndexerInputs, options: IndexerOptions) -> tuple[IndexerProblem, IndexerInputs]:
    """The problem of a call, and its tensors as backends read them. Raises ArgumentError."""
    q, k, weights = spec_of("q", given.q), spec_of("k", given.k), spec_of("weights", given.weights)
    check_dtype(q)
    check_rank("q", q, "total_q, nheads, headdim")
    check_like_q("k", k, q)
    check_rank("k", k, "batch_size, seqlen_k, headdim")
    if k.shape[-1] != q.shape[-1]:
        raise ArgumentError(f"k must have the headdim of q, {q.shape[-1]}, got {k.shape[-1]}")
    check_shape("weights", weights, tuple(q.shape[:2]), "total_q, nheads")
    if weights.dtype not in DTYPES:
        raise ArgumentError(f"weights must be float32, float16 or bfloat16, got {weights.dtype}")
    check_device("weights", weights, q)
    total_q, nheads, headdim = q.shape
    batch_size, seqlen_q = options.batch_size, total_q // max(options.batch_size, 1)
    if given.cu_seqlens_q is not None:
        check_index("cu_seqlens_q", spec_of("cu_seqlens_q", given.cu_seqlens_q), q, (-1,), "batch_size + 1")
        batch_size, seqlen_q = given.cu_seqlens_q.shape[0] - 1, 0
    tokens = key_tokens(given)
    tokens.check(q, batch_size)
    check_numbers(given, batch_size)
    paged = given.block_table is not None
    in_transform = differentiation(q=given.q, k=given.k, weights=given.weights).in_transform
    problem = IndexerProblem(
        total_q, batch_size, seqlen_q, nheads, headdim, tokens.rows, tokens.seqlen, tokens.most, paged, options.topk,
        options.causal, q.dtype, q.device, weights.dtype, in_transform,
    )  # fmt: skip
    return problem, as_backends_read(given)


def check_numbers(given: IndexerInputs, batch_size: int) -> None:
    """Checks values of lengths, offsets and pages, on a CPU; elsewhere only when checks are on."""
    if given.q.is_meta or not are_checked(given.q):
        return
    if given.cu_seqlens_q is not None:
        check_cu_seqlens("cu_seqlens_q", given.cu_seqlens_q, given.q.shape[0])
    key_tokens(given).check_numbers(batch_size)


def as_backends_read(given: IndexerInputs) -> IndexerInputs:
    """The tensors of a call as IndexerInputs describes them: those that are so already are not copied."""
    return given._replace(
        q=last_axis_contiguous(given.q),
        k=last_axis_contiguous(given.k),
        weights=last_axis_contiguous(given.weights.to(torch.float32)),
        cu_seqlens_q=None if given.cu_seqlens_q is None else given.cu_seqlens_q.contiguous(),
        cu_seqlens_k=None if given.cu_seqlens_k is None else given.cu_seqlens_k.contiguous(),
        seqused_k=None if given.seqused_k is None else given.seqused_k.contiguous(),
        block_table=None if given.block_table is None else last_axis_contiguous(given.block_table),
    )
