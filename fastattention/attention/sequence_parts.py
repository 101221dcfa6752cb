"""Varlen calls over parts of sequences, as varlen calls whose sequences are the parts.

Used tokens (seqused_q, seqused_k) of a sequence are one part, or one for each chunk (attention_chunk) that its queries
are in. Unused queries are a part without keys: rows without keys give out 0 and lse -inf. Keys that no query sees,
unused ones and those before the first chunk, are parts without queries: no kernel reads them, and their gradients are
0. Pages need no such parts, because only the lengths of sequences say what is read of them.

Every backend serves such calls, with gradients. Offsets are computed on their device: nothing synchronizes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattention.attention.problem import Inputs
from fastattention.attention.validation import lengths
from fastattention.attention.validation.prefill import check_varlen_shapes
from fastattention.engine.checks import check_index, read_int, spec_of
from fastattention.engine.eager import runs_eagerly
from fastattention.errors import UnsupportedError


class Longest(NamedTuple):
    """Lengths of the longest sequences; None derives them."""

    q: int | None
    k: int | None


class SequenceParts(NamedTuple):
    """What a varlen call is given in place of its own arguments. The parts of a sequence stand side by side."""

    given: Inputs
    longest: Longest
    per_sequence: int  # parts of each sequence

    def of_each(self, tensor: Tensor | None, rank: int) -> Tensor | None:
        """`tensor`, repeated for the parts of each sequence where its first of `rank` axes is the batch."""
        assert self.given.cu_seqlens_q is not None
        batch_size = (self.given.cu_seqlens_q.shape[0] - 1) // self.per_sequence
        if not isinstance(tensor, Tensor) or tensor.dim() != rank or tensor.shape[0] != batch_size:
            return tensor
        return tensor.repeat_interleave(self.per_sequence, dim=0)


def sequence_parts(
    given: Inputs, longest: Longest, seqused_q: Tensor | None, seqused_k: Tensor | None, chunk: int
) -> SequenceParts:
    """The parts of a call of which only the first seqused_q and seqused_k tokens of each sequence are used.

    - `given`: its cu_seqlens_k may be None where seqused_k has the lengths of paged sequences
    - `chunk`: queries see the keys of their own chunk of that many positions; 0 is all keys

    Raises ArgumentError for tensors of wrong shapes, and for lengths on the CPU that are not 0 to those of sequences.
    """
    names = ("max_seqlen_q", "max_seqlen_k")
    longest = Longest(*(None if n is None else read_int(name, n) for name, n in zip(names, longest, strict=True)))
    table = given.block_table
    only_used = table is not None and seqused_k is not None and given.cu_seqlens_k is None
    check_varlen_shapes(given._replace(cu_seqlens_k=given.cu_seqlens_q) if only_used else given)
    _check_used(given, {"seqused_q": seqused_q, "seqused_k": seqused_k})
    tokens_q, tokens_k = (None if x is None else x.diff()[:, None] for x in (given.cu_seqlens_q, given.cu_seqlens_k))
    used_q = tokens_q if seqused_q is None else seqused_q[:, None]
    used_k = tokens_k if seqused_k is None else seqused_k[:, None]
    assert tokens_q is not None
    assert used_q is not None
    assert used_k is not None
    no_tokens = torch.zeros_like(used_q)
    queries, keys = [used_q], [used_k]  # (batch_size, parts) each
    pages = [] if table is None else [table[:, None]]
    if chunk:
        starts = _chunk_starts(chunk, used_q, used_k, _longest_q(given, used_q, longest.q))
        seen_q = (starts - (used_k - used_q)).clamp(min=0).minimum(used_q)
        seen_k = starts.clamp(min=0).minimum(used_k)
        queries, keys = [seen_q.diff()], [seen_k.diff()]
        if table is None:
            queries.insert(0, no_tokens)
            keys.insert(0, seen_k[:, :1])
        else:
            given, pages = _pages_of_chunks(given, starts[:, :-1], chunk)
            longest = longest._replace(k=None if longest.k is None else min(longest.k, chunk))
        if seqused_q is None:
            longest = longest._replace(q=None if longest.q is None else min(longest.q, chunk))
    if seqused_q is not None:
        queries.append(tokens_q - used_q)
        keys.append(no_tokens)
        pages += [page[:, :1] for page in pages]  # any: there are no keys
    if seqused_k is not None and tokens_k is not None and table is None:
        queries.append(no_tokens)
        keys.append(tokens_k - used_k)
    given = given._replace(
        cu_seqlens_q=_offsets(queries),
        cu_seqlens_k=_offsets(keys),
        block_table=torch.cat(pages, dim=1).flatten(0, 1) if pages else None,
    )
    return SequenceParts(given, longest, sum(part.shape[1] for part in queries))


def _offsets(columns: list[Tensor]) -> Tensor:
    """Offsets of parts from their lengths, (batch_size, parts) each."""
    return F.pad(torch.cat(columns, dim=1).flatten().cumsum(0, dtype=torch.int32), (1, 0))


def _longest_q(given: Inputs, used_q: Tensor, longest: int | None) -> int:
    """A bound of the used queries of a sequence. Reading it synchronizes, so a traced call takes all queries."""
    if longest is not None:
        return longest
    if not used_q.numel() or not runs_eagerly(*given):
        return given.q.shape[0]
    return int(used_q.max())


def _chunk_starts(chunk: int, used_q: Tensor, used_k: Tensor, longest_q: int) -> Tensor:
    """Positions at which the chunks of each sequence begin that its queries may be in, and the end of the last one.

    Query i is at position i + used_k - used_q. Positions below 0 are in chunks without keys.

    - `used_q`, `used_k`: int32 (batch_size, 1)

    Returns int64 (batch_size, chunks + 1).
    """
    first = torch.div((used_k - used_q).long(), chunk, rounding_mode="floor")
    chunks = -(-(longest_q - 1) // chunk) + 1  # as many as so many successive positions can be in
    return (first + torch.arange(chunks + 1, device=first.device)) * chunk


def _pages_of_chunks(given: Inputs, starts: Tensor, chunk: int) -> tuple[Inputs, list[Tensor]]:
    """The call with pages that nest in chunks, and the pages of each chunk: int32 (batch_size, chunks, pages).

    Pages are divided where chunks begin within them, without a copy.
    """
    assert given.block_table is not None
    page_block_size = given.k.shape[1]
    size = math.gcd(page_block_size, chunk)
    per_page = page_block_size // size
    capacity = given.block_table.shape[1] * per_page
    places = (starts // size)[..., None] + torch.arange(min(chunk // size, capacity), device=starts.device)
    places = places.clamp(0, max(capacity - 1, 0))  # those outside of a sequence are not read
    table = given.block_table.long()[:, None].expand(-1, starts.shape[1], -1)
    pages = table.gather(2, places // per_page) * per_page + places % per_page
    k, v = (_divided(name, x, size) for name, x in (("k", given.k), ("v", given.v)))
    return given._replace(k=k, v=v), [pages.int()]


def _divided(name: str, pages: Tensor, size: int) -> Tensor:
    """Views of `size` tokens of each page. Raises UnsupportedError where they need a copy."""
    num_blocks, page_block_size, *rest = pages.shape
    if size == page_block_size:
        return pages
    try:
        return pages.view(num_blocks * (page_block_size // size), size, *rest)
    except RuntimeError as error:
        raise UnsupportedError(
            f"{name} has pages of {page_block_size} tokens, which attention_chunk is no multiple of, with strides "
            f"{pages.stride()}; give pages whose tokens follow one another in memory"
        ) from error


def _check_used(given: Inputs, used: dict[str, Tensor | None]) -> None:
    """Checks the lengths of used tokens, on the CPU their values too, and the pages that they are in."""
    cu_seqlens_q, cu_seqlens_k, table = given.cu_seqlens_q, given.cu_seqlens_k, given.block_table
    assert cu_seqlens_q is not None
    batch_size = cu_seqlens_q.shape[0] - 1
    for name, tensor in used.items():
        if tensor is not None:
            check_index(name, spec_of(name, tensor), spec_of("q", given.q), (batch_size,), "batch_size")
    if not (lengths.are_checked(given.q) and runs_eagerly(*given, *used.values())):
        return
    lengths.check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, given.q.shape[0])
    tokens = {"seqused_q": cu_seqlens_q.diff().tolist()}
    if cu_seqlens_k is not None:
        lengths.check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, given.k.shape[0] if table is None else None)
        tokens["seqused_k"] = cu_seqlens_k.diff().tolist()
    elif table is not None:
        tokens["seqused_k"] = [table.shape[1] * given.k.shape[1]] * batch_size
    for name, tensor in used.items():
        if tensor is not None:
            counts = tensor.tolist()
            lengths.check_used(name, counts, tokens[name])
            tokens[name] = counts
    if table is not None:
        lengths.check_block_table(table, tokens["seqused_k"], given.k.shape[1], given.k.shape[0])
