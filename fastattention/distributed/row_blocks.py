"""Blocks of rows as parts of a call: which sequences and rows of q, which keys, under which mask.

A block is rows [start, stop) of the flattened (batch_size * seqlen_q) query rows. It consists of pieces, each a call of
attention by itself: whole sequences together, and a part of a sequence at either end. No tensor is copied and no mask
is stored, since the mask of a piece is again a window aligned to the bottom right.

Row i of seqlen_q stands at key i + seqlen_k - seqlen_q and sees `window_right` keys beyond it. `after` rows, and as
many keys, follow the last row of a piece. min(after, window_right) of these keys are kept, since the piece may see
them; the others are cut off, as far as they exist. The keys that are kept move the bottom right corner, and with it
both sides of the window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.attention.backend import ATTENTION_BACKENDS, AttentionBackend
from fastattention.attention.problem import AttentionOutput, Inputs, Layout, Problem
from fastattention.distributed.row_partitions import Partition
from fastattention.distributed.transports import Transport


class Piece(NamedTuple):
    """Rows [first_row, end_row) of each of the sequences [first_sequence, end_sequence)."""

    first_sequence: int
    end_sequence: int
    first_row: int
    end_row: int

    @property
    def num_rows(self) -> int:
        """Rows of all sequences of the piece."""
        return (self.end_sequence - self.first_sequence) * (self.end_row - self.first_row)


class PieceCall(NamedTuple):
    """A piece as a call of its own."""

    problem: Problem
    cut_keys: int  # keys at the end of every sequence that no row of the piece sees
    backend: AttentionBackend


@functools.lru_cache(maxsize=4096)
def pieces(start: int, stop: int, seqlen_q: int) -> tuple[Piece, ...]:
    """The pieces of rows [start, stop), in their order: at most three."""
    found: list[Piece] = []
    while start < stop:
        sequence, row = divmod(start, seqlen_q)
        whole = 0 if row else (stop - start) // seqlen_q
        end_row = seqlen_q if whole else min(seqlen_q, row + stop - start)
        found.append(Piece(sequence, sequence + max(whole, 1), row, end_row))
        start += found[-1].num_rows
    return tuple(found)


def may_cut_sequences(problem: Problem) -> bool:
    """Whether a block may begin within a sequence: not where ALiBi counts distances from a corner that would move."""
    return "alibi_slopes" not in problem.score_tensors or problem.window_right == 0


@functools.lru_cache(maxsize=4096)
def piece_call(problem: Problem, piece: Piece, backend: str) -> PieceCall:
    """The call of a piece. Cutting a sequence must be exact: `may_cut_sequences` says where."""
    assert problem.block_size is None, "rows of a piece are counted anew, and those of a block mask are not"
    after = problem.seqlen_q - piece.end_row
    kept = after if problem.window_right == -1 else min(after, problem.window_right)
    batch_size, seqlen_q = piece.end_sequence - piece.first_sequence, piece.end_row - piece.first_row
    seqlen_k = problem.seqlen_k  # the capacity of a cache
    if problem.layout is Layout.DENSE:
        seqlen_k = max(seqlen_k - (after - kept), 0)
    smaller = replace(
        problem,
        batch_size=batch_size,
        seqlen_q=seqlen_q,
        total_q=batch_size * seqlen_q,
        seqlen_k=seqlen_k,
        window_left=-1 if problem.window_left == -1 else problem.window_left + kept,
        window_right=-1 if problem.window_right == -1 else problem.window_right - kept,
    )
    return PieceCall(smaller, after - kept, ATTENTION_BACKENDS.select(smaller, backend))


def piece_inputs(inputs: Inputs, piece: Piece, call: PieceCall) -> Inputs:
    """The tensors of a piece: views, apart from the lengths of a cache."""
    sequences, rows = slice(piece.first_sequence, piece.end_sequence), slice(piece.first_row, piece.end_row)
    slopes, bias = inputs.alibi_slopes, inputs.attn_bias
    part = inputs._replace(
        q=inputs.q[sequences, rows],
        alibi_slopes=slopes[sequences] if slopes is not None and slopes.dim() == 2 else slopes,
        attn_bias=None if bias is None else bias[sequences, :, rows, : call.problem.seqlen_k],
    )
    if call.problem.layout is Layout.DENSE:
        keys = slice(call.problem.seqlen_k)
        return part._replace(k=inputs.k[sequences, keys], v=inputs.v[sequences, keys])
    return _of_cache(part, sequences, call.cut_keys)


def _of_cache(inputs: Inputs, sequences: slice, cut_keys: int) -> Inputs:
    """Caches, lengths and indices of some sequences, which then end `cut_keys` tokens earlier."""
    lengths, leftpad = inputs.cache_seqlens, _some(inputs.cache_leftpad, sequences)
    assert lengths is not None
    lengths = lengths[sequences]
    if cut_keys:
        lengths = (lengths - cut_keys).clamp(min=0 if leftpad is None else leftpad)
    shared = inputs._replace(
        cache_seqlens=lengths,
        cache_leftpad=leftpad,
        cache_batch_idx=_some(inputs.cache_batch_idx, sequences),
        block_table=_some(inputs.block_table, sequences),
    )
    if inputs.block_table is not None or inputs.cache_batch_idx is not None:
        return shared
    return shared._replace(
        k=inputs.k[sequences],
        v=inputs.v[sequences],
        k_scale=_some(inputs.k_scale, sequences),
        v_scale=_some(inputs.v_scale, sequences),
    )


def _some(tensor: Tensor | None, sequences: slice) -> Tensor | None:
    return None if tensor is None else tensor[sequences]


Attend = Callable[[Inputs], AttentionOutput]  # AttentionBackend.make_call


class AttentionOutProj:
    """One rank's part of a call, by blocks of rows: attention of its heads, times its columns of the projection."""

    def __init__(
        self, problem: Problem, inputs: Inputs, w_o: Tensor, backend: str, attend: Attend | None = None
    ) -> None:
        """problem, inputs: validated; w_o: (hidden, nheads * headdim_v); attend: attention to all rows, where known."""
        self.problem = problem
        self.inputs = inputs
        self.weight = w_o.t()
        self.backend = backend
        self._attend_to_all = attend

    def attend(self, piece: Piece) -> Tensor:
        """Attention of a piece: (rows, nheads * headdim_v)."""
        problem, inputs = self.problem, self.inputs
        if piece.num_rows != problem.total_q:
            call = piece_call(problem, piece, self.backend)
            out = call.backend.forward(call.problem, piece_inputs(inputs, piece, call)).out
        elif self._attend_to_all is not None:
            out = self._attend_to_all(inputs).out
        else:
            out = ATTENTION_BACKENDS.select(problem, self.backend).forward(problem, inputs).out
        return out.view(piece.num_rows, -1)

    def compute(self, start: int, stop: int, partial: Tensor, *, adds: bool = False) -> None:
        """Writes this rank's part of rows [start, stop) to `partial` (stop - start, hidden), or adds it."""
        first = 0
        for piece in pieces(start, stop, self.problem.seqlen_q):
            end = first + piece.num_rows
            # It is nearly always the whole tensor, and a view takes as long as a launch.
            self.multiply(self.attend(piece), partial if end - first == stop - start else partial[first:end], adds)
            first = end

    def multiply(self, attended: Tensor, partial: Tensor, adds: bool) -> None:
        """Writes the product of attended rows to `partial`, or adds it, with one rounding."""
        if adds:
            torch.addmm(partial, attended, self.weight, out=partial)
        else:
            torch.mm(attended, self.weight, out=partial)


