"""KeyTokens: where the keys of each sequence lie, and how many there are, for calls whose queries see parts of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from fastattention.attention.validation import lengths
from fastattention.engine.checks import TensorSpec, check_index, check_rank, spec_of
from fastattention.errors import ArgumentError


class KeyTokens(NamedTuple):
    """Keys in rows of a batch, one sequence after another (cu_seqlens), or in pages (block_table)."""

    rows: int  # rows of the batch, or pages; 1 with cu_seqlens
    seqlen: int  # tokens of each of them
    cu_seqlens: Tensor | None  # int32 (batch_size + 1,)
    block_table: Tensor | None  # int32 (batch_size, max_blocks_per_seq)
    used: Tensor | None  # int32 (batch_size,): tokens of each sequence that there are; None: all

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        axes: str,
        cu_seqlens_k: Tensor | None,
        block_table: Tensor | None,
        seqused_k: Tensor | None,
    ) -> KeyTokens:
        """The tokens of keys, and of values, by their names. axes: those after the axes of tokens."""
        if cu_seqlens_k is not None and block_table is not None:
            raise ArgumentError("cu_seqlens_k and block_table cannot be given together; seqused_k has lengths of pages")
        tokens = "batch_size, seqlen_k" if block_table is None else "num_blocks, page_block_size"
        for name, x in tensors.items():
            check_rank(name, spec_of(name, x), f"{'total_k' if cu_seqlens_k is not None else tokens}, {axes}")
        shape = next(iter(tensors.values())).shape
        rows, seqlen = (1, shape[0]) if cu_seqlens_k is not None else shape[:2]
        if block_table is not None and seqlen < 1:
            raise ArgumentError(f"keys must be ({tokens}, {axes}) with at least one token a page, got {tuple(shape)}")
        return cls(rows, seqlen, cu_seqlens_k, block_table, seqused_k)

    @property
    def most(self) -> int:
        """A bound of the tokens of a sequence, from shapes alone."""
        return self.seqlen * (1 if self.block_table is None else self.block_table.shape[1])

    def check(self, q: TensorSpec, batch_size: int) -> None:
        """Checks shapes, dtypes and devices."""
        table, offsets = self.block_table, self.cu_seqlens
        if batch_size < 0:
            raise ArgumentError("cu_seqlens_q must be (batch_size + 1,), got no elements; an empty batch is [0]")
        if self.used is not None:
            check_index("seqused_k", spec_of("seqused_k", self.used), q, (batch_size,), "batch_size")
        if table is not None:
            check_index("block_table", spec_of("block_table", table), q, (batch_size, -1), "batch_size, max_blocks")
            if self.used is None:
                raise ArgumentError("seqused_k must be given with block_table: it has the lengths of sequences")
        elif offsets is not None:
            check_index("cu_seqlens_k", spec_of("cu_seqlens_k", offsets), q, (batch_size + 1,), "batch_size + 1")
        elif self.rows != batch_size:
            raise ArgumentError(f"keys are those of {self.rows} sequences, and queries of {batch_size}")

    def check_numbers(self, batch_size: int) -> None:
        """Checks values of offsets, lengths and pages: with wrong ones, keys of another sequence would be read."""
        tokens = [self.most] * batch_size
        if self.cu_seqlens is not None:
            lengths.check_cu_seqlens("cu_seqlens_k", self.cu_seqlens, self.seqlen)
            tokens = self.cu_seqlens.diff().tolist()
        if self.used is not None:
            counts = self.used.tolist()
            lengths.check_used("seqused_k", counts, tokens)
            if self.block_table is not None:
                lengths.check_block_table(self.block_table, counts, self.seqlen, self.rows)
