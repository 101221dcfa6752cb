"""SELECTION: the operator that turns the indices of keys into slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from fastattention.attention.key_tokens import KeyTokens
from fastattention.attention.selection.backend import SELECTION_BACKENDS, SelectionBackend
from fastattention.attention.selection.problem import SelectionInputs, SelectionOutput, SelectionProblem
from fastattention.attention.validation.lengths import are_checked, check_cu_seqlens
from fastattention.engine.checks import check_index, differentiation, spec_of
from fastattention.engine.kinds import check_readable
from fastattention.engine.operator import Operator
from fastattention.errors import ArgumentError


class SelectionOptions(NamedTuple):
    """The scalar arguments of a call: fields of the problem, and how many rows, or pages, keys have."""

    batch_size: int  # of queries of one length; not used with cu_seqlens_q
    k_rows: int
    k_seqlen: int
    key_block: int
    causal: bool
    row_step: int
    token_step: int = 1
    head_step: int = 0


class Selection(
    Operator[SelectionInputs, SelectionOptions, SelectionProblem, SelectionInputs, SelectionOutput, SelectionBackend]
):
    """Calls write nothing and have no gradients."""

    name = "selection"
    registry = SELECTION_BACKENDS
    fallback = "torch"
    given = inputs = SelectionInputs
    options = SelectionOptions
    output = SelectionOutput
    tensors = SelectionInputs._fields
    scalars = SelectionOptions._fields
    results = SelectionOutput._fields
    asked_by: ClassVar[Mapping[str, str]] = {}

    def prepare(self, given: SelectionInputs, options: SelectionOptions) -> tuple[SelectionProblem, SelectionInputs]:
        try:
            return _prepare(given, options)
        except (RuntimeError, TypeError):
            check_readable(given._asdict())
            raise

    def as_read(self, problem: SelectionProblem, inputs: SelectionInputs, names: Sequence[str]) -> SelectionInputs:
        return _as_backends_read(inputs)

    def recheck(self, problem: SelectionProblem) -> Callable[[SelectionInputs, SelectionOptions], SelectionInputs]:
        def check(given: SelectionInputs, options: SelectionOptions) -> SelectionInputs:
            _check_numbers(given, options, problem.batch_size)
            return given

        return check

    def result_shapes(
        self, given: SelectionInputs, options: SelectionOptions, differentiated: bool
    ) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        total_q, heads, topk = given.indices.shape
        sets = total_q * heads
        return {"slots": ((sets, topk * options.key_block), torch.int32), "counts": ((sets,), torch.int32)}

    def flops(self, arguments: Mapping[str, Any], backward: bool) -> int:
        """0: torch counts no operations of integers."""
        return 0


def _tokens(given: SelectionInputs, options: SelectionOptions) -> KeyTokens:
    return KeyTokens(options.k_rows, options.k_seqlen, given.cu_seqlens_k, given.block_table, given.seqused_k)


def _prepare(given: SelectionInputs, options: SelectionOptions) -> tuple[SelectionProblem, SelectionInputs]:
    indices = spec_of("indices", given.indices)
    if indices.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"indices must be int32 or int64, got {indices.dtype}")
    total_q, heads, topk = indices.shape
    batch_size, seqlen_q = options.batch_size, total_q // max(options.batch_size, 1)
    if given.cu_seqlens_q is not None:
        check_index("cu_seqlens_q", spec_of("cu_seqlens_q", given.cu_seqlens_q), indices, (-1,), "batch_size + 1")
        batch_size, seqlen_q = given.cu_seqlens_q.shape[0] - 1, 0
    tokens = _tokens(given, options)
    tokens.check(indices, batch_size)
    _check_numbers(given, options, batch_size)
    problem = SelectionProblem(
        total_q, heads, topk, batch_size, seqlen_q, tokens.seqlen, tokens.most, options.key_block, options.causal,
        options.row_step, options.token_step, options.head_step, indices.device, indices.dtype,
        differentiation(indices=given.indices).in_transform,
    )  # fmt: skip
    return problem, _as_backends_read(given)


def _check_numbers(given: SelectionInputs, options: SelectionOptions, batch_size: int) -> None:
    """Checks values of lengths, offsets and pages on a CPU, elsewhere when checks are on. Backends check indices."""
    if given.indices.is_meta or not are_checked(given.indices):
        return
    if given.cu_seqlens_q is not None:
        check_cu_seqlens("cu_seqlens_q", given.cu_seqlens_q, given.indices.shape[0])
    _tokens(given, options).check_numbers(batch_size)


def _as_backends_read(given: SelectionInputs) -> SelectionInputs:
    return SelectionInputs(*(None if x is None else x.contiguous() for x in given))  # type: ignore[arg-type]


SELECTION = Selection()