class CoarseAttention:
    """`AttentionOutProj.compute` with attention of several blocks at once, when the first of their rows are needed.

    Attention of few rows leaves much of a GPU idle, and a product does so only with far fewer. Results of attention are
    kept, because rows may be asked for in any order.
    """

    def __init__(self, call: AttentionOutProj, rows: Sequence[int]) -> None:
        """rows: the rows of each call of attention."""
        self._call = call
        self._ends = iter(tuple(accumulate(rows)))
        self._attended: list[tuple[int, int, Tensor]] = []  # of each piece: first row, end row, and attention
        self._end = 0  # end of the rows that have been attended

    def compute(self, start: int, stop: int, partial: Tensor, *, adds: bool = False) -> None:
        """Writes this rank's part of rows [start, stop) to `partial` (stop - start, hidden), or adds it."""
        while self._end < stop:
            self._attend(self._end, next(self._ends))
        for first, past, attended in self._attended:
            begin, end = max(start, first), min(stop, past)
            if begin < end:
                # It is nearly always the whole tensor, and a view takes as long as a launch.
                target = partial if end - begin == stop - start else partial[begin - start : end - start]
                self._call.multiply(attended[begin - first : end - first], target, adds)

    def _attend(self, start: int, stop: int) -> None:
        for piece in pieces(start, stop, self._call.problem.seqlen_q):
            past = start + piece.num_rows
            self._attended.append((start, past, self._call.attend(piece)))
            start = past
        self._end = stop


class Strategy(NamedTuple):
    """A strategy of a call: the transport that sums its rows, and the blocks."""

    transport: Transport
    partition: Partition

    def run(self, call: AttentionOutProj, out: Tensor) -> None:
        """Fills `out` (rows, hidden) with the sum over all ranks. Collective."""
        rows, attention_rows = self.partition
        compute = CoarseAttention(call, attention_rows).compute if attention_rows else call.compute
        self.transport.run(compute, out, rows)
