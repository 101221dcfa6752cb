"""Checks the values of integer tensors: lengths, offsets and page indices.

On the CPU they are read and checked before anything is computed. On other devices reading them would synchronise, so
they are taken as given, as flash-attn does, unless FASTATTENTION_CHECK_NUMBERS asks for the checks.
"""

from __future__ import annotations

import numpy
from torch import Tensor

from fastattention import config
from fastattention.errors import ArgumentError


def are_checked(tensor: Tensor) -> bool:
    """Whether the numbers of calls on the device of `tensor` are checked."""
    return tensor.is_cpu or config.check_numbers()


def check_cu_seqlens(name: str, cu_seqlens: Tensor, total: int | None) -> int:
    """Longest sequence of a varlen batch, after checking that the offsets are well formed.

    total: tokens in the varlen tensor, which the last offset must equal; None when the tensor is paged.
    """
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ArgumentError(f"{name} must start at 0, got {offsets[0]}")
    longest = 0
    for index in range(1, len(offsets)):
        length = offsets[index] - offsets[index - 1]
        if length < 0:
            raise ArgumentError(
                f"{name} must not decrease, got {offsets[index - 1]} then {offsets[index]} at index {index}"
            )
        longest = max(longest, length)
    if total is not None and offsets[-1] != total:
        raise ArgumentError(f"{name} must end at the number of tokens, {total}, got {offsets[-1]}")
    return longest


def check_max_seqlen(name: str, given: int | None, longest: int) -> int:
    """`given`, or the longest sequence when it is None; raises when `given` is too small."""
    if given is None:
        return longest
    if given < longest:
        raise ArgumentError(f"{name}={given} is smaller than the longest sequence, {longest}; None derives it")
    return given


def check_block_table(block_table: Tensor, seqlens: list[int], page_block_size: int, num_blocks: int) -> None:
    """Raises unless every page that a sequence of the given lengths uses exists; unused entries may hold anything."""
    table = block_table.numpy(force=True)
    missing = (table < 0) | (table >= num_blocks)
    if not missing.any():
        return
    pages_used = -(-numpy.asarray(seqlens, dtype=numpy.int64) // page_block_size)
    missing &= numpy.arange(table.shape[1]) < pages_used[:, None]
    if missing.any():
        sequence, place = (int(index) for index in numpy.argwhere(missing)[0])
        raise ArgumentError(
            f"block_table names page {table[sequence, place]} for sequence {sequence}; "
            f"the cache has pages 0 to {num_blocks - 1}"
        )


def check_appended_places(block_table: Tensor, seqlens: list[int], seqlen_new: int, page_block_size: int) -> None:
    """Raises when two of the tokens appended to sequences of the given lengths go to one place: one would be lost."""
    positions = numpy.asarray(seqlens, dtype=numpy.int64)[:, None] + numpy.arange(seqlen_new)
    pages = numpy.take_along_axis(block_table.numpy(force=True), positions // page_block_size, axis=1)
    places = numpy.sort(pages * numpy.int64(page_block_size) + positions % page_block_size, axis=None)
    repeated = places[1:][places[1:] == places[:-1]]
    if repeated.size:
        page, slot = divmod(int(repeated[0]), page_block_size)
        raise ArgumentError(
            f"block_table puts two appended tokens into slot {slot} of page {page}; sequences may share pages that "
            "they read, but each appended token needs a place of its own"
        )


def check_paged_lengths(name: str, seqlens: list[int], capacity: int) -> None:
    """Raises when a sequence is longer than its row of the block table can hold."""
    for index, length in enumerate(seqlens):
        if length > capacity:
            raise ArgumentError(
                f"{name} gives sequence {index} {length} tokens; its row of block_table holds {capacity} at most"
            )


def check_range(name: str, values: list[int], low: int, high: int, what: str) -> None:
    """Raises unless low <= value <= high for every value."""
    for index, value in enumerate(values):
        if not low <= value <= high:
            raise ArgumentError(f"{name}[{index}]={value} is out of range; allowed are {low} to {high} ({what})")
